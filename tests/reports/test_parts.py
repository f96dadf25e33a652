"""Charts and differences of texts: what they draw, and what hostile input does to them."""

import re

import pytest

from assay.reports.changes import changes_of
from assay.reports.charts import Line, interval_bar, lines_chart


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


@pytest.mark.parametrize(
    ("low", "high", "numbers"),
    [
        (0.05, 0.23, ["0.05", "0.1", "0.15", "0.2", "0.25"]),
        (0.0, 5.63, ["0", "2", "4", "6"]),
        (1.88, 8.0, ["0", "2", "4", "6", "8"]),
        (0.3, 0.3, ["-0.25", "0", "0.25", "0.5", "0.75", "1"]),
        (1234.0, 4321.0, ["1,000", "2,000", "3,000", "4,000", "5,000"]),
        (0.0, 0.00002, ["0", "0.000005", "0.00001", "0.000015", "0.00002"]),
    ],
)
def test_grid_lines_of_a_chart_are_at_round_numbers(low: float, high: float, numbers: list[str]) -> None:
    svg = lines_chart([Line(name="a", points=[(0, low), (1, high)])], label="", x_name="x", y_name="y")
    assert re.findall(r'text-anchor="end">([^<]*)<', svg)[:-1] == numbers
    unit = lines_chart([Line(name="a", points=[(0, 0.1), (1, 0.9)])], label="", x_name="x", y_name="y", unit=True)
    assert re.findall(r'text-anchor="end">([^<]*)<', unit)[:-1] == ["0", "0.25", "0.5", "0.75", "1"]


def test_numbers_of_an_axis_have_room_left_of_it() -> None:
    line = Line(name="alpha", points=[(0, -0.1382), (1, 0.4642)])
    svg = lines_chart([line], label="", x_name="x", y_name="y")
    numbers = re.findall(r'text-anchor="end">([^<]*)<', svg)[:5]
    assert numbers == ["-0.2", "0", "0.2", "0.4", "0.6"]
