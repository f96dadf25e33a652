"""How often the referee's rule promotes a text without a gain, and how often it promotes a better one.

    python benchmarks/referee.py [--draws 1000] [--seed 0] [--submissions 200] [--tasks 40 100 300]

The rule is the referee's own (`assay.evaluation.adaptive`): the screen on val, then a look at gate. Answers are right
or wrong; an edit answers half of the tasks anew, so a difference has a deviation of 0.5, and a text's answer to a task
does not change. Optimisers submit:

- random: edits of the original text;
- climbs on gate: edits of the champion, which is all that the gate releases;
- climbs on val: keeps each edit that raises the mean on val, so that it overfits val;
- rare losses: edits that gain 0.1 on 90 % of the tasks and lose 0.9 on the others, with a mean of 0.

False: any promotion of a text whose true mean is not above the champion's, in a run of all submissions. Power: any of
10 truly better edits among the submissions is promoted, the others being without effect. `5 % each time` is a paired
test of 5 % for each submission, to show that the optimisers can deceive a rule. Shares have exact 95 % intervals.
Prints the tables of a page in Markdown.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from intervals import row, share

from assay.evaluation.adaptive import AdaptiveGate, look_level, passes_screen
from assay.evaluation.statistics import shows_gain

BETTER = 10  # truly better edits among the submissions, for the power
Rng = np.random.Generator


@dataclass(frozen=True)
class Text:
    """Scores of a text on val and on gate, and its true mean."""

    val: np.ndarray
    gate: np.ndarray
    mean: float

    def edited(self, rng: Rng, gain: float = 0.0) -> "Text":
        """With half of the tasks answered anew. `gain`: true gain over a text that is right on half of the tasks."""
        right = 0.5 + 2 * gain

        def anew(scores: np.ndarray) -> np.ndarray:
            return np.where(rng.random(len(scores)) < 0.5, rng.random(len(scores)) < right, scores).astype(float)

        return Text(anew(self.val), anew(self.gate), (self.mean + right) / 2)

    def with_rare_losses(self, rng: Rng) -> "Text":
        """With 0.1 more on 90 % of the tasks and 0.9 less on the others: the mean of the differences is 0."""

        def moved(scores: np.ndarray) -> np.ndarray:
            return scores + np.where(rng.random(len(scores)) < 0.1, -0.9, 0.1)

        return replace(self, val=moved(self.val), gate=moved(self.gate))


def original(rng: Rng, tasks: int) -> Text:
    return Text(*((rng.random(tasks) < 0.5).astype(float) for _ in range(2)), mean=0.5)


class Referee:
    """Decides on submissions by the rule; keeps the champion."""

    def __init__(self, champion: Text) -> None:
        self.champion, self.gate, self.promoted = champion, AdaptiveGate(), list[bool]()

    @property
    def open(self) -> bool:
        return not self.gate.used_up

    def submit(self, text: Text) -> None:
        if not self.accepts(text):
            return
        self.promoted.append(text.mean > self.champion.mean + 1e-9)
        self.champion = text

    def accepts(self, text: Text) -> bool:
        return passes_screen(text.val - self.champion.val) and self.gate.look(text.gate - self.champion.gate)


class EachTime(Referee):
    """A paired one-sided test of 5 % for each submission, on gate alone."""

    open = True

    def accepts(self, text: Text) -> bool:
        return shows_gain(text.gate - self.champion.gate, level=0.05)


def submitted(how: str, referee: Referee, rng: Rng, count: int, gains: np.ndarray) -> None:
    """Submits `count` texts. `gains`: the true gain of each edit."""
    start = current = referee.champion
    for gain in gains[:count]:
        if not referee.open:
            return
        if how == "random":
            text = start.edited(rng, gain)
        elif how == "climbs on gate":
            text = referee.champion.edited(rng, gain)
        elif how == "climbs on val":
            text = current.edited(rng, gain)
            if text.val.mean() <= current.val.mean():
                continue
            current = text
        else:
            text = referee.champion.with_rare_losses(rng)
        referee.submit(text)


def runs(arguments: argparse.Namespace, how: str, tasks: int, rule: type[Referee], gain: float) -> str:
    """The share of false runs; with a gain, of runs in which a better text was promoted."""
    rng, results = np.random.default_rng([arguments.seed, tasks, round(100 * gain)]), []
    for _ in range(arguments.draws):
        gains = np.zeros(arguments.submissions)
        if gain:
            gains[rng.choice(arguments.submissions, BETTER, replace=False)] = gain
        referee = rule(original(rng, tasks))
        submitted(how, referee, rng, arguments.submissions, gains)
        results.append(any(referee.promoted) if gain else not all(referee.promoted))
    return share(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--submissions", type=int, default=200)
    parser.add_argument("--tasks", type=int, nargs="+", default=[40, 100, 300])
    arguments = parser.parse_args()

    def table(title: str, rows: dict[str, Callable[[int], str]]) -> None:
        row(title, [f"{n} tasks" for n in arguments.tasks])
        row("---", ["---"] * len(arguments.tasks))
        for name, cell in rows.items():
            row(name, [cell(n) for n in arguments.tasks])
        print()

    def of(how: str, rule: type[Referee] = Referee, gain: float = 0.0) -> Callable[[int], str]:
        return lambda tasks: runs(arguments, how, tasks, rule, gain)

    def one_look(tasks: int) -> str:
        rng, level = np.random.default_rng([arguments.seed, tasks]), look_level(1, 0)
        texts = [Text(np.zeros(1), np.zeros(tasks), 0.0).with_rare_losses(rng) for _ in range(10 * arguments.draws)]
        return share([shows_gain(text.gate, level=level) for text in texts])

    hows = ("random", "climbs on gate", "climbs on val", "rare losses")
    table("false promotion, % of runs", {how: of(how) for how in hows})
    table("the same, 5 % each time", {how: of(how, EachTime) for how in hows[:1]})
    table("power, % of runs", {
        f"{how}, +{gain:g}": of(how, gain=gain) for how in ("random", "climbs on val") for gain in (0.1, 0.2)
    })  # fmt: skip
    table("one look at its first level, rare losses: accepted, %", {"90 % +0.1, 10 % -0.9 (mean 0)": one_look})


if __name__ == "__main__":
    main()
