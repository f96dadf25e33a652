"""A store with a training that is at its second step, as its log says."""

from pathlib import Path

from pages import NOW, rollout_of_sums

from assay.reports.training import TrainingLog
from assay.traces import Store

SAMPLE = f"{200:032x}"  # the sample rollout of step 1


def put_training(
    store: Store, folder: Path, *, text: str = "the KL is high", run_id: str = "training", status: str = "running"
) -> TrainingLog:
    """A training of nine steps with two sample rollouts, of which the store has the second.

    Args:
        text: of its alarm, its program and the task of the sample.
    """
    config = {"program": text, "model": "embedded/m", "algorithm": "grpo", "steps": 9}
    store.put_run(run_id, kind="train", config=config, status=status, started_at=NOW)
    rollout_of_sums(store, 200, run_id=run_id, phase="train", score=0.75, inputs={"question": text})
    store.flush()
    log = TrainingLog(folder / "runs" / run_id)
    log.values(0, {"held_out_greedy": 0.25}, {})
    log.sample(0, "f" * 32, [0.5])
    log.values(1, {"reward": 0.25, "criteria/right": 0.5}, {})
    log.sample(1, SAMPLE, [-0.5])
    log.values(2, {"reward": 0.5, "criteria/right": 1.0}, {"kl": f"step 2: {text}"})
    log.values(2, {"held_out_greedy": 0.75}, {"kl": f"step 2: {text}"})
    return log


def put_sft(store: Store, folder: Path, *, run_id: str = "warm", status: str = "running") -> TrainingLog:
    """A supervised fine-tuning of six steps that is at its fourth."""
    config = {"algorithm": "sft", "model": "embedded/m", "adapter_name": "warm", "export": "data/warm", "epochs": 2}
    store.put_run(run_id, kind="train", config=config, status=status, started_at=NOW)
    store.flush()
    log = TrainingLog(folder / "runs" / run_id)
    log.begin(6)
    log.values(0, {"loss/held_out": 2.5}, {})
    for step in (1, 2, 3, 4):
        log.values(step, {"loss/training": 2.0 / step}, {})
    log.values(4, {"loss/held_out": 1.5}, {"overfitting": "step 4: the held-out loss rose"})
    return log


def put_before_and_after(store: Store, *, run_id: str = "training", program: str = "sums.py:Sums", at: int = 0) -> None:
    """Six tasks before and after a training, greedily and sampled, in the run: +0.25 and -0.25.

    Args:
        at: number of the first rollout, of 24.
    """
    scores = {"before, greedy": 0.25, "after, greedy": 0.5, "before, sampled": 0.75, "after, sampled": 0.5}
    for place, (condition, score) in enumerate(scores.items()):
        for task in range(6):
            name = f"task-{task}"
            rollout_of_sums(
                store, 300 + at + 6 * place + task, run_id=run_id, phase="test", split="test", task_id=name,
                group_id=f"{condition}/{name}", score=score, parameters={"temperature": 1.0}, program=program,
            )  # fmt: skip
    store.flush()
