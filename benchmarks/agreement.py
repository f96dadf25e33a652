"""Agreement statistics with bootstrap intervals on many rows, against scikit-learn and scipy called once for each resample.

Both compute the point values and `--resamples` resamples of the same rows; scikit-learn is given a tenth as many, and its time
is scaled, or it would take minutes.
"""

import argparse
import json
import time

import numpy as np
from scipy import stats
from sklearn.metrics import accuracy_score, cohen_kappa_score

from assay.judges import Item, Rating
from assay.judges.agreement import MEASURES, Answers, _Table
from assay.rubrics import JudgeSpec

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=100_000)
parser.add_argument("--resamples", type=int, default=20)
arguments = parser.parse_args()

rng = np.random.default_rng(0)
spec = JudgeSpec(text="?", scale=("a", "b", "c", "d", "e"))
truth = rng.integers(0, 5, arguments.rows)
said = np.where(rng.random(arguments.rows) < 0.6, truth, rng.integers(0, 5, arguments.rows))
items = [Item(id=str(at), shown={}, ratings=(Rating(rater="r", label=spec.scale[label]),)) for at, label in enumerate(truth)]
answers = Answers([spec.scale[label] for label in said], said.astype(float).tolist())

clock = time.perf_counter()
table = _Table(answers, items, spec)
built = time.perf_counter() - clock
ours: dict[str, float] = {}
theirs: dict[str, float] = {}
one = {
    "accuracy": accuracy_score,
    "kappa": cohen_kappa_score,
    "weighted_kappa": lambda a, b: cohen_kappa_score(a, b, weights="quadratic"),
    "spearman": lambda a, b: stats.spearmanr(a, b).statistic,
}
gaps = {}
for name in one:
    table.measure(name)  # imports are nobody's time
for name in MEASURES:
    if name not in one:
        continue
    clock = time.perf_counter()
    value, _ = table.measure(name)
    table.resampled(name, rng.integers(0, arguments.rows, (arguments.resamples, arguments.rows)))
    ours[name] = time.perf_counter() - clock
    few = max(1, arguments.resamples // 10)
    clock = time.perf_counter()
    same = one[name](truth, said)
    point = time.perf_counter() - clock
    clock = time.perf_counter()
    for rows in rng.integers(0, arguments.rows, (few, arguments.rows)):
        one[name](truth[rows], said[rows])
    theirs[name] = point + (time.perf_counter() - clock) / few * arguments.resamples
    gaps[name] = abs(float(value or 0) - float(same))
ratios = {name: theirs[name] / ours[name] for name in ours}
print(json.dumps({"rows": arguments.rows, "table_s": built, "ours_s": ours, "theirs_s": theirs, "ratios": ratios, "largest_gap": max(gaps.values())}))
