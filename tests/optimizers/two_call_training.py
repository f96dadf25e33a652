"""A program with two calls per rollout, trained with a small real model."""

from pathlib import Path
from typing import Any

import dspy

import assay
from assay.datasets import Task
from assay.evaluation import RecordedProgram, Session
from assay.models import Meter, with_recording
from assay.optimizers.finetuning.comparison import EvalTask
from assay.optimizers.finetuning.engines import TrainerPolicy
from assay.optimizers.finetuning.policy_gradient import train_policy
from assay.optimizers.finetuning.report import PolicyReport
from assay.optimizers.finetuning.settings import PolicySettings
from assay.optimizers.finetuning.sources import Rollouts
from assay.traces import Recorder, Store

SMALL = {
    "steps": 4,
    "prompts_per_step": 2,
    "num_generations": 2,
    "per_device_batch_size": 2,
    "max_completion": 8,
    "eval_tasks": 2,
    "lora_r": 2,
    "learning_rate": 1e-2,
    "save_every": 1,
}


class TwoCalls(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.draft, self.answer = dspy.Predict("question -> draft"), dspy.Predict("question, draft -> answer")

    def forward(self, question: str) -> Any:
        draft = self.draft(question=question).draft
        return self.answer(question=question, draft=draft)


def letters(task: Any, prediction: Any, rollout: Any) -> float:
    """How many of the first ten letters are one of ten: something that a step can change."""
    return min(1.0, sum(c in "aeiou 0123" for c in str(prediction["answer"])[:10]) / 10)


def source(
    model: str, config: PolicySettings, check: Any = letters, store: Store | None = None, name: str = "two"
) -> Rollouts:
    engine, recorder = TrainerPolicy(model, max_completion=config.max_completion), Recorder(store, run_id="r")
    meter = Meter()
    lm = with_recording(engine.lm, meter=meter, observers=[recorder.observe])
    rubric = assay.Rubric("letters", [assay.Criterion(name="letters", check=check)])
    session = Session(lm=lm, rubric=rubric, recorder=recorder, meter=meter, program_name=name)
    splits = ["train"] * 4 + ["val"] * 2 + ["test"] * 2
    tasks = [
        Task(id=f"t{at}", inputs={"question": f"How much is {at} + 1?"}, split=split) for at, split in enumerate(splits)
    ]
    session.register(tasks)
    return Rollouts(
        EvalTask(name, RecordedProgram(TwoCalls(), session, prompt_format="lean"), session, tasks[4:6], tasks[6:]),
        tasks[:4],
        config,
        engine,
    )


def run(
    model: Path, name: str, *, resume: bool = False, check: Any = letters, store: Store | None = None, **settings: Any
) -> PolicyReport:
    config = PolicySettings(**{**SMALL, "model": str(model), **settings})
    return train_policy(source(str(model), config, check, store), name, config, resume=resume)
