"""How often the gate accepts a program that is not better, and how often its interval holds the truth.

    python benchmarks/intervals.py [--draws 1000] [--seed 0]

The interval is that of gates, comparisons and stopped tests (`assay.evaluation.statistics.interval_of`). `one look` is
a comparison of all tasks; `stopped` is one that may stop early (`SequentialTest`, as gates do it). Each share is of
`--draws` draws and has its exact 95 % interval. Prints the tables of a page in Markdown.
"""

import argparse
import functools
from collections.abc import Callable, Sequence

import numpy as np

from assay.evaluation import mean_interval, statistics
from assay.evaluation.statistics import SequentialTest, interval_of

Draw = Callable[[np.random.Generator, int], np.ndarray]
SIZES = (8, 20, 40, 100)
LOSSES: dict[str, tuple[float, float, float]] = {  # share of losses, gain of the others, loss
    "97 % slightly positive, 3 % -0.7 (mean 0)": (0.03, 0.7 * 0.03 / 0.97, -0.7),
    "90 % +0.1, 10 % -0.9 (mean 0)": (0.1, 0.1, -0.9),
    "95 % +0.05, 5 % -1 (mean -0.0025)": (0.05, 0.05, -1.0),
}
SKEWED: dict[str, tuple[Draw, float]] = {
    "right on 90 %": (lambda rng, n: (rng.random(n) < 0.9).astype(float), 0.9),
    "right on 97 %": (lambda rng, n: (rng.random(n) < 0.97).astype(float), 0.97),
    "beta(0.2, 2), mean 0.09": (lambda rng, n: rng.beta(0.2, 2, n), 0.2 / 2.2),
    "0 on 80 %, else uniform": (lambda rng, n: np.where(rng.random(n) < 0.8, 0.0, rng.random(n)), 0.1),
}


def losses(share: float, gain: float, loss: float) -> Draw:
    """Equal small gains, up to noise, beside rare losses."""
    return lambda rng, n: np.where(rng.random(n) < share, loss, gain * (1 + 0.2 * rng.uniform(-1, 1, n)))


def answers(gain: float, spread: float) -> Draw:
    """Differences of right or wrong answers with this mean and standard deviation."""
    apart = spread**2 + gain**2
    return lambda rng, n: rng.choice([1.0, 0.0, -1.0], n, p=[(apart + gain) / 2, 1 - apart, (apart - gain) / 2])


def accepts(values: np.ndarray) -> bool:
    """Whether a comparison of all tasks shows a gain."""
    return _passes(lambda: interval_of(values, -1.0, 1.0)[0] > 0)


def accepts_stopped(values: np.ndarray) -> bool:
    """Whether a gate that may stop early accepts."""

    def gate() -> bool:
        rule, done = SequentialTest(tasks=len(values)), list[int]()
        for count in rule.evaluations:
            done.append(count)
            decision = rule.decide(values[:count].tolist(), done)
            if decision.stop:
                break
        return interval_of(values[: done[-1]], -1.0, 1.0, level=decision.level)[0] > 0

    return _passes(gate)


def _passes(decide: Callable[[], bool]) -> bool:
    """The bootstrap takes nearly all of the time and only makes an interval wider: it is run where a gain is shown
    without it."""
    usual = statistics.BOOTSTRAP_MIN_LEVEL
    statistics.BOOTSTRAP_MIN_LEVEL = 1.0
    try:
        without = decide()
    finally:
        statistics.BOOTSTRAP_MIN_LEVEL = usual
    return without and decide()


def holds(truth: float, values: np.ndarray) -> bool:
    """Whether the interval of a mean score holds the truth."""
    low, high = mean_interval(values.tolist())
    return low <= truth <= high


def share(results: Sequence[bool]) -> str:
    from scipy import stats

    found = stats.binomtest(sum(results), len(results))
    low, high = found.proportion_ci(0.95)
    return f"{100 * sum(results) / len(results):.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def row(name: str, cells: Sequence[str]) -> None:
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    def repeated(draw: Draw, n: int, result: Callable[[np.ndarray], bool]) -> str:
        rng = np.random.default_rng(arguments.seed)
        return share([result(draw(rng, n)) for _ in range(arguments.draws)])

    row("not better: accepted, % of gates", [f"{n} tasks, {how}" for n in SIZES for how in ("one look", "stopped")])
    row("---", ["---"] * 2 * len(SIZES))
    for name, pattern in LOSSES.items():
        draw = losses(*pattern)
        row(name, [repeated(draw, n, rule) for n in SIZES for rule in (accepts, accepts_stopped)])
    print()
    row("better: accepted, % of gates", ["one look", "stopped"])
    row("---", ["---", "---"])
    for gain, spread, n in ((0.2, 0.5, 60), (0.1, 0.5, 215), (0.5, 0.5, 20)):
        draw = answers(gain, spread)
        row(
            f"+{gain:g}, deviation {spread:g}, {n} tasks",
            [repeated(draw, n, rule) for rule in (accepts, accepts_stopped)],
        )
    print()
    row("mean score: interval holds the truth, %", [f"{n} tasks" for n in SIZES])
    row("---", ["---"] * len(SIZES))
    for name, (draw, truth) in SKEWED.items():
        row(name, [repeated(draw, n, functools.partial(holds, truth)) for n in SIZES])


if __name__ == "__main__":
    main()
