"""Criteria: what is graded, by what, and how much it weighs. Does not grade: `assay.rubrics.scoring` does."""

import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from assay.errors import FailureKind, RubricError

__all__ = ["PASS_AT", "SCALE_KINDS", "Check", "Criterion", "Essential", "Failed", "Grade", "JudgeSpec", "NoGrade", "arguments_rule"]

SCALE_KINDS = ("ordinal", "nominal", "numeric")

PASS_AT = 0.5  # the grade from which a criterion that is not essential has passed
_NOT_RISING = "a numeric judge scale must be rising numbers, found {!r}"
_HEAVIEST = 1e9  # weights beyond it would overflow the sum


@dataclass(frozen=True, kw_only=True)
class Grade:
    """What a check or judge answers. `value` in [0, 1]; `reason` is shown to people and to reflecting models."""

    value: float
    reason: str = ""
    label: str | None = None
    confidence: float | None = None


class NoGrade(Exception):
    """Raised by a check or judge that cannot decide: the criterion is unscored, with this reason.

    Args:
        wanted: the expected field that the task lacks, where that is why.
    """

    def __init__(self, *args: object, wanted: str = "") -> None:
        super().__init__(*args)
        self.wanted = wanted


@dataclass(frozen=True)
class Failed:
    """Stands where a prediction should: the run gave none.

    `own` failures (no answer, unparsed output, an exception in the program) score 0. The others (the model's server,
    the machinery) are nobody's fault and leave the task unscored. `empty`: nothing was raised, and nothing answered.
    """

    reason: str
    own: bool = True
    kind: FailureKind = FailureKind.AGENT
    empty: bool = False


def arguments_rule(rule: Callable[..., Any]) -> Callable[[Any], Any]:
    """Marks a check whose `with` arguments are tried by `rule(**arguments)` when the rubric is made; it raises what is wrong."""

    def mark(check: Any) -> Any:
        check.arguments_rule = rule
        return check

    return mark


Check = Callable[..., Any]  # (task, prediction, rollout, **with) -> bool | float in [0, 1] | Grade | None


@dataclass(frozen=True, kw_only=True)
class Essential:
    """Graded below `pass_at`, the whole score is at most `cap`. Both in [0, 1]."""

    pass_at: float = 1.0
    cap: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("pass_at", self.pass_at), ("cap", self.cap)):
            if not 0 <= value <= 1:
                raise RubricError(f"essential {name}={value!r} must be between 0 and 1")


@dataclass(frozen=True, kw_only=True)
class JudgeSpec:
    """A question for a model, or a judge that is defined elsewhere (`use`: its YAML file or its artifact's folder).

    `anchors` say what a word of the scale means. `kind` says how far its words lie apart: `ordinal` runs from worst to
    best in even steps (two words: binary), `numeric` words are rising numbers, and `nominal` words have no order; in a
    rubric each of those needs a grade in [0, 1].
    """

    text: str = ""
    scale: tuple[str, ...] = ("no", "yes")
    anchors: Mapping[str, str] = field(default_factory=dict)
    kind: str = "ordinal"
    grades: Mapping[str, float] = field(default_factory=dict)
    use: str = ""

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise RubricError("; ".join(problems))

    def _problems(self) -> Iterator[str]:
        if not self.text.strip() and not self.use:
            yield "a judge's text must say what to judge"
        if self.kind not in SCALE_KINDS:
            yield f"judge kind={self.kind!r} must be one of {', '.join(SCALE_KINDS)}"
        if self.kind == "numeric" and not _rises(self.scale):
            yield _NOT_RISING.format(list(self.scale))
        if self.grades and (set(self.grades) != set(self.scale) or not all(0 <= grade <= 1 for grade in self.grades.values())):
            yield f"judge grades {dict(self.grades)!r} must give each word of {list(self.scale)!r} a number between 0 and 1"
        if len(self.scale) < 2 or len({word.casefold() for word in self.scale}) != len(self.scale):
            yield f"judge scale {list(self.scale)!r} needs at least two different words, from worst to best"
        if unknown := sorted(set(self.anchors) - set(self.scale)):
            yield f"judge anchors {unknown!r} are not on the scale {list(self.scale)!r}"

    @property
    def steps(self) -> list[float]:
        """Where the words of the scale stand: their numbers on a numeric scale, else 0, 1, 2 and so on.

        Raises:
            RubricError: a word of a numeric scale is no number.
        """
        if self.kind != "numeric":
            return [float(index) for index in range(len(self.scale))]
        try:
            return [float(word) for word in self.scale]
        except ValueError:
            raise RubricError(_NOT_RISING.format(list(self.scale))) from None

    @property
    def graded(self) -> bool:
        """Whether each word has a grade: not those of a nominal scale without `grades`."""
        return bool(self.grades) or self.kind != "nominal"

    def grade(self, word: str) -> float:
        """The word's own grade, else its place between the first of the scale (0) and the last (1).

        Raises:
            RubricError: the words of a nominal scale have no grades.
        """
        if not self.graded:
            raise RubricError(f"the words {list(self.scale)!r} have no order; give each a grade to score with them")
        if self.grades:
            return self.grades[word]
        steps = self.steps
        return (steps[self.scale.index(word)] - steps[0]) / (steps[-1] - steps[0])


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """One named part of a rubric, decided by exactly one of `check` and `judge`.

    A negative weight is a pitfall: its grade says how far the output fell into it. `scope` is `final` (the whole run)
    or `step` (each LM call, for intermediate rewards; never in the score).

    `when` names another criterion: this one counts only where that one passed (`passed`). Elsewhere it earns and costs
    nothing, and is not asked. A length penalty without it teaches a model to think less on tasks that it gets wrong.
    """

    name: str
    weight: float = 1.0
    scope: str = "final"
    check: Check | None = None
    judge: JudgeSpec | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    essential: Essential | None = None
    when: str = ""
    source: str = ""  # dotted path of the check, as written

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise RubricError("; ".join(f"criterion {self.name!r}: {problem}" for problem in problems))

    def _problems(self) -> Iterator[str]:
        if not self.name.isidentifier():
            yield "the name must be a word of letters, digits and underscores"
        if not abs(self.weight) <= _HEAVIEST:
            yield f"weight={self.weight!r} must be a finite number between -1e9 and 1e9"
        if self.scope not in ("final", "step"):
            yield f"scope={self.scope!r} must be 'final' or 'step'"
        if (self.check is None) == (self.judge is None):
            yield "it needs exactly one of check and judge"
        if self.judge is not None and not self.judge.use and not self.judge.graded:
            yield "its judge's scale is nominal; say what each word is worth in grades"
        if self.scope == "step" and (self.essential is not None or self.judge is not None):
            yield "a step criterion is a check, and cannot be essential"
        if self.essential is not None and self.weight < 0:
            yield f"a pitfall (weight {self.weight:g}) cannot be essential"
        if self.check is not None and (wrong := self._unfit_arguments(self.check)):
            yield wrong

    def _unfit_arguments(self, check: Check) -> str:
        """What is wrong with the arguments; empty where nothing is."""
        try:
            inspect.signature(check).bind(None, None, None, **self.arguments)
        except TypeError as error:
            return f"check {self.source or check!r} cannot be called as check(task, prediction, rollout, **{dict(self.arguments)!r}): {error}"
        except ValueError:
            pass  # a builtin without a signature: the call will tell
        try:
            getattr(check, "arguments_rule", dict)(**self.arguments)
        except Exception as error:
            return f"{self.source or check!r} with {dict(self.arguments)!r}: {str(error).splitlines()[0]}"
        return ""

    def passed(self, value: float) -> bool:
        """Whether a grade passes: at least `pass_at` of an essential criterion, at least 0.5 of any other."""
        return value >= (self.essential.pass_at if self.essential is not None else PASS_AT)

    def describe(self) -> dict[str, Any]:
        """JSON-ready; together with the check's source it decides the rubric's version."""
        entry: dict[str, Any] = {"name": self.name, "weight": self.weight, "scope": self.scope}
        if self.judge is not None:
            entry["judge"] = {**asdict(self.judge), "scale": list(self.judge.scale), "used": _content_hash(self.judge.use)}
        else:
            entry |= {"check": self.source or _name_of(self.check), "with": dict(self.arguments)}
            entry["code"] = _code_hash(self.check)
        if self.essential is not None:
            entry["essential"] = {"pass_at": self.essential.pass_at, "cap": self.essential.cap}
        if self.when:
            entry["when"] = self.when
        return entry


def _rises(scale: Sequence[str]) -> bool:
    try:
        steps = [float(word) for word in scale]
    except ValueError:
        return False
    return steps == sorted(set(steps)) and all(map(math.isfinite, steps))


def _content_hash(use: str) -> str:
    """Of a judge that is used from elsewhere: its file, or its artifact's manifest, which holds the hashes of the rest."""
    if not use:
        return ""
    path = Path(use) / "manifest.json" if Path(use).is_dir() else Path(use)
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def _name_of(check: Any) -> str:
    """`module:name` of a function, of a partial's function, or of a callable object's class."""
    function = check.func if isinstance(check, functools.partial) else check
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def _code_hash(check: Any) -> str:
    if isinstance(check, functools.partial):
        return f"{_code_hash(check.func)} {check.args!r} {check.keywords!r}"
    try:
        text = inspect.getsource(check if hasattr(check, "__qualname__") else type(check))
    except (OSError, TypeError):
        text = _name_of(check)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
