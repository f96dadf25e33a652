"""The table of `make figures`: `benchmarks/claims`. What is measured is not tested here, because it takes minutes."""

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("claims", "figures", "judges", "thinking")]:
        del sys.modules[name]


def record(seed: int, values: dict[str, Any], **facts: Any) -> dict[str, Any]:
    return {"measurement": "m", "seed": seed, "seconds": 90.0, "values": values, "facts": facts}


def test_the_committed_table_is_that_of_the_committed_records() -> None:
    from claims.rows import ROWS
    from claims.storing import read
    from claims.table import page

    records = read(BENCHMARKS / "results" / "seeds.jsonl")
    assert page(ROWS, records, (0, 1, 2)) == (BENCHMARKS / "results" / "seeds.md").read_text()


def test_every_measurement_can_be_imported() -> None:
    from claims.groups import GROUPS
    from claims.rows import ROWS

    for group in GROUPS.values():
        assert callable(getattr(importlib.import_module(f"claims.{group.module}"), group.function))
    assert {name for row in ROWS for name in row.measurements} == GROUPS.keys()


def lines_of(measured: dict[int, dict[str, float]], wanted: tuple[int, ...], **fields: Any) -> str:
    """The table of one row whose tasks have these values by seed; a seed of 3 takes three minutes."""
    from claims.table import Row, markdown, share

    row = Row(name="r", claim="c", goal="g", measurement="m", cells=share("x"), **fields)
    records = {
        ("m", seed): record(seed, {"x": {"after": values}}) | {"seconds": 60.0 * seed}
        for seed, values in measured.items()
    }
    return str(markdown([row], records, wanted))


def test_a_row_says_which_of_its_seeds_were_run_and_how_long_the_longest_took() -> None:
    one, both = {0: {"a": 1.0}}, {0: {"a": 1.0}, 1: {"a": 0.0}}
    assert "not run (1 of 2 seeds)" in lines_of(one, (0, 1))
    assert "| 100, 0 % | 50.0 % [0.0, 100.0], n = 2 | g | reported |" in lines_of(both, (0, 1))
    assert "| reported | 12 |" in lines_of({3: {"a": 1.0}, 12: {"a": 1.0}}, (3, 12))
    enough = lines_of({0: {"a": 1.0, "b": 0.0}}, (0, 1, 2), enough=1)
    assert "n = 2 | g | reported (1 of 3 seeds) |" in enough
    assert "not run" in lines_of({}, (0, 1, 2), enough=1)
    own: dict[int, dict[str, float]] = {0: {"a": 0.0}, 1: {"a": 0.0}, 7: {"a": 1.0}}
    assert "not run (1 of 2 seeds)" in lines_of(own, (0, 1), seeds=(7, 8))
    assert "| 100, 0 % | 50.0 %" in lines_of({**own, 8: {"a": 0.0}}, (0, 1), seeds=(7, 8))


def test_an_end_of_an_interval_shows_its_side_of_zero() -> None:
    from claims.table import points

    assert points(0.075, 0.0003, 0.15) == "+7.5 points [0.03, 15.0]"
    assert points(-0.01, -0.02, -0.0004) == "-1.0 points [-2.0, -0.04]"
    assert points(0.0, 0.0, 0.1) == "+0.0 points [0.0, 10.0]"


def sides(before: dict[str, float], after: dict[str, float]) -> list[dict[str, Any]]:
    return [record(0, {"x": {"before": before, "after": after}})]


def values(count: int, right: Callable[[int], bool]) -> dict[str, float]:
    return {str(number): float(right(number)) for number in range(count)}


def test_a_gain_needs_its_mean_and_an_interval_above_zero() -> None:
    from claims.table import gain

    before, after = values(40, lambda _: False), values(40, lambda number: number % 4 == 0)
    assert gain("x", least=0.25)(sides(before, after)).reached is True  # 10 of 40
    assert gain("x", least=0.26)(sides(before, after)).reached is False
    assert gain("x", least=0.25, least_after=0.3)(sides(before, after)).reached is False
    assert gain("x", least=-1.0)(sides(after, before)).reached is False


def test_a_saving_of_tokens_is_the_change_of_their_sum() -> None:
    from claims.table import ratio_change

    before = {str(number): float(number) for number in range(1, 11)}
    assert ratio_change(before, {task: tokens / 2 for task, tokens in before.items()}) == pytest.approx((-0.5,) * 3)
    mean, low, high = ratio_change({"a": 10.0, "b": 30.0}, {"a": 10.0, "b": 10.0})
    assert (mean, low, high) == (-0.5, -math.inf, math.inf)  # 20 / 40 - 1; no interval of two tasks


def test_a_saving_with_a_loss_above_the_margin_is_not_chosen() -> None:
    from claims.table import cheaper

    tasks = [str(number) for number in range(400)]
    tokens = {"before": dict.fromkeys(tasks, 10.0), "after": dict.fromkeys(tasks, 5.0)}
    same = dict.fromkeys(tasks, 1.0)
    worse = {task: float(int(task) >= 8) for task in tasks}  # two points
    equal = [record(0, {"tokens": tokens, "score": {"before": same, "after": same}})]
    lower = [record(0, {"tokens": tokens, "score": {"before": same, "after": worse}})]
    cells = cheaper("tokens", "score", least=0.4, margin=0.01)
    assert (cells(equal).reached, cells(lower).reached) == (True, False)
    assert cheaper("tokens", "score", least=0.6, margin=0.01)(equal).reached is False


def test_unscored_values_are_left_out(tmp_path: Path) -> None:
    from claims.storing import Measured, Setting, append, read, record as line_of
    from claims.table import share

    setting = Setting(seed=0, model="m", stronger=None, scratch=tmp_path, downloads=tmp_path)
    measured = Measured(values={"x": {"after": {"a": math.nan, "b": 1.0, "c": 0.0}}}, facts={})
    append(tmp_path / "seeds.jsonl", line_of("m", setting, measured, model="m", command="c", seconds=1.0))
    assert "NaN" not in (tmp_path / "seeds.jsonl").read_text()
    cells = share("x")(list(read(tmp_path / "seeds.jsonl").values()))
    assert (cells.after, cells.difference[-5:]) == ("50 %", "n = 2")


def test_a_relative_change_needs_its_mean_and_an_interval_without_zero() -> None:
    from claims.table import relative

    many, few = values(40, lambda _: True), values(40, lambda number: number % 5 == 0)
    falls, rises = sides(many, few), sides(few, many)
    for least, changed, reached in ((-0.7, falls, True), (-0.9, falls, False), (-0.7, rises, False)):  # -80 %
        assert relative("x", least=least)(changed).reached is reached
    assert [relative("x", least=least)(rises).reached for least in (3.9, 4.1)] == [True, False]  # +400 %
    scored = relative("x", least=-0.7, score="x")(falls)
    assert (scored.before, scored.after) == ("100 %, 100 % right", "20 %, 20 % right")


def test_only_a_significant_loss_counts_as_a_loss() -> None:
    from claims.table import not_below

    full, lost, one = (values(40, lambda number, first=first: number >= first) for first in (0, 20, 1))
    reached = [not_below("x")(sides(*pair)).reached for pair in ((full, lost), (full, one), (lost, full))]
    assert reached == [False, True, True]


def test_a_twin_may_be_better_by_a_margin_only() -> None:
    from claims.table import as_good_as

    tasks = [str(number) for number in range(100)]
    full, lower = dict.fromkeys(tasks, 1.0), {task: float(int(task) >= 20) for task in tasks}
    facts = {side: {"rate": 0.5} for side in ("twin", "own")}
    equal, worse = ([record(0, {"twin": {"after": full}, "own": {"after": own}}, **facts)] for own in (full, lower))
    cells = as_good_as("twin", "own", within=0.1, rate="rate")
    assert (cells(equal).reached, cells(worse).reached) == (True, False)
    assert cells(equal).after == "100 % right, 0.50 samples/s"


def test_trainings_are_compared_over_seeds() -> None:
    from claims.table import over_seeds

    def records(gains: list[float]) -> list[dict[str, Any]]:
        curves = {"a": [0.2, 0.4], "b": [0.3, 0.5]}
        return [
            record(seed, {"x": {"before": {"t": 0.5}, "after": {"t": 0.5 + gain}}}, curves=curves | {"b": curves["a"]})
            for seed, gain in enumerate(gains)
        ]

    cells = over_seeds("x", ("a", "b"))
    assert cells(records([0.1, 0.2, 0.1, 0.2, 0.1])).reached is True
    assert cells(records([0.3, -0.3, 0.3, -0.3, 0.1])).reached is False
    assert cells(records([0.1, 0.2, 0.1, 0.2, 0.1])).before == "50, 50, 50, 50, 50 %; area 30, 30, 30, 30, 30 %"


def test_a_failed_measurement_is_named_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = importlib.import_module("figures")
    monkeypatch.setitem(figures.GROUPS, "memory", figures.Group("absent"))
    monkeypatch.setattr(sys, "argv", ["figures.py", "run", "memory", "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match="failed, see above: memory"):
        figures.main()
    assert "No module named 'claims.absent'" in capsys.readouterr().err
    assert "memory" in (tmp_path / "seeds.md").read_text()
