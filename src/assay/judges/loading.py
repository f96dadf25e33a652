"""Judges by name: a YAML file, `path.py:NAME` or `package.module:NAME`, or one sentence that says what to judge."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pydantic

from assay.errors import AssayError, ConfigError, RubricError
from assay.judges.base import Judge
from assay.judges.listwise import ListwiseJudge
from assay.judges.pairwise import PAIR_SCALE, PairwiseJudge
from assay.judges.panel import Cascade, Jury
from assay.judges.pointwise import PointwiseJudge
from assay.judges.reading import MIN_MASS
from assay.rubrics import JudgeSpec
from assay.rubrics.loading import JudgeFile, StrictModel, import_check, load_rubric, parse_yaml
from assay.rubrics.yamlfiles import read_text

__all__ = ["AnyJudge", "load_judge", "members_of"]

AnyJudge = Judge | ListwiseJudge
Find = Callable[[str], AnyJudge]


class _JuryFile(StrictModel):
    members: list[str] = pydantic.Field(min_length=1)
    how: Literal["majority", "median", "mean"] = "majority"
    weights: list[float] = []


class _CascadeFile(StrictModel):
    first: str
    second: str
    least: float = pydantic.Field(0.7, ge=0, le=1)


class _JudgeDefinition(JudgeFile):
    name: str = "judge"
    compare: Literal["alone", "pairs", "list"] = "alone"
    shows: list[str] = []
    reading: Literal["auto", "probabilities", "text"] = "auto"
    style: Literal["auto", "words", "letters"] = "auto"
    reasoning: bool = False
    samples: int = 1
    min_mass: float = pydantic.Field(MIN_MASS, ge=0, le=1)
    orders: int = 4
    model: str | None = None
    jury: _JuryFile | None = None
    cascade: _CascadeFile | None = None


def load_judge(source: str | Path, *, find: Find | None = None, **spec: Any) -> AnyJudge:
    """A judge that is not compiled yet.

    Args:
        source: a `.yaml` file, a rubric's criterion as `rubric.yaml:NAME`, `file.py:NAME` or `package.module:NAME` of a judge or
            a class of one, or a sentence.
        find: gives the members of a jury or cascade by their paths; this function where None.
        spec: fields of a `JudgeSpec` (`scale`, `kind`, `anchors`) for a sentence.
    Raises:
        RubricError: the file is wrong (with its line), it is no judge, or fields are given for one that has its own.
    """
    text = str(source)
    path = Path(text)
    if (within := re.fullmatch(r"(.+\.ya?ml):(\w+)", text, re.IGNORECASE)) is not None:
        return _of_rubric(within[1], within[2], find or load_judge)
    if path.suffix.lower() in (".yaml", ".yml"):
        if spec:
            raise RubricError(f"{text} has its own {', '.join(sorted(spec))}; change them there")
        return _from_yaml(path, find or load_judge)
    if " " not in text.strip() and ":" in text:
        found = import_check(text)
        if not issubclass(found if isinstance(found, type) else type(found), (Judge, ListwiseJudge)):  # before anything is called
            raise RubricError(f"{text!r} is {f'the class {found.__name__}' if isinstance(found, type) else f'a {type(found).__name__}'}, not a judge")
        judge: Any = found() if isinstance(found, type) else found
        return judge
    if " " not in text.strip():
        there = " (there is no such file or folder)" if "/" in text and not Path(text).exists() else ""
        raise RubricError(
            f"no judge is called {text!r}{there}: give a .yaml file, file.py:NAME, package.module:NAME, an artifact's folder, or a sentence"
        )
    return PointwiseJudge(JudgeSpec(text=text, **spec))


def _of_rubric(file: str, name: str, find: Find) -> AnyJudge:
    judged = {c.name: c.judge for c in load_rubric(file).criteria if c.judge is not None}
    if name not in judged:
        raise RubricError(f"{file} has no judge criterion {name!r}; there are {', '.join(judged) or 'none'}")
    spec = judged[name]
    return find(spec.use) if spec.use else PointwiseJudge(spec)


def _from_yaml(path: Path, find: Find) -> AnyJudge:
    parsed, _ = parse_yaml(read_text(path), str(path), _JudgeDefinition, "a judge is a mapping with 'text' and 'scale', or with 'jury' or 'cascade'")
    if parsed.use:
        raise RubricError(f"{path}: use names a judge from within a rubric; a judge's own file has a text")
    try:
        if parsed.jury or parsed.cascade:
            return _panel(parsed, path, find)
        return _single(parsed)
    except (ConfigError, RubricError) as error:
        raise RubricError(f"{path}: {error}") from None


def _single(parsed: _JudgeDefinition) -> AnyJudge:
    if parsed.compare == "pairs" and "scale" not in parsed.model_fields_set:
        parsed = parsed.model_copy(update={"scale": list(PAIR_SCALE)})
    spec, given = parsed.spec(), parsed.model_fields_set
    kinds = {"alone": PointwiseJudge, "pairs": PairwiseJudge}
    if parsed.compare == "list":
        if unused := sorted(given & {"shows", "style", "reasoning", "samples", "min_mass"}):
            raise RubricError(f"a judge of a list has no {', '.join(unused)}; it sees task_input and the outputs")
        return ListwiseJudge(spec, orders=parsed.orders, reading=parsed.reading, model=parsed.model)
    if "orders" in given:
        raise RubricError("orders goes with compare: list")
    chosen: dict[str, Any] = {"shows": parsed.shows} if parsed.shows else {}
    return kinds[parsed.compare](
        spec,
        reading=parsed.reading,
        style=parsed.style,
        reasoning=parsed.reasoning,
        samples=parsed.samples,
        min_mass=parsed.min_mass,
        model=parsed.model,
        **chosen,
    )


def members_of(path: Path) -> list[str]:
    """The members of a jury's or cascade's YAML file, by their places; none of any other file."""
    parsed, _ = parse_yaml(read_text(path), str(path), _JudgeDefinition, "a judge is a mapping")
    names = [*(parsed.jury.members if parsed.jury else ()), *((parsed.cascade.first, parsed.cascade.second) if parsed.cascade else ())]
    return [_placed(name, path) for name in names]


def _placed(name: str, path: Path) -> str:
    """A member's place: beside the file that names it, else as it is named."""
    beside = path.parent / name
    return str(beside if beside.exists() else name)


def _panel(parsed: _JudgeDefinition, path: Path, find: Find) -> Judge:
    if unused := sorted(parsed.model_fields_set - {"name", "jury", "cascade"}) or (parsed.jury and parsed.cascade):
        raise RubricError(f"a jury or a cascade has its members' questions and scales and nothing beside them; found {unused}")

    def member(name: str) -> Judge:
        try:
            judge = find(_placed(name, path))
        except AssayError as error:
            raise RubricError(f"member {name!r}: {error}") from None
        if not isinstance(judge, Judge):
            raise RubricError(f"member {name!r} judges lists; a jury or cascade takes judges of one output or of pairs")
        return judge

    if parsed.jury:
        return Jury([member(name) for name in parsed.jury.members], how=parsed.jury.how, weights=parsed.jury.weights)
    assert parsed.cascade is not None
    return Cascade(member(parsed.cascade.first), member(parsed.cascade.second), least=parsed.cascade.least)
