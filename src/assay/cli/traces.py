"""`assay traces`: list, show, stats, rate, close, score, forget, import."""

import time
from dataclasses import asdict
from datetime import datetime
from typing import Any

import click

from assay.cli.shared import min_coverage_option, no_preflight_option, print_json, require_coverage, task_timeout_option, trust_option
from assay.cli.wording import counted

__all__ = ["command"]

_store = click.option("--store", help="Database of traces; by default .assay/assay.db or $ASSAY_STORE.")
_json = click.option("--json", "as_json", is_flag=True, help="JSON on standard output.")


@click.group("traces")
def command() -> None:
    """Look at what happened."""


def open_store(store: str | None) -> Any:
    from assay.errors import StoreError
    from assay.traces.location import store_file

    file = store_file(store)
    if file is not None and not file.is_file():
        raise StoreError(f"there is no store at {file}: nothing has run here yet, or name it with --store")
    from assay.traces.store import Store

    return Store(store)


@command.command("list")
@click.option("--run", "run_id", help="Only of this run.")
@click.option("--task", "task_id", help="Only of this task.")
@click.option("--split", type=click.Choice(["train", "val", "gate", "test"]), help="Only of this split.")
@click.option("--status", type=click.Choice(["done", "failed", "error", "running"]), help="Only of this status.")
@click.option("--phase", help="Only of this phase: baseline, search, gate, test, evaluate, collect, run, …")
@click.option("--program", help="Only of programs whose name contains this.")
@click.option("--source", help="Only of this source: program, gateway, …; judge for the verdicts of judges, which are else left out.")
@click.option("--failure", help="Only of this failure kind: parse, context, timeout, model, agent, tool, check, judge, loop, cap.")
@click.option("--min-score", type=click.FloatRange(0, 1), help="Only scored at least so high.")
@click.option("--max-score", type=click.FloatRange(0, 1), help="Only scored at most so high.")
@click.option("--since", metavar="WHEN", help="Only begun since: 30m, 12h, 7d, or a date as 2026-11-23.")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True)
@_store
@_json
def list_rollouts(
    limit: int, since: str | None, min_score: float | None, max_score: float | None, program: str | None, store: str | None, as_json: bool,
    **equal: str | None,
) -> None:  # fmt: skip
    """The newest rollouts, one a line: id, time, phase, split, status, score, failure, program, first input."""
    from assay.errors import ConfigError
    from assay.traces.listing import find_rollouts, known_programs

    chosen = {name: value for name, value in equal.items() if value is not None}
    begun = _since(since)
    with open_store(store) as opened:
        rollouts = list(find_rollouts(opened, equal=chosen, program=program, since=begun, least=min_score, most=max_score, limit=limit))
        programs = known_programs(opened) if program is not None and not rollouts else []
    if program is not None and programs and not any(program.lower() in name.lower() for name in programs):
        raise ConfigError(f"no rollout's program has {program!r} in its name (--program); there are {', '.join(programs)}")
    if as_json:
        print_json({"rollouts": [asdict(rollout) for rollout in rollouts]})
        return
    if not rollouts:
        filters = {**chosen, "program": program, "since": since, "min_score": min_score, "max_score": max_score}
        on = ", ".join(f"{name.removesuffix('_id').replace('_', ' ')} {value}" for name, value in filters.items() if value is not None)
        judges = "" if "source" in chosen else " (verdicts of judges are listed with --source judge)"
        click.echo(f"no rollout matches the filters: {on}{judges}" if on else f"the store holds no rollouts{judges}", err=True)
    else:
        click.echo(f"{'id':16} {'time':14} {'phase':10} {'split':5} {'status':7} {'score':>5} {'failure':8} program  first input")
    for r in rollouts:
        when = time.strftime("%m-%d %H:%M:%S", time.localtime(r.started_at))
        first = " ".join(str(next(iter(r.inputs.values()), "")).split())
        short = r.program.replace("\\", "/").rpartition("/")[2]
        score = "–" if r.score is None else f"{r.score:.2f}"
        line = f"{r.id[:16]} {when} {r.phase:10} {r.split or '–':5} {r.status:7} {score:>5} {r.failure or '–':8} {short}  "
        click.echo(line + first[:60] + ("…" if len(first) > 60 else ""))


def _since(text: str | None) -> float | None:
    """Seconds since the epoch of `30m`, `12h`, `7d` or a date."""
    if text is None:
        return None
    units = {"m": 60, "h": 3600, "d": 86400}
    if text[-1:] in units and text[:-1].isdigit():
        return time.time() - int(text[:-1]) * units[text[-1]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise click.UsageError(f"--since {text!r} must be a number of minutes, hours or days (30m, 12h, 7d) or a date (2026-11-23)") from None


@command.command("show")
@click.argument("rollout_id")
@_store
@_json
def show(rollout_id: str, store: str | None, as_json: bool) -> None:
    """One rollout with every LM call, exactly as sent and received. The start of an id is enough."""
    from assay.traces.dialects import answer_of, chat_messages

    with open_store(store) as opened:
        rollout = opened.rollout(rollout_id)
    if as_json:
        print_json(asdict(rollout))
        return
    score = "unscored" if rollout.score is None else f"{rollout.score:.3f}"
    click.echo(f"{rollout.id}  {rollout.program}@{rollout.program_version}  {rollout.model}  {rollout.status}  score {score}")
    click.echo(f"task {rollout.task_id} ({rollout.task_type}, {rollout.split}): {rollout.inputs}")
    _show_tools(rollout.early_tools)
    for t in rollout.transitions:
        marks = [word for word, on in (("cached", t.cached), ("constrained", t.constrained)) if on]
        tokens = f"{t.prompt_tokens}+{t.completion_tokens} tokens, {t.latency_ms:.0f} ms"
        click.echo(f"\n[{t.t}] {tokens}{', ' + ', '.join(marks) if marks else ''}")
        for message in chat_messages(t.request):
            calls = "".join(f" [calls {c['function']['name']}({c['function']['arguments']})]" for c in message.get("tool_calls") or ())
            click.echo(f"  {message['role']}: {_flat(message.get('content') or '')}{calls}")
        response = t.response or {}
        answer = answer_of(t.request.get("dialect"), response.get("body", response))
        if answer.reasoning:
            click.echo(f"  reasoning: {_flat(answer.reasoning)}")
        click.echo(f"  -> {t.error if t.error else _flat(t.output)}{' (refusal)' if answer.refusal else ''}")
        _show_tools(t.tools)
        if t.step_rewards:
            click.echo(f"  step rewards: {', '.join(f'{name} {value:g}' for name, value in t.step_rewards.items())}")
    click.echo(f"\nprediction: {rollout.prediction if rollout.prediction is not None else rollout.error}")
    if rollout.human_rating is not None:
        click.echo(f"rated by people: {rollout.human_rating:g}")
    for v in rollout.verdicts:
        grade = "not counted" if not v.applies else "unscored" if v.grade is None else f"{v.grade:.2f}"
        click.echo(f"  {v.criterion} (weight {v.weight:g}): {grade} {v.reason}")


def _show_tools(tools: list[Any]) -> None:
    for tool in tools:
        click.echo(f"  tool {tool.name}({tool.arguments}) = {tool.result if tool.error is None else 'error: ' + tool.error}")


def _flat(text: Any) -> str:
    return str(text).replace("\n", "\n      ")


@command.command("stats")
@click.option("--run", "run_id", help="Only of this run.")
@_store
@_json
def stats(run_id: str | None, store: str | None, as_json: bool) -> None:
    """Counts, tokens and dollars of the store; `unrecorded` are LM calls that went past the recorder; unknown where nothing can see them."""
    from assay.traces.counts import file_stats
    from assay.traces.location import store_file

    file = store_file(store)
    found = file_stats(file, run_id) if file is not None else None
    if found is None:
        with open_store(store) as opened:
            found = opened.stats(run_id=run_id)
    if as_json:
        print_json(found)
        return
    for label, text in _stats_lines(found):
        click.echo(f"{label:18} {text}")


def _stats_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What `traces stats` prints: labels with units, and values."""

    def by(name: str) -> str:
        return ", ".join(f"{part} {count:,}" for part, count in found[name].items()) or "–"

    if found["unrecorded"] is None:
        unrecorded = f"unknown, at least {counted(found['unrecorded_seen'], 'LM calls')} ({found['unrecorded_reason']})"
    else:
        unrecorded = counted(found["unrecorded"], "LM calls")
    unpriced = "a call has no known price" if found["unrecorded"] == 0 else "LM calls that went past the recorder are in no price"
    mean = "–" if found["mean_score"] is None else f"{found['mean_score']:.3f}"
    return [
        ("rollouts", f"{found['rollouts']:,}"), ("  by status", by("statuses")), ("  by split", by("splits")),
        ("  scored", f"{found['scored']:,}, mean score {mean}"), ("LM calls", f"{found['transitions']:,}"),
        ("  from the cache", f"{found['cached']:,}"), ("  failed", f"{found['errors']:,}"), ("unrecorded", unrecorded),
        ("prompt tokens", f"{found['prompt_tokens']:,} (calls from the cache included)"),
        ("completion tokens", f"{found['completion_tokens']:,} (calls from the cache included)"),
        ("cost", f"unknown: {unpriced}" if found["cost_usd"] is None else f"${found['cost_usd']:.4f}"),
    ]  # fmt: skip


@command.command("rate")
@click.argument("rollout_id", required=False)
@click.argument("rating", type=float, required=False)
@click.option("--run", "run_id", help="Walk through the rollouts of this run that nobody rated.")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="Largest number of rollouts to rate in this session.")
@_store
@_json
def rate(rollout_id: str | None, rating: float | None, run_id: str | None, limit: int, store: str | None, as_json: bool) -> None:
    """Rate one rollout, from 0 to 1; without one, walk through those that nobody has rated yet.

    A rating stands before the rubric's score wherever data is exported for training.
    """
    rated: dict[str, float] = {}
    with open_store(store) as opened:
        if rollout_id is not None:
            if rating is None:
                raise click.UsageError("say the rating as well, from 0 to 1: assay traces rate ROLLOUT 0.8")
            rated[_rate(opened, rollout_id, rating)] = rating
        else:
            found_all = opened.rollouts(run_id=run_id, limit=None)
            own = (r for r in found_all if r.source not in ("judge", "outside") and r.split not in ("gate", "test"))
            waiting = [r for r in own if r.human_rating is None and r.status in ("done", "failed")][:limit]
            for at, found in enumerate(waiting):
                click.echo(
                    f"\n[{at + 1} of {len(waiting)}] {found.inputs}\n  -> {found.prediction if found.prediction is not None else found.error}",
                    err=True,
                )
                try:
                    said = click.prompt("rating 0 to 1 (Enter: leave it, q: stop)", default="", show_default=False, err=True).strip()
                except click.Abort:  # the end of the input
                    break
                if said == "q":
                    break
                if said and (value := _number(said)) is not None:
                    rated[_rate(opened, found.id, value)] = value
    if as_json:
        print_json({"rated": rated})
    else:
        click.echo(f"{len(rated)} rollout{'' if len(rated) == 1 else 's'} rated")


def _rate(opened: Any, rollout_id: str, rating: float) -> str:
    from assay.errors import ConfigError

    found = opened.rollout(rollout_id)
    if found.source in ("judge", "outside"):
        what = "a verdict of a judge" if found.source == "judge" else "calls outside of a task"
        raise ConfigError(
            f"{found.id} is {what}, which an export never draws on: rate the rollout of the program itself (assay traces list). "
            "What a judge is to learn from is said with assay judge label"
        )
    opened.rate(found.id, rating)
    return str(found.id)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if 0 <= value <= 1:
        return value
    click.echo(f"{text!r} is no number from 0 to 1; left unrated", err=True)
    return None


@command.command("close")
@click.option("--idle-minutes", type=click.FloatRange(0), default=60.0, show_default=True, help="Since the last call of a rollout.")
@_store
@_json
def close(idle_minutes: float, store: str | None, as_json: bool) -> None:
    """End the rollouts that a gateway left open when it was killed: only what has ended is exported."""
    from assay.traces.live import close_left

    with open_store(store) as opened:
        found = close_left(opened, idle_s=60 * idle_minutes)
    if as_json:
        print_json(found)
    else:
        click.echo(f"{counted(found['done'], 'rollouts')} ended with their answer, {found['error']} without one")


@command.command("score")
@click.option("--rubric", required=True, metavar="R", help="A rubric's name or file.")
@click.option("--run", "runs", multiple=True, help="Only rollouts of this run; repeatable.")
@click.option("--again", is_flag=True, help="Replace scores that are there.")
@click.option("--judge-model", metavar="NAME", help="Decides the criteria that need a judge.")
@click.option("--judge-api-base", metavar="URL", help="Address of an OpenAI-compatible server of --judge-model.")
@click.option("--judge-api-key-env", metavar="NAME", help="Environment variable with its key; the provider's usual one by default.")
@click.option("--threads", type=int, help="Rollouts scored at once; by default what the judges' engine gains from.")
@task_timeout_option()
@no_preflight_option()
@min_coverage_option()
@trust_option()
@_store
@_json
def score(rubric: str, store: str | None, as_json: bool, no_preflight: bool, **values: Any) -> None:
    """Score stored rollouts by a rubric, step rewards included: of the gateway, of imports.

    A rollout on which a criterion could not be decided keeps the score that it had, or none.
    """
    from assay.cli.shared import Console
    from assay.exporting import score_rollouts

    open_store(store).close()
    data = score_rollouts(rubric, store=store, preflight=not no_preflight, progress=Console(), **values)  # type: ignore[arg-type]
    mean = "" if data["mean"] is None else f", mean {data['mean']:.3f}"
    if as_json:
        print_json(data)
    else:
        click.echo(
            f"{counted(data['scored'], 'rollouts')} scored{mean}; {data['unscored']} could not be and are as before, {data['skipped']} had a score"
        )
        if others := data["skipped_of_other_rubrics"]:
            of = ", ".join(f"{count} of {name or 'a rubric without a name'}" for name, count in others.items())
            click.echo(f"note: scores that were there are of another rubric than {data['rubric']}: {of}. --again replaces them")
        if data["running"]:
            running, are = counted(data["running"], "rollouts"), "is" if data["running"] == 1 else "are"
            click.echo(f"{running} {are} still running and not scored; end those that are left open with: assay traces close")
    require_coverage(data)


@command.command("forget")
@click.argument("subject")
@_store
@_json
def forget(subject: str, store: str | None, as_json: bool) -> None:
    """Remove all rollouts of a data subject, and name the exports and artifacts that were made from them."""
    from assay.exporting import forget_subject

    open_store(store).close()
    data = forget_subject(subject, store=store)
    if as_json:
        print_json(data)
        return
    click.echo(f"{counted(data['removed'], 'rollouts')} of {subject!r} removed")
    click.echo(
        f"{data['prompts_emptied']} prompts of others that showed their tasks emptied, {data['cached_answers_removed']} cached answers removed"
    )
    if data["unowned_answers_removed"]:
        click.echo(f"{data['unowned_answers_removed']} cached answers of an older version removed: whose they are cannot be told")
    for made in data["made_from_them"]:
        click.echo(f"made from them before: {made}")


@command.command("import")
@click.argument("kind", type=click.Choice(["otlp", "langfuse", "mlflow"]))
@click.argument("file")
@click.option("--score", metavar="NAME", help="The score that counts, where a trace carries several.")
@_store
@_json
def import_(kind: str, file: str, score: str | None, store: str | None, as_json: bool) -> None:
    """Bring traces of other tools into the store: OpenTelemetry spans (GenAI conventions), Langfuse or MLflow exports."""
    from assay.traces.importing import import_traces
    from assay.traces.store import Store

    with Store(store) as opened:
        report = import_traces(opened, kind, file, score=score)
    data = report.to_dict()
    if as_json:
        print_json(data)
        return
    for key, value in data.items():
        if key != "reasons":
            click.echo(f"{key:18} {value}")
    for reason in data["reasons"]:
        click.echo(f"skipped: {reason}", err=True)
