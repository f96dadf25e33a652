"""The trainer of a policy: which tasks each step takes, and TRL's settings from ours. Imports torch and TRL where it makes one."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from assay.optimizers.weights.base import Policy, fast_bf16, lora_of
from assay.optimizers.weights.config import PolicyConfig
from assay.optimizers.weights.work import world

__all__ = ["make_trainer", "task_order"]


def task_order(items: int, config: PolicyConfig) -> list[int]:
    """Which items each step takes, all of them before any comes again: one long epoch, so that a run that goes on takes the same."""
    chosen, left, found = random.Random(config.seed), list[int](), list[int]()
    for _ in range(math.ceil(config.steps / config.iterations)):
        step, left = left[: config.tasks], left[config.tasks :]
        if len(step) < config.tasks:  # a new round, in which those of this step come last
            left = sorted(chosen.sample(range(items), items), key=set(step).__contains__)
            missing = config.tasks - len(step)
            step, left = step + left[:missing], left[missing:]
        found += step
    return found


def make_trainer(policy: Policy, config: PolicyConfig, tasks: int, out: Path, collect: Callable[..., Any], callback: Any) -> Any:
    """The trainer of a new LoRA adapter on the rows that `collect` gives."""
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig

    from assay.optimizers.weights.trainer import TransitionTrainer

    cuda = torch.cuda.is_available()
    micro, parts = config.shared_out(world())
    every = config.iterations * math.ceil(config.save_every / config.iterations)  # rollouts that are used again are not in a checkpoint
    vllm = {"use_vllm": True, "vllm_mode": config.vllm, "vllm_importance_sampling_correction": False} if config.vllm != "none" else {}
    rollouts = config.tasks * config.num_generations
    arguments = GRPOConfig(
        output_dir=str(out), max_steps=config.steps, per_device_train_batch_size=micro, gradient_accumulation_steps=parts,
        steps_per_generation=parts, num_generations=config.num_generations if config.num_generations > 1 else rollouts,
        num_iterations=config.iterations, learning_rate=config.learning_rate,
        beta=0.0 if config.kl_in_reward else config.beta,
        epsilon=config.clip[0], epsilon_high=config.clip[1], loss_type=config.loss, temperature=config.temperature,
        importance_sampling_level="sequence" if config.loss == "luspo" else "token",
        max_completion_length=config.max_completion, max_grad_norm=config.max_grad_norm, lr_scheduler_type="constant", seed=config.seed,
        logging_steps=1, logging_nan_inf_filter=False, save_strategy="steps", save_steps=every, save_total_limit=2,
        report_to=config.report_to, bf16=fast_bf16(), use_cpu=not cuda, gradient_checkpointing=cuda,
        shuffle_dataset=False, disable_tqdm=True, **vllm,
    )  # fmt: skip
    arguments.num_generations = config.num_generations  # TRL wants two, for a baseline that is not taken from it here
    rows = Dataset.from_list([{"prompt": "", "index": at} for at in task_order(tasks, config)])
    trainer = TransitionTrainer(
        model=policy.model, args=arguments, train_dataset=rows, processing_class=policy.tokenizer, peft_config=lora_of(config.rank),
        callbacks=[callback], collect=collect, by_token=config.algorithm == "reinforce++", kl_in_reward=config.beta if config.kl_in_reward else 0.0,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    callback.trainer = trainer
    return trainer
