"""Shared by commands that call one judge: the judge, its settings, its session and its usage."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import dspy

from assay.deployment.artifact import is_artifact, with_model_of
from assay.errors import ConfigError
from assay.evaluation import Progress, Session
from assay.judges import Item, Judge, ListwiseJudge
from assay.judges.loading import AnyJudge
from assay.judges.questions import remember
from assay.models import Meter
from assay.optimizers.judges.compile import agreement_rubric
from assay.rubrics.criteria import JudgeFields
from assay.runs.arguments import resolve_lm
from assay.runs.loading import load_judge
from assay.runs.opening import Run, open_run
from assay.runs.preflight import check_prices, preflight_judge
from assay.runs.settings import CommonSettings
from assay.runs.settings.judge import JudgeAuditSettings, JudgeSettings
from assay.sources.artifact_files import unproven_note
from assay.sources.modules import qualified_name

OPTIONAL = ("task_input",)  # outputs alone can be judged
_Settings = TypeVar("_Settings", bound=JudgeSettings)


def built_judge(judge: str | AnyJudge, scale: Sequence[str] | None = None, *, lists: bool = False) -> Judge:
    """The judge. `scale`: for a judge given as a sentence. `lists`: turns a listwise judge into one of pairs."""
    if scale and not isinstance(judge, str):
        raise ConfigError("scale applies only to a judge given as a sentence; this one has its own")
    spec: JudgeFields = {"scale": tuple(scale)} if scale else {}
    built = load_judge(judge, own_model=False, **spec) if isinstance(judge, str) else judge
    if lists and isinstance(built, ListwiseJudge):
        return built.as_pairs()
    if not isinstance(built, Judge):
        raise ConfigError("a listwise judge grades whole groups; use it in a rubric with score_group")
    return built


@contextmanager
def judge_session(run: Run, judge: Judge, progress: Progress, config: CommonSettings) -> Iterator[Session]:
    """The session of an open run for `judge_items`. The store gets the judge's question, for raters."""
    remember(run.store, judge, str(getattr(config, "judge", "")), run_id=run.run_id)
    yield Session(
        lm=run.lm, rubric=agreement_rubric(judge.spec), recorder=run.recorder, meter=run.meter,
        program_name=qualified_name(judge), source="judge", seed=config.seed, threads=run.threads,
        progress=progress, prompt_lm=run.reflection, task_timeout=config.task_timeout,
    )  # fmt: skip


@contextmanager
def at_work(
    config: JudgeSettings,
    judge: str | AnyJudge,
    lm: dspy.LM | None,
    progress: Progress,
    store: str | Path | None,
    *,
    resume: bool = False,
) -> Iterator[tuple[Judge, Session, Run]]:
    """Context with the judge, an open session for it, and its run."""
    built = built_judge(judge, config.scale, lists=isinstance(config, JudgeAuditSettings))
    with (
        open_run(config, lm=lm, progress=progress, store=store, resume=resume) as run,
        judge_session(run, built, progress, config) as session,
        session.phase(config.kind.removeprefix("judge ")),
    ):
        if isinstance(judge, str) and is_artifact(judge) and (note := unproven_note(judge)) is not None:
            progress.say(f"note: {note}")
        check_prices(session, config.max_cost_usd, judge=built)
        yield built, session, run


def judge_settings(
    kind: type[_Settings], judge: str | AnyJudge, lm: dspy.LM | None, data: str, options: Mapping[str, Any]
) -> tuple[_Settings, dspy.LM | None]:
    """The settings of a command that calls a judge, and its model object, if any.

    A compiled judge has its own model.
    """
    settings = {name: value for name, value in options.items() if value is not None}
    lm = resolve_lm(lm, settings)
    if lm is None and settings.get("model") is None and isinstance(judge, str) and is_artifact(judge):
        settings = with_model_of(judge, settings)
    model = {"model": lm.model} if lm is not None else {}
    return kind(judge=judge if isinstance(judge, str) else judge.spec.text, data=data, **{**settings, **model}), lm


def preflight_items(judge: Judge, items: Sequence[Item], session: Session, config: JudgeSettings) -> None:
    """Calls each model of the judge once, so that a missing one is found before every item waits for it."""
    complete = [item for item in items if all(name in item.fields or name in OPTIONAL for name in judge.shows)]
    if config.preflight and complete:
        session.progress.say("preflight: each model answers once")
        preflight_judge(judge, complete, session, max_cost_usd=config.max_cost_usd)


def spent_by(session: Session) -> dict[str, Any]:
    return usage_of(session.meter)


def usage_of(meter: Meter) -> dict[str, Any]:
    usage = meter.usage
    return {
        "calls": usage.calls,
        "cached": usage.cached,
        "repeated_calls": usage.repeated,
        "tokens": usage.tokens,
        "cost_usd": usage.known_cost_usd,
    }
