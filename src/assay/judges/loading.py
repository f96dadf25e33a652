"""Loads judges from a YAML file, `path.py:NAME`, `package.module:NAME`, or a question as text."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Unpack

import pydantic

from assay.errors import AssayError, ConfigError, RubricError
from assay.judges.base import Judge
from assay.judges.comparing import PAIR_SCALE, ListwiseJudge, PairwiseJudge
from assay.judges.panel import Cascade, Jury
from assay.judges.pointwise import PointwiseJudge
from assay.judges.reading import MIN_MASS
from assay.models.roles import address_in, is_loopback
from assay.rubrics import JudgeSpec
from assay.rubrics.criteria import JudgeFields
from assay.rubrics.loading import SHIPPED_JUDGES, JudgeFile, import_check, load_rubric, shipped_judge
from assay.sources import trust
from assay.sources.artifact_files import around
from assay.support.names import nearest
from assay.support.yaml_files import StrictModel, did_you_mean, parse_yaml, read_text

AnyJudge = Judge | ListwiseJudge
Find = Callable[[str], AnyJudge]
_KEYWORDS = (*JudgeFields.__annotations__, "source", "own_model", "trust")  # of `assay.load_judge`


class _JuryFile(StrictModel):
    members: list[str] = pydantic.Field(min_length=1)
    """Judge files or artifacts, relative to this file, all with the same scale."""
    how: Literal["majority", "median", "mean"] = "majority"
    """How their verdicts are combined."""
    weights: list[pydantic.StrictFloat] = []
    """Weight of each member; equal by default."""


class _CascadeFile(StrictModel):
    first: str
    """Judge that is called for every item."""
    second: str
    """Judge that is called if the first is not confident."""
    least: float = pydantic.Field(0.7, strict=True, ge=0, le=1)
    """Confidence of the first judge below which the second is called."""


class _JudgeDefinition(JudgeFile):
    name: str = "judge"
    """Name in reports and traces."""
    compare: Literal["alone", "pairs", "list"] = "alone"
    """`alone`: one output at a time; `pairs`: two outputs, in both orders; `list`: a group at once."""
    reading: Literal["auto", "probabilities", "text"] = "auto"
    """`probabilities`: of the next token; `text`: written verdict; `auto`: probabilities if the engine gives them."""
    style: Literal["auto", "words", "letters"] = "auto"
    """Whether the model answers with words or letters; `auto` uses letters if two words begin alike."""
    reasoning: bool = False
    """Whether the judge writes its reasoning before the verdict."""
    samples: pydantic.StrictInt = 1
    """Number of written verdicts; their shares are the probabilities."""
    min_mass: float = pydantic.Field(MIN_MASS, strict=True, ge=0, le=1)
    """Minimum probability of the labels, relative to all other reported tokens; below it the item is unscored."""
    orders: pydantic.StrictInt = 4
    """Number of seeded orders in which `compare: list` shows the group."""
    model: str | None = None
    """Model of this judge; by default the one named for all judges."""
    jury: _JuryFile | None = None
    """Combine several judges, instead of `text`."""
    cascade: _CascadeFile | None = None
    """Call a second judge if the first is not confident, instead of `text`."""


def load_judge(source: str | Path, *, find: Find | None = None, **spec: Unpack[JudgeFields]) -> AnyJudge:
    """Loads a judge that is not compiled.

    Args:
        source: one of `SHIPPED_JUDGES`, a `.yaml` file, a rubric's criterion as `rubric.yaml:NAME`, a judge or judge
            class as `file.py:NAME` or `package.module:NAME`, or a question.
        find: loads the members of a jury or cascade by path; by default this function.
        spec: fields of a `JudgeSpec` (`scale`, `kind`, `anchors`) for a question.
    Raises:
        RubricError: the file is invalid (with its line), the source is not a judge, or `spec` is given for a file.
    """
    text = str(shipped_judge(str(source)) or source)
    path = Path(text)
    if unknown := sorted(spec.keys() - JudgeFields.__annotations__):
        hint = f". Did you mean {near!r}?" if (near := nearest(unknown[0], _KEYWORDS)) else ""
        raise RubricError(f"a judge has no field {unknown[0]!r}; it has {', '.join(JudgeFields.__annotations__)}{hint}")
    if (within := re.fullmatch(r"(.+\.ya?ml):(\w+)", text, re.IGNORECASE)) is not None:
        return _of_rubric(within[1], within[2], find or load_judge)
    if path.suffix.lower() in (".yaml", ".yml"):
        if spec:
            raise RubricError(f"{text} defines its own {', '.join(sorted(spec))}; change them in the file")
        return _from_yaml(path, find or load_judge)
    if " " not in text.strip() and ":" in text:
        target: Any = import_check(text)
        kind = target if isinstance(target, type) else type(target)
        if not issubclass(kind, (Judge, ListwiseJudge)):  # checked before anything is called
            description = f"the class {kind.__name__}" if target is kind else f"a {kind.__name__}"
            raise RubricError(f"{text!r} is {description}, not a judge")
        judge: Any = target() if isinstance(target, type) else target
        return judge
    if " " not in text.strip():
        hint = " (there is no such file or folder)" if "/" in text and not Path(text).exists() else ""
        near = nearest(path.name, SHIPPED_JUDGES)
        raise RubricError(
            f"unknown judge {text!r}{hint}: pass one of {', '.join(SHIPPED_JUDGES)}, a .yaml file, file.py:NAME, "
            f"package.module:NAME, an artifact folder or a question.{did_you_mean(near)}"
        )
    return PointwiseJudge(JudgeSpec(text=text, **spec))


def _of_rubric(file: str, name: str, find: Find) -> AnyJudge:
    judged = {c.name: c.judge for c in load_rubric(file).criteria if c.judge is not None}
    if name not in judged:
        raise RubricError(f"{file} has no judge criterion {name!r}; judge criteria: {', '.join(judged) or 'none'}")
    spec = judged[name]
    return find(spec.use) if spec.use else PointwiseJudge(spec)


def _from_yaml(path: Path, find: Find) -> AnyJudge:
    parsed = _read(path)
    if parsed.use:
        raise RubricError(f"{path}: use is only for criteria of a rubric; a judge file needs a text")
    address = address_in(parsed.model)
    if address is not None and not is_loopback(address) and around(path) is None:  # an artifact has its own trust
        trust.demand(trust.hash_of_file(path), path, f"sends prompts, and the key of their provider, to {address}")
    try:
        if parsed.jury or parsed.cascade:
            return _panel(parsed, path, find)
        return _single(parsed)
    except (ConfigError, RubricError) as error:
        raise RubricError(f"{path}: {error}") from None


def _read(path: Path) -> _JudgeDefinition:
    expected = "a judge is a mapping with 'text' and 'scale', or with 'jury' or 'cascade'"
    text = read_text(path, "rubric or judge", RubricError)
    return parse_yaml(text, str(path), _JudgeDefinition, expected, RubricError)[0]


def _single(parsed: _JudgeDefinition) -> AnyJudge:
    if parsed.compare == "pairs" and "scale" not in parsed.model_fields_set:
        parsed = parsed.model_copy(update={"scale": list(PAIR_SCALE)})
    spec, fields = parsed.spec(), parsed.model_fields_set
    kinds = {"alone": PointwiseJudge, "pairs": PairwiseJudge}
    if parsed.compare == "list":
        if unused := sorted(fields & {"shows", "style", "reasoning", "samples", "min_mass"}):
            raise RubricError(f"compare: list does not support {', '.join(unused)}; it sees task_input and the outputs")
        return ListwiseJudge(spec, orders=parsed.orders, reading=parsed.reading, model=parsed.model)
    if "orders" in fields:
        raise RubricError("orders requires compare: list")
    return kinds[parsed.compare](
        spec,
        reading=parsed.reading,
        style=parsed.style,
        reasoning=parsed.reasoning,
        samples=parsed.samples,
        min_mass=parsed.min_mass,
        model=parsed.model,
    )


def members_of(path: Path) -> list[str]:
    """Returns the members of a jury's or cascade's YAML file as paths; an empty list for any other judge file."""
    parsed = _read(path)
    names = [
        *(parsed.jury.members if parsed.jury else ()),
        *((parsed.cascade.first, parsed.cascade.second) if parsed.cascade else ()),
    ]
    return [_member_path(name, path) for name in names]


def _member_path(name: str, path: Path) -> str:
    """A member's path relative to the file that names it, if that exists; otherwise the name."""
    relative = path.parent / name
    return str(relative if relative.exists() else name)


def _panel(parsed: _JudgeDefinition, path: Path, find: Find) -> Judge:
    if unused := sorted(parsed.model_fields_set - {"name", "jury", "cascade"}) or (parsed.jury and parsed.cascade):
        raise RubricError(
            f"a jury or cascade uses the questions and scales of its members and has no other settings; found {unused}"
        )

    def member(name: str) -> Judge:
        try:
            judge = find(_member_path(name, path))
        except AssayError as error:
            raise RubricError(f"member {name!r}: {error}") from None
        if not isinstance(judge, Judge):
            raise RubricError(
                f"member {name!r} is a listwise judge; a jury or cascade needs pointwise or pairwise ones"
            )
        return judge

    if parsed.jury:
        return Jury([member(name) for name in parsed.jury.members], how=parsed.jury.how, weights=parsed.jury.weights)
    assert parsed.cascade is not None
    return Cascade(member(parsed.cascade.first), member(parsed.cascade.second), least=parsed.cascade.least)
