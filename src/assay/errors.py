"""One exception tree. Messages say the value, the rule it broke and the way out; they carry no markup.

`StopRun` and its children are `BaseException`s: teleprompters and evaluators swallow `Exception`,
and a cap that is swallowed is no cap.
"""

__all__ = [
    "ArtifactError",
    "AssayError",
    "BudgetExceeded",
    "Cancelled",
    "ConfigError",
    "DataError",
    "Diverged",
    "MissingExtra",
    "ModelError",
    "OptimizerError",
    "ParameterError",
    "ProgramError",
    "RubricError",
    "SealedSplit",
    "StopRun",
    "StoreError",
    "Unscored",
]


class AssayError(Exception):
    """Base of every error that assay raises on purpose."""


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


class ModelError(AssayError, RuntimeError):
    """A model cannot be found, fetched, verified or started."""


class Diverged(ModelError):
    """A training went where nothing can be kept of it; another one may do better."""


class OptimizerError(AssayError, RuntimeError):
    """An optimizer broke; what its runs did is in the store, and no artifact was written."""


class ProgramError(AssayError, ValueError):
    """A program cannot be found, built or loaded."""


class ArtifactError(AssayError, ValueError):
    """An artifact is missing parts, was changed by hand, or is of a newer format."""


class StoreError(AssayError, RuntimeError):
    """The store cannot be opened, written or read."""


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
