"""Parts of pages: charts, differences of texts, texts that are invisible, long or cut, and numbers."""

import re
from typing import Any

from assay.reports.charts import Line, interval_bar, lines_chart
from assay.reports.judges import drift_charts
from assay.reports.texts import Budget, changes_of, iso, moment, preview, readable, seconds, setting_texts
from assay.support.numbers import price
from assay.web.rendering import link


def test_a_huge_text_is_cut() -> None:
    parts = changes_of("x\n" * 100_000, "y\n" * 100_000)
    assert [part.text.count("\n") for part in parts] == [399, 399, 0]  # the last line says that it was cut


def test_a_bar_is_coloured_only_if_its_interval_excludes_zero() -> None:
    assert 'class="bar better" x1="109.5" y1="8" x2="128.5"' in interval_bar(0.2, 0.1, 0.3)  # 100 + 95 * 0.1 = 109.5
    assert 'class="bar even"' in interval_bar(0.2, -0.1, 0.3)
    assert "<circle" not in interval_bar(None, None, None)


def test_a_chart_escapes_its_texts_and_thins_its_lines() -> None:
    line = Line(name="<b>'\"", points=[(x, x % 2) for x in range(5_000)], kind="first")
    svg = lines_chart([line], label='<"', x_name="x", y_name="y")
    assert "<title>&lt;b&gt;&#39;&#34;</title>" in svg
    assert 'aria-label="&lt;&#34;"' in svg
    assert len(svg.split('points="')[1].split('"')[0].split()) <= 201
    assert lines_chart([Line(name="", points=[(0, 1)])], label="", x_name="", y_name="") == ""


def axis(*values: float, unit: bool = False) -> list[str]:
    """Numbers at the grid lines of a chart."""
    line = Line(name="alpha", points=list(enumerate(values)))
    svg = lines_chart([line], label="", x_name="x", y_name="y", unit=unit)
    return re.findall(r'text-anchor="end">([^<]*)<', svg)[:-1]


def test_grid_lines_of_a_chart_are_at_round_numbers() -> None:
    for low, high, numbers in (
        (0.05, 0.23, "0.05 0.1 0.15 0.2 0.25"),
        (0.0, 5.63, "0 2 4 6"),
        (1.88, 8.0, "0 2 4 6 8"),
        (0.3, 0.3, "-0.25 0 0.25 0.5 0.75 1"),
        (1234.0, 4321.0, "1,000 2,000 3,000 4,000 5,000"),
        (0.0, 0.00002, "0 0.000005 0.00001 0.000015 0.00002"),
        (-0.1382, 0.4642, "-0.2 0 0.2 0.4 0.6"),
    ):
        assert axis(low, high) == numbers.split()
    assert axis(0.1, 0.9, unit=True) == ["0", "0.25", "0.5", "0.75", "1"]


DAY = 86_400.0


def replay(mean: float | None, cusum: float) -> dict[str, Any]:
    return {"alarms": [], "mean_difference": mean, "cusum": cusum, "cusum_limit": 8.0, "psi": None, "psi_limit": None}


def test_replays_of_a_judge_are_drawn_if_there_are_two_whatever_their_times() -> None:
    assert drift_charts([]) == drift_charts([(DAY, replay(0.1, 1.0))]) == []
    (alarms,) = drift_charts([(DAY, replay(None, 1.0)), (2 * DAY, replay(None, 2.0))])
    assert [name for _, name in alarms.keys] == ["CUSUM", "limit"]
    _, alarms = drift_charts([(0.0, replay(0.1, 1.0)), (3 * 3_600, replay(0.1, 2.0))])
    assert "by hours since" in alarms.chart
    assert ">3<" in alarms.chart
    assert all("nan" not in chart.chart for chart in drift_charts([(DAY, replay(0.1, 1.0)), (DAY, replay(0.2, 1.5))]))


def test_invisible_characters_are_named() -> None:
    assert readable("a\x00\x1b\u202e\ud800\u2067b") == "a[U+0000][U+001B][U+202E][U+D800][U+2067]b"
    assert readable("tab\tline\nÄ שלום 🎉") == "tab\tline\nÄ שלום 🎉"


PREVIEWS = [
    ('{"q":"How much?"}', "How much?"),
    ('{"q": "two\\nlines \\u0041\\"', 'two lines A"'),
    ('{"q":"cut in an escape \\u00', "cut in an escape "),
    ('{"q":"cut after a backslash \\', "cut after a backslash "),
    ('{"a \\"key\\"":"x"}', "x"),
    ('{"rows":[1,2', "[1,2"),
    ("{}", ""),
    ("", ""),
    ('{"q":"' + "x" * 200, "x" * 120 + "…"),
]


def test_a_preview_is_the_first_value_in_one_line() -> None:
    assert [preview(inputs).rstrip() for inputs, _ in PREVIEWS] == [text.rstrip() for _, text in PREVIEWS]


def test_a_budget_leaves_every_text_its_beginning() -> None:
    budget = Budget(1_000, most=600, least=10)
    clipped = [budget.clip("x" * 5_000) for _ in range(4)]
    assert [len(text.text) for text in clipped] == [600, 400, 10, 10]
    assert [text.left_out for text in clipped] == [4_400, 4_600, 4_990, 4_990]


def test_numbers_and_times_are_formatted_for_reading() -> None:
    assert [seconds(value) for value in (None, 0.04, 59, 61, 7_260)] == ["–", "0.0 s", "59 s", "1 min 1 s", "2 h 1 min"]
    assert (iso(0.0), iso(None)) == ("1970-01-01T00:00:00+00:00", "")
    assert [moment(value) for value in (None, 1e300)] == ["–", "–"]
    # a small cost is not nothing
    assert [price(value) for value in (None, 0.0, 0.00004, 0.00006, 1.5)] == [
        "unknown", "$0", "< $0.0001", "$0.0001", "$1.5000"
    ]  # fmt: skip


def test_addresses_quote_every_part() -> None:
    assert (
        link("rollouts", "a/b?c#d", text="x&y=ä", empty="", none=None) == "/rollouts/a%2Fb%3Fc%23d?text=x%26y%3D%C3%A4"
    )
    assert link("rollouts", "\ud800") == "/rollouts/%3F"


def test_settings_are_texts_and_no_python_values() -> None:
    config = {
        "kind": "tune", "program": "p.py:P", "preflight": True, "cache": False, "task_timeout": 600.0, "margin": 0.02,
        "objectives": ["score", "tokens"], "parameters": {"temperature": 0.1}, "data": None, "sizes": {}, "seed": 0,
        "roles": {"judge": {"model": "m"}},
    }  # fmt: skip
    assert dict(setting_texts(config)) == {
        "program": "p.py:P", "preflight": "yes", "cache": "no", "task timeout": "600", "margin": "0.02",
        "objectives": "score, tokens", "parameters": "temperature 0.1", "seed": "0",
        "roles": '{"judge": {"model": "m"}}',
    }  # fmt: skip
