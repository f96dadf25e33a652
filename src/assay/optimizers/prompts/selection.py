"""Which demonstrations a program shows: at random, stratified by label, representative of the inputs, or diverse in
form.

Nearest ones are chosen at run time (`assay.programs.compose.NearestDemos`).
"""

import random
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from assay.optimizers.prompts.demonstrations import Demonstration, choose
from assay.programs.compose import Embedding, input_key
from assay.support.values import json_text

SELECTIONS = ("random", "stratified", "representative", "diverse")
_MOST = 400  # demonstrations among which representative ones are searched; the cost is quadratic


def select(pool: Sequence[Demonstration], k: int, *, how: str, seed: int) -> list[Demonstration]:
    """At most `k` of the pool, in the order in which they are shown.

    Args:
        how: one of `SELECTIONS`. `stratified`: the labels in turn, at random among those of a label. `representative`:
            the labels in turn, each time the demonstration that brings the inputs of its label nearest to one that is
            shown (greedy facility location, Nemhauser et al. 1978). `diverse`: unlike each other in the form of their
            outputs.
    """
    if how in ("random", "diverse"):
        return choose(pool, k, seed=seed, diverse=how == "diverse")
    rng = random.Random(f"{how} {seed}")
    order = rng.sample(list(pool), min(len(pool), _MOST))
    groups: dict[str, list[Demonstration]] = defaultdict(list)
    for demonstration, stratum in zip(order, strata(order), strict=True):
        groups[stratum].append(demonstration)
    if how == "representative":
        groups = {name: _representative(members, k) for name, members in groups.items()}
    names = rng.sample(sorted(groups), len(groups))
    names.sort(key=lambda name: -len(groups[name]))  # with fewer places than labels, the frequent ones
    chosen: list[Demonstration] = []
    for place in range(max(len(members) for members in groups.values())):
        chosen += [groups[name][place] for name in names if place < len(groups[name])]
    chosen = chosen[:k]
    rng.shuffle(chosen)
    return chosen


def strata(pool: Sequence[Demonstration]) -> list[str]:
    """The label of each demonstration where labels repeat, else its type of task."""
    labels = [json_text(dict(d.task.expected), sort_keys=True) for d in pool]
    return labels if 2 * len(Counter(labels)) <= len(labels) else [d.task.task_type for d in pool]


def _representative(members: list[Demonstration], k: int) -> list[Demonstration]:
    keys = [input_key(dict(d.task.inputs)) for d in members]
    vectors = Embedding(keys).vectors(keys)
    likeness = (vectors @ vectors.T).toarray()
    covered, chosen = np.zeros(len(members)), list[int]()
    for _ in range(min(k, len(members))):
        gains = np.maximum(likeness, covered[:, None]).sum(axis=0)
        gains[chosen] = -np.inf
        best = int(gains.argmax())
        chosen.append(best)
        covered = np.maximum(covered, likeness[:, best])
    return [members[i] for i in chosen]
