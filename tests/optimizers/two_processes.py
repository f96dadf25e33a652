"""Run by `test_policy_trainer.py` in one process and in two; writes weights and advantages.

Takes three steps on rows that depend on the task alone.
"""

import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def drawn(chosen: random.Random, task: int, rollout: int) -> Any:
    """A rollout of one to three turns with tokens and rewards by chance."""
    from assay.optimizers.finetuning.rows import Row, Trajectory

    turns = chosen.randint(1, 3)
    rows = [
        Row(
            turn=t,
            prompt_ids=[chosen.randint(3, 200) for _ in range(chosen.randint(4, 12))],
            completion_ids=(ids := [chosen.randint(3, 200) for _ in range(chosen.randint(2, 6))]),
            trained=[True] * len(ids),
        )
        for t in range(turns)
    ]
    return Trajectory(
        group=str(task),
        rollout=f"{task}:{rollout}",
        rewards=[chosen.random() for _ in range(turns)],
        rows=rows,
    )


def main(model: str, out: str) -> None:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig

    from assay.optimizers.finetuning.rows import ValueMemory, assign_credit
    from assay.optimizers.finetuning.settings import PolicySettings
    from assay.optimizers.finetuning.trl_trainer import Batch, TransitionTrainer, over_ranks

    world = int(os.environ.get("WORLD_SIZE", "1"))
    group, recorded = 4, []

    def collect(inputs: list[dict[str, Any]], trainer: Any) -> Batch:
        first, mine = trainer.accelerator.process_index * len(inputs), []
        for at, example in enumerate(inputs):
            chosen = random.Random(f"{example['index']}:{(first + at) % group}:{trainer.state.global_step}")
            mine.append(drawn(chosen, example["index"], first + at))
        every = over_ranks([trajectory.without_rows() for trajectory in mine])
        credit = assign_credit(every, PolicySettings(), ValueMemory())
        recorded.append(dict(sorted(credit.advantages.items())))
        return Batch(
            *credit.apply_to(mine, Counter()),
            {"reward": sum(sum(trajectory.rewards) for trajectory in every) / len(every)},
        )

    torch.manual_seed(0)
    torch.set_num_threads(1)
    arguments = GRPOConfig(
        output_dir=f"{out}-work", per_device_train_batch_size=4 // world, gradient_accumulation_steps=2,
        steps_per_generation=2, num_generations=group,
        max_steps=3, learning_rate=0.5, optim="sgd",  # Adam moves weights as far for a gradient that is mere rounding
        report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True, seed=3, bf16=False,
        lr_scheduler_type="constant", shuffle_dataset=False, beta=0.05, ddp_backend="gloo" if world > 1 else None,
    )  # fmt: skip
    trainer = TransitionTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), args=arguments,
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=Dataset.from_list([{"prompt": "", "index": at} for at in range(6)]), collect=collect,
        peft_config=LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip
    trainer.train()
    if trainer.accelerator.is_main_process:
        weights = {
            name: value.flatten().tolist()
            for name, value in trainer.accelerator.unwrap_model(trainer.model).named_parameters()
            if value.requires_grad
        }
        Path(out).write_text(json.dumps({"weights": weights, "advantages": recorded}))


if __name__ == "__main__":
    main(*sys.argv[1:])
