"""Public API for `assay compare`: two programs or artifacts on the same tasks, paired task by task."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import dspy

from assay.api.evaluate import EvaluationReport, evaluate
from assay.deployment.artifact import is_artifact, load_artifact, with_model_of
from assay.errors import ConfigError
from assay.evaluation import Gain, Progress, paired_gain
from assay.programs.loading import program_class
from assay.rubrics import Rubric
from assay.runs.arguments import resolve_lm
from assay.runs.settings import DEFAULT_MODEL, CompareSettings
from assay.runs.settings.options import CompareOptions
from assay.sources.trust import trusts
from assay.support.keywords import takes
from assay.support.reprs import ReportRepr
from assay.traces.records import new_id

__all__ = ["CompareReport", "compare"]


@dataclass(repr=False)
class CompareReport(ReportRepr):
    """What `compare` returns. `gain`: score of `b` minus score of `a`. `models`: model of each side."""

    names: tuple[str, str]
    models: tuple[str, str]
    a: EvaluationReport
    b: EvaluationReport
    gain: Gain

    def to_dict(self) -> dict[str, Any]:
        a, b = self.a.evaluation.scores, self.b.evaluation.scores
        tasks = [
            {"task": task, "a": _or_none(a.get(task)), "b": _or_none(b.get(task))} for task in dict.fromkeys([*a, *b])
        ]
        sides = {
            side: {"program": name, "model": model, **report.to_dict()["result"]}
            for side, name, model, report in zip("ab", self.names, self.models, (self.a, self.b), strict=True)
        }
        both = {
            key: [report.to_dict()[key] for report in (self.a, self.b)]
            for key in ("calls", "cached", "tokens", "cost_usd")
        }
        spent: dict[str, Any] = {key: None if None in values else sum(values) for key, values in both.items()}
        openings = self.b.openings or self.a.openings  # those of both sides, as one job
        spent["test_openings"] = openings.to_dict() if openings else None
        notes = list(dict.fromkeys([*self.a.notes, *self.b.notes]))
        about = {
            "gain": self.gain.to_dict(),
            "split": self.a.split,
            "tasks": tasks,
            "notes": notes,
            "data": self.a.rows.to_dict(),
        }
        return {**sides, **about, **spent, "stopped": self.a.stopped or self.b.stopped}


@takes(CompareSettings)
@trusts
def compare(
    a: Any, b: Any, *, rubric: str | Path | Rubric, data: Any, lm: dspy.LM | None = None,
    store: str | Path | None = None,
    resume: bool = False, progress: Progress | None = None, **options: Unpack[CompareOptions],
) -> CompareReport:  # fmt: skip
    """Scores two programs or artifacts on the same tasks and compares them task by task.

    Args:
        a: baseline, as in `evaluate`. Without `model` and `lm`, an artifact runs with the model that it was measured
            with; a program compared with an artifact uses the artifact's model.
        b: program or artifact that is compared with `a`.
        options: the fields of `assay.runs.settings.CompareSettings`. `split="test"` opens the sealed split; the opening
            is counted once for both sides.
    Raises:
        ConfigError: a program is compared with itself.
        AssayError: what was wrong, which rule, what to do.
    """
    job, settings = f"compare-{new_id()[:12]}", dict[str, Any](options)
    sides = [settings, settings]
    lm = resolve_lm(lm, settings)
    # a wrong type is named before the programs are loaded, whose own errors would hide it
    CompareSettings(program="a", rubric="rubric", data="data", **settings)
    if lm is None and settings.get("model") is None:
        artifacts = [
            side_program
            for side_program in (a, b)
            if isinstance(side_program, str | Path) and is_artifact(side_program)
        ]
        sides = [
            with_model_of(side_program if side_program in artifacts else artifacts[0], settings)
            if artifacts
            else settings
            for side_program in (a, b)
        ]
    if (a is b or (isinstance(a, str | Path) and isinstance(b, str | Path) and str(a) == str(b))) and sides[0] == sides[
        1
    ]:
        raise ConfigError(
            f"a and b are both {a}, with the same model: there is nothing to compare. Score it alone with evaluate"
        )
    _check_loads(b)
    first, second = (
        evaluate(
            side_program,
            rubric=rubric,
            data=data,
            lm=lm,
            store=store,
            resume=resume,
            progress=progress,
            opens_as=job,
            **side,
        )
        for side_program, side in zip((a, b), sides, strict=True)
    )
    models = [lm.model if lm is not None else str(side.get("model") or DEFAULT_MODEL) for side in sides]
    gain = paired_gain(first.evaluation.scores, second.evaluation.scores)
    return CompareReport((str(a), str(b)), (models[0], models[1]), first, second, gain)


def _check_loads(side: Any) -> None:
    """Refuses a side that cannot be loaded before the other side has been evaluated."""
    if isinstance(side, str | Path):
        _ = load_artifact(side) if is_artifact(side) else program_class(str(side))


def _or_none(score: float | None) -> float | None:
    return None if score is None or math.isnan(score) else score
