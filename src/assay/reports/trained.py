"""Tasks before and after a training: the evaluations that its report names, compared task by task."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.errors import StoreError
from assay.reports.files import ROWS
from assay.reports.sides import Sides, sides_of
from assay.traces.store.evaluations import before_and_after
from assay.traces.store.store import StoreReads

_FEWEST_ROWS = 20  # tasks of one comparison, however many comparisons there are


@dataclass(frozen=True, kw_only=True)
class TrainedTasks:
    """A program's tasks before and after; `sides` is None where the store has not the rollouts of both evaluations.

    Attributes:
        mode: how the model was sampled, `greedy` or `sampled`.
    """

    program: str
    mode: str
    sides: Sides | None


def trained_tasks(store: StoreReads, validation: Mapping[str, Any]) -> list[TrainedTasks]:
    """Each comparison of a training by task, the worst change first; of several comparisons fewer tasks each.

    Args:
        validation: of the report of a training.
    """
    compared = list(_compared(validation))
    rows = max(_FEWEST_ROWS, ROWS // max(1, len(compared)))
    return [
        TrainedTasks(program=program, mode=mode, sides=_sides(store, runs, mode, rows))
        for program, mode, runs in compared
    ]


def compared_runs(validation: Mapping[str, Any]) -> list[str]:
    """Ids of the evaluations of all comparisons."""
    return [run for _, _, runs in _compared(validation) for run in runs or ()]


def _compared(validation: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple[str, str] | None]]:
    """Program, mode and runs of each comparison."""
    for program, modes in validation.items():
        for mode, comparison in modes.items():
            runs: Sequence[str] = comparison.get("runs") or ()
            yield program, mode, (runs[0], runs[1]) if len(runs) == 2 else None


def _sides(store: StoreReads, runs: tuple[str, str] | None, mode: str, rows: int) -> Sides | None:
    try:
        pair = None if runs is None else before_and_after(store, runs, mode)
    except StoreError:
        return None
    if runs is None or pair is None:
        return None
    return sides_of(store, runs, *pair, rows=rows, better_first=False)
