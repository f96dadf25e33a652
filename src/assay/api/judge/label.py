"""Public API for `assay judge label`: stored rollouts that a rater has not judged yet."""

import getpass
from collections.abc import Sequence

import numpy as np

from assay.errors import ConfigError
from assay.judges import ListwiseJudge
from assay.judges.loading import AnyJudge
from assay.judges.questions import ToLabel, items_to_label, remember
from assay.rubrics.criteria import JudgeFields
from assay.runs.loading import load_judge
from assay.runs.settings import JudgeLabelSettings
from assay.support.keywords import takes
from assay.traces import Store
from assay.traces.store.listing import check_run


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
    Raises:
        ConfigError: `scale` for a judge that has its own, or a listwise judge.
        DataError: there is no run `run_id`.
    """
    if scale and not isinstance(judge, str):
        raise ConfigError("scale applies only to a judge given as a sentence; this one has its own")
    rater = rater or getpass.getuser()
    spec: JudgeFields = {"scale": tuple(scale)} if scale else {}
    built = load_judge(judge, own_model=False, **spec) if isinstance(judge, str) else judge
    if isinstance(built, ListwiseJudge):
        raise ConfigError("a listwise judge has no labels of its own; label pairs or single outputs")
    key = remember(store, built, judge if isinstance(judge, str) else built.spec.text).key
    judged = {row["item_id"] for row in store.labels(key) if row["rater"] == rater}
    check_run(store, run_id)
    rollouts = store.rollouts(run_id=run_id, task_id=task_id)
    waiting = [entry for entry in items_to_label(rollouts, built) if entry.item_id not in judged]
    order = np.random.default_rng(seed).permutation(len(waiting))
    return built, [waiting[index] for index in order[:limit]]
