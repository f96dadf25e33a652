"""Criteria of a rubric: their graders, weights and validation. Grading is in `assay.rubrics.scoring`."""

import difflib
import functools
import hashlib
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from assay.datasets import Task
from assay.errors import FailureKind, RubricError
from assay.rubrics.calling import MetricCheck, as_check, definition_of, named_keywords, unfit_arguments
from assay.support.names import one_of
from assay.support.package import CONTENT
from assay.traces.records import Verdict

SCALE_KINDS = ("ordinal", "nominal", "numeric")
ORIGINS = ("input", "output", "expected")
SHOWS = ("task_input", "output")  # what a judge sees by default

PASS_AT = 0.5  # lowest passing grade of a criterion that is not essential
_NOT_RISING = "a numeric judge scale must be increasing numbers, found {!r}"
_HEAVIEST = 1e9  # far larger weights would overflow the sum


@dataclass(frozen=True, kw_only=True)
class Grade:
    """Result of a check or judge.

    Args:
        value: in the criterion's range, [0, 1] by default; higher is better (for a pitfall: the degree to which it
            occurred).
        reason: explanation, shown to users and to reflection models.
        label: word of the judge's scale.
        confidence: in [0, 1].
    """

    value: float
    reason: str = ""
    label: str | None = None
    confidence: float | None = None

    @classmethod
    def of(cls, holds: bool, otherwise: str = "") -> "Grade":
        """Grade 1 if something holds; otherwise 0, with the reason."""
        return cls(value=float(holds), reason="" if holds else otherwise)

    @classmethod
    def beyond(cls, used: float, budget: float, reason: str) -> "Grade":
        """Grade of a pitfall: 0 up to a budget, rising linearly to 1 at twice the budget (at one if it is 0)."""
        value = min(1.0, max(0.0, (used - budget) / max(1, budget)))
        return cls(value=value, reason=reason if value else "")


class NoGrade(Exception):
    """Raised by a check or judge that cannot decide. The criterion is unscored, with the message as reason.

    Args:
        missing_field: name of the expected field, if the task lacks one.
    """

    def __init__(self, *args: object, missing_field: str = "") -> None:
        super().__init__(*args)
        self.missing_field = missing_field


def not_expected(task: Task, name: str, *, with_what: str = "") -> NoGrade:
    """The error of a check on an expected output that a task lacks: its row, if a file has it, is named."""
    way = ""
    if ":" in task.where:
        other = ", or have the criterion read another field (with: {field: NAME})" if task.expected else ""
        way = f". Give it a value in {task.where}{other}"
    elif task.where and not task.expected:
        way = ". Give the row as {'inputs': {…}, 'expected': {…}}"
    elif not task.expected:
        way = ". Give `expected` where the rollout is opened or recorded, or use a check that needs none"
    names = ", ".join(sorted(task.expected)) or "no expected outputs"
    return NoGrade(f"task {task.id!r} has no expected {name!r}{with_what}; it has {names}{way}", missing_field=name)


class NotApplicable(NoGrade):
    """Raised by a check whose question does not arise for a task. The criterion then counts neither in the score nor
    against the coverage."""


class OutOfRange(RubricError):
    """A check graded outside the range of its criterion."""


@dataclass(frozen=True)
class Failed:
    """Replaces the prediction of a run that produced none.

    Args:
        by_agent: True for failures of the agent (no answer, unparsed output, an exception in the program), which score
            0. False for failures of the model server or the infrastructure, which leave the task unscored.
        empty: no exception was raised, but the answer is empty.
    """

    reason: str
    by_agent: bool = True
    kind: FailureKind = FailureKind.AGENT
    empty: bool = False


def arguments_rule(rule: Callable[..., Any]) -> Callable[[Any], Any]:
    """Decorates a check with a validator of its `with` arguments.

    `rule(**arguments)` is called when the rubric is created and raises an exception for invalid arguments.
    """

    def mark(check: Any) -> Any:
        check.arguments_rule = rule
        return check

    return mark


# (task, prediction, rollout, **with), or those of the three that it names -> bool, number, `Grade`, None, or a mapping
# or prediction with `score` and `feedback`
Check = Callable[..., Any]


def is_number(value: object) -> bool:
    """Whether a value is a number; True and False are not."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


@named_keywords()
@dataclass(frozen=True, kw_only=True)
class Essential:
    """If the grade is below `pass_at`, the total score is at most `cap`. Both in [0, 1]."""

    pass_at: float = 1.0
    cap: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("pass_at", self.pass_at), ("cap", self.cap)):
            if not (is_number(value) and 0 <= value <= 1):
                raise RubricError(f"essential {name}={value!r} must be between 0 and 1")


class JudgeFields(TypedDict, total=False):
    """Fields of a `JudgeSpec` for a judge that is given as a question."""

    scale: tuple[str, ...]
    anchors: Mapping[str, str]
    kind: str
    grades: Mapping[str, float]
    shows: tuple[str, ...]


@named_keywords()
@dataclass(frozen=True, kw_only=True)
class JudgeSpec:
    """A question for a judge model, or a reference to a judge defined elsewhere.

    Args:
        text: the question.
        scale: labels, worst first.
        anchors: label -> its meaning.
        kind: `ordinal` (evenly spaced from worst to best; two labels are binary), `numeric` (labels are increasing
            numbers) or `nominal` (no order; needs `grades` in a rubric).
        grades: label -> grade in [0, 1]. By default the position on the scale.
        shows: names of what the judge sees, see `assay.judges.questions.shown_values`; if empty, the judge's default.
        use: YAML file or artifact folder of a judge defined elsewhere.
    """

    text: str = ""
    scale: tuple[str, ...] = ("no", "yes")
    anchors: Mapping[str, str] = field(default_factory=dict)
    kind: str = "ordinal"
    grades: Mapping[str, float] = field(default_factory=dict)
    shows: tuple[str, ...] = ()
    use: str = ""

    def __post_init__(self) -> None:
        if problems := list(self._wrong_types()) or list(self._problems()):
            raise RubricError("; ".join(problems))

    def _wrong_types(self) -> Iterator[str]:
        if not isinstance(self.text, str):
            yield f"judge text={self.text!r} must be a string"
        for name, words, example in (
            ("scale", self.scale, "('no', 'yes')"),
            ("shows", self.shows, "('input.question', 'output.answer')"),
        ):
            if not isinstance(words, tuple | list) or not all(isinstance(word, str) for word in words):
                yield f"judge {name}={words!r} must be a tuple or list of strings, such as {example}"
        for name, value in (("anchors", self.anchors), ("grades", self.grades)):
            if not isinstance(value, Mapping):
                yield f"judge {name}={value!r} must be a mapping with labels of the scale as keys"

    def _problems(self) -> Iterator[str]:
        if not self.text.strip() and not self.use:
            yield "a judge needs a text with the question to decide"
        if self.kind not in SCALE_KINDS:
            yield f"judge kind={self.kind!r} {one_of(self.kind, SCALE_KINDS)}"
        if self.kind == "numeric" and not _rises(self.scale):
            yield _NOT_RISING.format(list(self.scale))
        if self.grades and (
            set(self.grades) != set(self.scale) or not all(0 <= grade <= 1 for grade in self.grades.values())
        ):
            yield (
                f"judge grades {dict(self.grades)!r} must map each label of {list(self.scale)!r} "
                "to a number between 0 and 1"
            )
        if len(self.scale) < 2 or len({word.casefold() for word in self.scale}) != len(self.scale):
            yield f"judge scale {list(self.scale)!r} needs at least two different labels, from worst to best"
        if wrong := [name for name in self.shows if not is_shown_name(name)]:
            yield f"judge shows {wrong!r}: write NAME, or ORIGIN.NAME with the origin {', '.join(ORIGINS)}"
        if self.use and self.shows:
            yield "the judge of use names what it sees in its own shows"
        if unknown := sorted(set(self.anchors) - set(self.scale)):
            yield f"judge anchors {unknown!r} are not on the scale {list(self.scale)!r}"

    def to_dict(self) -> dict[str, Any]:
        """The fields, JSON-serializable; `shows` only if it is set."""
        fields = {**asdict(self), "scale": list(self.scale), "shows": list(self.shows)}
        return fields if self.shows else {name: value for name, value in fields.items() if name != "shows"}

    @property
    def steps(self) -> list[float]:
        """Positions of the labels: their values on a numeric scale, otherwise 0, 1, 2, ...

        Raises:
            RubricError: a label of a numeric scale is not a number.
        """
        if self.kind != "numeric":
            return [float(index) for index in range(len(self.scale))]
        try:
            return [float(word) for word in self.scale]
        except ValueError:
            raise RubricError(_NOT_RISING.format(list(self.scale))) from None

    @property
    def graded(self) -> bool:
        """Whether each label has a grade. False for a nominal scale without `grades`."""
        return bool(self.grades) or self.kind != "nominal"

    def grade(self, word: str) -> float:
        """Grade of a label: its entry in `grades`, otherwise its position between the first label (0) and the last (1).

        Raises:
            RubricError: a nominal scale without `grades`.
        """
        if not self.graded:
            raise RubricError(f"the labels {list(self.scale)!r} have no order; set grades to score with them")
        if self.grades:
            return self.grades[word]
        steps = self.steps
        return (steps[self.scale.index(word)] - steps[0]) / (steps[-1] - steps[0])


@named_keywords(**{"with": "arguments"})
@dataclass(frozen=True, kw_only=True)
class Criterion:
    """A named, weighted part of a rubric, decided by exactly one of `check` and `judge`.

    Args:
        check: a function of `task`, `prediction` and `rollout`, or of those that it names; or a DSPy metric, told by
            the name of a parameter: `example`, `gold`, `pred`, `trace`.
        range: lowest and highest value that the check gives; values become grades in [0, 1].
        weight: signed share of the score. Negative means a pitfall: its grade is the degree to which it occurred.
        scope: `final` (graded once per run) or `step` (graded per LM call, for step rewards; not part of the score).
        arguments: keyword arguments of the check (`with` in YAML).
        when: name of another criterion. This one counts only if that one passed (see `passed`); otherwise it is not
            evaluated and does not change the score. A length penalty without `when` trains a model to think less on
            tasks that it answers incorrectly.
    """

    name: str
    weight: float = 1.0
    scope: str = "final"
    check: Check | None = None
    judge: JudgeSpec | None = None
    range: tuple[float, float] = (0.0, 1.0)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    essential: Essential | None = None
    when: str = ""
    source: str = ""  # dotted path of the check, as written

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "check", as_check(self.check, metric=False))
        except RubricError as error:
            raise RubricError(f"criterion {self.name!r}: {error}") from None
        if problems := list(self._problems()):
            raise RubricError("; ".join(f"criterion {self.name!r}: {problem}" for problem in problems))

    def _problems(self) -> Iterator[str]:
        if not (isinstance(self.name, str) and self.name.isidentifier()):
            yield "the name must consist of letters, digits and underscores and not start with a digit"
        weighted = is_number(self.weight) and abs(self.weight) <= _HEAVIEST
        if not weighted:
            yield f"weight={self.weight!r} must be a finite number between -1e9 and 1e9"
        if self.scope not in ("final", "step"):
            yield f"scope={self.scope!r} must be 'final' or 'step'"
        if (self.check is None) == (self.judge is None):
            yield "set exactly one of check and judge"
        if not isinstance(self.judge, JudgeSpec | None):
            yield f"judge={self.judge!r} must be a JudgeSpec, such as JudgeSpec(text=…)"
        elif self.judge is not None and not self.judge.use and not self.judge.graded:
            yield "its judge's scale is nominal; set grades with the value of each label"
        if not isinstance(self.essential, Essential | None):
            yield f"essential={self.essential!r} must be an Essential, such as Essential(pass_at=1.0, cap=0.0)"
        if self.scope == "step" and (self.essential is not None or self.judge is not None):
            yield "a step criterion needs a check and cannot be essential"
        if self.essential is not None and weighted and self.weight < 0:
            yield f"a pitfall (weight {self.weight:g}) cannot be essential"
        if self.check is not None and not callable(self.check):
            yield f"check={self.check!r} must be a function, such as assay.rubrics.checks.exact"
        if not _is_range(self.range):
            yield f"range={self.range!r} must be two finite numbers, the lower one first, such as (0, 10)"
        elif self.judge is not None and tuple(self.range) != (0, 1):
            yield "a judge grades by its scale; set range only with a check"
        if not isinstance(self.arguments, Mapping):
            yield f"arguments={self.arguments!r} must be a mapping of argument names to values"
        elif callable(self.check) and (wrong := unfit_arguments(self.check, self.arguments, self.source)):
            yield wrong

    @property
    def expected_names(self) -> set[str]:
        """Names of the expected outputs that the criterion itself names: its `field`, and what its judge sees."""
        shown = [name.partition(".") for name in (self.judge.shows if self.judge is not None else ())]
        fields = {str(self.arguments["field"])} if "field" in self.arguments else set()
        return fields | {name for origin, _, name in shown if origin == "expected" and name}

    def passed(self, value: float) -> bool:
        """Whether a grade passes: >= `pass_at` for an essential criterion, >= 0.5 for any other."""
        return value >= (self.essential.pass_at if self.essential is not None else PASS_AT)

    def describe(self) -> dict[str, Any]:
        """JSON-serializable description with the hash of the check's source. The rubric's version is its hash."""
        entry: dict[str, Any] = {"name": self.name, "weight": self.weight, "scope": self.scope}
        if self.judge is not None:
            entry["judge"] = {**self.judge.to_dict(), "used": _content_hash(self.judge.use)}
            place = Path(self.judge.use)
            if place.parent == CONTENT / "judges":  # the same version wherever assay is installed
                entry["judge"]["use"] = place.stem
        else:
            entry |= {"check": self.source or _name_of(self.check), "with": dict(self.arguments)}
            entry["code"] = _code_hash(self.check)
            if tuple(self.range) != (0, 1):
                entry["range"] = list(self.range)
        if self.essential is not None:
            entry["essential"] = {"pass_at": self.essential.pass_at, "cap": self.essential.cap}
        if self.when:
            entry["when"] = self.when
        return entry


def is_shown_name(name: str) -> bool:
    """Whether a judge can be shown a field of this name: `NAME`, or `ORIGIN.NAME` with an origin of `ORIGINS`."""
    origin, dot, rest = name.rpartition(".")
    return rest.isidentifier() and (not dot or origin in ORIGINS)


def _is_range(value: Any) -> bool:
    if not (isinstance(value, tuple | list) and len(value) == 2 and all(map(is_number, value))):
        return False
    return math.isfinite(value[0]) and math.isfinite(value[1]) and value[0] < value[1]


def _rises(scale: Sequence[str]) -> bool:
    try:
        steps = [float(word) for word in scale]
    except ValueError:
        return False
    return steps == sorted(set(steps)) and all(map(math.isfinite, steps))


def _content_hash(use: str) -> str:
    """Hash of a referenced judge: of its file, or of its artifact's manifest, which contains all other hashes."""
    if not use:
        return ""
    path = Path(use) / "manifest.json" if Path(use).is_dir() else Path(use)
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def _name_of(check: Any) -> str:
    """`module:name` of a function, a partial's function, or a callable object's class."""
    definition = definition_of(check)
    return f"{definition.__module__}:{definition.__qualname__}"


def _code_hash(check: Any) -> str:
    if isinstance(check, MetricCheck):
        return _code_hash(check.metric)
    if isinstance(check, functools.partial):
        return f"{_code_hash(check.func)} {check.args!r} {check.keywords!r}"
    try:
        text = inspect.getsource(definition_of(check))
    except (OSError, TypeError):
        text = _name_of(check)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# -- Conditional criteria (`Criterion.when`): they count only if another criterion passed. Does not grade.
#
# A length penalty on wrong answers ranks short wrong answers above long ones. With group-relative advantages, a group
# of only wrong answers (a hard task) then trains the model to think less. With `when: correct` it is a zero-variance
# group.


def check_conditions(rubric: str, criteria: Sequence[Criterion]) -> dict[str, Criterion]:
    """Validates `when` of all criteria and returns the criteria by name.

    Raises:
        RubricError: `when` names an unknown criterion, a pitfall, a criterion of scope `step` (for a final criterion),
            or is part of a cycle.
    """
    by_name = {c.name: c for c in criteria}
    for c in criteria:
        if not c.when:
            continue
        where = f"rubric {rubric!r}: criterion {c.name!r}: when={c.when!r}"
        gate = by_name.get(c.when)
        if gate is None:
            raise RubricError(f"rubric {rubric!r}: {no_such_condition(c.name, c.when, by_name)}")
        if gate.weight < 0:
            raise RubricError(
                f"{where} is a pitfall (weight {gate.weight:g}), which cannot pass; name a criterion with a weight >= 0"
            )
        if c.scope == "final" and gate.scope == "step":
            raise RubricError(f"{where} has scope 'step'; a final criterion can depend only on a final one")
        _check_cycle(where, c, by_name)
    return by_name


def _check_cycle(where: str, c: Criterion, by_name: dict[str, Criterion]) -> None:
    path, gate = [c.name], by_name.get(c.when)
    while gate is not None and gate.name not in path:
        path.append(gate.name)
        gate = by_name.get(gate.when)
    if gate is not None and gate.name == c.name:
        raise RubricError(f"{where} is part of a cycle ({' -> '.join([*path, c.name])}); remove one of them")


def no_such_condition(name: str, when: str, names: Iterable[str]) -> str:
    """Error message for a `when` that names an unknown criterion, with the closest name."""
    near = difflib.get_close_matches(when, list(names), 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"criterion {name!r}: when={when!r} names no criterion of the rubric; there are {', '.join(names)}.{hint}"


def condition(criterion: Criterion, gate: Criterion, verdict: Verdict) -> Verdict | None:
    """Returns None if the gate passed, otherwise the verdict that replaces the criterion's.

    If the gate is unscored, the criterion is unscored too; otherwise it does not apply.
    """
    if verdict.applies and verdict.grade is not None and gate.passed(verdict.grade):
        return None
    unknown = verdict.applies and verdict.grade is None
    reason = f"counts only where {gate.name} passes, and {gate.name} {'is unscored' if unknown else 'did not'}"
    return Verdict(
        criterion=criterion.name,
        grade=None,
        weight=criterion.weight,
        scope=criterion.scope,
        reason=reason,
        applies=unknown,
    )


# -- `judging="overall"`: merges the judge criteria of a rubric into one (implicit aggregation).


_RATING = ("very poor", "poor", "fair", "good", "very good")


def merge_judge_criteria(name: str, criteria: Sequence[Criterion]) -> tuple[Criterion, ...]:
    """Returns the criteria with all judge criteria replaced by one whose question lists them with their weights.

    Raises:
        RubricError: a judge criterion is essential, uses a judge defined elsewhere, or is linked to another by `when`;
            or none has a positive weight.
    """
    judged = [c for c in criteria if c.judge is not None]
    if unfit := [c.name for c in judged if c.essential is not None or (c.judge and c.judge.use)]:
        raise RubricError(
            f"rubric {name!r}: judging='overall' merges the judge criteria into one question, "
            f"so {unfit} can neither be essential nor use a judge"
        )
    names = {c.name for c in judged}
    if linked := [c.name for c in criteria if c.when and (c in judged or c.when in names)]:
        raise RubricError(
            f"rubric {name!r}: judging='overall' merges the judge criteria into one question, "
            f"so {linked} cannot depend on one with when"
        )
    weight = math.fsum(c.weight for c in judged if c.weight > 0)
    if not weight:
        raise RubricError(f"rubric {name!r}: judging='overall' needs a judge criterion with a weight above 0")
    questions = " ".join(f"({c.weight:+g}) {c.judge.text}" for c in judged if c.judge)
    text = f"Rate the output as a whole by these criteria, each with its weight, a negative one a pitfall: {questions}"
    shows = tuple(dict.fromkeys(name for c in judged if c.judge for name in c.judge.shows or SHOWS))
    spec = JudgeSpec(text=text, scale=_RATING, shows=() if shows == SHOWS else shows)
    overall = Criterion(name="overall", weight=weight, judge=spec)
    return (*(c for c in criteria if c.judge is None), overall)
