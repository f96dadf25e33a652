"""A short training of the embedded model, and programs that it is trained on."""

from typing import Any

DATA = "arithmetic:terms=2-2&digits=1-1&size=60"


SMALL: dict[str, Any] = {
    "steps": 2,
    "prompts_per_step": 2,
    "num_generations": 2,
    "per_device_batch_size": 2,
    "lora_r": 2,
    "max_completion": 24,
    "evaluate_every": 0,
    "prompt_format": "lean",
}
