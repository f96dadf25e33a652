"""Makes the trainer of a policy: the order of the tasks, and TRL's settings from ours.

Imports torch and TRL only when a trainer is made.
"""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from assay.optimizers.finetuning.base import Policy, fast_bf16, lora_of
from assay.optimizers.finetuning.run_folder import world
from assay.optimizers.finetuning.settings import PolicySettings


def task_order(items: int, config: PolicySettings) -> list[int]:
    """Item indices in the order of the steps; every item is taken once before any repeats.

    The order covers the whole run as one epoch, so that a resumed run takes the same items.
    """
    chosen, remaining, order = random.Random(config.seed), list[int](), list[int]()
    for _ in range(config.rollout_steps):
        step, remaining = remaining[: config.prompts_per_step], remaining[config.prompts_per_step :]
        if len(step) < config.prompts_per_step:  # next round; the items of this step come last in it
            remaining = sorted(chosen.sample(range(items), items), key=set(step).__contains__)
            missing = config.prompts_per_step - len(step)
            step, remaining = step + remaining[:missing], remaining[missing:]
        order += step
    return order


def make_trainer(
    policy: Policy,
    config: PolicySettings,
    tasks: int,
    out: Path,
    collect: Callable[..., Any],
    callback: Any,
    *,
    by_place: bool = False,
) -> Any:
    """A trainer of a new LoRA adapter on the rows that `collect` returns for tasks, or for places in their order."""
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig

    from assay.optimizers.finetuning.trl_trainer import TransitionTrainer

    cuda = torch.cuda.is_available()
    per_device, parts = config.shared_out(world())
    # a checkpoint has no rollouts: save only after the last step that uses them
    every = config.iterations * math.ceil(config.save_every / config.iterations)
    vllm: dict[str, Any] = (
        {"use_vllm": True, "vllm_mode": config.vllm, "vllm_importance_sampling_correction": False}
        if config.vllm != "none"
        else {}
    )
    rollouts = config.prompts_per_step * config.num_generations
    arguments = GRPOConfig(
        output_dir=str(out), max_steps=config.steps, per_device_train_batch_size=per_device,
        gradient_accumulation_steps=parts,
        steps_per_generation=parts, num_generations=config.num_generations if config.num_generations > 1 else rollouts,
        num_iterations=config.iterations, learning_rate=config.learning_rate,
        beta=0.0 if config.kl_in_reward else config.beta,
        epsilon=config.clip[0], epsilon_high=config.clip[1], loss_type=config.loss, temperature=config.temperature,
        importance_sampling_level="sequence" if config.loss == "luspo" else "token",
        max_completion_length=config.max_completion, max_grad_norm=config.max_grad_norm,
        lr_scheduler_type="constant", seed=config.seed,
        logging_steps=1, logging_nan_inf_filter=False, save_strategy="steps", save_steps=every, save_total_limit=2,
        report_to=config.report_to, bf16=fast_bf16(), use_cpu=not cuda, gradient_checkpointing=cuda,
        shuffle_dataset=False, disable_tqdm=True, **vllm,
    )  # fmt: skip
    arguments.num_generations = config.num_generations  # TRL demands 2 for its own baseline, which is unused here
    order = list(enumerate(task_order(tasks, config)))
    rows = Dataset.from_list([{"prompt": "", "index": place if by_place else task} for place, task in order])
    trainer = TransitionTrainer(
        model=policy.model,
        args=arguments,
        train_dataset=rows,
        processing_class=policy.tokenizer,
        peft_config=lora_of(config.lora_r),
        callbacks=[callback],
        collect=collect,
        by_token=config.algorithm == "reinforce++",
        kl_in_reward=config.beta if config.kl_in_reward else 0.0,
    )
    trainer.remove_callback(PrinterCallback)
    callback.trainer = trainer
    return trainer
