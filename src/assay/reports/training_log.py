"""The log of a training in the folder of its run: curves, alarms and sample rollouts so far, one JSON object a line.

Training appends to it after each step, and the page reads it while the training runs or after it was killed. Values of
a step that is repeated after a resume replace the earlier ones. Samples are ids of rollouts: their texts are only in
the store, where they can be erased.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from assay.reports.training import curves_of

_FILE = "training.jsonl"
_MOST_BYTES = 8 << 20  # read from the end of a log: about 8,000 steps


class TrainingLog:
    """Appends to the log of a run.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE

    def begin(self, steps: int) -> None:
        """Adds the number of steps that the training takes at most."""
        self._append({"step": 0, "steps": steps})

    def values(self, step: int, values: Mapping[str, float], alarms: Mapping[str, str]) -> None:
        """Adds the finite values by curve, and all alarms so far by name."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}  # JSON has no others
        self._append({"step": step, "values": finite, "alarms": dict(alarms)})

    def sample(self, step: int, rollout_id: str, advantages: Sequence[float]) -> None:
        """Adds a sample rollout, with the advantage of each of its calls that was trained on."""
        self._append({"step": step, "sample": rollout_id, "advantages": list(advantages)})

    def _append(self, line: Mapping[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # The line break comes first: a line that a kill cut off does not join the next one.
        with self._path.open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps(line))


@dataclass(kw_only=True)
class TrainingProgress:
    """What a log holds.

    Attributes:
        curves: `curves[name][step]`.
        alarms: texts by name.
        samples: id and advantages of the sample rollout by step.
        step: the last step with a value; None if there is none.
        steps: number of steps at most; None if the log does not say it.
        shortened: whether the log is longer than what was read of it, which is its end.
    """

    curves: dict[str, dict[int, float]] = field(default_factory=dict)
    alarms: dict[str, str] = field(default_factory=dict)
    samples: dict[int, tuple[str, list[float]]] = field(default_factory=dict)
    step: int | None = None
    steps: int | None = None
    shortened: bool = False


def read_training_log(folder: Path) -> TrainingProgress | None:
    """What the log of a run's folder holds; None if there is no log. Lines that were cut off are skipped."""
    path, progress = folder / _FILE, TrainingProgress()
    if not path.is_file():
        return None
    curves: dict[str, dict[Any, float]] = {}
    with path.open("rb") as file:
        start = max(0, file.seek(0, os.SEEK_END) - _MOST_BYTES)
        file.seek(start)
        lines = file.read(_MOST_BYTES).split(b"\n")
    progress.shortened = start > 0
    for text in lines[1:]:  # the first is empty, or the rest of a line
        try:
            line = orjson.loads(text)
            step = int(line["step"])
            if "sample" in line:
                progress.samples[step] = (str(line["sample"]), [float(value) for value in line["advantages"]])
                continue
            if "steps" in line:
                progress.steps = int(line["steps"])
                continue
            for name, value in line["values"].items():
                curves.setdefault(str(name), {})[step] = float(value)
            progress.alarms = {str(name): str(text) for name, text in line["alarms"].items()}
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        progress.step = step
    progress.curves = curves_of(curves)
    return progress
