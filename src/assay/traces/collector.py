"""Interactions that people come with: checked one by one, kept in the store as rollouts of one turn, filtered, prepared for training."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.datasets import load_tasks
from assay.datasets.tasks import content_hash, owners_of
from assay.errors import ConfigError
from assay.traces.records import Rollout, Transition, new_id
from assay.traces.store import Store

__all__ = ["Collected", "DataCollector", "TrainingData"]

_FIELDS = ("input", "output", "rating", "task_type", "model", "data_subject", "tenant", "consent")


@dataclass
class Collected:
    """What became of the interactions: rollouts by id, and each refused one's place with the reason."""

    kept: list[str] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class TrainingData:
    """Rows with `prompt` and `completion` as chat messages, `quality` and `task_type`; and how many of each type there are."""

    rows: list[dict[str, Any]]
    task_distribution: dict[str, int]
    left_out: int = 0  # below the quality, or unrated


class DataCollector:
    """Args:
    store: where interactions are kept, opened or by its path; None keeps them in memory only.
    """

    def __init__(self, store: Store | str | Path | None = None) -> None:
        self.store = Store(store) if isinstance(store, str | Path) else store
        self.rollouts: list[Rollout] = []
        self._seen: set[str] = set()
        self._run = f"interactions-{new_id()[:12]}"

    def collect_interaction_data(self, interactions: Iterable[Mapping[str, Any]], *, source: str = "interaction") -> Collected:
        """Takes in `{"input", "output", "rating", "task_type"}`; the rating in [0, 1] or missing, the task type by default `default`.

        A duplicate (the same input and output), an empty text, a rating out of range and an unknown field are refused with the
        reason; the others are kept all the same.
        """
        report = Collected()
        for at, row in enumerate(interactions):
            reason = self._wrong(row)
            if reason is not None:
                report.refused.append((at, reason))
                continue
            rollout = self._rollout(row, source)
            self.rollouts.append(rollout)
            report.kept.append(rollout.id)
            if self.store is not None:
                self.store.put_rollout(rollout)
                self.store.put_transition(rollout.id, rollout.transitions[0])
        return report

    def _wrong(self, row: Any) -> str | None:
        if not isinstance(row, Mapping):
            return f"expected an object with input and output, found {type(row).__name__}"
        if unknown := sorted(map(str, set(row) - set(_FIELDS))):
            return f"unknown fields {unknown}; there are {', '.join(_FIELDS)}"
        for name in ("input", "output"):
            if not isinstance(row.get(name), str) or not row[name].strip():
                return f"{name} is {'missing' if name not in row else 'empty or no text'}"
        rating = row.get("rating")
        if rating is not None and (isinstance(rating, bool) or not isinstance(rating, int | float) or not 0 <= rating <= 1):
            return f"rating={rating!r} must be between 0 and 1"
        key = content_hash({"input": row["input"].strip(), "output": row["output"].strip()})
        if key in self._seen:
            return "a duplicate: the same input and output came before"
        self._seen.add(key)
        return None

    def _rollout(self, row: Mapping[str, Any], source: str) -> Rollout:
        task = content_hash({"input": row["input"]})[:16]
        model = str(row.get("model") or "unknown")
        request = {"dialect": "chat", "body": {"model": model, "messages": [{"role": "user", "content": row["input"]}]}}
        response = {"body": {"choices": [{"message": {"role": "assistant", "content": row["output"]}, "finish_reason": "stop"}]}}
        whose: dict[str, Any] = {name: text for name, text in owners_of(row).items() if text}
        rating = None if row.get("rating") is None else float(row["rating"])
        return Rollout(
            run_id=self._run,
            task_id=task, group_id=task, task_type=str(row.get("task_type") or "default"), source=source, status="done", model=model,
            inputs={"input": row["input"]}, prediction={"answer": row["output"]}, human_rating=rating,
            transitions=[Transition(t=0, model=model, request=request, response=response, output=row["output"])], **whose,
        )  # fmt: skip

    def generate_synthetic_data(self, n: int, *, data: str = "arithmetic:terms=2-3&digits=1-3", seed: int = 0) -> Collected:
        """`n` interactions with answers known to be right, from a generator of tasks (`arithmetic:…`, `reasoning_gym:…`).

        They are kept with the source `synthetic` and a rating of 1, since they are right by construction.
        """
        if n < 1:
            raise ConfigError(f"n={n!r} must be at least 1")
        kind, _, rest = data.partition(":")
        query = rest if kind == "arithmetic" else rest.partition("?")[2]
        before = f"{kind}:" if kind == "arithmetic" else f"{kind}:{rest.partition('?')[0]}?"
        joined = before + "&".join(part for part in (query, f"size={n}", f"seed={seed}") if part)
        rows = []
        for task in load_tasks(joined):
            question, answer = (" ".join(str(value) for value in part.values()) for part in (task.inputs, task.expected))
            kind = task.task_type if task.task_type != "default" else data.partition(":")[0]
            rows.append({"input": question, "output": answer, "rating": 1.0, "task_type": kind})
        return self.collect_interaction_data(rows, source="synthetic")

    def filter_high_quality(self, threshold: float = 0.8) -> list[Rollout]:
        """Interactions whose rating, or score, is at least the threshold; unrated ones are not among them."""
        if not 0 <= threshold <= 1:
            raise ConfigError(f"threshold={threshold!r} must be between 0 and 1")
        return [rollout for rollout in self.rollouts if (quality := rollout.quality) is not None and quality >= threshold]

    def prepare_training_data(self, *, threshold: float = 0.8) -> TrainingData:
        """Rows of good interactions for supervised training, and the distribution of their task types. To write them behind the
        gates, anonymised: `assay.export("sft", …)` on the same store."""
        good = self.filter_high_quality(threshold)
        rows = [
            {
                "prompt": [{"role": "user", "content": rollout.inputs["input"]}],
                "completion": [{"role": "assistant", "content": rollout.transitions[0].output}],
                "quality": rollout.quality, "task_type": rollout.task_type,
            }
            for rollout in good
        ]  # fmt: skip
        return TrainingData(rows, dict(Counter(rollout.task_type for rollout in good).most_common()), len(self.rollouts) - len(good))
