"""Curricula: stages of data by difficulty, read from YAML or JSON. Does not load the data or run anything.

`assay.datasets.staged` reads the tasks of the stages, `assay.datasets.schedule` decides which stage is next.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.errors import DataError
from assay.support.package import CONTENT
from assay.support.settings import nearest

__all__ = ["PREFIX", "SHIPPED", "STAGE", "Curriculum", "Stage", "load_curriculum", "stage_of"]

PREFIX = "curriculum:"  # of the dataset with the tasks of all stages
SHIPPED = ("tool_use",)
STAGE = "curriculum_stage"  # key of a task's metadata


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of a curriculum.

    Attributes:
        name: unique in the curriculum.
        data: path or spec of its tasks; None: the data of the command.
        where: takes only tasks with these values: `task_type`, a field of the metadata or of the expected outputs ->
            the accepted values.
        promote_at: mean score on the stage's val tasks, in (0, 1], from which the next stage follows.
        max_share: share of the steps of a run, in (0, 1], after which the next stage follows without it; None: no
            limit.
        replay: share of the tasks of a step that are drawn from earlier stages, in [0, 1).
        where_from: `file:line`, for error messages.
    """

    name: str
    data: str | None = None
    where: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    promote_at: float = 0.8
    max_share: float | None = None
    replay: float = 0.2
    where_from: str = field(default="", compare=False)

    def limit(self, steps: int) -> int | None:
        """Number of steps after which the stage ends without promotion, in a run of `steps`; None: no limit."""
        return None if self.max_share is None else max(1, round(self.max_share * steps))


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """Stages in the order of their difficulty.

    Attributes:
        name: the file's name without its ending.
        source: file or shipped name.
        sha256: of the file's content.
    """

    name: str
    stages: tuple[Stage, ...]
    source: str = ""
    sha256: str = ""

    @property
    def needs_data(self) -> bool:
        """Whether a stage takes its tasks from the data of the command."""
        return any(stage.data is None for stage in self.stages)


def stage_of(metadata: Mapping[str, Any]) -> str | None:
    """Name of the stage of a task, from its metadata; None without a curriculum."""
    name = metadata.get(STAGE)
    return name if isinstance(name, str) else None


def load_curriculum(source: str | Path) -> Curriculum:
    """Reads a curriculum from a YAML or JSON file, or by the name of a shipped one.

    Raises:
        DataError: the file cannot be read, a key is unknown or a value out of range; the message names file and line.
    """
    from assay.datasets.curriculum_file import CurriculumFile
    from assay.support.yaml_files import read_text
    from assay.support.yaml_models import line_of, parse_yaml

    path, label = Path(source), str(source)
    if label in SHIPPED:
        path, label = CONTENT / "programs" / "tool_user" / f"{source}.yaml", f"{source}.yaml"
    elif not path.exists() and path.suffix.lower() not in (".yaml", ".yml", ".json"):
        near = nearest(label, SHIPPED)
        raise DataError(
            f"there is no curriculum {label!r}: name a YAML or JSON file, or a shipped one: {', '.join(SHIPPED)}"
            + (f"; did you mean {near!r}?" if near else "")
        )
    text = read_text(path, "curriculum", DataError)
    parsed, node = parse_yaml(text, label, CurriculumFile, "a curriculum is a mapping with a list of stages", DataError)
    stages = dict[str, Stage]()
    for at, own in enumerate(parsed.stages):
        place = f"{label}:{line_of(node, ('stages', at))}"
        if own.name in stages:
            raise DataError(f"{place}: there are two stages {own.name!r}; names must differ")
        values = {name: getattr(part, name) for part in (parsed, own) for name in part.model_fields_set - {"stages"}}
        if (data := values.get("data")) is not None and (path.parent / data).is_file():
            values["data"] = str(path.parent / data)  # relative to the file, where it exists there
        stages[own.name] = Stage(**values, where_from=place)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Curriculum(name=path.stem, stages=tuple(stages.values()), source=str(source), sha256=digest)
