"""The parts of a curriculum file, as pydantic models, which `assay.datasets.curriculum` loads where it reads a file."""

from typing import Annotated, Any

import pydantic

from assay.support.yaml_files import StrictModel

_LONGEST_NAME = 60  # characters; a name is part of the names of studies


class _Defaults(StrictModel):
    """Keys of a stage; at the top of the file, of all stages."""

    data: Annotated[str, pydantic.Field(pattern=r"\S")] | None = None
    promote_at: float = pydantic.Field(0.8, strict=True, gt=0, le=1)
    max_share: float | None = pydantic.Field(None, strict=True, gt=0, le=1)
    replay: float = pydantic.Field(0.2, strict=True, ge=0, lt=1)


def _in_one_line(name: str) -> str:
    if not name.isprintable() or not 0 < len(name.strip()) <= _LONGEST_NAME:
        raise ValueError(f"must be text of 1 to {_LONGEST_NAME} characters in one line")
    return name.strip()


def _accepted(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


_Accepted = Annotated[
    list[pydantic.StrictStr | bool | int | float], pydantic.BeforeValidator(_accepted), pydantic.AfterValidator(tuple)
]


class _StageFile(_Defaults):
    name: Annotated[str, pydantic.AfterValidator(_in_one_line)]
    where: dict[str, Annotated[_Accepted, pydantic.Field(min_length=1)]] = pydantic.Field({}, min_length=1)


class CurriculumFile(_Defaults):
    stages: list[_StageFile] = pydantic.Field(min_length=1)
