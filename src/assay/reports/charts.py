"""Small charts as inline SVG, made on the server. Colours come from the style sheet by class; nothing is scripted.

Every chart has a text alternative, and its data is in a table next to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from assay.reports.texts import readable

__all__ = ["Line", "interval_bar", "lines_chart"]

_WIDTH, _HEIGHT = 640, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 12, 10, 30
_MARGIN = 0.04  # of the height
_POINTS = 200  # of one line


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a chart. `kind` is its class in the style sheet: `first`, `second` or `other`."""

    name: str
    points: Sequence[tuple[float, float]]
    kind: str = "other"


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
        text = f"{mean:+.3f}"
        tone = "better" if low is not None and low > 0 else "worse" if high is not None and high < 0 else "even"
        if low is not None and high is not None:
            text += f", from {low:+.3f} to {high:+.3f}"
            parts.append(f'<line class="bar {tone}" x1="{x(low)}" y1="8" x2="{x(high)}" y2="8"/>')
        parts.append(f'<circle class="dot {tone}" cx="{x(mean)}" cy="8" r="4"/>')
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
    xs = [x for line in drawn for x, _ in line.points]
    ys = [y for line in drawn for _, y in line.points]
    left, right = min(xs), max(xs)
    low, high = (0.0, 1.0) if unit else (min(ys), max(ys))
    if high == low:
        low, high = low - 0.5, high + 0.5
    across, up = (right - left) or 1.0, high - low
    margin = _MARGIN * (_HEIGHT - _TOP - _BOTTOM)  # so that a line at an end is not drawn on the axis

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (_WIDTH - _LEFT - _RIGHT) * (x - left) / across,
            _HEIGHT - _BOTTOM - margin - (_HEIGHT - _TOP - _BOTTOM - 2 * margin) * (y - low) / up,
        )

    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        value = low + share * up
        _, y = at(left, value)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - _RIGHT}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{_tick(value)}</text>')
    for value, anchor in ((left, "start"), (right, "end")):
        x, _ = at(value, low)
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 14}" text-anchor="{anchor}">{_tick(value)}</text>'
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    caption = _text(f"{y_name}, by {x_name}")
    parts.append(f'<text class="tick" x="{middle}" y="{_HEIGHT - 4}" text-anchor="middle">{caption}</text>')
    for line in sorted(drawn, key=lambda line: line.kind != "other"):  # the important ones above the others
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in _thinned(line.points)))
        parts.append(
            f'<polyline class="line {line.kind}" points="{points}"><title>{_text(line.name)}</title></polyline>'
        )
        x, y = at(*line.points[-1])
        parts.append(f'<circle class="end {line.kind}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
    return Markup(
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{_text(label)}">'
        f"{''.join(parts)}</svg>"
    )


def _text(text: str) -> Markup:
    return escape(readable(text[:200]).encode("utf-8", "replace").decode())


def _tick(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `_POINTS` points, evenly chosen, the last among them."""
    step = max(1, -(-len(points) // _POINTS))
    return [*points[:-1:step], points[-1]]
