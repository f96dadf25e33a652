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
from assay.rubrics.loading import RubricSource
from assay.runs.arguments import check_state, resolve_lm
from assay.runs.settings import CompareSettings
from assay.runs.settings.options import CompareOptions
from assay.sources.trust import trusts
from assay.support.keywords import takes
from assay.support.reprs import ReportRepr
from assay.traces.records import new_id

_CAPS = ("max_calls", "max_tokens", "max_cost_usd")


@dataclass(repr=False)
class CompareReport(ReportRepr):
    """What `compare` returns. `gain`: score of `b` minus score of `a`. `models`, `states`: those of each side."""

    names: tuple[str, str]
    models: tuple[str, str]
    a: EvaluationReport
    b: EvaluationReport
    gain: Gain
    states: tuple[str | None, str | None] = (None, None)

    def to_dict(self) -> dict[str, Any]:
        a, b = self.a.evaluation.scores, self.b.evaluation.scores
        tasks = [
            {"task": task, "a": _or_none(a.get(task)), "b": _or_none(b.get(task))} for task in dict.fromkeys([*a, *b])
        ]
        sides = {
            side: {
                "program": name,
                "state": state,
                "model": model,
                **report.to_dict()["result"],
                "models": report.called.get("models", []),
            }
            for side, name, state, model, report in zip(
                "ab", self.names, self.states, self.models, (self.a, self.b), strict=True
            )
        }
        both = {
            key: [report.to_dict()[key] for report in (self.a, self.b)]
            for key in ("calls", "cached", "tokens", "cost_usd", "unrecorded")
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
    a: Any, b: Any, *, rubric: RubricSource, data: Any, lm: dspy.LM | None = None,
    store: str | Path | None = None,
    resume: bool = False, progress: Progress | None = None, **options: Unpack[CompareOptions],
) -> CompareReport:  # fmt: skip
    """Scores two programs or artifacts on the same tasks and compares them task by task, by default those of `gate`.

    Args:
        a: baseline, as in `evaluate`. Without `model` and `lm`, an artifact runs with the model that it was measured
            with; a program compared with an artifact uses the artifact's model.
        b: program or artifact that is compared with `a`.
        options: the fields of `assay.runs.settings.CompareSettings`. `split="test"` opens the sealed split; the opening
            is counted once for both sides. The caps are those of both: the first side stops at half of them.
    Raises:
        ConfigError: a program is compared with itself.
        AssayError: what was wrong, which rule, what to do.
    """
    job, settings = f"compare-{new_id()[:12]}", dict[str, Any](options)
    sides = [settings, settings]
    lm = resolve_lm(lm, settings)
    # a wrong type is named before the programs are loaded, whose own errors would hide it
    settings["split"] = CompareSettings(program="a", rubric="rubric", data="data", **settings).split
    states = settings.pop("state_a", None), settings.pop("state_b", None)
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
    sides = [{**side, **({} if state is None else {"state": state})} for side, state in zip(sides, states, strict=True)]
    same = a is b or (isinstance(a, str | Path) and isinstance(b, str | Path) and str(a) == str(b))
    if same and sides[0] == sides[1]:
        raise ConfigError(
            f"a and b are both {a}, with the same model: there is nothing to compare. Score it alone with evaluate"
        )
    check_state(a, states[0])
    check_state(b, states[1])
    _check_loads(b)
    common: dict[str, Any] = {
        "rubric": rubric, "data": data, "lm": lm, "store": store, "resume": resume, "progress": progress,
        "opens_as": job,
    }  # fmt: skip
    first = evaluate(a, **common, **{**sides[0], **_first_half(settings)})
    second = evaluate(b, **common, **{**sides[1], **_rest(settings, first)})
    gain = paired_gain(first.evaluation.scores, second.evaluation.scores)
    models = first.called["model"], second.called["model"]
    files = [None if state is None else str(state) for state in states]
    return CompareReport((str(a), str(b)), models, first, second, gain, (files[0], files[1]))


def _caps(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: cap for name in _CAPS if (cap := settings.get(name)) is not None}


def _first_half(settings: dict[str, Any]) -> dict[str, Any]:
    """Caps of the first side, so that the second can be scored on the same tasks."""
    return {name: cap / 2 if name == "max_cost_usd" else (cap + 1) // 2 for name, cap in _caps(settings).items()}


def _rest(settings: dict[str, Any], first: EvaluationReport) -> dict[str, Any]:
    """Caps of the second side: what the first has left of those of both."""
    caps = _caps(settings)
    spent = first.to_dict() if caps else {}
    return {name: max(0, cap - (spent[name.removeprefix("max_")] or 0)) for name, cap in caps.items()}


def _check_loads(side: Any) -> None:
    """Refuses a side that cannot be loaded before the other side has been evaluated."""
    if isinstance(side, str | Path):
        _ = load_artifact(side) if is_artifact(side) else program_class(str(side))


def _or_none(score: float | None) -> float | None:
    return None if score is None or math.isnan(score) else score
