"""Whether a program works at all: where its exceptions come from, and whether the first runs of a job all fail by the program itself.

Does not run programs. Failures of a model, and answers that could not be parsed, say nothing of the program.
"""

import inspect
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dspy

import assay
from assay.datasets import Task
from assay.errors import FailureKind, ProgramFailed

__all__ = ["FirstRuns", "Place", "own_traceback", "place_of", "require_answers"]

_FIRST = 10  # runs that a job begins with
_FEWEST = 3  # of fewer nothing is said
_EMPTY = ". The answer of `forward` needs a value: return a dspy.Prediction (or a mapping) with fields that are not empty"
_LIBRARIES = (str(Path(assay.__file__).parent), str(Path(dspy.__file__).parent), str(Path(inspect.__file__).parent))


class FirstRuns:
    """The runs that a job begins with. Where all fail by the program, the job is stopped: what follows could only be a table of zeros."""

    def __init__(self, *, proven: bool = False) -> None:
        self.runs: list[Any] = []
        self.proven = proven  # one of them has not failed so

    def watch(self, tasks: Sequence[Task]) -> dict[str, Any]:
        """Where an evaluation puts its predictions for the tasks that decide, by their ids; empty where nothing is open."""
        return {} if self.proven else dict.fromkeys(task.id for task in tasks[:_FIRST])

    def done(self, deciding: dict[str, Any], task: Task, prediction: Any) -> None:
        """Puts a prediction there, and takes all of them in where it is the last, whatever the order in which they came.

        Raises:
            ProgramFailed: as `take`.
        """
        if task.id in deciding and deciding[task.id] is None:
            deciding[task.id] = prediction
            if all(one is not None for one in deciding.values()):
                self.take(deciding.values())

    def take(self, predictions: Iterable[Any]) -> None:
        """Takes in scored predictions.

        Raises:
            ProgramFailed: of at least three runs so far none gave an answer, and that by the program.
        """
        if self.proven:
            return
        self.runs += predictions
        self.proven = len(self.runs) >= _FIRST or not all(_failed_itself(one) for one in self.runs)
        require_answers(self.runs)


def require_answers(predictions: Sequence[Any]) -> None:
    """Stops where each of several runs failed by the program itself.

    Raises:
        ProgramFailed: with the commonest reason, and the traceback of an exception.
    """
    if len(predictions) < _FEWEST or not all(_failed_itself(one) for one in predictions):
        return
    reason, count = Counter(one._result.failed for one in predictions).most_common(1)[0]
    error = next((one._error for one in predictions if getattr(one, "_error", None) is not None), None)
    how = f"\n{own_traceback(error)}\nCorrect the program" if error is not None else _EMPTY
    such = "" if count == len(predictions) else ", such as"
    raise ProgramFailed(
        f"the program failed on each of the first {len(predictions)} tasks{such}: {reason}{how}. preflight=False skips this check",
        flag="--no-preflight",
    )


def _failed_itself(prediction: Any) -> bool:
    result = getattr(prediction, "_result", None)
    return result is not None and result.failed is not None and result.failure is FailureKind.AGENT


@dataclass(frozen=True)
class Place:
    """Where an exception was raised: of the program's own lines the last one."""

    kind: type[BaseException]
    file: str
    line: int


def place_of(error: BaseException, program: Any) -> Place:
    """The last line of the program's own files; of the program's `forward` where it was not reached (wrong arguments)."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_own(frame.filename)]
    if own:
        return Place(type(error), own[-1].filename, own[-1].lineno or 0)
    inside = [frame for frame in frames if "assay" in Path(frame.filename).parts and "programs" in Path(frame.filename).parts]
    if inside:
        return Place(type(error), inside[-1].filename, inside[-1].lineno or 0)
    forward = getattr(type(program), "forward", type(program))
    try:
        return Place(type(error), inspect.getsourcefile(forward) or "?", inspect.getsourcelines(forward)[1])
    except (OSError, TypeError):
        last = frames[-1] if frames else None
        return Place(type(error), last.filename if last else "?", (last.lineno or 0) if last else 0)


def _is_own(file: str) -> bool:
    return not file.startswith((*_LIBRARIES, "<")) and "site-packages" not in file


def own_traceback(error: BaseException) -> str:
    """From the program's first line on; all of it where none of its lines is in it."""
    shown = traceback.TracebackException.from_exception(error)
    own = [at for at, frame in enumerate(shown.stack) if _is_own(frame.filename)]
    if own:
        shown.stack = traceback.StackSummary.from_list(list(shown.stack)[own[0] :])
    return "".join(shown.format()).rstrip()
