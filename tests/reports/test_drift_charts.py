"""Charts of a judge's replays: which are drawn, and what their points stand for."""

from typing import Any

from assay.reports.drift import drift_charts

DAY = 86_400.0


def replay(mean: float | None, cusum: float, psi: float | None = None, *, alarms: int = 0) -> dict[str, Any]:
    return {
        "alarms": ["it moved"] * alarms, "mean_difference": mean, "cusum": cusum, "cusum_limit": 8.0, "psi": psi,
        "psi_limit": None if psi is None else 0.5,
    }  # fmt: skip


def test_too_few_replays_or_values_draw_nothing() -> None:
    assert drift_charts([]) == drift_charts([(DAY, replay(0.1, 1.0))]) == []
    (alarms,) = drift_charts([(DAY, replay(None, 1.0)), (2 * DAY, replay(None, 2.0))])
    assert [name for _, name in alarms.keys] == ["CUSUM", "limit"]


def test_replays_of_one_day_have_an_axis_in_hours() -> None:
    _, alarms = drift_charts([(0.0, replay(0.1, 1.0)), (3 * 3_600, replay(0.1, 2.0))])
    assert "by hours since" in alarms.chart
    assert ">3<" in alarms.chart


def test_replays_at_one_time_are_drawn() -> None:
    assert all("nan" not in chart.chart for chart in drift_charts([(DAY, replay(0.1, 1.0)), (DAY, replay(0.2, 1.5))]))
