"""One exception tree. Messages say the value, the rule it broke and the way out; they carry no markup.

`StopRun` and its children are `BaseException`s: teleprompters and evaluators swallow `Exception`,
and a cap that is swallowed is no cap.
"""

from enum import StrEnum

__all__ = [
    "ArtifactError",
    "AssayError",
    "BudgetExceeded",
    "Cancelled",
    "ConfigError",
    "DataError",
    "Diverged",
    "FailureKind",
    "LowCoverage",
    "MissingExtra",
    "ModelError",
    "OptimizerError",
    "ParameterError",
    "ProgramError",
    "ProgramFailed",
    "RubricError",
    "SealedSplit",
    "StopRun",
    "StoreError",
    "UnknownRollout",
    "Unscored",
]


class FailureKind(StrEnum):
    """Why a transition, rollout or verdict failed. Stored with it; code decides by this value, never by the text of a message."""

    PARSE = "parse"  # the model answered, and the answer could not be parsed into the fields that were asked for
    CONTEXT = "context"  # the request did not fit into the model's context
    TIMEOUT = "timeout"  # no answer within the time limit
    MODEL = "model"  # the model's server or engine failed: connection, 5xx, an error or an empty list in place of an answer
    AGENT = "agent"  # the program raised, or gave no answer
    TOOL = "tool"  # a tool raised
    CHECK = "check"  # a check of the rubric raised
    JUDGE = "judge"  # a judge gave no verdict
    LOOP = "loop"  # the agent repeated itself until it was stopped
    CAP = "cap"  # a cap on calls, tokens, dollars or time, or the user, stopped it


class AssayError(Exception):
    """Base of every error that assay raises on purpose. Messages name Python arguments.

    Args:
        flag: how the command line says the argument that the message names, such as `--rename COLUMN=NAME`; printed there alone.
    """

    def __init__(self, *args: object, flag: str = "") -> None:
        super().__init__(*args)
        self.flag = flag


class ConfigError(AssayError, ValueError):
    """A setting is out of range, unknown, or would be silently ignored."""


class ParameterError(ConfigError):
    """An agent parameter is out of its range."""


class DataError(AssayError, ValueError):
    """A dataset cannot be read or used; the message names file and line."""


class SealedSplit(DataError):
    """Something other than the final report asked for the test split."""


class RubricError(AssayError, ValueError):
    """A rubric is malformed, or grades do not fit it."""


class Unscored(AssayError):
    """A score is missing (NaN): it is left out and counted, never used as a number."""


class LowCoverage(AssayError, RuntimeError):
    """Less was scored than is required: a criterion was not decided on too many tasks."""


class ModelError(AssayError, RuntimeError):
    """A model cannot be found, fetched, verified or started."""


class Diverged(ModelError):
    """A training went where nothing can be kept of it; another one may do better."""


class OptimizerError(AssayError, RuntimeError):
    """An optimizer broke before any program was evaluated; no artifact was written. After that it is a note in the report."""


class ProgramError(AssayError, ValueError):
    """A program cannot be found, built or loaded."""


class ProgramFailed(AssayError, RuntimeError):
    """A program failed on each of its first tasks; of an exception the message has the traceback with file and line."""


class ArtifactError(AssayError, ValueError):
    """An artifact is missing parts, was changed by hand, or is of a newer format."""


class StoreError(AssayError, RuntimeError):
    """The store cannot be opened, written or read."""


class UnknownRollout(StoreError):
    """No rollout of this name or id is in the store, or open."""


class MissingExtra(AssayError, ImportError):
    """A package of an optional extra is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package!r} is not installed. Install it with: pip install 'assay[{extra}]'")
        self._of = (package, extra)

    def __reduce__(self) -> tuple[type["MissingExtra"], tuple[str, str]]:
        return MissingExtra, self._of  # it may come from another host


class StopRun(BaseException):
    """Ends a run from inside somebody else's loop; the best result so far is kept."""


class BudgetExceeded(StopRun):
    """A cap is reached. `what` names it: `calls`, `tokens`, `dollars` or `search calls`."""

    def __init__(self, message: str, *, what: str = "calls") -> None:
        super().__init__(message)
        self.what = what


class Cancelled(StopRun):
    """The user asked the run to stop."""
