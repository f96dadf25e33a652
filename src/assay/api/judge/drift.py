"""Public API for `assay judge drift`: freezes a judge's verdicts on an anchor set, and replays them."""

from pathlib import Path
from typing import Any, Unpack

import dspy

from assay.api.judge.items import need_fields
from assay.api.judge.session import OPTIONAL, at_work, built_judge, judge_settings, preflight_items, spent_by
from assay.datasets.sources import iter_rows
from assay.deployment.artifact import is_artifact
from assay.errors import ConfigError
from assay.evaluation import Progress, default_progress
from assay.evaluation.judged import judge_again, judge_items
from assay.judges import Judge
from assay.judges.labels import make_items
from assay.judges.quality.drift import AnchorSet
from assay.runs.anchors import ANCHORS, items_of, replay
from assay.runs.anchors import freeze as freeze_set
from assay.runs.finished import FinishedRun
from assay.runs.settings import JudgeDriftSettings
from assay.runs.settings.options import JudgeDriftOptions
from assay.sources.trust import trusts
from assay.support.keywords import takes
from assay.support.places import check_writable
from assay.support.reprs import ReportDict


@takes(JudgeDriftSettings)
@trusts
def replay_anchors(
    judge: str | Judge, *, anchors: str | Path | None = None, freeze: str | None = None, lm: dspy.LM | None = None,
    store: str | Path | None = None, progress: Progress | None = None, **options: Unpack[JudgeDriftOptions],
) -> dict[str, Any]:  # fmt: skip
    """Freezes a judge's verdicts on a set of items, or replays a frozen set and reports drift.

    Never uses the response cache: a cached answer cannot show drift.

    Args:
        anchors: JSON file of the frozen set; None for a compiled judge's own.
        freeze: dataset to freeze (rows as for `score_rows`); None replays the existing set.
        options: the fields of `assay.runs.settings.JudgeDriftSettings`.
    Returns:
        After freezing, `frozen` (number of anchors), `anchors` and `noise`. After a replay, `alarms`, `changed`,
        `cusum`, `psi` and `mean_difference`, see `assay.judges.quality.drift.compare`.
    """
    if anchors is None:
        if not isinstance(judge, str) or not is_artifact(judge):
            raise ConfigError("only a compiled judge has anchors of its own; name a file with anchors=…")
        anchors = Path(judge) / ANCHORS
    path, progress = Path(anchors), default_progress(progress)
    named = {"anchors": str(path), "freeze": freeze}
    config, lm = judge_settings(JudgeDriftSettings, judge, lm, freeze or str(path), {**options, **named})
    frozen = None if freeze else AnchorSet.load(path)
    if freeze and path.exists():
        raise ConfigError(f"{path} is there already; an anchor set is frozen once. Delete it, or name another file")
    built = built_judge(judge, config.scale)
    if not built.spec.graded:
        raise ConfigError("drift is measured on values, and the words of this judge's scale have no grades")
    if freeze:
        check_writable(path, "anchors")
    with at_work(config, judge, lm, progress, store) as (judge_, session, run):
        if frozen is not None:
            preflight_items(judge_, items_of(frozen), session, config)
            report = {**replay(judge_, frozen, session), **spent_by(session)}
            FinishedRun(run.folder, caps=config.caps, about={}).keep(report)
            return ReportDict("Replay", report, {"alarms": len(report["alarms"])})
        items = make_items(
            iter_rows(str(freeze)), labels=judge_.labels, spec=str(freeze), unrated=True, shows=judge_.shows
        )
        need_fields(judge_, items, optional=OPTIONAL)
        preflight_items(judge_, items, session, config)
        judged = judge_items(judge_, items, session, name="freeze")
        first = judged.answers
        repeat = judge_again(judge_, items, session, name="freeze: once more").answers
        anchor_set = freeze_set(judge_, items, first, repeat, session)
        run.store.put_searched(path)
        anchor_set.save(path)
        frozen_set = {"frozen": len(anchor_set.anchors), "anchors": str(path), "noise": anchor_set.noise}
        return ReportDict("Anchors", {**frozen_set, **judged.coverage(judge_), **spent_by(session)})
