"""Noisy experiments: how a plan yields, and their tasks, `experiment:size=&seed=&trials=&noise=`.

A plan heats a material for some hours. Each material has a best plan, which differs a little from sample to sample; a
task is one sample. Plans that need more energy than there is fail.
"""

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from assay.datasets.specs import number_of, options_of, share_of
from assay.errors import DataError
from assay.support.names import one_of

MATERIALS: Mapping[str, tuple[int, int]] = {"copper": (50, 6), "iron": (90, 4), "zinc": (30, 3), "nickel": (70, 2)}
HEATS, HOURS = range(20, 101, 10), range(1, 9)
ENERGY = 400  # most of heat times hours
_HEAT_WIDTH, _HOURS_WIDTH = 20.0, 1.5  # from the best plan; there the yield is exp(-1/2) of the best
_BEST = 90.0  # yield of the best plan, in per cent


@dataclass(frozen=True)
class Experiment:
    """One sample of a material: its best plan, the number of trials and the deviation of the noise.

    Raises:
        DataError: an unknown material, or a number out of range.
    """

    material: str
    heat: int
    hours: int
    trials: int
    noise: float
    seed: int

    @classmethod
    def of(cls, inputs: Mapping[str, Any], seed: int) -> "Experiment":
        """The experiment of a task; its best plan is drawn from the seed."""
        material, trials, noise = inputs.get("material"), inputs.get("trials", 4), inputs.get("noise", 5.0)
        if material not in MATERIALS:
            raise DataError(f"experiment: material={material!r} {one_of(material, MATERIALS)}")
        if not isinstance(trials, int) or not 1 <= trials <= 50:
            raise DataError(f"experiment: trials={trials!r} must be an integer from 1 to 50")
        if not isinstance(noise, int | float) or not 0 <= noise <= 100:
            raise DataError(f"experiment: noise={noise!r} must be between 0 and 100")
        rng, (heat, hours) = random.Random(f"{material}/{seed}"), MATERIALS[str(material)]
        plans = [
            (heat + dh, hours + dt)
            for dh in (-10, 0, 10)
            for dt in (-1, 0, 1)
            if (heat + dh) in HEATS and (hours + dt) in HOURS and (heat + dh) * (hours + dt) <= ENERGY
        ]
        best = rng.choice(plans)
        return cls(str(material), *best, trials, float(noise), seed)

    def problem(self, heat: int, hours: int) -> str:
        """Why a plan fails; "" if it is feasible."""
        if not HEATS[0] <= heat <= HEATS[-1]:
            return f"the oven heats from {HEATS[0]} to {HEATS[-1]} degrees"
        if not HOURS[0] <= hours <= HOURS[-1]:
            return f"the oven is free for {HOURS[0]} to {HOURS[-1]} hours"
        if heat * hours > ENERGY:
            return f"{heat} degrees for {hours} hours need {heat * hours} units of energy, and there are {ENERGY}"
        return ""

    def share(self, heat: int, hours: int) -> float:
        """Yield without noise, as a share of that of the best plan, in [0, 1]; 0 for a plan that fails."""
        if self.problem(heat, hours):
            return 0.0
        far = ((heat - self.heat) / _HEAT_WIDTH) ** 2 + ((hours - self.hours) / _HOURS_WIDTH) ** 2
        return math.exp(-far / 2)

    def measured(self, heat: int, hours: int, trial: int) -> float:
        """What the trial of this number measures, in per cent: with noise, the same for every rollout."""
        noise = random.Random(f"{self.seed}/{trial}/{heat}/{hours}").gauss(0.0, self.noise)
        return min(100.0, max(0.0, _BEST * self.share(heat, hours) + noise))


def rows(query: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Tasks of experiments. Options: `size`, `seed`, `trials` (4), `noise` (5, in points of the yield).

    Raises:
        DataError: an unknown option, or a value out of range.
    """
    options = options_of(query, ("size", "seed", "trials", "noise"), "experiment")
    size, seed = number_of(options, "size", 500, at_least=1), number_of(options, "seed", 0)
    trials = number_of(options, "trials", 4, at_least=1)
    noise = share_of(options, "noise", 5.0, most=100)
    rng = random.Random(f"experiment/{seed}")
    for at in range(size):
        material = rng.choice(sorted(MATERIALS))
        inputs = {"material": material, "trials": trials, "noise": noise, "seed": rng.randrange(2**31)}
        Experiment.of(inputs, 0)
        yield f"experiment:{at + 1}", {"inputs": inputs, "task_type": material}
