"""The search space: the five agent parameters, thresholds of a thinking policy, each in a range, and the program.

Does not call a model.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.errors import ParameterError
from assay.programs import RANGES, AgentParameters
from assay.programs.thinking import THRESHOLDS
from assay.support.names import nearest

_INTEGERS = ("context_length", "max_steps", "reasoning_depth", "stable", "samples")
_STEPPED = ("probe_margin", "confidence")  # in steps of a tenth, so that 1, which turns them off, is drawn too
_STEP = 0.1
_LIMITS: Mapping[str, tuple[float, float]] = {**RANGES, **THRESHOLDS}
_LOG = ("context_length", "max_steps")  # searched on a log scale
_GRID = 4  # values of each parameter on a grid


@dataclass(frozen=True)
class Point:
    """A program by name, and parameters by name; missing parameters keep the program's values."""

    program: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Space:
    """The parameters that are searched, with their ranges, for each program that is tried.

    Attributes:
        programs: names of the programs, the first being the default.
        acting: by program, the parameters with an effect there; others are not suggested for it.
        ranges: searched parameters with lowest and highest value, within `RANGES` and
            `THRESHOLDS`; by default those of `RANGES`, in full.
        fixed: parameters that are not searched, with their values.
    """

    programs: Sequence[str]
    acting: Mapping[str, Sequence[str]]
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=lambda: dict(RANGES))
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_ranges(self.ranges, self.fixed)
        if not any(self.searched(program) for program in self.programs):
            way = "; they need `method='optuna'` and a program with a thinking budget, such as `thinking=64`"
            raise ParameterError(
                f"nothing is searched: no effect of {', '.join(self.ranges)} in {', '.join(self.programs)}"
                f"{way if set(self.ranges) & set(THRESHOLDS) else ''}"
            )

    def searched(self, program: str) -> list[str]:
        """The parameters that are searched for a program, in order."""
        return [name for name in _LIMITS if name in self.ranges and name in self.acting[program]]

    def suggest(self, trial: Any) -> Point:
        """A point from an Optuna trial. A parameter without effect in the chosen program is not suggested."""
        program = (
            trial.suggest_categorical("program", list(self.programs)) if len(self.programs) > 1 else self.programs[0]
        )
        return Point(
            program, {**self._fixed_in(program), **{name: self._value(trial, name) for name in self.searched(program)}}
        )

    def _value(self, trial: Any, name: str) -> float | int:
        low, high = self.ranges[name]
        if name in _INTEGERS:
            return int(trial.suggest_int(name, int(low), int(high), log=name in _LOG))
        if name in _STEPPED:
            return round(float(trial.suggest_float(name, low, high, step=_STEP)), 1)
        return float(trial.suggest_float(name, low, high))

    def _fixed_in(self, program: str) -> dict[str, Any]:
        return {name: value for name, value in self.fixed.items() if name in self.acting[program]}

    def place(self, name: str, value: float) -> float:
        """Position of a value in its range, in [0, 1]; logarithmic for `context_length` and `max_steps`."""
        low, high = self.ranges[name]
        if high == low:
            return 0.5
        if name in _LOG:
            return min(1.0, max(0.0, math.log(value / low) / math.log(high / low)))
        return min(1.0, max(0.0, (value - low) / (high - low)))

    def at(self, name: str, place: float) -> float | int:
        """The value at a position; positions outside [0, 1] are clipped."""
        low, high = self.ranges[name]
        clipped = min(1.0, max(0.0, place))
        value = low * (high / low) ** clipped if name in _LOG else low + clipped * (high - low)
        return min(int(high), max(math.ceil(low), round(value))) if name in _INTEGERS else self._within(name, value)

    def _within(self, name: str, value: float) -> float:
        """The nearest value that is searched."""
        low, high = self.ranges[name]
        return min(max(round(value, 1) if name in _STEPPED else value, low), high)

    def point(self, params: Mapping[str, Any]) -> Point:
        """The point that a trial's params are."""
        program = str(params.get("program", self.programs[0]))
        return Point(
            program,
            {**self._fixed_in(program), **{name: params[name] for name in self.searched(program) if name in params}},
        )

    def trial_parameters(self, point: Point) -> dict[str, Any]:
        """Parameters of a point for `study.enqueue_trial`; values that are not searched become the nearest."""
        values = {
            name: self._within(name, point.parameters[name])
            for name in self.searched(point.program)
            if name in point.parameters
        }
        return {**({"program": point.program} if len(self.programs) > 1 else {}), **values}

    def grid(self) -> dict[str, list[Any]]:
        """A few values of each parameter over its range, for a grid."""
        import numpy as np

        grid: dict[str, list[Any]] = {"program": list(self.programs)} if len(self.programs) > 1 else {}
        for name in dict.fromkeys(name for program in self.programs for name in self.searched(program)):
            low, high = self.ranges[name]
            values = np.geomspace(low, high, _GRID) if name in _LOG else np.linspace(low, high, _GRID)
            grid[name] = sorted(
                {round(float(v)) if name in _INTEGERS else self._within(name, float(v)) for v in values}
            )
        return grid

    def describe(self) -> dict[str, Any]:
        """The space as JSON, to compare it with another study's."""
        return {
            "programs": list(self.programs),
            "searched": {program: self.searched(program) for program in self.programs},
            "ranges": {name: list(self.ranges[name]) for name in _LIMITS if name in self.ranges},
            "fixed": dict(self.fixed),
        }


def check_ranges(ranges: Mapping[str, tuple[float, float]], fixed: Mapping[str, Any]) -> None:
    """Refuses ranges of parameters that cannot be searched, before anything is run.

    Raises:
        ParameterError: unknown, out of range, falling, not whole where it must be, or both fixed and searched.
    """
    AgentParameters.of(fixed)
    if unknown := sorted(set(ranges) - set(_LIMITS)):
        hint = f". Did you mean {near!r}?" if (near := nearest(unknown[0], _LIMITS)) else ""
        raise ParameterError(
            f"not an agent parameter: {', '.join(map(repr, unknown))}; there are {', '.join(RANGES)}, and of a program "
            f"that thinks {', '.join(THRESHOLDS)}{hint}"
        )
    if conflicting := sorted(set(ranges) & set(fixed)):
        raise ParameterError(f"{conflicting} are fixed and searched at once; give each a range or a value")
    for name, (low, high) in ranges.items():
        least, highest = _LIMITS[name]
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ParameterError(f"the range {low:g} to {high:g} of {name} must be of finite numbers")
        if name in _INTEGERS and (low != int(low) or high != int(high)):
            raise ParameterError(f"the range {low:g} to {high:g} of {name} must have whole numbers")
        if name in _STEPPED and (round(low, 1) != low or round(high, 1) != high):
            raise ParameterError(f"the range {low:g} to {high:g} of {name} must have ends in tenths, such as 0.3")
        if not least <= low <= high <= highest:
            raise ParameterError(
                f"the range {low:g} to {high:g} of {name} must rise and lie between {least:g} and {highest:g}"
            )


def in_figures(value: float) -> str:
    """A number as text: without decimals where it is whole or at least 1000, else three significant digits."""
    return f"{value:.0f}" if value == round(value) or abs(value) >= 1000 else f"{value:.3g}"
