"""The steps of an improvement: checks of their settings, models and judges, and the runs that they request.

`assay improve` and its estimate (`--dry-run`) share these checks, so that neither accepts what the other refuses.
Opens nothing and calls no model.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.api.train import guards_of
from assay.deployment.artifact import is_artifact
from assay.errors import ConfigError
from assay.models import Meter
from assay.optimizers.budget import ImprovePlan, forecast_pair, plan_report, plan_steps, search_cap, search_runs
from assay.optimizers.finetuning.run_folder import check_free
from assay.optimizers.finetuning.settings import PolicySettings, SFTSettings, settings_from
from assay.runs.independence import independent
from assay.runs.jobs import Job
from assay.runs.settings import DEFAULT_MODEL, ImproveSettings
from assay.runs.settings.shared import PromptSettings
from assay.sources.artifact_files import read_manifest
from assay.support.settings import nearest

STATE = "state.json"  # of an unfinished improvement, in its folder
STEPS = ("prompts", "sft", "grpo")


def check_improvement(config: ImproveSettings, *, model: str | None, monitor: str | Path | None = None) -> None:
    """Refuses an improvement that would fail at a later step.

    Args:
        model: the one that was named; None where the program's own or the default is meant.
        monitor: the monitor rubric, where it is not `config.monitor`.
    Raises:
        ConfigError: an unknown step or setting, a model that cannot be trained, or a judge that is the trained model.
    """
    order, monitor = config.order, monitor or config.monitor
    if unknown := sorted(set(order) - set(STEPS)):
        hint = f". Did you mean {near!r}?" if (near := nearest(unknown[0], STEPS)) else ""
        raise ConfigError(f"order={unknown[0]!r} is no step; the steps are {', '.join(STEPS)}{hint}")
    if not order:
        raise ConfigError(f"order is empty: name at least one of the steps {', '.join(STEPS)}", flag="--order")
    if (config.retention or monitor) and "grpo" not in order:
        raise ConfigError(
            f"retention and monitor would have no effect: they guard grpo, and the order is {', '.join(order)}"
        )
    sft, grpo = config.sft or {}, config.grpo or {}
    settings_from(SFTSettings, sft, "sft")
    if settings_from(PolicySettings, grpo, "grpo").evaluate_every == 0 and config.retention:
        raise ConfigError(
            "retention tasks are evaluated every evaluate_every steps, and evaluate_every=0 evaluates none: give "
            "grpo={'evaluate_every': STEPS}"
        )
    start_model = start_model_of(config.program, model)
    for step, trained in _trained(order, start_model, {"sft": sft, "grpo": grpo}):
        _check_trainable(step, trained)
        judge = config.judge_model or start_model
        independent(config.rubric, judge, trained)
        guards_of(
            config.retention,
            monitor,
            program=program_name(config.program),
            data=config.data,
            judge=judge,
            model=trained,
        )


def steps_of(job: Job, order: Sequence[str], *, rollouts: int, grpo: PolicySettings, retained: int) -> ImprovePlan:
    """The runs of the steps, of their gates and of the sealed test, without caps.

    Args:
        rollouts: of each train task, collected by `sft`.
        retained: number of retention tasks of `grpo`.
    """
    sizes, cap = job.splits.sizes(), None
    if isinstance(job.config, PromptSettings):
        cap = search_cap(job.config.max_search_calls, job.config.optimizer)
    pair = forecast_pair(job.recorded.program, job.session)
    return ImprovePlan(
        report=plan_report(job.splits, Meter(), job.config.decisions, pair=pair),
        steps=plan_steps(
            order, sizes, search=search_runs(cap, pair.calls / 2, sizes["val"]), rollouts=rollouts, grpo=grpo,
            retained=retained,
        ),
    )  # fmt: skip


def check_name(name: str, order: Sequence[str], folder: Path) -> None:
    """Refuses to begin an improvement under a name that is taken.

    Args:
        folder: of the improvement of this name, in which an unfinished one is kept.
    Raises:
        ConfigError: there is an unfinished improvement, or an adapter, of this name.
    """
    if (folder / STATE).is_file():
        raise ConfigError(
            f"there is an unfinished improvement {name!r} in {folder}: add resume=True, or take another name"
        )
    for adapter in adapter_names(name, order):
        check_free(adapter)


def adapter_names(name: str, order: Sequence[str]) -> list[str]:
    """Names of the adapters that the steps of an improvement create."""
    return [f"{name}-{number}" for number, step in enumerate(order, start=1) if step != "prompts"]


def start_model_of(program: str, model: str | None) -> str:
    """The first model of an improvement: that of the artifact, the named one, or the default."""
    return str(read_manifest(Path(program))["model"]) if is_artifact(program) else str(model or DEFAULT_MODEL)


def program_name(program: str) -> str:
    """Name of the program in its rollouts."""
    return str(read_manifest(Path(program))["program"]) if is_artifact(program) else program


def _trained(order: Sequence[str], model: str, settings: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Each training step and the model it trains, if all steps before it are kept."""
    for step in order:
        if step != "prompts":
            model = str(settings[step].get("model", model))
            yield step, model


def _check_trainable(step: str, model: str) -> None:
    """Raises if the model is not `embedded/NAME`; only those are served by name for the comparison afterwards."""
    if model.startswith("embedded/"):
        return
    raise ConfigError(
        f"{step} cannot train {model!r}: improve trains embedded models (embedded/NAME), which it can serve. Improve "
        "the prompts alone "
        f"(order=['prompts']), or name the model to train ({step}={{'model': 'embedded/NAME'}})",
        flag=f"--order prompts, --{step} model=embedded/NAME",
    )
