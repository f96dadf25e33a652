"""Loads rubrics from YAML, and makes them of a check or DSPy metric.

All errors of a file are reported at once, with file, line and valid values.
"""

import inspect
import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import pydantic
import yaml

from assay.errors import ArtifactError, RubricError
from assay.rubrics import checks, conversations, documents, environments, steps, tools
from assay.rubrics.calling import as_check, definition_of
from assay.rubrics.code import checks as code_checks
from assay.rubrics.criteria import Check, Criterion, Essential, JudgeSpec, no_such_condition
from assay.rubrics.protocols import Resolver
from assay.rubrics.rubric import STEP_CAP, Rubric
from assay.sources.artifact_files import is_artifact
from assay.sources.modules import attribute_of, qualified_name, why_not_imported
from assay.support.names import nearest
from assay.support.package import CONTENT
from assay.support.places import no_such_file
from assay.support.yaml_files import (
    Problem,
    StrictModel,
    as_text,
    corrected_key,
    did_you_mean,
    line_of,
    read_mapping,
    read_text,
    validated,
)

# -- The parts of a rubric file and of a judge file, as pydantic models, and their JSON schema.


class EssentialFile(StrictModel):
    # The key `essential` of a criterion in a rubric file.
    pass_at: float = pydantic.Field(1.0, strict=True, ge=0, le=1)
    """Grade from which the criterion passes."""
    cap: float = pydantic.Field(0.0, strict=True, ge=0, le=1)
    """Highest score of a rollout that does not pass."""


def _word(value: Any) -> Any:
    """Converts a number on a scale, as YAML parses it, to a string."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


_Word = Annotated[str, pydantic.BeforeValidator(_word)]


class JudgeFile(StrictModel):
    """The fields of a `JudgeSpec`."""

    text: str = ""
    """The question."""
    scale: list[_Word] = ["no", "yes"]
    """Labels, from worst to best where `kind` is `ordinal`."""
    anchors: dict[_Word, str] = {}
    """Label -> what it means, shown to the judge."""
    kind: Literal["ordinal", "nominal", "numeric"] = "ordinal"
    """`ordinal`: from worst to best; `nominal`: without order; `numeric`: rising numbers."""
    grades: dict[_Word, pydantic.StrictFloat] = {}
    """Label -> grade in [0, 1]; by default evenly spaced along the scale."""
    shows: list[str] = []
    """What the judge sees: `task_input`, `output`, `expected`, or fields of them as `input.NAME`, `output.NAME`,
    `expected.NAME`; by default `task_input` and `output`. Columns of labels have the same names."""
    use: str = ""
    """A compiled judge (artifact), a judge's file, relative to this file, or a shipped judge, in place of `text`."""

    def spec(self) -> JudgeSpec:
        fields = {name: getattr(self, name) for name in JudgeFile.model_fields}
        return JudgeSpec(**{**fields, "scale": tuple(self.scale), "shows": tuple(self.shows)})


class CriterionFile(StrictModel):
    # A criterion in a rubric file.
    name: str
    """Unique in the rubric."""
    weight: float = pydantic.Field(1.0, strict=True, allow_inf_nan=False)
    """Share of the score; a negative weight is a pitfall."""
    scope: Literal["final", "step"] = "final"
    """`final`: of the whole rollout; `step`: of each LM call, a step reward that is not part of the score."""
    check: str | None = None
    """`package.module:NAME` or `file.py:NAME` next to the rubric. Loading the rubric runs the file."""
    metric: str | None = None
    """A DSPy metric of `(example, pred, trace=None)`, named as a check is."""
    range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest value of the check or metric; values become grades in [0, 1]."""
    with_: dict[str, Any] = pydantic.Field({}, alias="with")
    """Arguments of the check."""
    judge: str | JudgeFile | None = None
    """A question, or a mapping with the keys of `judge` below. One of `check`, `metric` and `judge`."""
    scale: list[_Word] | None = None
    """Labels of a judge that is given as a question."""
    anchors: dict[str, str] | None = None
    """Label -> what it means, of a judge that is given as a question."""
    shows: list[str] | None = None
    """What a judge that is given as a question sees; see `judge` below."""
    essential: EssentialFile | None = None
    """Caps the score where the criterion does not pass."""
    when: str = ""
    """Name of a criterion: this one counts only where that one passed."""


class RubricFile(StrictModel):
    # A rubric file.
    name: str
    """Name in reports and traces."""
    description: str = ""
    """For readers."""
    step_cap: float = pydantic.Field(STEP_CAP, strict=True, ge=0, lt=1)
    """Largest sum of the step rewards of a rollout."""
    judging: Literal["each", "together", "overall"] = "each"
    """`each`: a call per judge criterion; `together`: one call with a verdict for each; `overall`: one rating of all
    criteria together."""
    criteria: list[CriterionFile] = pydantic.Field(min_length=1)
    """The criteria, see below."""


def rubric_schema() -> dict[str, Any]:
    """Returns the JSON schema of a rubric file, for editors."""
    return RubricFile.model_json_schema(by_alias=True)


# -- Reads rubrics of other tools: verifiers' criteria files (TOML or JSON) and HealthBench-like points (JSON).


_MOST_PARTS = 16  # of a dotted TOML key; tomllib's time is quadratic in their number
_TOML_TEXTS = re.compile(  # strings and comments; an unterminated string extends as far as tomllib would search
    r'''"""(?:\\.|[^\\])*?(?:"""|\Z)"{0,2}|\'{3}.*?(?:\'{3}|\Z)\'{0,2}|"(?:\\.|[^"\\\n])*+"?|\'[^\'\n]*+\'?|\#[^\n]*+''',
    re.DOTALL,
)
_LONG_KEY = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{_MOST_PARTS}}}")


def read_foreign(path: Path, *, resolver: Resolver | None = None) -> Rubric:
    """Reads a rubric from a `.toml` or `.json` file of another tool.

    - verifiers: `criteria` with `name`, `text`, `weight` (>= 0) and `choices`, worst first.
    - HealthBench (arXiv 2505.08775): a list of `criterion` and `points`, at the top level or under `rubrics`. Negative
      points are pitfalls.

    Raises:
        RubricError: the file has neither format, or a criterion is invalid.
    """
    try:
        text = read_text(path, "rubric or judge", RubricError)
        data = _toml(text, path) if path.suffix.lower() == ".toml" else json.loads(text)
    except RubricError:
        raise
    except (ValueError, RecursionError) as error:
        raise RubricError(f"{path}: cannot be read: {error}") from None
    entries = data.get("criteria", data.get("rubrics")) if isinstance(data, dict) else data
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise RubricError(f"{path}: expected a list of criteria, at the top level or under 'criteria' or 'rubrics'")
    if "points" in entries[0]:
        return points_rubric(entries, name=path.stem, resolver=resolver, source=str(path))
    criteria = [_verifiers(entry, f"{path}: criterion {at}") for at, entry in enumerate(entries, 1)]
    try:
        return Rubric(path.stem, criteria, resolver=resolver)
    except RubricError as error:
        raise RubricError(f"{path}: {error}") from None


def _toml(text: str, path: Path) -> Any:
    """Parses TOML.

    Raises:
        RubricError: a dotted key has too many parts.
        ValueError: invalid TOML.
    """
    bare = _TOML_TEXTS.sub(lambda match: "" if match[0].startswith("#") else "s", text)
    if _LONG_KEY.search(bare):
        raise RubricError(
            f"{path}: a key has more than {_MOST_PARTS} dotted parts; "
            "rubric keys have one part: name, text, weight, choices"
        )
    return tomllib.loads(text)


class _Verifiers(StrictModel):
    # A criterion of verifiers.
    name: Annotated[str, pydantic.StringConstraints(strip_whitespace=True, min_length=1)]
    text: Annotated[str, pydantic.StringConstraints(strip_whitespace=True, min_length=1)]
    weight: float = pydantic.Field(1.0, strict=True, ge=0, allow_inf_nan=False)
    choices: list[str] = ["no", "yes"]


def _verifiers(entry: dict[str, Any], where: str) -> Criterion:
    parsed, problems = validated(entry, None, _Verifiers)
    if parsed is None:
        raise RubricError(f"{where}: {'; '.join(message for _, message in problems)}")
    try:
        judge = JudgeSpec(text=parsed.text, scale=tuple(parsed.choices))
        return Criterion(name=_identifier(parsed.name), weight=parsed.weight, judge=judge)
    except RubricError as error:
        raise RubricError(f"{where}: {error}") from None


def points_rubric(
    entries: Sequence[Mapping[str, Any]],
    *,
    name: str = "points",
    resolver: Resolver | None = None,
    source: str = "points",
) -> Rubric:
    """Creates a rubric from criteria with points, as in a row of a HealthBench-like dataset.

    A judge decides whether each criterion is met. The score is the sum of the points met, divided by the sum of all
    positive points, clipped to [0, 1].

    Args:
        entries: mappings with `criterion` (text) and `points` (a number other than 0; negative for a pitfall); other
            keys are ignored.
        source: file or dataset, for error messages.
    Raises:
        RubricError: an entry lacks one of the keys, or no points are positive.
    """
    criteria = []
    for at, entry in enumerate(entries, 1):
        text, points = entry.get("criterion"), entry.get("points")
        if (
            not isinstance(text, str)
            or not text.strip()
            or isinstance(points, bool)
            or not isinstance(points, int | float)
            or not points
        ):
            raise RubricError(
                f"{source}: criterion {at} needs 'criterion' (text) and 'points' (a number != 0), found {dict(entry)!r}"
            )
        question = f"Is this true of the output? {text.strip()}"
        criteria.append(Criterion(name=f"c{at}", weight=float(points), judge=JudgeSpec(text=question)))
    try:
        return Rubric(name, criteria, resolver=resolver)
    except RubricError as error:
        raise RubricError(f"{source}: {error}") from None


def _identifier(name: str) -> str:
    """Converts a name to an identifier; other tools allow spaces and dashes."""
    word = re.sub(r"\W+", "_", name.strip()).strip("_") or "criterion"
    return f"c_{word}" if word[0].isdigit() else word


SHIPPED = (
    "answer_from_documents",
    "classify",
    "code_repair",
    "converse",
    "experiment",
    "extract",
    "math_qa",
    "nim",
    "text_to_sql",
    "tool_user",
)
SHIPPED_JUDGES = ("better_answer", "reports_problem", "right_label", "sentiment")
_ENDINGS = (".yaml", ".yml", ".toml", ".json")  # of rubric files

# what may be given as a rubric: a name or file, a rubric, a DSPy metric or check
RubricSource: TypeAlias = str | Path | Rubric | Callable[..., Any]


_OF_PROGRAMS = [import_module(f"assay.shipped.programs.{name}.checks") for name in ("experiment", "nim", "text_to_sql")]
SHIPPED_CHECKS: Mapping[str, Check] = {
    name: getattr(module, name)
    for module in (
        *(checks, code_checks, tools, steps, conversations, documents, environments),
        *_OF_PROGRAMS,
    )
    for name in module.__all__
    if "task" in inspect.signature(getattr(module, name)).parameters
}
_PITFALLS = ("calls_used", "length", "refusal", "steps_used", "token_use", "turns_used")
OF_STEPS = (*steps.__all__, *(name for name in conversations.__all__ if name.startswith("user_")))
_CRITERION_KEYS = {name for key, field in CriterionFile.model_fields.items() for name in (key, field.alias) if name}
_JUDGE_KEYS = {"text", "jury", "cascade"}  # one of them is in every judge file
_EXPECTED = "a rubric is a mapping with 'name' and 'criteria'"


def load_rubric(source: RubricSource, *, resolver: Resolver | None = None) -> Rubric:
    """Loads a rubric from a YAML file, by the name of a shipped one, or from another tool's file.

    A check or a DSPy metric is a rubric of one criterion.

    Args:
        source: a path ending in `.yaml` or `.yml`, one of `SHIPPED`, a `.toml` or `.json` file as accepted by
            `assay.rubrics.loading.read_foreign` (verifiers' criteria, HealthBench-like points), one of
            `SHIPPED_CHECKS`, `file.py:NAME` or `package.module:NAME` of a check, metric or `Rubric`, or the object.
        resolver: creates the graders of judge criteria; without one a rubric with judges does not score.
    Raises:
        RubricError: unknown rubric, invalid YAML, an unknown key, a value out of range, or a check that cannot be
            imported or called. The message names file and line.
    """
    if isinstance(source, Rubric):
        return source if resolver is None else source.with_resolver(resolver)
    if not isinstance(source, str | Path):
        return _of_function(source, resolver)
    if Path(source).suffix.lower() in (".toml", ".json"):
        return read_foreign(Path(source), resolver=resolver)
    text, name, folder = rubric_text(source)
    data, node = read_mapping(text, name, _EXPECTED, RubricError)
    if "criteria" not in data and data.keys() & _JUDGE_KEYS:
        raise RubricError(
            f"{name} is a judge file, not a rubric. A rubric has criteria; one of them can use this judge: "
            f"{{name: NAME, judge: {{use: {Path(name).name}}}}}"
        )
    parsed, problems = validated(data, node, RubricFile)
    if parsed is not None and (whole := _whole(parsed, folder)) is not None:
        return load_rubric(whole, resolver=resolver)
    entries = parsed.criteria if parsed is not None else _valid_entries(data)
    criteria, criterion_problems = _criteria(entries, folder, node)
    problems += criterion_problems
    if problems or parsed is None:
        raise RubricError(as_text(name, problems))
    try:
        return Rubric(parsed.name, criteria, step_cap=parsed.step_cap, resolver=resolver, judging=parsed.judging)
    except RubricError as error:
        raise RubricError(f"{name}:{line_of(node, ('criteria',))}: {error}") from None


def _whole(file: RubricFile, folder: Path | None) -> Rubric | None:
    """The `Rubric` that the only criterion of a file names as its metric, as `file.py:NAME` does; None for a metric."""
    named = file.criteria[0].metric if len(file.criteria) == 1 else None
    try:
        found = attribute_of(named, folder=folder) if named else None
    except Exception:  # reported with its line, as for any metric
        return None
    return found if isinstance(found, Rubric) else None


def _of_function(function: Any, resolver: Resolver | None) -> Rubric:
    """The rubric of one criterion that a check or DSPy metric decides."""
    check = as_check(function, metric=True)
    if not callable(check):
        raise RubricError(
            f"`rubric={function!r}` must be a Rubric, a YAML file's path, a shipped name, or a DSPy metric or check"
        )
    name = str(definition_of(check).__name__)
    name = name if name.isidentifier() else "metric"  # a lambda
    return Rubric(name, [Criterion(name=name, check=check)], resolver=resolver)


def _criteria(
    entries: Sequence[CriterionFile | None], folder: Path | None, node: yaml.Node | None
) -> tuple[list[Criterion], list[Problem]]:
    """The valid criteria and the problems of the others, each with its line. None entries are skipped."""
    criteria: list[Criterion] = []
    problems: list[Problem] = []
    names = Counter(entry.name for entry in entries if entry is not None)
    seen = set[str]()
    for index, entry in enumerate(entries):
        if entry is None:
            continue
        messages = [no_such_condition(entry.name, entry.when, names)] if entry.when and entry.when not in names else []
        messages += [f"there is already a criterion {entry.name!r}"] if entry.name in seen else []
        seen.add(entry.name)
        criterion, wrong = _criterion(entry, folder)
        criteria += [criterion] if criterion is not None else []
        problems += [(line_of(node, ("criteria", index)), message) for message in [*messages, *wrong]]
    return criteria, problems


def _valid_entries(data: Mapping[str, Any]) -> list[CriterionFile | None]:
    """Criteria of a file with errors, without what is wrong in them, so that all problems are reported at once.

    None for an entry that cannot be read.
    """
    listed = data.get("criteria")
    return [
        _without_errors(entry, at) if isinstance(entry, dict) else None
        for at, entry in enumerate(listed if isinstance(listed, list) else [], 1)
    ]


def _without_errors(entry: Mapping[str, Any], at: int) -> CriterionFile | None:
    """An entry with misspelled keys corrected and invalid values replaced; None if its check is not a string."""
    known: dict[str, Any] = {key: part for key, part in entry.items() if key in _CRITERION_KEYS}
    for key, part in entry.items():
        if key not in known and (near := corrected_key(str(key), _CRITERION_KEYS)) and near not in entry:
            known[near] = part
    known.setdefault("name", f"criterion_{at}")
    try:
        return CriterionFile.model_validate(known)
    except pydantic.ValidationError as error:
        wrong = {str(problem["loc"][0]) for problem in error.errors()}
    if wrong & {"check", "metric"}:
        return None
    placeholders = {"name": f"criterion_{at}", "judge": "?"}
    valid = {key: part for key, part in known.items() if key not in wrong}
    return CriterionFile.model_validate({**valid, **{key: placeholders[key] for key in wrong & placeholders.keys()}})


def rubric_name(source: RubricSource) -> str:
    """The name of a rubric in settings: as it was given, else that of the object."""
    return str(source) if isinstance(source, str | Path) else load_rubric(source).name


def importable_name(source: RubricSource) -> str:
    """The name by which a rubric can be loaded again: as it was given, else that of the check or metric.

    Raises:
        RubricError: the object has no such name.
    """
    if isinstance(source, str | Path):
        return str(source)
    name = qualified_name(source)
    try:
        found = attribute_of(name)
    except Exception:
        found = None
    if found is not source:
        raise RubricError(f"`rubric={source!r}` cannot be imported by its name: write it at the top level of a file")
    return name


def check_rubric_exists(source: str) -> None:
    """Refuses a rubric that is neither shipped nor a file. Does not read the file.

    Raises:
        RubricError: there is no such rubric.
    """
    place, colon, _ = source.rpartition(":")
    if source in SHIPPED or source in SHIPPED_CHECKS or (colon and not place.endswith(".py")):
        return
    file = place if colon else source
    if not colon and Path(source).suffix.lower() not in _ENDINGS:
        raise _unknown(source)
    if not Path(file).is_file():
        raise RubricError(no_such_file(file))


def _unknown(source: str) -> RubricError:
    if source.endswith(".py"):
        if not Path(source).is_file():
            return RubricError(no_such_file(source))
        return RubricError(f"rubric {source!r} is a Python file: name the metric, check or rubric in it, {source}:NAME")
    near = nearest(source, [*SHIPPED, *SHIPPED_CHECKS, *_files_like(source)])
    return RubricError(
        f"unknown rubric {source!r}: pass a .yaml, .toml or .json file, one of {', '.join(SHIPPED)}, a check such as "
        f"exact, or file.py:NAME of a DSPy metric.{did_you_mean(near)}"
    )


def _files_like(source: str) -> list[str]:
    """The rubric file that was meant where its ending is missing."""
    return [source + ending for ending in _ENDINGS if Path(source + ending).is_file()]


def rubric_text(source: str | Path) -> tuple[str, str, Path | None]:
    """A rubric as YAML: its text, its name for messages, and the folder that the names in it are relative to.

    Raises:
        RubricError: there is no such rubric, or the file cannot be read.
    """
    name = str(source)
    if name in SHIPPED:
        return (CONTENT / "rubrics" / f"{name}.yaml").read_text(encoding="utf-8"), f"{name}.yaml", None
    if name in SHIPPED_CHECKS:
        if name in (*_PITFALLS, *OF_STEPS):
            kind = "a pitfall, whose weight is negative" if name in _PITFALLS else "a check of single LM calls"
            raise RubricError(f"the check {name} is {kind}: write a rubric file with it and another criterion")
        return _text_of_one(name, "check", name), name, None
    place, colon, attribute = name.rpartition(":")
    if colon and place and all(part.isidentifier() for part in attribute.split(".")):
        return _text_of_one(attribute.rpartition(".")[2], "metric", name), name, Path.cwd()
    path = Path(source)
    if path.suffix.lower() not in (".yaml", ".yml"):
        raise _unknown(name)
    return read_text(path, "rubric or judge", RubricError), name, path.absolute().parent


def _text_of_one(name: str, key: str, value: str) -> str:
    return json.dumps({"name": name, "criteria": [{"name": name, key: value}]})  # JSON is YAML


def _criterion(entry: CriterionFile, folder: Path | None) -> tuple[Criterion | None, list[str]]:
    """The criterion of a file entry, or None and its problems."""
    problems: list[str] = []

    def made(make: Callable[[CriterionFile, Path | None], Any], placeholder: Any) -> Any:
        """The judge or check; where it is invalid a placeholder, so that the other fields are validated too."""
        try:
            return make(entry, folder)
        except RubricError as error:
            problems.append(f"criterion {entry.name!r}: {error}")
            return placeholder

    source, essential = entry.check or entry.metric or "", entry.essential
    fields = entry.model_dump(include={"name", "weight", "scope", "range", "when"})
    fields["judge"] = made(_judge_of, None if entry.judge is None else JudgeSpec(text="?"))
    fields["check"] = made(_check_of, _any_check)
    fields["essential"] = None if essential is None else Essential(**essential.model_dump())
    try:
        criterion = Criterion(**fields, arguments=entry.with_, source=source)
    except RubricError as error:
        return None, [*problems, str(error)]
    return (None, problems) if problems else (criterion, [])


def _check_of(entry: CriterionFile, folder: Path | None) -> Check | None:
    if entry.metric is not None:
        if entry.check is not None:
            raise RubricError("set either check or metric")
        return as_check(import_check(entry.metric, folder), metric=True)
    return None if entry.check is None else import_check(entry.check, folder)


def _any_check(*_: Any, **__: Any) -> None:
    """Placeholder check that accepts any arguments."""


def _judge_of(entry: CriterionFile, folder: Path | None) -> JudgeSpec | None:
    named = {name: getattr(entry, name) for name in ("scale", "anchors", "shows")}
    beside = {name: value for name, value in named.items() if value is not None}
    if entry.judge is None and beside:
        raise RubricError(f"{', '.join(beside)}: only a judge has this; a check has none")
    if not isinstance(entry.judge, JudgeFile):
        return None if entry.judge is None else JudgeFile(text=entry.judge, **beside).spec()
    if beside:
        raise RubricError(f"set {', '.join(beside)} either inside judge or next to its text, not both")
    spec = entry.judge.spec()
    if not spec.use:
        return spec
    place = (folder or Path()) / spec.use
    if is_artifact(place):
        return replace(spec, use=str(place))
    is_name = not place.suffix and not place.exists()  # unknown; as the file has it, for the message
    return replace(spec, use=str(shipped_judge(spec.use) or (spec.use if is_name else place)))


def shipped_judge(name: str) -> Path | None:
    """File of a shipped judge, such as `sentiment`; None for any other name."""
    return CONTENT / "judges" / f"{name}.yaml" if name in SHIPPED_JUDGES else None


def import_check(path: str, folder: Path | None = None) -> Check:
    """Imports a check.

    Args:
        path: `package.module:name`, `file.py:name` (relative to `folder`), or the name of a shipped check.
    Raises:
        RubricError: the check is unknown, cannot be imported or is not callable.
    """
    if ":" not in path:
        if path in SHIPPED_CHECKS:
            return SHIPPED_CHECKS[path]
        raise RubricError(
            f"unknown check {path!r}: pass 'package.module:name' or one of {', '.join(SHIPPED_CHECKS)}."
            f"{did_you_mean(nearest(path, list(SHIPPED_CHECKS)))}"
        )
    try:
        check = attribute_of(path, folder=folder)
    except ArtifactError:
        raise
    except Exception as error:
        name = path.rpartition(":")[2]
        if path.startswith("assay.") and name in SHIPPED_CHECKS:
            own = qualified_name(definition_of(SHIPPED_CHECKS[name]))
            raise RubricError(f"check {path!r} does not exist. Did you mean {own!r}, or just {name!r}?") from error
        raise RubricError(f"check {path!r} {why_not_imported(path, error, folder=folder)}") from error
    if not callable(check) or isinstance(check, Rubric):
        raise RubricError(f"{path!r} is a {type(check).__name__}, not a check, metric or judge")
    return check
