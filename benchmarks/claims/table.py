"""The table of claims, made of the records.

A record holds values by task; each seed has tasks of its own. Intervals are over all tasks of all seeds, paired where
there are two sides. Does not measure anything.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from assay.evaluation import paired_gain
from assay.evaluation.statistics import mean_difference, mean_interval
from claims.groups import GROUPS

NOT_RUN = "not run"
HEAD = """# The claims, with three seeds

Written by `make figures` (`python benchmarks/figures.py table`) from `seeds.jsonl`, which has the values of each task,
the commands, versions and commits. Embedded model (`embedded/smollm2-135m`) unless said otherwise. All tasks are held
out: nothing was selected on them. Where a cell has three numbers they are those of seeds 0, 1 and 2, unless the row's
note names others. Intervals are 95 % intervals over the tasks of all seeds, paired where there are two sides, by the
formula of the gate ([compile](../../docs/explanation/compile.md)). They do not include the variation between compile
runs, of which there are only three. A gain is reached if its mean is at least the goal and its interval excludes zero.
Minutes are those of the longest of the seeds on one or two cores, mostly next to other work; rows of one measurement
share its run.
"""
Records = Sequence[Mapping[str, Any]]  # of one measurement, one for each seed


@dataclass(frozen=True)
class Cells:
    """The measured cells of a row. `reached` is None if the row has no goal."""

    before: str
    after: str
    difference: str
    reached: bool | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One claim.

    Attributes:
        name: unique.
        measurement: name of the measurement; `run` takes both names.
        also: another measurement that the row reads.
        cells: makes the cells from the records of all seeds.
        enough: number of seeds from which the row is reported; None: all of them.
        seeds: other seeds than those of the table, where a row was measured anew by a changed protocol.
    """

    name: str
    claim: str
    goal: str
    measurement: str
    cells: Callable[[Records], Cells]
    note: str = ""
    also: str | None = None
    enough: int | None = None
    seeds: tuple[int, ...] | None = None

    @property
    def measurements(self) -> list[str]:
        return [self.measurement, *([self.also] if self.also else [])]

    def records(self, records: Mapping[tuple[str, int], Mapping[str, Any]], seeds: Sequence[int]) -> Records:
        """One record for each seed for which all measurements have one, with the values, facts and seconds of all."""
        by_seed = [[records.get((name, seed)) for name in self.measurements] for seed in seeds]
        return [
            {
                "seed": seed,
                "seconds": sum(entry["seconds"] for entry in entries if entry is not None),
                **{part: _joined(entries, part) for part in ("values", "facts")},
            }
            for seed, entries in zip(seeds, by_seed, strict=True)
            if None not in entries
        ]


def _joined(entries: Sequence[Mapping[str, Any] | None], part: str) -> dict[str, Any]:
    return {name: value for entry in entries if entry is not None for name, value in entry[part].items()}


def pooled(records: Records, figure: str, side: str) -> dict[str, float]:
    """Values of all seeds by seed and task; unscored ones (null in a record) are NaN."""
    return {
        f"{record['seed']}:{task}": math.nan if value is None else float(value)
        for record in records
        for task, value in record["values"][figure].get(side, {}).items()
    }


def mean_of(values: Mapping[Any, float]) -> float:
    scored = [value for value in values.values() if not math.isnan(value)]
    return float(np.mean(scored)) if scored else math.nan


def by_seed(records: Records, figure: str, side: str) -> list[float]:
    return [mean_of(pooled([record], figure, side)) for record in records]


def per_cent(values: Sequence[float]) -> str:
    return ", ".join(f"{100 * value:.0f}" for value in values) + " %"


def points(mean: float, low: float, high: float) -> str:
    return f"{100 * mean:+.1f} points [{_end(100 * low)}, {_end(100 * high)}]"


def _end(value: float) -> str:
    """An end of an interval, with as many digits as show on which side of zero it is."""
    text = f"{value:.1f}"
    return text if value == 0 or float(text) else f"{value:.1g}"


def gain(
    figure: str, *, least: float, most_before: float = 1.0, least_after: float = 0.0
) -> Callable[[Records], Cells]:
    """Cells of a share that must rise: by at least `least`, with an interval above zero.

    Args:
        most_before, least_after: bounds of the two means, where the claim has them.
    """

    def cells(records: Records) -> Cells:
        before, after = pooled(records, figure, "before"), pooled(records, figure, "after")
        paired = paired_gain(before, after)
        within = mean_of(before) <= most_before and mean_of(after) >= least_after
        return Cells(
            per_cent(by_seed(records, figure, "before")),
            per_cent(by_seed(records, figure, "after")),
            f"{points(paired.mean, paired.low, paired.high)}, n = {paired.n}",
            paired.is_gain and paired.mean >= least and within,
        )

    return cells


def share(figure: str, *, least: float | None = None) -> Callable[[Records], Cells]:
    """Cells of a share that has no other side, or whose other side is not compared."""

    def cells(records: Records) -> Cells:
        after = pooled(records, figure, "after")
        scored = [value for value in after.values() if not math.isnan(value)]
        low, high = mean_interval(scored)
        before = by_seed(records, figure, "before") if pooled(records, figure, "before") else []
        return Cells(
            per_cent(before) if before else "",
            per_cent(by_seed(records, figure, "after")),
            f"{100 * mean_of(after):.1f} % [{100 * low:.1f}, {100 * high:.1f}], n = {len(scored)}",
            None if least is None else mean_of(after) >= least,
        )

    return cells


def as_good(figure: str) -> Callable[[Records], Cells]:
    """Cells of a share that must be at least that of the other side."""

    def cells(records: Records) -> Cells:
        return replace(gain(figure, least=0.0)(records), reached=_difference(records, figure) >= 0)

    return cells


def _difference(records: Records, figure: str) -> float:
    return paired_gain(pooled(records, figure, "before"), pooled(records, figure, "after")).mean


def ratio_change(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[float, float, float]:
    """Relative change of a sum, paired over tasks, with its 95 % interval by linearisation of the ratio.

    Source: Cochran 1977, Sampling Techniques, section 6.4 (ratio estimator).
    """
    keys = sorted(before.keys() & after.keys())
    old, new = (np.array([side[key] for key in keys]) for side in (before, after))
    if not len(keys) or old.sum() == 0:
        return math.nan, -math.inf, math.inf
    ratio = new.sum() / old.sum()
    mean, low, high = mean_difference(list((new - ratio * old) / old.mean() + ratio - 1))
    return mean, -math.inf if low is None else low, math.inf if high is None else high


def cheaper(
    tokens: str, score: str, *, least: float, margin: float, loops: str | None = None, unit: str = "tokens"
) -> Callable[[Records], Cells]:
    """Cells of a saving of tokens whose score stays within a margin that was declared before; with runs in loops.

    Args:
        unit: what is saved, where it is not tokens.
    """

    def cells(records: Records) -> Cells:
        before, after = pooled(records, tokens, "before"), pooled(records, tokens, "after")
        mean, low, high = ratio_change(before, after)
        paired = paired_gain(pooled(records, score, "before"), pooled(records, score, "after"))
        sides = [
            f"{', '.join(f'{value:.0f}' for value in by_seed(records, tokens, side))} {unit}, "
            f"{per_cent(by_seed(records, score, side))} right"
            for side in ("before", "after")
        ]
        if loops is not None:
            counts = [sum(pooled(records, loops, side).values()) for side in ("before", "after")]
            sides = [f"{text}, {count:.0f} loops" for text, count in zip(sides, counts, strict=True)]
        return Cells(
            sides[0],
            sides[1],
            f"{unit} {100 * mean:+.0f} % [{100 * low:.0f}, {100 * high:.0f}]; "
            f"score {points(paired.mean, paired.low, paired.high)}, n = {paired.n}",
            mean <= -least and high < 0 and paired.low >= -margin,
        )

    return cells


def effort(by_hand: str, compiled: str) -> Callable[[Records], Cells]:
    """Cells of the lines that a person writes, and of the paired score of the two.

    Args:
        by_hand, compiled: figures with the scores.
    """

    def cells(records: Records) -> Cells:
        lines = records[0]["facts"]["lines"]
        written = lines["program"] + lines["rubric"] + lines["command"]
        paired = paired_gain(pooled(records, by_hand, "after"), pooled(records, compiled, "after"))
        less = written / lines["prompt"] - 1
        scores = [per_cent(by_seed(records, figure, "after")) for figure in (by_hand, compiled)]
        return Cells(
            f"{_lines(lines['prompt'])}, {scores[0]} right",
            f"{_lines(written)}, {scores[1]} right",
            f"{100 * less:+.0f} % lines; score {points(paired.mean, paired.low, paired.high)}, n = {paired.n}",
            less <= -0.8 and paired.high >= 0,
        )

    return cells


def relative(
    figure: str, *, least: float, score: str | None = None, form: Callable[[Sequence[float]], str] = per_cent
) -> Callable[[Records], Cells]:
    """Cells of a relative change of a mean: by at least `least`, a fall if that is negative; its interval without zero.

    Args:
        score: a figure that is shown too, as the share that is right.
        form: how the means of the seeds are shown.
    """

    def cells(records: Records) -> Cells:
        change, low, high = ratio_change(pooled(records, figure, "before"), pooled(records, figure, "after"))
        sides = [form(by_seed(records, figure, side)) for side in ("before", "after")]
        if score is not None:
            right = [per_cent(by_seed(records, score, side)) for side in ("before", "after")]
            sides = [f"{text}, {share_right} right" for text, share_right in zip(sides, right, strict=True)]
        count = len(pooled(records, figure, "before").keys() & pooled(records, figure, "after").keys())
        return Cells(
            sides[0],
            sides[1],
            f"{100 * change:+.0f} % [{100 * low:.0f}, {100 * high:.0f}], n = {count}",
            change <= least and high < 0 if least < 0 else change >= least and low > 0,
        )

    return cells


def as_good_as(twin: str, figure: str, *, within: float, rate: str) -> Callable[[Records], Cells]:
    """Cells of a score after training next to that of a twin: lower by less than this share of it, with its interval.

    Args:
        rate: a fact of both sides that is shown, in samples a second.
    """

    def cells(records: Records) -> Cells:
        theirs, ours = pooled(records, twin, "after"), pooled(records, figure, "after")
        paired = paired_gain(theirs, ours)
        sides = [
            f"{per_cent(by_seed(records, side, 'after'))} right, "
            f"{', '.join(format(record['facts'][side][rate], '.2f') for record in records)} samples/s"
            for side in (twin, figure)
        ]
        low = -within * mean_of(theirs)
        return Cells(*sides, f"{points(paired.mean, paired.low, paired.high)}, n = {paired.n}", paired.low >= low)

    return cells


def over_seeds(figure: str, curves: tuple[str, str]) -> Callable[[Records], Cells]:
    """Cells of two trainings, paired over seeds with an interval by Student's t: faster or higher.

    Args:
        curves: names of the training curves of both sides; the mean of a curve says how fast it rises.
    """

    def cells(records: Records) -> Cells:
        areas = [[mean_of(dict(enumerate(record["facts"]["curves"][name]))) for record in records] for name in curves]
        scores = [by_seed(records, figure, side) for side in ("before", "after")]
        changes = [mean_difference([b - a for a, b in zip(*sides, strict=True)]) for sides in (scores, areas)]
        higher, faster = (
            points(mean, -math.inf if low is None else low, math.inf if high is None else high)
            for mean, low, high in changes
        )
        return Cells(
            *(f"{per_cent(score)}; area {per_cent(area)}" for score, area in zip(scores, areas, strict=True)),
            f"score {higher}; area {faster}, n = {len(records)} seeds",
            any(low is not None and low > 0 for _, low, _ in changes),
        )

    return cells


def _lines(count: int) -> str:
    return f"{count} line{'s' if count != 1 else ''}"


def statements(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values) + " statements"


def not_below(figure: str) -> Callable[[Records], Cells]:
    """Cells of a share that must not fall significantly: the interval of its change is not below zero."""

    def cells(records: Records) -> Cells:
        paired = paired_gain(pooled(records, figure, "before"), pooled(records, figure, "after"))
        return Cells(
            per_cent(by_seed(records, figure, "before")),
            per_cent(by_seed(records, figure, "after")),
            f"{points(paired.mean, paired.low, paired.high)}, n = {paired.n}",
            paired.high >= 0,
        )

    return cells


def revised(records: Records) -> Cells:
    """Refinement compared with votes: fewer tokens at an equal score, or a higher score at no more tokens."""
    cells = cheaper("tokens", "score", least=0.05, margin=0.01)(records)
    before, after = pooled(records, "score", "before"), pooled(records, "score", "after")
    tokens = ratio_change(pooled(records, "tokens", "before"), pooled(records, "tokens", "after"))
    better = paired_gain(before, after).is_gain and mean_of(after) >= 1.05 * mean_of(before) and tokens[0] <= 0
    return replace(cells, reached=cells.reached or better)


def page(rows: Sequence[Row], records: Mapping[tuple[str, int], Mapping[str, Any]], seeds: Sequence[int]) -> str:
    """The page `seeds.md`."""
    notes = [f"- `{row.name}`: {row.note}" for row in rows if row.note]
    return "\n".join([HEAD, markdown(rows, records, seeds), "", "## Notes", "", *notes, ""])


def markdown(rows: Sequence[Row], records: Mapping[tuple[str, int], Mapping[str, Any]], seeds: Sequence[int]) -> str:
    """The table. A row is reported only with the records of all `seeds`, or of as many as are `enough` for it."""
    lines = [
        "| claim | before | after | difference, 95 % | goal | reached | minutes | command |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        own = row.seeds or seeds
        measured = row.records(records, own)
        stronger = row.measurement in GROUPS and GROUPS[row.measurement].stronger
        command = f"`python benchmarks/figures.py run {row.name}{' --stronger FILE.gguf' if stronger else ''}`"
        if len(measured) < (row.enough or len(own)):
            why = NOT_RUN if not measured else f"{NOT_RUN} ({len(measured)} of {len(own)} seeds)"
            lines.append(f"| {row.claim} | | | | {row.goal} | {why} | | {command} |")
            continue
        cells = row.cells(measured)
        reached = {True: "yes", False: "**no**", None: "reported"}[cells.reached]
        reached += "" if len(measured) == len(own) else f" ({len(measured)} of {len(own)} seeds)"
        minutes = f"{max(record['seconds'] for record in measured) / 60:.0f}"
        columns = (row.claim, cells.before, cells.after, cells.difference, row.goal, reached, minutes, command)
        lines.append(f"| {' | '.join(columns)} |".replace("|  |", "| |"))
    return "\n".join(lines)
