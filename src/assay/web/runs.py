"""The pages of runs: the list, one run with its settings, cost, result and the command that resumes it, and two runs.

Two runs are compared by their evaluations, task by task.
"""

import itertools
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.commands.repeat import resume_command, run_command, spoken_by_run
from assay.commands.runs import stored_report
from assay.errors import ConfigError
from assay.reports.compiled import compile_page, evaluation_labels
from assay.reports.files import Scores, scores_of
from assay.reports.markdown import RunScores, run_scores
from assay.reports.sides import sides_of
from assay.reports.studies import tuned_page, tuned_words
from assay.reports.texts import Budget, Clipped, preview, setting_texts
from assay.reports.training import TrainingPage, TrainingProgress, read_training_log, training_page, unfinished_page
from assay.support.numbers import since
from assay.support.report import Table
from assay.traces.store import Store, tables as schema
from assay.traces.store.evaluations import Evaluated, evaluations_of, is_training, mean_scores
from assay.traces.store.listing import (
    INTERRUPTED,
    ModelUsage,
    failure_of,
    find_run,
    finished_report,
    finished_reports,
    list_runs,
    phases_of,
    run_folder,
    usage_of_models,
    usage_of_phases,
)
from assay.traces.store.paging import WINDOW, rollouts_of_run, small_runs
from assay.traces.store.sealing import openings_line
from assay.web.next_steps import comparable, judges_of, next_steps
from assay.web.rendering import RUN_FIELDS, View, cursor_of, filled_in, link

# -- What the page of a run shows of a training: its report, or its log while it runs; and sample rollouts over steps.


_SAMPLES, _CALLS = 12, 8  # rollouts of a page, and calls of each
_OUTPUT = 600  # characters of a call
_INPUTS = 400  # characters read of a rollout's inputs


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A rollout that was trained on. `calls` are advantage, where it is known, and text; `more` calls are left out."""

    step: int
    rollout_id: str
    score: float | None
    task: str
    calls: list[tuple[float | None, Clipped]]
    more: int


@dataclass(frozen=True, kw_only=True)
class ShownTraining:
    """A training: what its report or its log says, and its sample rollouts, the last step first."""

    page: TrainingPage
    samples: list[Sample]


def training_of(store: Store, run: Mapping[str, Any], report: Mapping[str, Any], folder: Path) -> ShownTraining | None:
    """The training of a run; None if the run is none, or has no step yet. Its alarms name the flags of its command.

    Args:
        report: of the run; empty while it runs, or if it was killed.
        folder: of the run, with its log.
    """
    if run["kind"] != "train":
        return None
    log = read_training_log(folder)
    if report.get("curves") or "held_out_loss" in report:
        page = training_page(report)
    elif log is None or not log.curves:
        return None
    else:
        page = _unfinished(run, log)
    page = replace(page, warnings=[spoken_by_run(run["kind"], run["config"], text) for text in page.warnings])
    samples = [] if log is None or "held_out_loss" in report else _samples(store, log)
    return ShownTraining(page=page, samples=samples)


def _unfinished(run: Mapping[str, Any], log: TrainingProgress) -> TrainingPage:
    config = run["config"]
    most = log.steps or config.get("steps")
    steps = f"{log.step} of {most}" if most else str(log.step)
    facts = {
        "Adapter": config.get("adapter_name"),
        "Model before": config.get("model"),
        "Method": config.get("algorithm"),
        "Step": steps,
    }
    if log.shortened:
        facts["Shown"] = "the last steps: the log is too long for a page"
    texts = {name: str(value) for name, value in facts.items() if value}
    return unfinished_page(log.curves, alarms=list(log.alarms.values()), facts=texts)


def _samples(store: Store, log: TrainingProgress) -> list[Sample]:
    """Some of the sample rollouts that the store still has, evenly over the steps."""
    steps = sorted(log.samples, reverse=True)
    steps = steps[:: max(1, -(-len(steps) // _SAMPLES))]
    ids = [log.samples[step][0] for step in steps]
    table, calls = schema.rollouts, schema.transitions
    inputs = sa.func.substr(table.c.inputs_json, 1, _INPUTS)
    rows = sa.select(table.c.id, table.c.score, inputs).where(table.c.id.in_(ids))
    outputs = sa.select(calls.c.rollout_id, calls.c.t, calls.c.output).where(calls.c.rollout_id.in_(ids))
    with store.engine.connect() as connection:
        stored = {rollout_id: (score, text) for rollout_id, score, text in connection.execute(rows)}
        texts: dict[str, list[str]] = {}
        for rollout_id, _, text in connection.execute(outputs.order_by(calls.c.rollout_id, calls.c.t)):
            texts.setdefault(rollout_id, []).append(text)
    budget = Budget(20_000, most=_OUTPUT, least=80)
    return [
        Sample(
            step=step, rollout_id=rollout_id, score=stored[rollout_id][0], task=preview(stored[rollout_id][1], 120),
            calls=[
                (advantages[at] if at < len(advantages) else None, budget.clip(text))
                for at, text in enumerate(texts.get(rollout_id, [])[:_CALLS])
            ],
            more=max(0, len(texts.get(rollout_id, [])) - _CALLS),
        )
        for step in steps
        for rollout_id, advantages in (log.samples[step],)
        if rollout_id in stored
    ]  # fmt: skip


# -- Runs.


RUNNING_S, _WAITING_S = 3, 20  # seconds between two loads, while something runs and otherwise
_ROWS, _TASKS = 50, 100
COUNTED = 4_000  # rollouts of a run up to which its calls are counted at once: about 0.1 s
SCORED = 800  # rollouts of an evaluation, with its verdicts, up to which its intervals are computed at once: 0.2 s
_DRAWN = ("compile", "evaluate", "train", "tune")  # have charts and tables of their own
STATUSES = ("running", INTERRUPTED, "done", "stopped", "failed")


def runs_page(store: Store, query: Mapping[str, str]) -> View:
    """Runs, newest first."""
    values, before = filled_in(query, RUN_FIELDS), cursor_of(query, "before")
    runs = list_runs(
        store,
        limit=_ROWS + 1,
        kind=values.get("kind"),
        status=values.get("status"),
        program=values.get("program"),
        since=since(values["since"], now=store.clock.now()) if "since" in values else None,
        before=None if before is None else (before.started_at, before.id),
    )
    listed = runs[:_ROWS]
    older = (
        link("runs", **values, before=f"{listed[-1]['started_at']!r}~{listed[-1]['id']}") if len(runs) > _ROWS else ""
    )
    running = any(run["status"] == "running" for run in listed)
    return View(
        template="runs.html",
        title="Runs",
        values={
            "runs": _with_scores(store, listed), "older": older, "filters": values,
            "statuses": STATUSES, "is_first": before is None,
            "newest": link("runs", **values),
        },
        part="runs_part.html",
        every_s=0 if before else RUNNING_S if running else _WAITING_S,
    )  # fmt: skip


def _with_scores(store: Store, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs with their scores: of `evaluate` from its rollouts, if they are few, of others from their report."""
    evaluations = [run["id"] for run in runs if run["kind"] == "evaluate"]
    reports = finished_reports(store, *(run["id"] for run in runs if run["kind"] != "evaluate"))
    means = mean_scores(store, sorted(small_runs(store, evaluations, most=SCORED)), phase="evaluate")
    return [
        {**run, "scores": RunScores(after=means.get(run["id"]))} if run["kind"] == "evaluate"
        else {**run, "scores": run_scores(reports.get(run["id"], {}))}
        for run in runs
    ]  # fmt: skip


def run_page(
    store: Store, run_id: str, query: Mapping[str, str], *, where: str | Path | None, store_flag: str | None
) -> View:
    """One run.

    Args:
        where: the store's location, next to which the run's folder is.
        store_flag: value of `--store` in the shown commands.
    """
    run = find_run(store, run_id)
    # Counting reads every rollout and call of the run: of a large one only if it is asked for.
    asked = query.get("count") == "all"
    counts = asked or rollouts_of_run(store, run["id"], most=COUNTED) <= COUNTED
    is_evaluation = run["kind"] == "evaluate"
    scored = is_evaluation and rollouts_of_run(store, run["id"]) <= (WINDOW if asked else SCORED)
    report = finished_report(store, run["id"]) or {}
    compiled = None
    if run["kind"] == "compile" and counts:
        better_first = query.get("order") == "better"
        compiled = compile_page(
            store, run["id"], report, run_folder(where, run["id"]), split=query.get("split", ""), rows=_TASKS,
            better_first=better_first,
        )  # fmt: skip
    tuned = report if run["kind"] == "tune" and report.get("history") else None
    running, stopped = run["status"] == "running", report.get("stopped") or _failure(store, run) or ""
    trained = training_of(store, run, report, run_folder(where, run["id"]))
    judges = judges_of(store, run)
    lines = [] if run["kind"] in _DRAWN else list(_lines(run, report))
    return View(
        template="run.html",
        title=f"Run {run['id']}",
        values={
            "run": run,
            "compiled": compiled,
            "evaluated": _scores(store, run) if scored else None,
            "scores_on_request": is_evaluation and not asked and not scored,
            "artifact": report.get("artifact"),
            "study": None if tuned is None else tuned_page(tuned),
            "decided": [] if tuned is None else tuned_words(tuned),
            "trained": trained,
            "has_rollouts": not _reads_rows(run),
            "question": _question(store, run),
            "best": _parameters(tuned or {}),
            "judges": [(link("judges", key, "label", run=run["id"]), source) for key, source in judges.items()],
            "comparable": comparable(store, run),
            "comparisons": _comparisons(store, run, report),
            "validation_runs": _validation_runs(report),
            "usage": usage_of_phases(store, run["id"]) if counts else [],
            "models": _models(store, run) if counts else [],
            "settings": _settings(run["config"]),
            "phases": phases_of(store, run["id"]) if counts else None,
            "stats": store.stats(run_id=run["id"]) if counts else None,
            "lines": lines,
            # a training shows its alarms above its curves
            "notes": [] if lines else notes_of(run, report, alarms=trained is None),
            "stopped": spoken_by_run(run["kind"], run["config"], stopped),
            "has_report": bool(report),
            "commands": list(_commands(store, run, report, judges, store_flag)),
        },
        part="run_part.html",
        every_s=RUNNING_S if running and (counts or trained is not None) else 0,
    )


def _models(store: Store, run: Mapping[str, Any]) -> list[ModelUsage]:
    """Usage by model; empty where the model of the run answered all calls."""
    usages = usage_of_models(store, run["id"])
    return [] if [usage.model for usage in usages] == [run["model"]] else usages


def _commands(
    store: Store, run: Mapping[str, Any], report: Mapping[str, Any], judges: Mapping[str, str], store_flag: str | None
) -> Iterator[tuple[str, str]]:
    """Words and commands: what can be done with the result, how the run is resumed and repeated."""
    if run["status"] in ("done", "stopped"):
        yield from next_steps(store, run, report, judges, store_flag)
    resume = resume_command(run["kind"], run["config"], store=store_flag) if run["status"] != "done" else None
    if resume is not None:
        yield "Resume it", resume
    if (again := run_command(run["kind"], run["config"], store=store_flag)) is not None:
        yield "Run it anew", again
    store_option = "" if store_flag is None else f" --store {shlex.quote(store_flag)}"
    yield "Show it in a terminal", f"assay runs show {shlex.quote(run['id'])}{store_option}"


def _lines(run: Mapping[str, Any], report: Mapping[str, Any]) -> Iterator[str | Table]:
    """The result of a run as its command prints it."""
    result = stored_report(run, report)
    for line in () if result is None else result.lines():
        yield line if isinstance(line, Table) else spoken_by_run(run["kind"], run["config"], line)


def notes_of(run: Mapping[str, Any], report: Mapping[str, Any], *, alarms: bool = True) -> list[str]:
    """What limits the result of a finished run, in the words of its command line."""
    noted = [*(report.get("alarms") or () if alarms else ()), *(report.get("notes") or ())]
    opened = report.get("test_openings") if run["kind"] == "evaluate" else None  # other pages show it at their result
    return [
        *(spoken_by_run(run["kind"], run["config"], str(note)) for note in noted),
        *([openings_line(opened)] if opened else []),
    ]


def _question(store: Store, run: Mapping[str, Any]) -> Any:
    """What the judge of a run of `assay judge` was asked; None for other runs."""
    if not run["kind"].startswith("judge "):
        return None
    from assay.web.judges import question_of_run  # imports numpy

    return question_of_run(store, run)


def _parameters(tuned: Mapping[str, Any]) -> str:
    """The best parameters of a search in one line."""
    best = tuned.get("best") or {}
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in best.items())


def _scores(store: Store, run: Mapping[str, Any]) -> Scores | None:
    """The scores of a run of `evaluate`; None before its first rollout."""
    for evaluated in evaluations_of(store, run["id"]):
        if evaluated.phase == "evaluate":
            return scores_of(store, run["id"], evaluated, rows=_TASKS)
    return None


def _reads_rows(run: Mapping[str, Any]) -> bool:
    """Whether it is a training on the rows of an export, which runs no program."""
    return run["kind"] == "train" and bool(run["config"].get("export"))


def _validation_runs(report: Mapping[str, Any]) -> list[str]:
    """Ids of the runs that evaluated the model before and after a training."""
    sides = [sides for modes in (report.get("validation") or {}).values() for sides in modes.values()]
    return list(dict.fromkeys(run_id for one in sides for run_id in one.get("runs") or ()))


def _comparisons(store: Store, run: Mapping[str, Any], report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Words and addresses of the pages that compare a model before and after a training, task by task.

    A policy gradient evaluated both in one run, on the test split; a supervised fine-tuning made two runs.
    """
    validations = report.get("validation") or {}
    of_runs = [
        (f"{program}, {mode}", link("compare", a=sides["runs"][0], b=sides["runs"][1]))
        for program, modes in validations.items()
        for mode, sides in modes.items()
        if len(set(sides.get("runs") or ())) == 2
    ]
    if run["kind"] != "train" or of_runs:
        return of_runs
    # of the program that was trained, and of retention tasks, whose evaluations are in runs of their own
    owners = [sides["runs"][0] for modes in validations.values() for sides in modes.values() if sides.get("runs")]
    return [
        (
            f"{first.program.rpartition('/')[2]}, {first.condition.removeprefix('before, ')}",
            link("compare", a=run_id, b=run_id, of_a=first.name, of_b=second.name),
        )
        for run_id in dict.fromkeys([run["id"], *owners])
        if rollouts_of_run(store, run_id, split="test") <= WINDOW
        for first, second in itertools.combinations(evaluations_of(store, run_id, split="test"), 2)
        if is_training(first, second)
    ]


def _failure(store: Store, run: Mapping[str, Any]) -> str | None:
    return failure_of(store, run["id"]) if run["status"] in ("failed", "stopped") else None


def _settings(config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    budget = Budget(20_000, most=1_000)
    return [(name, budget.clip(text)) for name, text in setting_texts(config)]


_COMPARED = 150
_FIELDS = ("a", "b", "of_a", "of_b", "order")
_OFFERED = 100  # newest runs that the form offers
_DECIDING = ("gate", "evaluate", "test")  # phases whose evaluations a report shows, the most important last


def compare_view(store: Store, query: Mapping[str, str]) -> View:
    """Two evaluations by task: the paired difference, and each task that both have, the worst change first."""
    values = filled_in(query, _FIELDS)
    runs = [find_run(store, values[name]) if name in values else None for name in ("a", "b")]
    sides = [_side(store, run, values.get(f"of_{name}")) for run, name in zip(runs, "ab", strict=True)]
    content: dict[str, Any] = {
        "filters": values, "offered": list_runs(store, limit=_OFFERED), "sides": sides, "order": "", "compared": None,
    }  # fmt: skip
    if sides[0] and sides[1]:
        first, second = _chosen(sides, values)
        sides[0]["chosen"], sides[1]["chosen"] = first.name, second.name
        better_first = values.get("order") == "better"
        ids = (sides[0]["run"]["id"], sides[1]["run"]["id"])
        content["compared"] = sides_of(store, ids, first, second, rows=_COMPARED, better_first=better_first)
        address = {name: values[name] for name in _FIELDS if name in values and name != "order"}
        content["order"] = link("compare", **address, order="" if values.get("order") == "better" else "better")
    return View(template="compare.html", title="Compare", values=content)


def _side(store: Store, run: dict[str, Any] | None, name: str | None) -> dict[str, Any] | None:
    """A run with its evaluations, as the form and the comparison need them.

    Args:
        name: the evaluation that was chosen. The form also sends that of the run that was named before: it is left out.
    """
    if run is None:
        return None
    evaluations = {evaluated.name: evaluated for evaluated in evaluations_of(store, run["id"])}
    if not evaluations:
        raise ConfigError(f"the run {run['id']} has no rollouts of tasks: there is nothing to compare")
    report = finished_report(store, run["id"]) or {}
    labels = evaluation_labels(list(evaluations.values()), report)
    model, adapters = str(run["model"] or ""), list[str]()
    if model.startswith("embedded/"):  # other names may have a plus of their own
        model, *adapters = model.split("+")
    return {
        "run": run, "evaluations": evaluations, "labels": labels, "chosen": name if name in evaluations else None,
        "model": model, "adapters": adapters, "notes": notes_of(run, report),
    }  # fmt: skip


def _chosen(sides: list[Any], values: Mapping[str, str]) -> tuple[Evaluated, Evaluated]:
    """The evaluations to compare: those named, otherwise the last ones that decide most and share scored tasks."""
    options = [
        [side["evaluations"][side["chosen"]]] if side["chosen"] else list(side["evaluations"].values())
        for side in sides
    ]
    pairs = list(itertools.product(*options))
    if sides[0]["run"]["id"] == sides[1]["run"]["id"]:  # one run: from an earlier version to a later one
        names = list(sides[0]["evaluations"])
        later = [(a, b) for a, b in pairs if names.index(a.name) < names.index(b.name)]
        pairs = later if later and not (sides[0]["chosen"] and sides[1]["chosen"]) else pairs

    def rank(item: tuple[int, tuple[Evaluated, Evaluated]]) -> tuple[bool, int, bool, int]:
        at, (first, second) = item
        decides = sum(_DECIDING.index(side.phase) if side.phase in _DECIDING else -1 for side in (first, second))
        trained = is_training(first, second)  # the first such pair is that of the program that was trained, greedily
        return not first.scores.keys().isdisjoint(second.scores), decides, trained, -at if trained else at

    return max(enumerate(pairs), key=rank)[1]
