"""Small charts as inline SVG, made on the server. Colours come from the style sheet by class; nothing is scripted.

Every chart has a text alternative, and its data is in a table next to it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from assay.reports.texts import readable
from assay.support.numbers import figure, signed

_WIDTH, _HEIGHT = 480, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 12, 10, 32
_MARGIN = 0.04  # of the height
_POINTS = 200  # of one line
_DOTS = 1_000  # of one chart
_ALMOST = 1e-9  # share of a step below which two ends are the same


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a chart. `kind` is its class in the style sheet: `first`, `second`, `third`, `fourth` or `other`."""

    name: str
    points: Sequence[tuple[float, float]]
    kind: str = "other"


@dataclass(frozen=True, kw_only=True)
class Dot:
    """A point of a chart. `kind` as for lines; `size` is its radius; `low` and `high` are the ends of its interval."""

    x: float
    y: float
    name: str = ""
    kind: str = "other"
    size: float = 3.5
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis. Without `low` and `high` it ends at the data. `log` takes the logarithm, if all values are above 0."""

    name: str
    low: float | None = None
    high: float | None = None
    log: bool = False


def interval_bar(mean: float | None, low: float | None, high: float | None, *, reach: float = 1.0) -> Markup:
    """A difference with its interval around zero, on a scale from -`reach` to `reach`.

    Args:
        mean: None draws nothing but the scale.
    """

    def x(value: float) -> str:
        return f"{100 + 95 * max(-1.0, min(1.0, value / reach)):.1f}"

    parts = ['<line class="axis" x1="100" y1="0" x2="100" y2="16"/><line class="axis" x1="5" y1="8" x2="195" y2="8"/>']
    text = "no difference known"
    if mean is not None:
        text = f"{signed(mean)}"
        tone = "better" if low is not None and low > 0 else "worse" if high is not None and high < 0 else "even"
        if low is not None and high is not None:
            text += f", from {signed(low)} to {signed(high)}"
            parts.append(f'<line class="bar {tone}" x1="{x(low)}" y1="8" x2="{x(high)}" y2="8"/>')
        parts.append(f'<circle class="dot {tone}" cx="{x(mean)}" cy="8" r="4"/>')
    return _small(text, parts)


def range_bar(value: float | None, low: float | None, high: float | None, *, mark: float | None = None) -> Markup:
    """A value with its interval on a scale from -0.25 to 1, with lines at 0 and 1, and a mark to compare it with."""

    def x(number: float) -> str:
        return f"{5 + 190 * (max(-0.25, min(1.0, number)) + 0.25) / 1.25:.1f}"

    parts = [f'<line class="axis" x1="{x(end)}" y1="0" x2="{x(end)}" y2="16"/>' for end in (0, 1)]
    parts.append('<line class="axis" x1="5" y1="8" x2="195" y2="8"/>')
    text = "undefined"
    if value is not None:
        text = f"{figure(value)}"
        if low is not None and high is not None:
            text += f", from {figure(low)} to {figure(high)}"
            parts.append(f'<line class="bar first" x1="{x(low)}" y1="8" x2="{x(high)}" y2="8"/>')
        parts.append(f'<circle class="dot first" cx="{x(value)}" cy="8" r="4"/>')
    if mark is not None:
        text += f"; compared with {figure(mark)}"
        parts.append(f'<line class="mark" x1="{x(mark)}" y1="1" x2="{x(mark)}" y2="15"/>')
    return _small(text, parts)


def share_bar(share: float, *, kind: str = "first") -> Markup:
    """A share in [0, 1] as the length of a bar."""
    share = max(0.0, min(1.0, share))
    parts = [
        '<line class="axis" x1="5" y1="8" x2="195" y2="8"/>',
        f'<line class="bar {kind}" x1="5" y1="8" x2="{5 + 190 * share:.1f}" y2="8"/>',
    ]
    return _small(f"{share:.0%}", parts)


def _small(text: str, parts: Sequence[str]) -> Markup:
    return Markup(f'<svg class="interval" viewBox="0 0 200 16" role="img" aria-label="{text}">{"".join(parts)}</svg>')


def lines_chart(lines: Sequence[Line], *, label: str, x_name: str, y_name: str, unit: bool = False) -> Markup:
    """Lines over a common axis; empty without a line of two points.

    Args:
        label: the text alternative.
        unit: whether the vertical axis is from 0 to 1.
    """
    drawn = [line for line in lines if len(line.points) > 1]
    if not drawn:
        return Markup("")
    across, up = Axis(name=x_name), Axis(name=y_name, low=0.0, high=1.0) if unit else Axis(name=y_name)
    plane = _Plane([point for line in drawn for point in line.points], across, up)
    parts = plane.frame()
    for line in sorted(drawn, key=lambda line: line.kind != "other"):  # the important ones above the others
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (plane.at(*point) for point in _thinned(line.points)))
        parts.append(
            f'<polyline class="line {line.kind}" points="{points}"><title>{_text(line.name)}</title></polyline>'
        )
        x, y = plane.at(*line.points[-1])
        parts.append(f'<circle class="end {line.kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
    return plane.svg(label, parts)


def points_chart(
    dots: Sequence[Dot], *, label: str, x: Axis, y: Axis, diagonal: bool = False, width: int = _WIDTH,
    height: int = _HEIGHT, steps: Sequence[Line] = (),
) -> Markup:  # fmt: skip
    """Points on a plane; empty without a point.

    Args:
        diagonal: draws the line on which both values are equal.
        steps: lines behind the points.
    """
    if not dots:
        return Markup("")
    ends = [(dot.x, end) for dot in dots for end in (dot.y, dot.low, dot.high) if end is not None]
    plane = _Plane(ends, x, y, width=width, height=height)
    parts = plane.frame()
    if diagonal:
        (x1, y1), (x2, y2) = (plane.at(end, end) for end in (max(plane.left, plane.low), min(plane.right, plane.high)))
        parts.append(f'<line class="axis" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>')
    for line in steps:
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in (plane.at(*point) for point in line.points))
        parts.append(f'<polyline class="line {line.kind}" points="{points}"/>')
    for dot in sorted(dots[:_DOTS], key=lambda dot: dot.kind != "other"):
        a, b = plane.at(dot.x, dot.y)
        if dot.low is not None and dot.high is not None:
            (_, bottom), (_, top) = plane.at(dot.x, dot.low), plane.at(dot.x, dot.high)
            parts.append(f'<line class="whisker" x1="{a:.1f}" y1="{bottom:.1f}" x2="{a:.1f}" y2="{top:.1f}"/>')
        title = f"<title>{_text(dot.name)}</title>" if dot.name else ""
        parts.append(f'<circle class="end {dot.kind}" cx="{a:.1f}" cy="{b:.1f}" r="{dot.size:.1f}">{title}</circle>')
    return plane.svg(label, parts)


class _Plane:
    """Axes with their ticks, and the place of a point on the picture."""

    def __init__(
        self, points: Sequence[tuple[float, float]], x: Axis, y: Axis, *, width: int = _WIDTH, height: int = _HEIGHT
    ) -> None:
        self.x, self.y, self.width, self.height = x, y, width, height
        self.left, self.right = _ends([point[0] for point in points], x)
        self.low, self.high = _ends([point[1] for point in points], y)
        self._step = _round_step((self.high - self.low) / (4 if height >= _HEIGHT else 2))
        if y.low is None:
            self.low = math.floor(self.low / self._step + _ALMOST) * self._step
        if y.high is None:
            self.high = math.ceil(self.high / self._step - _ALMOST) * self._step
        self._log = x.log and self.left > 0
        # so that a line at an end is not drawn on the axis
        self._margin = _MARGIN * (height - _TOP - _BOTTOM)

    def at(self, x: float, y: float) -> tuple[float, float]:
        place: Callable[[float], float] = math.log if self._log else float
        across = (place(x) - place(self.left)) / (place(self.right) - place(self.left))
        up = (y - self.low) / (self.high - self.low)
        tall = self.height - _TOP - _BOTTOM - 2 * self._margin
        return (
            _LEFT + (self.width - _LEFT - _RIGHT) * max(0.0, min(1.0, across)),
            self.height - _BOTTOM - self._margin - tall * max(0.0, min(1.0, up)),
        )

    def frame(self) -> list[str]:
        parts, end = [], self.width - _RIGHT
        for at in range(math.floor((self.high - self.low) / self._step + _ALMOST) + 1):
            value = self.low + at * self._step
            _, y = self.at(self.left, value)
            parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{end}" y2="{y:.1f}"/>')
            number = _rounded(value, self._step)
            parts.append(f'<text class="tick" x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{number}</text>')
        for value, anchor in ((self.left, "start"), (self.right, "end")):
            x, _ = self.at(value, self.low)
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{self.height - _BOTTOM + 14}" text-anchor="{anchor}">'
                f"{_tick(value)}</text>"
            )
        caption = _text(f"{self.y.name}, by {self.x.name}" if self.y.name else self.x.name)
        middle = (_LEFT + end) / 2
        parts.append(f'<text class="tick" x="{middle}" y="{self.height - 4}" text-anchor="middle">{caption}</text>')
        return parts

    def svg(self, label: str, parts: Sequence[str]) -> Markup:
        return Markup(
            f'<svg class="chart" viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{_text(label)}">'
            f"{''.join(parts)}</svg>"
        )


def _ends(values: Sequence[float], axis: Axis) -> tuple[float, float]:
    low = min(values) if axis.low is None else axis.low
    high = max(values) if axis.high is None else axis.high
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _text(text: str) -> Markup:
    return escape(readable(text[:200]).encode("utf-8", "replace").decode())


def _tick(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 2.5 and 5 times a power of ten that is at least this."""
    power: float = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least * (1 - _ALMOST))


def _rounded(value: float, step: float) -> str:
    """A value of an axis whose grid lines are `step` apart."""
    text = figure(value, min(6, max(0, 1 - math.floor(math.log10(step))))) if abs(value) < 1000 else f"{value:,.0f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `_POINTS` points, evenly chosen, the last among them."""
    step = max(1, -(-len(points) // _POINTS))
    return [*points[:-1:step], points[-1]]
