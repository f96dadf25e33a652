"""Checks that a model in training does not judge its own rollouts."""

from collections.abc import Iterator
from typing import Any

from assay.errors import ConfigError
from assay.jobs.loading import load_judge, load_rubric
from assay.rubrics import Rubric
from assay.rubrics.loading import RubricSource


def independent(rubric: RubricSource, judge: str | None, model: str, *, forced: bool = False) -> Rubric:
    """Loads the rubric and checks that the model in training does not judge it.

    Raises:
        ConfigError: the model would judge itself and `forced` is false; or a judge compares outputs, but rollouts are
            scored one by one.
    """
    loaded = load_rubric(rubric)
    judges = [
        load_judge(c.judge.use, own_model=judge is None) if c.judge.use else None
        for c in loaded.criteria
        if c.judge is not None
    ]
    if compared := [loaded_judge for loaded_judge in judges if loaded_judge is not None and loaded_judge.compares]:
        raise ConfigError(
            f"the rubric {loaded.name!r} has a judge that compares outputs ({compared[0].spec.text[:80]!r}), and a "
            "training scores each rollout alone: use a judge that grades single outputs"
        )
    judging_models = {name for loaded_judge in judges for name in _models_of(loaded_judge, judge or model)}
    if model in judging_models and not forced:
        raise ConfigError(
            f"the rubric {loaded.name!r} would be judged by {model}, the model in training, which would learn to "
            "satisfy itself as a judge. Name another with `judge_model=…` (or in the judge's own file), or, for the "
            "rubric that is trained on, set `judged_by_itself=True`"
        )
    return loaded


def _models_of(judge: Any, default: str) -> Iterator[str]:
    """Names of the models that a judge asks, those of a jury's or a cascade's members included."""
    model = getattr(judge, "model", None) or default
    members = [
        *getattr(judge, "members", ()),
        *(part for name in ("first", "second") if (part := getattr(judge, name, None)) is not None),
    ]
    for member in members:
        yield from _models_of(member, model)
    if not members:
        yield model
