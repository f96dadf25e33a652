"""Rubrics from YAML, checked whole at load: an error names file, line and the valid values."""

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic
import yaml

from assay.errors import ArtifactError, RubricError
from assay.rubrics import checks, steps
from assay.rubrics.conditions import no_such_condition
from assay.rubrics.criteria import Check, Criterion, Essential, JudgeSpec
from assay.rubrics.formats import read_foreign
from assay.rubrics.rubric import STEP_CAP, Resolver, Rubric
from assay.rubrics.yamlfiles import read_text, read_yaml
from assay.sourcecode import attribute_of

__all__ = ["SHIPPED", "JudgeFile", "StrictModel", "load_rubric", "parse_yaml", "rubric_schema"]

SHIPPED = ("classify", "extract", "math_qa")


Model = TypeVar("Model", bound=pydantic.BaseModel)


class StrictModel(pydantic.BaseModel):
    """What a YAML file holds: unknown keys are errors."""

    model_config = pydantic.ConfigDict(extra="forbid", populate_by_name=True)


class _EssentialFile(StrictModel):
    pass_at: float = pydantic.Field(1.0, ge=0, le=1)
    cap: float = pydantic.Field(0.0, ge=0, le=1)


def _word(value: Any) -> Any:
    """A number on a scale, as YAML reads it, is the word it was written as."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


_Word = Annotated[str, pydantic.BeforeValidator(_word)]


class JudgeFile(StrictModel):
    """The fields of a `JudgeSpec`."""

    text: str = ""
    scale: list[_Word] = ["no", "yes"]
    anchors: dict[_Word, str] = {}
    kind: Literal["ordinal", "nominal", "numeric"] = "ordinal"
    grades: dict[_Word, float] = {}
    use: str = ""

    def spec(self) -> JudgeSpec:
        return JudgeSpec(text=self.text, scale=tuple(self.scale), anchors=self.anchors, kind=self.kind, grades=self.grades, use=self.use)


class _CriterionFile(StrictModel):
    name: str
    weight: float = pydantic.Field(1.0, allow_inf_nan=False)
    scope: Literal["final", "step"] = "final"
    check: str | None = None
    with_: dict[str, Any] = pydantic.Field({}, alias="with")
    judge: str | JudgeFile | None = None
    scale: list[_Word] | None = None
    anchors: dict[str, str] | None = None
    essential: _EssentialFile | None = None
    when: str = ""


class _RubricFile(StrictModel):
    name: str
    description: str = ""
    step_cap: float = pydantic.Field(STEP_CAP, ge=0, lt=1)
    judging: Literal["each", "together", "overall"] = "each"
    criteria: list[_CriterionFile] = pydantic.Field(min_length=1)


_CRITERION_KEYS = {name for key, field in _CriterionFile.model_fields.items() for name in (key, field.alias) if name}
_JUDGE_KEYS = {"text", "jury", "cascade"}  # of a judge's file
_WHAT = "a rubric is a mapping with 'name' and 'criteria'"


def rubric_schema() -> dict[str, Any]:
    """JSON schema of a rubric file, for editors."""
    return _RubricFile.model_json_schema(by_alias=True)


def load_rubric(source: str | Path, *, resolver: Resolver | None = None) -> Rubric:
    """A rubric from a YAML file, or a shipped one by name, or a file that was written for another tool.

    Args:
        source: a path ending in `.yaml` or `.yml`, one of `SHIPPED`, or a `.toml` or `.json` file as in
            `assay.rubrics.formats.read_foreign` (verifiers' criteria, HealthBench-like points).
        resolver: makes the file's judge criteria decidable; without one they stay unscored.
    Raises:
        RubricError: no such rubric; the file is not YAML; an unknown key, a value out of range, a check that cannot
            be imported or called. The message names file and line.
    """
    if Path(source).suffix.lower() in (".toml", ".json"):
        return read_foreign(Path(source), resolver=resolver)
    text, shown, folder = _read(str(source))
    data, node = _mapping(text, shown, _WHAT)
    if "criteria" not in data and data.keys() & _JUDGE_KEYS:
        raise RubricError(
            f"{shown} is a judge's file, not a rubric: a rubric has criteria, and one of them can use this judge: "
            f"{{name: NAME, judge: {{use: {Path(shown).name}}}}}"
        )
    parsed, problems = _validated(data, node, shown, _RubricFile)
    entries = parsed.criteria if parsed is not None else _valid_entries(data)
    criteria: list[Criterion] = []
    names = Counter(entry.name for entry in entries if entry is not None)
    for index, entry in enumerate(entries):
        if entry is None:
            continue
        where = f"{shown}:{_line(node, ('criteria', index))}"
        wrong = [no_such_condition(entry.name, entry.when, names)] if entry.when and entry.when not in names else []
        if names[entry.name] > 1 and any(other is not None and other.name == entry.name for other in entries[:index]):
            wrong.append(f"there is a criterion {entry.name!r} already")
        try:
            criteria.append(_criterion(entry, folder))
        except RubricError as error:
            wrong += str(error).split("\n")
        problems += [f"{where}: {problem}" for problem in wrong]
    if problems or parsed is None:
        raise RubricError("\n".join(problems))
    try:
        return Rubric(parsed.name, criteria, step_cap=parsed.step_cap, resolver=resolver, judging=parsed.judging)
    except RubricError as error:
        raise RubricError(f"{shown}:{_line(node, ('criteria',))}: {error}") from None


def _valid_entries(data: Mapping[str, Any]) -> list[_CriterionFile | None]:
    """The criteria of a file that is wrong elsewhere, unknown keys left out: their own problems are told in the same go. None where an entry
    cannot be read."""
    listed = data.get("criteria")
    found: list[_CriterionFile | None] = []
    for entry in listed if isinstance(listed, list) else []:
        known = {key: value for key, value in entry.items() if key in _CRITERION_KEYS} if isinstance(entry, dict) else None
        try:
            found.append(None if known is None else _CriterionFile.model_validate(known))
        except pydantic.ValidationError:
            found.append(None)
    return found


def parse_yaml(text: str, shown: str, model: type[Model], what: str) -> tuple[Model, yaml.Node | None]:
    """A file's content, checked whole against its model, and its nodes, which know their lines.

    Raises:
        RubricError: not YAML, an unknown or repeated key, a wrong value; each with its line.
    """
    data, node = _mapping(text, shown, what)
    parsed, problems = _validated(data, node, shown, model)
    if problems or parsed is None:
        raise RubricError("\n".join(problems))
    return parsed, node


def _mapping(text: str, shown: str, what: str) -> tuple[dict[str, Any], yaml.Node | None]:
    """A file's content as it is written, and its nodes."""
    data, node = read_yaml(text, shown)
    if not isinstance(data, dict):
        raise RubricError(f"{shown}:1: {what}, found {type(data).__name__}")
    return data, node


def _validated(data: dict[str, Any], node: yaml.Node | None, shown: str, model: type[Model]) -> tuple[Model | None, list[str]]:
    """The content by its model, None where it does not fit, and all that is wrong with it, each with its line."""
    problems = [f"{shown}:{line}: the key {key!r} stands here a second time" for key, line in _twice(node)]
    try:
        return model.model_validate(data), problems
    except pydantic.ValidationError as error:
        return None, [*(_explain(shown, node, problem, model) for problem in error.errors()), *problems]


def _read(source: str) -> tuple[str, str, Path | None]:
    if source in SHIPPED:
        return resources.files("assay.rubrics").joinpath("shipped", f"{source}.yaml").read_text(), f"{source}.yaml", None
    path = Path(source)
    if path.suffix.lower() not in (".yaml", ".yml"):
        near = difflib.get_close_matches(source, SHIPPED, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise RubricError(f"no rubric is called {source!r}: give a .yaml, .toml or .json file, or one of {', '.join(SHIPPED)}.{hint}")
    return read_text(path), str(path), path.absolute().parent


def _criterion(entry: _CriterionFile, folder: Path | None) -> Criterion:
    """The criterion of an entry.

    Raises:
        RubricError: what is wrong with it, a line a problem.
    """
    problems: list[str] = []
    judge, check = None, None
    try:
        judge = _judge_of(entry, folder)
    except RubricError as error:
        problems.append(f"criterion {entry.name!r}: {error}")
    try:
        check = None if entry.check is None else import_check(entry.check, folder)
    except RubricError as error:
        problems.append(str(error))
    unread = bool(problems)  # what could not be read is stood for by something that fits, so that the rest is checked too
    try:
        made = Criterion(
            name=entry.name, weight=entry.weight, scope=entry.scope,
            check=_fitting if check is None and entry.check is not None else check,
            judge=JudgeSpec(text="?") if judge is None and entry.judge is not None else judge,
            arguments=entry.with_,
            essential=None if entry.essential is None else Essential(pass_at=entry.essential.pass_at, cap=entry.essential.cap),
            when=entry.when, source=entry.check or "",
        )  # fmt: skip
    except RubricError as error:
        raise RubricError("\n".join([*problems, str(error)])) from None
    if unread:
        raise RubricError("\n".join(problems))
    return made


def _fitting(*_: Any, **__: Any) -> None:
    """Takes any arguments."""


def _judge_of(entry: _CriterionFile, folder: Path | None) -> JudgeSpec | None:
    beside = entry.scale is not None or entry.anchors is not None
    if isinstance(entry.judge, JudgeFile):
        if beside:
            raise RubricError("give scale and anchors inside judge, or beside its text, not both")
        return _beside(entry.judge, folder).spec()
    if entry.judge is not None:
        return JudgeSpec(text=entry.judge, scale=tuple(entry.scale) if entry.scale is not None else ("no", "yes"), anchors=entry.anchors or {})
    if beside:
        raise RubricError("scale and anchors go with a judge; a check has none")
    return None


def _beside(judge: JudgeFile, folder: Path | None) -> JudgeFile:
    """With a judge that is used from elsewhere found from the rubric's folder."""
    return judge.model_copy(update={"use": str((folder or Path()) / judge.use)}) if judge.use else judge


def import_check(path: str, folder: Path | None = None) -> Check:
    """The callable behind `package.module:name`, `file.py:name` (relative to the rubric), or a shipped check's name."""
    if ":" not in path:
        for module in (checks, steps):
            if path in module.__all__:
                return getattr(module, path)
        known = [*checks.__all__, *steps.__all__]
        near = difflib.get_close_matches(path, known, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise RubricError(f"no check is called {path!r}: give 'package.module:name' or one of {', '.join(known)}.{hint}")
    try:
        check = attribute_of(path, folder=folder)
    except ArtifactError:
        raise
    except Exception as error:
        raise RubricError(f"check {path!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(check):
        raise RubricError(f"check {path!r} is a {type(check).__name__}, not a callable")
    return check


def _explain(shown: str, node: yaml.Node | None, problem: Any, model: type[pydantic.BaseModel]) -> str:
    location = tuple(part for part in problem["loc"] if part not in ("str", "JudgeFile"))
    where, key = f"{shown}:{_line(node, location)}", ".".join(map(str, location))
    if problem["type"] == "extra_forbidden":
        valid = _valid_keys(location, model)
        near = difflib.get_close_matches(str(location[-1]), valid, 1)
        return f"{where}: unknown key {location[-1]!r}; there are {', '.join(valid)}." + (f" Did you mean {near[0]!r}?" if near else "")
    found = f", found {problem['input']!r}" if problem["type"] != "missing" else ""
    return f"{where}: {key}: {problem['msg']}{found}"


def _valid_keys(location: tuple[Any, ...], model: type[pydantic.BaseModel]) -> list[str]:
    if "essential" in location[:-1]:
        model = _EssentialFile
    elif "judge" in location[:-1]:
        model = JudgeFile
    elif "criteria" in location[:-1]:
        model = _CriterionFile
    return [field.alias or name for name, field in model.model_fields.items()]


def _twice(node: yaml.Node | None) -> Iterator[tuple[str, int]]:
    """Keys that stand twice in one mapping, with the line of the second; YAML itself takes the last without a word."""
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if key.value in seen:
                yield key.value, key.start_mark.line + 1
            seen.add(key.value)
            yield from _twice(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _twice(item)


def _line(node: yaml.Node | None, location: tuple[Any, ...]) -> int:
    """Line of the deepest part of `location` that stands in the file, from 1."""
    line = 1 if node is None else node.start_mark.line + 1
    for part in location:
        child = None
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == part:
                    line, child = key.start_mark.line + 1, value
        elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            child = node.value[part]
            line = child.start_mark.line + 1
        if child is None:
            break
        node = child
    return line
