"""Public API for `assay traces`: scores stored rollouts, and erases a data subject's data."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Unpack

from assay.deployment.deployments import Deployments, versions_of_erased
from assay.evaluation import Progress, default_progress
from assay.models import Call, LanguageModel, Meter, get_lm
from assay.models.limits import limited
from assay.models.roles import Endpoint
from assay.rubrics import Rubric
from assay.rubrics.loading import RubricSource, rubric_name
from assay.runs.ending import cancelled_by_signals
from assay.runs.erasure import demonstrated_inputs, erase_answers, erase_files, files_of_jobs
from assay.runs.lineage import lineage_of
from assay.runs.loading import JUDGE_TEMPERATURE, load_rubric
from assay.runs.opening import budgeted, home_of
from assay.runs.rescoring import Rescoring, threads_for
from assay.runs.settings import StoredJudgeSettings, TracesForgetSettings, TracesScoreSettings
from assay.runs.settings.store_options import TracesScoreOptions
from assay.sources.trust import trusts
from assay.support.keywords import takes
from assay.traces import Store
from assay.traces.records import NOT_AGENTS, subject_digests
from assay.traces.store.erasure import erase_subject
from assay.traces.store.listing import check_run


@takes(TracesScoreSettings)
@trusts
def score_rollouts(
    rubric: RubricSource,
    *,
    store: str | Path | None = None,
    agent: str | None = None,
    progress: Progress | None = None,
    **options: Unpack[TracesScoreOptions],
) -> dict[str, Any]:
    """Scores stored rollouts by a rubric, with step rewards: of the gateway, of imports, of other rubrics.

    Nothing is stored for a rollout with an undecided final criterion: it keeps its earlier score, or none. Rollouts are
    scored in parallel and stored in their order; an interrupt keeps the scores so far.

    Args:
        agent: only rollouts of this agent's versions.
        options: the fields of `assay.runs.settings.TracesScoreSettings`. `judge_model` is for criteria that need a
            judge and name no model themselves.
    Returns:
        `calls`, `tokens`, `cost_usd` of the judges, None where they name their own models or no price is known;
        `scored`; `unscored` (undecided); `skipped` (had a score); `skipped_of_other_rubrics` (those among them that
        another rubric scored, by its name and version; `again=True` replaces them); `running` (not ended, so not
        scored); `mean`; `rubric`; and for the rollouts scored now `coverage` and `undecided`, see
        `assay.rubrics.scoring`.
    Raises:
        ConfigError: a criterion needs a judge and no model is named for it.
        DataError: there is no run of one of these names.
        ModelError: a judge did not answer.
    """
    values: dict[str, Any] = {**options}
    settings = TracesScoreSettings(rubric=rubric_name(rubric), **values)
    meter = Meter()
    judge = named_judge(settings, meter)
    measure, progress = load_rubric(rubric, judge_model=judge), default_progress(progress)
    measure.require_judges()
    at_once, name = threads_for(measure, settings.threads), f"{measure.name}@{measure.version}"
    run_ids: list[str | None] = [*settings.runs] or [None]
    with Store(store) as opened, cancelled_by_signals(meter), limited(settings.task_timeout):
        for run_id in settings.runs:
            check_run(opened, run_id)
        states = _states(opened, run_ids, agent)
        ended = {key: scored_by for key, (status, scored_by) in states.items() if status in ("done", "failed")}
        pending = [rollout_id for rollout_id, scored_by in ended.items() if settings.again or scored_by is None]
        with progress.bar(f"score: {measure.name}", len(pending)) as advance:
            scoring = Rescoring(measure, opened, advance, meter)
            waiting = (opened.rollout(rollout_id) for rollout_id in pending)
            scoring.run(waiting, threads=at_once, preflight=settings.preflight)
    skipped = [] if settings.again else [scored_by for scored_by in ended.values() if scored_by is not None]
    running = sum(status == "running" for status, _ in states.values())
    return {**scoring.report(), **_skipped(skipped, name), "running": running, **_spent(measure, judge, meter)}


def _states(opened: Store, runs: Sequence[str | None], agent: str | None) -> dict[str, tuple[str, str | None]]:
    """Status of each rollout, and the rubric that scored it."""
    stored = (r for run in runs for r in opened.rollouts(run_id=run) if r.source not in ("outside", *NOT_AGENTS))
    chosen = (r for r in stored if agent is None or (r.version or "").startswith(f"{agent}@"))
    return {r.id: (r.status, r.rubric if r.score is not None else None) for r in chosen}


def named_judge(
    settings: StoredJudgeSettings, meter: Meter, *, observers: Sequence[Callable[[Call], None]] = ()
) -> LanguageModel | None:
    """The model that settings name for a rubric's judges."""
    if (model := settings.judge_model) is None:
        return None
    endpoint = Endpoint(settings.judge_api_base, settings.judge_api_key_env)
    lm = get_lm(
        model, temperature=JUDGE_TEMPERATURE, meter=meter, observers=list(observers), price=settings.judge_price,
        **endpoint.client(model),
    )  # fmt: skip
    return budgeted(lm, settings.judge_thinking, "judge_thinking")


def _spent(measure: Rubric, judge: LanguageModel | None, meter: Meter) -> dict[str, Any]:
    """What judges have spent; unknown for the models that they name themselves, which have no meter."""
    known, usage = judge is not None or not measure.needs_judge, meter.usage
    spent = {"calls": usage.calls, "tokens": usage.tokens, "cost_usd": usage.known_cost_usd}
    return spent if known else dict.fromkeys(spent)


def _skipped(rubrics: Sequence[str], name: str) -> dict[str, Any]:
    """The part of the report about rollouts that had a score, each by the rubric named here."""
    by_rubric = dict(Counter(rubric for rubric in rubrics if rubric != name))
    return {"rubric": name, "skipped": len(rubrics), "skipped_of_other_rubrics": by_rubric}


@takes(TracesForgetSettings)
def forget_subject(
    subject: str, *, store: str | Path | None = None, tenant: str | None = None, versions: str = "name"
) -> dict[str, Any]:
    """Erases a data subject: their rollouts, their tasks in other prompts, and the cached answers to both.

    Args:
        tenant: erases only what is of this tenant. What was made from the person's data is named for all tenants.
        versions: of agents that hold the person's data: name lists them; retire also takes them out of all aliases
            but champion and out of deployments, permanently.
    Returns:
        `removed`: number of rollouts, with those of no data subject in which a tool recalled facts about the person.
        `quoting_facts`: ids of other rollouts that quote such a fact.
        `naming_facts`: numbers of remembered facts about others that have the person's name; they are not changed.
        `facts_removed`: what agents remembered from them or of the person.
        `prompts_emptied`: other calls that showed one of their tasks.
        `cached_answers_removed`: to these, and those that repeat a text of the person. `unowned_answers_removed`:
        cached answers without a recorded request; all of these are removed, because their owner is unknown.
        `made_from_them`: paths of what was made of the person's data: artifacts, exports, pools, data sets, reports,
        adapters and trainings, and what was made of these. Delete or remake them. `runs_on_them`: jobs that ran on
        one of these. `versions`: registered versions made from them, see
        `assay.deployment.deployments.versions_of_erased`.
        `emptied`: `rows` (number by table) and `files` in which a text of the person was replaced, see
        `assay.traces.store.erasure`. `holding`: files outside of `.assay`, other than pages of `--report`, and indexed
        documents that hold such a text;
        they are not changed. `not_searched`: `short_texts` (number of texts of the person that are too short),
        `shared_texts` (that others wrote too), `tasks_without_texts` (whose inputs nothing has), `files`, `free_pages`
        (True if another process kept the database from being compacted), `models` (folders of models that were
        trained, and may hold merged adapters).
    Raises:
        CacheError: the response cache could not be written.
    """
    settings = TracesForgetSettings(tenant=tenant, versions=versions)
    with Store(store) as opened:
        home = home_of(store)
        erased = erase_subject(
            opened, subject, tenant=settings.tenant, inputs_of=functools.partial(demonstrated_inputs, opened, home)
        )
        digests = subject_digests(subject)
        made = lineage_of(opened, home, digests)
        files = erase_files(opened, home, erased.texts, [*opened.artifacts(), *files_of_jobs(opened)])
        holding = versions_of_erased(
            Deployments(opened.engine), digests, made.paths, made.adapters, policy=settings.versions
        )
    had_data = bool(erased.removed or erased.tasks or erased.prompts)
    requests = [request for request, _, _ in erased.calls]
    answers, unowned = erase_answers(home, requests, erased.texts) if had_data else (0, 0)
    return {
        "subject": subject, "removed": erased.removed, "facts_removed": erased.facts, "prompts_emptied": erased.prompts,
        "cached_answers_removed": answers,
        "unowned_answers_removed": unowned, "quoting_facts": erased.quoting, "naming_facts": erased.naming,
        "made_from_them": made.paths, "runs_on_them": made.runs,
        "versions": holding,
        "emptied": {"rows": dict(erased.emptied), "files": files.emptied},
        "holding": [*files.holding, *erased.documents],
        "not_searched": {
            "short_texts": erased.texts.short, "shared_texts": erased.texts.shared,
            "tasks_without_texts": erased.unread, "files": files.unread, "free_pages": erased.compacted is False,
            "models": made.unknown,
        },
    }  # fmt: skip
