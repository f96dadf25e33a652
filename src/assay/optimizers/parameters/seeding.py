"""A sampler that is seeded by trial number, so that a resumed study suggests the same points.

Optuna stores a study's trials but not the state of the sampler's random generator. Here the random numbers of a trial
depend on its number, and those of a parameter also on its name, so that a trial that was interrupted while its
parameters were drawn gets the same remaining ones.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from optuna.samplers import BaseSampler


class SeededByTrial(BaseSampler):
    """A sampler built anew for each trial.

    Args:
        make: builds a sampler from a seed; it must read earlier trials from the study only.
        seed: of the study.
    """

    def __init__(self, make: Callable[[int], BaseSampler], seed: int) -> None:
        self._make, self._seed = make, seed
        self._current: tuple[int, BaseSampler] | None = None

    def _of(self, trial: Any, name: str = "") -> BaseSampler:
        if not name and self._current is not None and self._current[0] == trial.number:
            return self._current[1]
        words = [
            self._seed,
            trial.number,
            *([int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")] if name else []),
        ]
        sampler = self._make(int(np.random.SeedSequence(words).generate_state(1)[0]))
        if not name:
            self._current = (trial.number, sampler)
        return sampler

    def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
        return self._of(trial).infer_relative_search_space(study, trial)

    def sample_relative(self, study: Any, trial: Any, search_space: dict[str, Any]) -> dict[str, Any]:
        return self._of(trial).sample_relative(study, trial, search_space)

    def sample_independent(self, study: Any, trial: Any, param_name: str, param_distribution: Any) -> Any:
        return self._of(trial, param_name).sample_independent(study, trial, param_name, param_distribution)

    def before_trial(self, study: Any, trial: Any) -> None:
        self._of(trial).before_trial(study, trial)

    def after_trial(self, study: Any, trial: Any, state: Any, values: Any) -> None:
        self._of(trial).after_trial(study, trial, state, values)
