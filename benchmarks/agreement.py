"""Agreement statistics on many rows, against scikit-learn, scipy and krippendorff: all of them from the same lists of
labels, and resamples of each measure (`--resamples`) against the library called once for each (a tenth as many,
scaled).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import krippendorff
import numpy as np
from scipy import stats
from sklearn.metrics import accuracy_score, cohen_kappa_score

from assay.judges import Item, Rating
from assay.judges.quality.agreement import AgreementTable, Answers, agreement
from assay.rubrics import JudgeSpec

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=100_000)
parser.add_argument("--resamples", type=int, default=20)
parser.add_argument("--rounds", type=int, default=5)
arguments = parser.parse_args()

rng = np.random.default_rng(0)
spec = JudgeSpec(text="?", scale=("a", "b", "c", "d", "e"))
truth = rng.integers(0, 5, arguments.rows)
judged = np.where(rng.random(arguments.rows) < 0.6, truth, rng.integers(0, 5, arguments.rows))
people, judge = ([spec.scale[label] for label in labels] for labels in (truth, judged))
items = [Item(id=str(at), fields={}, ratings=(Rating(rater="r", label=label),)) for at, label in enumerate(people)]
answers = Answers(judge, judged.astype(float).tolist())
one: dict[str, Callable[[Any, Any], float]] = {
    "accuracy": accuracy_score,
    "kappa": cohen_kappa_score,
    "weighted_kappa": lambda a, b: cohen_kappa_score(a, b, weights="quadratic"),
    "spearman": lambda a, b: stats.spearmanr(a, b).statistic,
    "alpha": lambda a, b: krippendorff.alpha(
        reliability_data=np.stack([a, b]).astype(float), level_of_measurement="ordinal"
    ),
}


def libraries() -> dict[str, float]:
    """Each measure as its library computes it from lists of labels; those that need numbers are given them."""
    steps = {label: at for at, label in enumerate(spec.scale)}
    numbers = [[steps[label] for label in column] for column in (people, judge)]
    return {
        name: float(measure(*((people, judge) if name in ("accuracy", "kappa") else numbers)))
        for name, measure in one.items()
    }


def clocked(run: Callable[[], Any]) -> tuple[float, Any]:
    clock = time.perf_counter()
    result = run()
    return time.perf_counter() - clock, result


agreement(answers, items, spec, intervals=False), libraries()  # imports are nobody's time
rounds = [
    (clocked(lambda: agreement(answers, items, spec, intervals=False)), clocked(libraries))
    for _ in range(arguments.rounds)
]
whole = [statistics.median(side[0] for side in sides) for sides in zip(*rounds, strict=True)]
(_, ours_found), (_, theirs_found) = rounds[-1]
gap = max(abs(float(ours_found.values[name] or 0) - value) for name, value in theirs_found.items())

table, ours, theirs = AgreementTable(answers, items, spec), dict[str, float](), dict[str, float]()
for name in one:
    draws = rng.integers(0, arguments.rows, (arguments.resamples, arguments.rows))
    ours[name] = clocked(lambda name=name, draws=draws: table.resampled(name, draws))[0]
    few = draws[: max(1, arguments.resamples // 10)]
    theirs[name] = (
        clocked(lambda name=name, few=few: [one[name](truth[rows], judged[rows]) for rows in few])[0]
        / len(few)
        * len(draws)
    )
print(
    json.dumps(
        {
            "rows": arguments.rows,
            "all_measures_s": {"ours": whole[0], "libraries": whole[1]},
            "all_measures_ratio": whole[1] / whole[0],
            "bootstrap_ratios": {name: theirs[name] / ours[name] for name in one},
            "largest_gap": gap,
        }
    )
)
