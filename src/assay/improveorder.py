"""Whether an improvement can be run as it is asked for: its steps, the models they train, and who judges.

`assay improve` and its estimate (`--dry-run`) both ask here, so that neither accepts what the other refuses. Opens nothing and asks no model.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.deployment.artifact import is_artifact
from assay.errors import ConfigError
from assay.jobs import RunConfig
from assay.optimizers.weights.config import PolicyConfig, SFTConfig, made_of
from assay.optimizers.weights.work import check_free
from assay.training import guards_of, independent

__all__ = ["STATE", "STEPS", "adapter_names", "check_name", "check_order", "own_model", "own_name"]

STATE = "state.json"  # of an unfinished improvement, in its folder
STEPS = ("prompts", "sft", "grpo")


def check_order(
    order: Sequence[str],
    *,
    program: str,
    rubric: str | Path,
    data: str,
    model: str | None = None,
    judge: str | None = None,
    sft: Mapping[str, Any] | None = None,
    grpo: Mapping[str, Any] | None = None,
    retain: Sequence[str] = (),
    watch: str | Path | None = None,
) -> None:
    """Refuses an improvement that would fail at a later step.

    Raises:
        ConfigError: an unknown step, a setting that a step does not have, a model that cannot be trained, or one that would judge itself.
    """
    if unknown := sorted(set(order) - set(STEPS)):
        raise ConfigError(f"order names {unknown}; the steps are {', '.join(STEPS)}")
    if not order:
        raise ConfigError("order is empty: there is nothing to do")
    if (retain or watch) and "grpo" not in order:
        raise ConfigError(f"retain and watch would have no effect: they guard grpo, and the order is {', '.join(order)}")
    made_of(SFTConfig, sft or {}, "sft")
    if made_of(PolicyConfig, grpo or {}, "grpo").evaluate_every == 0 and retain:
        raise ConfigError("what is to be retained is looked at every evaluate_every steps, and 0 is never: give grpo={'evaluate_every': STEPS}")
    own = own_model(program, model)
    for step, trained in _trained(order, own, {"sft": sft or {}, "grpo": grpo or {}}):
        _check_trainable(step, trained)
        independent(rubric, judge or own, trained)
        guards_of(retain, watch, program=own_name(program), data=data, judge=judge or own, model=trained)


def check_name(name: str, order: Sequence[str], folder: Path) -> None:
    """Refuses to begin an improvement under a name that is taken.

    Args:
        folder: of the improvement of this name, in which an unfinished one is kept.
    Raises:
        ConfigError: there is an unfinished improvement, or an adapter, of this name.
    """
    if (folder / STATE).is_file():
        raise ConfigError(f"there is an unfinished improvement {name!r} in {folder}: add resume=True, or take another name")
    for adapter in adapter_names(name, order):
        check_free(adapter)


def adapter_names(name: str, order: Sequence[str]) -> list[str]:
    """Of the adapters that the steps of an improvement make."""
    return [f"{name}-{number}" for number, step in enumerate(order, start=1) if step != "prompts"]


def own_model(program: str, model: str | None) -> str:
    """The model that an improvement begins with: an artifact's own, else the one that is named, else the default."""
    return str(_manifest(program)["model"]) if is_artifact(program) else str(model or RunConfig(program="", rubric="", data="").model)


def own_name(program: str) -> str:
    """Of the program, as its rollouts have it."""
    return str(_manifest(program)["program"]) if is_artifact(program) else program


def _manifest(program: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(program) / "manifest.json").read_text(encoding="utf-8"))
    return found


def _trained(order: Sequence[str], model: str, settings: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Each step that trains, and the model that it trains where all steps before it are kept."""
    for step in order:
        if step != "prompts":
            model = str(settings[step].get("model", model))
            yield step, model


def _check_trainable(step: str, model: str) -> None:
    """A trained model has to be served under a name, to be compared with the one before: that is so of `embedded/NAME` alone."""
    if model.startswith("embedded/"):
        return
    raise ConfigError(
        f"{step} cannot train {model!r}: improve trains embedded models (embedded/NAME), which it can serve. Improve the prompts alone "
        f"(order=['prompts']), or name the model to train ({step}={{'model': 'embedded/NAME'}})",
        flag=f"--order prompts, --{step} model=embedded/NAME",
    )
