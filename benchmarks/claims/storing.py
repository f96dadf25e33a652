"""Measurements and their records, one JSON line for each measurement and seed.

Does not interpret the values: `claims.table` does.
"""

import datetime
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import assay
from assay.evaluation import Evaluation, SilentProgress

PACKAGES = ("dspy", "xllamacpp", "numpy", "scipy")
ROOT = Path(__file__).parents[2]
Values = Mapping[str, Mapping[str, Mapping[str, float]]]  # figure -> side, `before` or `after` -> task id -> value


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a measurement is run with.

    Attributes:
        stronger: GGUF file of the stronger model; None if there is none.
        scratch: folder for the stores and artifacts of this run.
        downloads: folder for data that is downloaded once.
    """

    seed: int
    model: str
    stronger: str | None
    scratch: Path
    downloads: Path


def held_out(setting: Setting, program: Any, *, test: int | None = None, **options: Any) -> Evaluation:
    """Runs a program over sealed tasks, one at a time, in a store of their own.

    Args:
        test: number of tasks; by default all of the test split.
        options: of `assay.evaluate`.
    """
    defaults = {"model": setting.model, "store": setting.scratch / "held_out.db"}
    sizes = None if test is None else {"test": test}
    return assay.evaluate(
        program, split="test", sizes=sizes, seed=setting.seed, threads=1, progress=Lines(), **{**defaults, **options}
    ).evaluation


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Raw values by task, and facts such as numbers of lines or the name of a winner."""

    values: Values
    facts: Mapping[str, Any]


Measurement = Callable[[Setting], Measured]


class Lines(SilentProgress):
    """Progress as lines on standard error."""

    def say(self, text: str) -> None:
        print(f"    {text}", file=sys.stderr, flush=True)


def record(
    name: str, setting: Setting, measured: Measured, *, model: str, command: str, seconds: float
) -> dict[str, Any]:
    """The line of a measurement. `model` is the one that was measured: the stronger one in rows that need it."""
    return {
        "measurement": name,
        "seed": setting.seed,
        "model": model,
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "seconds": round(seconds, 1),
        "commit": commit(),
        "versions": {"python": sys.version.split()[0], **{name: version(name) for name in PACKAGES}},
        "facts": measured.facts,
        "values": {
            figure: {side: _numbers(of) for side, of in sides.items()} for figure, sides in measured.values.items()
        },
    }


def _numbers(values: Mapping[str, float]) -> dict[str, float | None]:
    """NaN, an unscored value, as null."""
    return {task: None if math.isnan(value) else round(value, 6) for task, value in values.items()}


def commit() -> str:
    """The checkout's commit, with `-dirty` if files differ from it; `unknown` without git."""
    try:
        words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def read(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Records by measurement and seed; the last line of each counts."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return {(line["measurement"], line["seed"]): line for line in lines}


def append(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
