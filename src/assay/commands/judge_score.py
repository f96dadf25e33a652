"""`assay judge score`: judges every row of a dataset."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from assay.commands.groups import JobOutput
from assay.commands.judging import OPTIONAL, JudgedReport, JudgeJob, need_fields, preflight_items, spent_by
from assay.errors import BudgetExceeded
from assay.jobs.groups import Cached, Preflight, Resumable
from assay.support.numbers import counted
from assay.support.options import Flag, function_of

if TYPE_CHECKING:
    from assay.evaluation.judged import Judged
    from assay.judges import Item, Judge

_MAX_REASONS = 3
_FEWEST = 5  # verdicts below which no interval is reported


@dataclass(frozen=True, kw_only=True, repr=False)
class Verdicts(JudgedReport):
    """Verdicts of a judge on a dataset.

    Attributes:
        n: number of items: rows with the same content are one.
        rows: number of rows.
        unscored: items without a verdict.
        why_unscored: up to three reasons.
        out: file with the verdicts; null if none was asked for.
        labelled: items with human labels.
        missing_labels: empty labels.
        alarms: those of a replay of the judge's anchors, if something that its verdicts depend on has changed.
        verdicts: number of items by label.
        mean: mean value of the verdicts; null for a scale without grades.
        interval: 95 % interval of the mean; null below 5 verdicts.
        corrected: the mean corrected by the human labels (prediction-powered inference); null below 20 of them.
    """

    n: int
    rows: int
    unscored: int
    why_unscored: Sequence[str]
    out: str | None
    labelled: int
    missing_labels: int
    alarms: Sequence[str]
    verdicts: Mapping[str, int]
    mean: float | None = None
    interval: Sequence[float] | None = None
    corrected: Mapping[str, Any] | None = None

    def _facts(self) -> list[tuple[str, str]]:
        return [*((label, str(count)) for label, count in self.verdicts.items()), *super()._facts()]

    def lines(self) -> Iterator[str]:
        shares = ", ".join(f"{label} {count}" for label, count in self.verdicts.items())
        several = f" of {counted(self.rows, 'rows')}; rows with the same content count once"
        yield f"{counted(self.n, 'items')}{several if self.rows != self.n else ''}: {shares}; unscored {self.unscored}"
        for reason in self.why_unscored:
            yield f"note: unscored: {reason}"
        if self.interval:
            low, high = self.interval
            yield f"mean value {self.mean:.3f}, 95 % [{low:.3f}, {high:.3f}] by this judge"
        if corrected := self.corrected:
            yield (
                f"corrected by {corrected['n_people']} human labels: {corrected['mean']:.3f}, 95 % "
                f"[{corrected['low']:.3f}, {corrected['high']:.3f}] "
                f"(raters alone {corrected['people_alone']:.3f}; weight of the verdicts {corrected['weight']:.2f})"
            )
        elif self.labelled:
            cause = "this needs at least 20, and two items without a label"
            if self.labelled == self.n:
                cause = "every item has one, so there is nothing to correct"
            yield f"note: the mean is not corrected by the {counted(self.labelled, 'items')} with human labels: {cause}"
        if self.out:
            yield f"verdicts: {self.out}"
        yield self.spent


class ScoreRows(Resumable, Cached, Preflight, JudgeJob):
    """Judge every row of a dataset, and report the mean value with its 95 % interval.

    Rows have the format of a labels file. Rows with the same content, such as those of several raters, are one item,
    which is judged and counted once. Labels in some rows correct the mean (prediction-powered inference).

    Raises:
        ConfigError: `out` cannot be written; nothing was judged.
        ModelError: a model of the judge did not answer.
    """

    OUTPUT: ClassVar[Any] = JobOutput
    kind: ClassVar[str] = "judge score"

    data: Annotated[str, Flag(metavar="D", path=True, key=False, stored=True)]
    """Rows with input and output (or output_a and output_b); labels of some rows correct the mean."""
    rename: Annotated[Mapping[str, str], Flag(metavar="COLUMN=NAME")] = field(default_factory=dict)
    """Column of the data to rename, and its new name."""
    out: Annotated[str | Path | None, Flag(metavar="FILE", key=False)] = None
    """JSONL file to write, with one line per item: its fields, `verdict`, `value`, `confidence`; `reason` if
    unscored."""

    def run(self) -> Verdicts:
        from assay.datasets.sources import iter_rows
        from assay.datasets.splits import renamed
        from assay.evaluation.judged import judge_items
        from assay.jobs.anchors import replay_changed, values_of
        from assay.jobs.ending import advised
        from assay.judges.labels import make_items
        from assay.support.places import check_new_file, check_writable

        out = None if self.out is None else Path(self.out)
        if out is not None:
            check = check_writable if self.resume else check_new_file  # a finished run that is resumed writes it again
            check(out, "out", inputs=(self.data, self.judge))
        built, rename = self.built(), self.rename
        rows = [(where, renamed(row, rename, where) if rename else row) for where, row in iter_rows(self.data)]
        items = make_items(
            rows, labels=built.labels, spec=self.data, unrated=True, shows=built.shows, anchors=built.spec.anchors
        )
        need_fields(built, items, optional=OPTIONAL)
        if not built.spec.graded:
            self.reporter.say("note: the words of this scale have no grades, so there is no mean value")
        with self.session(resume=self.resume) as (judge, session, run):
            if out is not None:
                run.store.put_searched(out)
            try:
                preflight_items(judge, items, session, self)
                alarms = replay_changed(self.judge, judge, session)
                judged = judge_items(judge, items, session, name="score")
            except BudgetExceeded as cap:
                raise BudgetExceeded(advised(str(cap))) from None
            spent = spent_by(run)
        values = values_of(judged.answers, judge)
        if out is not None:
            _write(out, items, judged, values)
        reasons = list(dict.fromkeys(reason for reason in judged.reasons if reason))
        return Verdicts(
            n=len(items), rows=len(rows), unscored=judged.unscored, why_unscored=reasons[:_MAX_REASONS],
            out=str(out) if out else None, labelled=sum(bool(item.ratings) for item in items),
            missing_labels=items.gaps, alarms=alarms,
            verdicts={label: judged.answers.verdicts.count(label) for label in judge.labels},
            **judged.coverage(judge), **_means(items, values, judge), **spent,
        )  # fmt: skip


def _means(items: "Sequence[Item]", values: Sequence[float | None], judge: "Judge") -> dict[str, Any]:
    import numpy as np

    from assay.evaluation import mean_interval
    from assay.judges.quality.drift import FEWEST_PEOPLE, corrected_mean

    scored = [value for value in values if value is not None]
    if not scored:
        return {}
    label_grades, graded, unlabelled = [], [], []
    for item, value in zip(items, values, strict=True):
        if value is None:
            continue
        if item.ratings:
            label_grades.append(math.fsum(judge.spec.grade(label) * share for label, share in item.shares.items()))
            graded.append(value)
        else:
            unlabelled.append(value)
    enough = len(label_grades) >= FEWEST_PEOPLE and len(unlabelled) > 1
    return {
        "mean": float(np.mean(scored)),
        "interval": list(mean_interval(scored)) if len(scored) >= _FEWEST else None,
        "corrected": asdict(corrected_mean(label_grades, graded, unlabelled)) if enough else None,
    }


def _write(path: Path, items: "Sequence[Item]", judged: "Judged", values: Sequence[float | None]) -> None:
    from assay.support.places import writing
    from assay.support.scrubbing import results
    from assay.support.values import json_text

    answers = judged.answers
    with writing(path) as scratch, scratch.open("w", encoding="utf-8") as file:
        for index, item in enumerate(items):
            masses, verdict = answers.probabilities[index], answers.verdicts[index]
            confidence, reason = masses[verdict] if masses and verdict else None, judged.reasons[index] or None
            row = {"verdict": verdict, "value": values[index], "confidence": confidence, "reason": reason}
            line = {"item_id": item.id, **item.fields, **row}
            file.write(json_text(results(line)) + "\n")


score_rows = function_of(ScoreRows, "score_rows")
