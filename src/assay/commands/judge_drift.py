"""`assay judge drift`: freezes a judge's verdicts on an anchor set, and replays them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from assay.commands.groups import JobOutput
from assay.commands.judging import OPTIONAL, JudgedReport, JudgeJob, Rows, need_fields, preflight_items, spent_by
from assay.errors import ConfigError
from assay.jobs.groups import Preflight
from assay.support.numbers import counted
from assay.support.options import Flag, Parse, function_of


@dataclass(frozen=True, kw_only=True, repr=False)
class FrozenAnchors(JudgedReport):
    """An anchor set that was frozen.

    Attributes:
        frozen: number of anchors.
        anchors: the file.
        noise: how much two runs of the judge differ, as a share of the scale.
    """

    frozen: int
    anchors: str
    noise: float

    def lines(self) -> Iterator[str]:
        yield (
            f"froze {self.frozen} verdicts in {self.anchors}; two runs differ by {self.noise:.3f} of the scale; "
            f"{self.spent}"
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class Replay(JudgedReport):
    """Verdicts on an anchor set, compared with the frozen ones.

    Attributes:
        alarms: what has drifted, each with what changed.
        changed: what the verdicts depend on and is another than when they were frozen: old and new value.
        n: anchors with a verdict both times.
        lost: anchors that are unscored now.
        mean_difference: mean change of the verdicts, as a share of the scale.
        mean_square: mean of the squared changes.
        mean_square_error: its standard error.
        noise: how much two runs of the judge differed when the set was frozen.
        flips: number, directions and p values of changed verdicts, for values of few levels; otherwise null.
        cusum: highest CUSUM statistic, for other values; otherwise null.
        cusum_limit: above it there is an alarm.
        psi: population stability index; null for few anchors.
        psi_limit: above it there is an alarm.
    """

    alarms: Sequence[str]
    changed: Mapping[str, Any]
    n: int
    lost: int
    mean_difference: float | None
    mean_square: float | None
    mean_square_error: float | None
    noise: float
    flips: Mapping[str, Any] | None
    cusum: float | None
    cusum_limit: float | None
    psi: float | None
    psi_limit: float | None

    def lines(self) -> Iterator[str]:
        from assay.reports.cards import drift_facts  # imports numpy

        for name, (before, after) in self.changed.items():
            yield f"changed: {name}: {before} -> {after}"
        yield drift_facts(self.to_dict())
        yield from (f"ALARM: {alarm}" for alarm in self.alarms)
        yield f"{'drifted' if self.alarms else 'no drift'}; {self.spent}"

    @property
    def failure(self) -> str:
        return f"the judge has drifted: {counted(len(self.alarms), 'alarms')}" if self.alarms else ""


class ReplayAnchors(Preflight, JudgeJob):
    """Replay a frozen set of verdicts on JUDGE, and raise an alarm that names what changed. Exit code 1 on an alarm.

    Never uses the response cache: a cached answer cannot show drift.

    Raises:
        ConfigError: there is no such set; with `freeze`, there is one already.
    """

    OUTPUT: ClassVar[Any] = JobOutput
    kind: ClassVar[str] = "judge drift"

    anchors: Annotated[str | Path | None, Flag(metavar="FILE", key=False, stored=True), Parse(str)] = None
    """The frozen set, a .json file; by default the one next to a compiled judge."""
    freeze: Rows = None
    """Freeze the verdicts of JUDGE on these rows, which are as for assay judge score."""

    @property
    def cache(self) -> bool:
        return False

    def run(self) -> FrozenAnchors | Replay:
        from assay.jobs.anchors import items_of, replay
        from assay.jobs.finished import FinishedRun
        from assay.judges.quality.drift import AnchorSet
        from assay.support.places import check_writable

        path = self._path()
        if self.freeze and path.exists():
            raise ConfigError(f"{path} is there already; an anchor set is frozen once. Delete it, or name another file")
        frozen = None if self.freeze else AnchorSet.load(path)
        if not self.built().spec.graded:
            raise ConfigError("drift is measured on values, and the words of this judge's scale have no grades")
        if self.freeze:
            check_writable(path, "anchors")
        with self.session() as (judge, session, run):
            if frozen is None:
                return self._frozen(judge, session, run, path)
            preflight_items(judge, items_of(frozen), session, self)
            report = Replay(**replay(judge, frozen, session), **spent_by(run))
            FinishedRun(run.folder, caps=self.caps, about={}).keep(report.to_dict())
            return report

    def _path(self) -> Path:
        from assay.jobs.anchors import ANCHORS
        from assay.sources.artifact_files import is_artifact

        if self.anchors is not None:
            return Path(self.anchors)
        if not isinstance(self.judge, str) or not is_artifact(self.judge):
            raise ConfigError("only a compiled judge has anchors of its own; name a file with `anchors`")
        return Path(self.judge) / ANCHORS

    def _frozen(self, judge: Any, session: Any, run: Any, path: Path) -> FrozenAnchors:
        from assay.datasets.sources import iter_rows
        from assay.evaluation.judged import judge_again, judge_items
        from assay.jobs.anchors import freeze
        from assay.judges.labels import make_items

        spec = str(self.freeze)
        items = make_items(iter_rows(spec), labels=judge.labels, spec=spec, unrated=True, shows=judge.shows)
        need_fields(judge, items, optional=OPTIONAL)
        preflight_items(judge, items, session, self)
        judged = judge_items(judge, items, session, name="freeze")
        repeat = judge_again(judge, items, session, name="freeze: once more")
        anchor_set = freeze(judge, items, judged.answers, repeat.answers, session)
        run.store.put_searched(path)
        anchor_set.save(path)
        return FrozenAnchors(
            frozen=len(anchor_set.anchors), anchors=str(path), noise=anchor_set.noise, **judged.coverage(judge),
            **spent_by(run),
        )  # fmt: skip


replay_anchors = function_of(ReplayAnchors, "replay_anchors")
