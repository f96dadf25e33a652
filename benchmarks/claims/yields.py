"""The oven with noisy outcomes: yield of the last plan, plain and trained on the best experiments of an explorer.

The explorer draws plans at random: the plain agent writes the plan of its instructions on nearly every trial, so that
its own experiments hardly show a better one. Only the last plan of an experiment counts, and only those are trained on.
"""

import random
from collections.abc import Callable
from typing import Any

from assay.datasets.experiments import HEATS, HOURS
from claims.acting import Acting, measured
from claims.storing import Measured, Setting

LAST = "The next trial counts."  # in the observation before the last plan


def explorer(seed: int) -> Callable[[Any], str]:
    """Writes plans at random."""
    rng = random.Random(f"plans/{seed}")
    return lambda request: f"action: heat {rng.choice(HEATS)}, hours {rng.choice(HOURS)}"


OVEN = Acting(
    name="experiment",
    data="experiment:size=400&trials=3",
    figures={"yield": "yield_share", "feasible": "feasible"},
    least=0.75,
    blocks=16,
    block=150,
    epochs=4,
    test=30,
    explorer=explorer,
    only=LAST,
)


def measure(setting: Setting) -> Measured:
    return measured(setting, OVEN)
