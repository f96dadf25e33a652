"""The exception tree. Messages give the value, the rule that it broke and the way out, without markup.

`StopRun` and its subclasses are `BaseException`s, because teleprompters and evaluators catch `Exception`: a cap that is
caught would not stop the run.
"""

from collections.abc import Callable
from enum import StrEnum
from itertools import chain, zip_longest
from typing import Any

__all__ = [
    "DISTRIBUTION",
    "ArtifactError",
    "AssayError",
    "BudgetExceeded",
    "Cancelled",
    "ConfigError",
    "DataError",
    "DeploymentError",
    "Diverged",
    "EnvironmentFailed",
    "FailureKind",
    "LoopStopped",
    "LowCoverage",
    "MissingExtra",
    "ModelError",
    "Names",
    "NoArtifact",
    "NoJsonForm",
    "NoModelFile",
    "NoStore",
    "OptimizerError",
    "ParameterError",
    "ProgramError",
    "ProgramFailed",
    "ProjectError",
    "RubricError",
    "SandboxError",
    "SealedSplit",
    "StopRun",
    "StoreError",
    "UnknownRollout",
    "Unscored",
    "WriteFailed",
    "spoken",
    "unspoken",
]

DISTRIBUTION = "dspy-assay"  # its name in the package index; the package is imported as `assay`


class FailureKind(StrEnum):
    """Why a transition, rollout or verdict failed. Stored with it; code branches on this value, never on a message."""

    PARSE = "parse"  # the model answered, but the requested fields could not be parsed from the answer
    CONTEXT = "context"  # the request did not fit into the model's context
    TIMEOUT = "timeout"  # no answer within the time limit
    MODEL = "model"  # the model's server or engine failed: connection, 5xx, an error or an empty list as the answer
    AGENT = "agent"  # the program raised, or returned no answer
    TOOL = "tool"  # a tool raised
    ENVIRONMENT = "environment"  # the environment raised, hung, or returned something that is not a step
    SANDBOX = "sandbox"  # untrusted code could not be run: no sandbox is available
    CHECK = "check"  # a check of the rubric raised
    JUDGE = "judge"  # a judge returned no verdict
    LOOP = "loop"  # the agent repeated itself until it was stopped
    RECORD = "record"  # the record of the run is incomplete: a part was not recorded, or is not understood
    LATE = "late"  # the answer came after another process had taken the job over
    CAP = "cap"  # stopped by a cap on calls, tokens, dollars or time, or by the user


Names = Callable[[str], str]  # how a surface writes a setting: `max_calls` -> `--max-calls`, `out=…` -> `--out`


class AssayError(Exception):
    """Base of all errors that assay raises deliberately.

    Args:
        field: the setting that the error is about, if any. It precedes the message, as each surface writes it.
        hint: what to do instead, as a sentence.

    Settings in message and hint are in backticks, with a value or without one: `max_calls`, `resume=True`, `out=…`.
    """

    report: Any = None  # what a command shows before it ends with this error
    exit_code = 1  # of the command line; 2 for wrong usage, which includes a named file that cannot be used

    def __init__(self, *args: object, field: str = "", hint: str = "") -> None:
        super().__init__(*args)
        self.field, self.hint = field, hint
        self.names: Names = str  # of the surface that the user has called; those of Python by default

    def text(self, names: Names = str) -> str:
        """The error in the words of a surface."""
        message = super().__str__()
        about = f"{names(self.field)}: " if self.field else ""
        return about + spoken(f"{message}. {self.hint}" if self.hint else message, names)

    def __str__(self) -> str:
        return self.text()


def spoken(text: str, names: Names) -> str:
    """A text whose settings, in backticks, are named as a surface writes them. Other texts in backticks are kept."""
    return "\n".join(_spoken_line(line, names) for line in text.split("\n"))


def _spoken_line(line: str, names: Names) -> str:
    parts = line.split("`")
    if len(parts) % 2 == 0 or line.startswith((" ", "\t")):  # a single backtick is that of a value; or of a traceback
        return line
    quoted = (names(part) if part.partition("=")[0].isidentifier() else f"`{part}`" for part in parts[1::2])
    return "".join(chain.from_iterable(zip_longest(parts[::2], quoted, fillvalue="")))


def unspoken(error: BaseException) -> str:
    """The text of an error with its settings in backticks, for a surface that names them later."""
    return error.text(lambda name: f"`{name}`") if isinstance(error, AssayError) else str(error)


class ConfigError(AssayError, ValueError):
    """A setting is out of range, unknown, or would be silently ignored."""

    exit_code = 2


class ProjectError(ConfigError):
    """`assay.toml` cannot be read, or has an unknown or wrong setting. The message names its tables and keys."""


class ParameterError(ConfigError):
    """An agent parameter is out of its range."""


class DataError(AssayError, ValueError):
    """A dataset cannot be read or used; the message names file and line."""

    exit_code = 2


class NoJsonForm(DataError, TypeError):
    """A value has no JSON form. `path` leads to it from the value that was to be written; empty for that value."""

    def __init__(self, message: str, *, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class SealedSplit(DataError):
    """The test split was read before it was unsealed for the final report."""


class DeploymentError(AssayError, RuntimeError):
    """A version, alias or deployment does not exist, is not what was registered, or is in another state."""


class RubricError(AssayError, ValueError):
    """A rubric is malformed, or grades do not fit it."""

    exit_code = 2


class Unscored(AssayError):
    """A score is missing (NaN): it is excluded and counted, and never used as a number."""


class LowCoverage(AssayError, RuntimeError):
    """The coverage is below the required one: a criterion is unscored on too many tasks."""


class ModelError(AssayError, RuntimeError):
    """A model cannot be found, downloaded, verified or started."""


class NoModelFile(ModelError):
    """The call names a model file that is not there or is none, or an unknown embedded model. Nothing was run."""

    exit_code = 2


class LoopStopped(RuntimeError):
    """The model repeated itself until it was stopped, or until its limit.

    A failure of one run and never of a job, so it is not an `AssayError`.

    Attributes:
        text: what it had written.
    """

    def __init__(self, message: str, *, text: str = "") -> None:
        super().__init__(message)
        self.text = text


class EnvironmentFailed(RuntimeError):
    """An environment raised, took too long, returned something that is not a step, or its opponent cheated.

    Never the agent's fault: the run is unscored. A failure of one run and never of a job, so it is not an `AssayError`.
    """


class Diverged(ModelError):
    """A training diverged and produced no usable result; a run with other settings may succeed."""


class OptimizerError(AssayError, RuntimeError):
    """An optimizer failed before any program was evaluated; no artifact was written.

    Later failures are notes in the report.
    """


class ProgramError(AssayError, ValueError):
    """A program cannot be found, built or loaded."""

    exit_code = 2


class ProgramFailed(AssayError, RuntimeError):
    """A program failed on each of its first tasks; for an exception, the message has its traceback."""


class SandboxError(AssayError, RuntimeError):
    """A sandbox with the required isolation is not available, or could not be started. Never the fault of the code."""


class ArtifactError(AssayError, ValueError):
    """An artifact is incomplete, was changed, or has another format."""


class NoArtifact(ArtifactError):
    """A folder that the call names is not an artifact, or none can be written there. Nothing was run."""

    exit_code = 2


class StoreError(AssayError, RuntimeError):
    """The store cannot be opened, written or read."""


class NoStore(StoreError):
    """The call names a file as the store that is not a database. Nothing was run."""

    exit_code = 2


class UnknownRollout(StoreError):
    """No rollout with this name or id is in the store, or open."""


class WriteFailed(AssayError, OSError):
    """A file could not be written, for instance on a full disk. Nothing of it is left, or what was there before."""


class MissingExtra(AssayError, ImportError):
    """A package of an optional extra is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package!r} is not installed. Install it with: pip install '{DISTRIBUTION}[{extra}]'")
        self._of = (package, extra)

    def __reduce__(self) -> tuple[type["MissingExtra"], tuple[str, str]]:
        return MissingExtra, self._of  # the arguments of __init__, for unpickling on another host


class StopRun(BaseException):
    """Ends a run from inside of another library's loop; the best result so far is kept."""


class BudgetExceeded(StopRun):
    """A cap is reached. `what` is its unit: `calls`, `tokens`, `dollars` or `search calls`."""

    def __init__(self, message: str, *, what: str = "calls") -> None:
        super().__init__(message)
        self.what = what


class Cancelled(StopRun):
    """The user stopped the run."""
