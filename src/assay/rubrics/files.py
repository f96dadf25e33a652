"""The parts of a rubric file and of a judge file, as pydantic models, and their JSON schema."""

from typing import Annotated, Any, Literal

import pydantic

from assay.rubrics.criteria import JudgeSpec
from assay.rubrics.rubric import STEP_CAP
from assay.support.yaml_models import StrictModel

__all__ = ["CriterionFile", "EssentialFile", "JudgeFile", "RubricFile", "rubric_schema"]


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
    """A compiled judge (artifact) or a judge's file, relative to this file, in place of `text`."""

    def spec(self) -> JudgeSpec:
        return JudgeSpec(
            text=self.text,
            scale=tuple(self.scale),
            anchors=self.anchors,
            kind=self.kind,
            grades=self.grades,
            shows=tuple(self.shows),
            use=self.use,
        )


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
