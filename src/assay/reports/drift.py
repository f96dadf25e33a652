"""Replays of a judge's anchors over time as charts: how far the verdicts moved, and how close an alarm is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from assay.reports.charts import Axis, Dot, Line, lines_chart, points_chart
from assay.reports.texts import moment
from assay.support.numbers import signed

_UNITS = {"days": 86_400, "hours": 3_600, "minutes": 60, "seconds": 1}
_REACH = 0.1  # least height of the chart of differences, to either side of 0


@dataclass(frozen=True, kw_only=True)
class DriftChart:
    """A chart of replays. `keys` are kind and name of what it draws."""

    heading: str
    note: str
    chart: Markup
    keys: Sequence[tuple[str, str]]


def drift_charts(replays: Sequence[tuple[float, Mapping[str, Any]]]) -> list[DriftChart]:
    """Charts of replays in any order; none of fewer than two.

    Args:
        replays: start, in seconds since the epoch, and the report of `assay judge drift`.
    """
    ordered = sorted(replays, key=lambda replay: replay[0])
    if len(ordered) < 2:
        return []
    first, last = ordered[0][0], ordered[-1][0]
    unit = next((name for name, seconds in _UNITS.items() if last - first >= 2 * seconds), "seconds")
    rows = [((at - first) / _UNITS[unit], at, report) for at, report in ordered]
    charts = [_differences(rows, unit), _alarms(rows, unit)]
    return [chart for chart in charts if chart.chart]


_Rows = Sequence[tuple[float, float, Mapping[str, Any]]]


def _differences(rows: _Rows, unit: str) -> DriftChart:
    known = [(time, at, report) for time, at, report in rows if report["mean_difference"] is not None]
    reach = max([_REACH, *(abs(report["mean_difference"]) for _, _, report in known)])
    dots = [
        Dot(
            x=time, y=report["mean_difference"], kind="fourth" if report["alarms"] else "first",
            name=f"{moment(at)}: {signed(report['mean_difference'])}{', drifted' if report['alarms'] else ''}",
        )
        for time, at, report in known
    ]  # fmt: skip
    last = rows[-1][0]
    steps = [
        Line(name="as frozen", points=[(0.0, 0.0), (last, 0.0)]),
        Line(name="replays", points=[(dot.x, dot.y) for dot in dots], kind="faint first"),
    ]
    return DriftChart(
        heading="Verdicts less frozen ones",
        note="Mean over the anchors, as a share of the scale; 0 is where they were frozen",
        keys=[("first", "no drift"), ("fourth", "drifted")],
        chart=points_chart(
            dots, label="Mean difference of verdicts over time",
            x=Axis(name=f"{unit} since the first shown"),
            y=Axis(name="mean difference", low=-reach, high=reach), steps=steps,
        ),
    )  # fmt: skip


def _alarms(rows: _Rows, unit: str) -> DriftChart:
    lines, keys = [], []
    for name, value, limit, kind in (("CUSUM", "cusum", "cusum_limit", "first"), ("PSI", "psi", "psi_limit", "second")):
        points = [
            (time, report[value] / report[limit])
            for time, _, report in rows
            if report.get(value) is not None and report[limit]
        ]
        if points:
            lines.append(Line(name=name, points=points, kind=kind))
            keys.append((kind, name))
    lines.append(Line(name="alarm", points=[(0.0, 1.0), (rows[-1][0], 1.0)], kind="fourth"))
    return DriftChart(
        heading="How close to an alarm",
        note="Each statistic as a share of its limit; above 1 is an alarm",
        keys=[*keys, ("fourth", "limit")],
        chart=lines_chart(
            lines, label="Share of the alarm limits over time", x_name=f"{unit} since the first shown",
            y_name="share of the limit",
        ),
    )  # fmt: skip
