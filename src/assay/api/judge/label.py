"""Public API for `assay judge label`: stored rollouts that a rater has not judged yet."""

import getpass
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from assay.api.judge.items import question_key
from assay.datasets.tasks import content_hash
from assay.errors import ConfigError
from assay.judges import ListwiseJudge
from assay.judges.deciding import one_of, output_of
from assay.judges.loading import AnyJudge
from assay.rubrics.criteria import JudgeFields
from assay.runs.loading import load_judge
from assay.runs.settings import JudgeLabelSettings
from assay.support.keywords import takes
from assay.traces import Rollout, Store
from assay.traces.records import NOT_AGENTS

__all__ = ["ToLabel", "item_to_label", "to_label"]


@dataclass(frozen=True)
class ToLabel:
    """One item for a rater."""

    item_id: str
    fields: Mapping[str, Any]
    rollout_id: str


@takes(JudgeLabelSettings)
def to_label(
    judge: str | AnyJudge,
    store: Store,
    *,
    rater: str | None = None,
    run_id: str | None = None,
    task_id: str | None = None,
    limit: int = 20,
    seed: int = 0,
    scale: Sequence[str] | None = None,
) -> tuple[AnyJudge, list[ToLabel]]:
    """Items from stored rollouts that this rater has not judged yet, as the judge would see them, in random order.

    Leaves out rollouts of the sealed test split, of judges, and without an answer. For a pairwise judge the items are
    pairs of different outputs of one task.

    Args:
        rater: name of the rater; by default that of the user of this process.
        scale: for a judge given as a sentence.
    """
    if scale and not isinstance(judge, str):
        raise ConfigError("scale applies only to a judge given as a sentence; this one has its own")
    rater = rater or getpass.getuser()
    spec: JudgeFields = {"scale": tuple(scale)} if scale else {}
    built = load_judge(judge, **spec) if isinstance(judge, str) else judge
    if isinstance(built, ListwiseJudge):
        raise ConfigError("a listwise judge has no labels of its own; label pairs or single outputs")
    judged = {row["item_id"] for row in store.labels(question_key(built)) if row["rater"] == rater}
    entries: dict[str, ToLabel] = {}
    rollouts = (
        r
        for r in store.rollouts(run_id=run_id, task_id=task_id)
        if r.prediction and r.source not in NOT_AGENTS and r.split != "test" and r.task_type != "verdict"
    )
    for entry in _pairs(rollouts) if built.compares else (item_to_label(rollout, built) for rollout in rollouts):
        if entry is not None and entry.item_id not in judged:
            entries.setdefault(entry.item_id, entry)
    order = np.random.default_rng(seed).permutation(len(entries))
    waiting = list(entries.values())
    return built, [waiting[index] for index in order[:limit]]


def item_to_label(rollout: Rollout, judge: AnyJudge) -> ToLabel | None:
    """A rollout as the judge would see it; None if it has no answer or lacks a field that the judge needs."""
    prediction = rollout.prediction or {}
    available = {**prediction, **rollout.inputs, "task_input": one_of(rollout.inputs), "output": output_of(prediction)}
    names = getattr(judge, "shows", ("task_input", "output"))
    if available["output"] in ("", {}, None) or any(name not in available for name in names):
        return None
    fields = {name: available[name] for name in names}
    return ToLabel(content_hash(fields)[:16], fields, rollout.id)


def _pairs(rollouts: Iterator[Rollout]) -> Iterator[ToLabel]:
    groups: dict[str, dict[str, Rollout]] = defaultdict(dict)
    for rollout in rollouts:
        groups[json.dumps(rollout.inputs, sort_keys=True, default=str)].setdefault(
            str(output_of(rollout.prediction or {})), rollout
        )
    for group in groups.values():
        # by hash, so that the order does not depend on age or length
        members = sorted(group.values(), key=lambda r: content_hash({"output": output_of(r.prediction or {})}))
        for first, second in zip(members[::2], members[1::2], strict=False):
            fields = {
                "task_input": one_of(first.inputs),
                "output_a": output_of(first.prediction or {}),
                "output_b": output_of(second.prediction or {}),
            }
            yield ToLabel(content_hash(fields)[:16], fields, first.id)
