"""Collects existing interactions as single-turn rollouts, and prepares the good ones for training."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.datasets import load_tasks
from assay.datasets.tasks import owners_of, task_key
from assay.errors import ConfigError
from assay.traces.records import Rollout, Transition, new_id
from assay.traces.store import Store

_FIELDS = ("input", "output", "rating", "task_type", "model", "data_subject", "tenant", "consent")


@dataclass
class Collected:
    """Result of `DataCollector.collect_interaction_data`.

    Args:
        kept: Ids of the rollouts.
        refused: Position and reason of each refused interaction.
    """

    kept: list[str] = field(default_factory=list)
    refused: list[tuple[int, str]] = field(default_factory=list)


@dataclass
class TrainingData:
    """Rows for supervised training.

    Args:
        rows: Rows with `prompt` and `completion` as chat messages, `quality` and `task_type`.
        task_distribution: Number of rows by task type.
        left_out: Number of interactions that are unrated or below the threshold.
    """

    rows: list[dict[str, Any]]
    task_distribution: dict[str, int]
    left_out: int = 0


class DataCollector:
    """Collects interactions as rollouts.

    Args:
        store: Store or its path; None keeps the interactions in memory only.
    """

    def __init__(self, store: Store | str | Path | None = None) -> None:
        if store is not None and not isinstance(store, Store | str | Path):
            raise ConfigError(f"`store={store!r}` must be a Store, its path or URL, or None")
        self.store = Store(store) if isinstance(store, str | Path) else store
        self.rollouts: list[Rollout] = []
        self._interaction_keys: set[tuple[str, str]] = set()
        self._run = f"interactions-{new_id()[:12]}"

    def collect_interaction_data(
        self, interactions: Iterable[Mapping[str, Any]], *, source: str = "interaction"
    ) -> Collected:
        """Check and store interactions.

        Duplicates (same input and output), empty texts, ratings out of range and unknown fields are refused with a
        reason; the other interactions are stored.

        Args:
            interactions: Mappings with `input`, `output`, and optionally `rating` in [0, 1], `task_type` (default
                `default`), `model`, `data_subject`, `tenant` and `consent`.
            source: Source of the rollouts.
        Raises:
            ConfigError: `interactions` is not an iterable of mappings.
        """
        if isinstance(interactions, str | bytes | Mapping) or not isinstance(interactions, Iterable):
            raise ConfigError(
                f"interactions={str(interactions)[:80]!r} must be a list of mappings with 'input' and 'output'"
            )
        report = Collected()
        for index, row in enumerate(interactions):
            reason = self._wrong(row)
            if reason is not None:
                report.refused.append((index, reason))
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
            return f"unknown fields {unknown}; allowed are {', '.join(_FIELDS)}"
        for name in ("input", "output"):
            if not isinstance(row.get(name), str) or not row[name].strip():
                return f"{name} is {'missing' if name not in row else 'empty or not text'}"
        rating = row.get("rating")
        if rating is not None and (
            isinstance(rating, bool) or not isinstance(rating, int | float) or not 0 <= rating <= 1
        ):
            return f"`rating={rating!r}` must be between 0 and 1"
        key = row["input"].strip(), row["output"].strip()
        if key in self._interaction_keys:
            return "duplicate of an earlier interaction with the same input and output"
        self._interaction_keys.add(key)  # last, so that a refused row does not make its correction a duplicate
        return None

    def _rollout(self, row: Mapping[str, Any], source: str) -> Rollout:
        task = task_key({"input": row["input"]})
        model = str(row.get("model") or "unknown")
        request = {"dialect": "chat", "body": {"model": model, "messages": [{"role": "user", "content": row["input"]}]}}
        response = {
            "body": {"choices": [{"message": {"role": "assistant", "content": row["output"]}, "finish_reason": "stop"}]}
        }
        owner_fields: dict[str, Any] = {name: text for name, text in owners_of(row).items() if text}
        rating = None if row.get("rating") is None else float(row["rating"])
        return Rollout(
            run_id=self._run,
            task_id=task,
            group_id=task,
            task_type=str(row.get("task_type") or "default"),
            source=source,
            status="done",
            model=model,
            inputs={"input": row["input"]},
            prediction={"answer": row["output"]},
            human_rating=rating,
            transitions=[Transition(t=0, model=model, request=request, response=response, output=row["output"])],
            **owner_fields,
        )

    def generate_synthetic_data(
        self, n: int, *, data: str = "arithmetic:terms=2-3&digits=1-3", seed: int = 0
    ) -> Collected:
        """Generate interactions with correct answers.

        They have the source `synthetic` and the rating 1, because they are correct by construction.

        Args:
            n: Number of interactions.
            data: Spec of a task generator (`arithmetic:…`, `reasoning_gym:…`).
            seed: Seed of the generator.
        Raises:
            ConfigError: `n` is smaller than 1.
        """
        if n < 1:
            raise ConfigError(f"n={n!r} must be at least 1")
        kind, _, rest = data.partition(":")
        query = rest if kind == "arithmetic" else rest.partition("?")[2]
        before = f"{kind}:" if kind == "arithmetic" else f"{kind}:{rest.partition('?')[0]}?"
        joined = before + "&".join(part for part in (query, f"size={n}", f"seed={seed}") if part)
        rows = []
        for task in load_tasks(joined):
            question, answer = (
                " ".join(str(value) for value in part.values()) for part in (task.inputs, task.expected)
            )
            kind = task.task_type if task.task_type != "default" else data.partition(":")[0]
            rows.append({"input": question, "output": answer, "rating": 1.0, "task_type": kind})
        return self.collect_interaction_data(rows, source="synthetic")

    def filter_high_quality(self, threshold: float = 0.8) -> list[Rollout]:
        """Rollouts whose rating (or score) is at least `threshold`, in [0, 1]. Unrated ones are excluded."""
        if not 0 <= threshold <= 1:
            raise ConfigError(f"`threshold={threshold!r}` must be between 0 and 1")
        return [
            rollout for rollout in self.rollouts if (quality := rollout.quality) is not None and quality >= threshold
        ]

    def prepare_training_data(self, *, threshold: float = 0.8) -> TrainingData:
        """Convert the interactions that reach `threshold` to training rows.

        Use `assay.export("sft", …)` on the same store to apply gates and anonymization.
        """
        good = self.filter_high_quality(threshold)
        rows = [
            {
                "prompt": [{"role": "user", "content": rollout.inputs["input"]}],
                "completion": [{"role": "assistant", "content": rollout.transitions[0].output}],
                "quality": rollout.quality,
                "task_type": rollout.task_type,
            }
            for rollout in good
        ]
        return TrainingData(
            rows, dict(Counter(rollout.task_type for rollout in good).most_common()), len(self.rollouts) - len(good)
        )
