"""`assay traces list`: the newest rollouts, one per line."""

import time
from dataclasses import asdict
from datetime import datetime
from typing import Any

import click

from assay.cli.numbers import Integer, Number
from assay.cli.shared import json_option, open_store, print_json, store_option, with_options

__all__ = ["list_command"]

SPLITS = ("train", "val", "gate", "test")
STATUSES = ("done", "failed", "error", "running")
_FILTERS = (
    click.option("--run", "run_id", help="Only rollouts of this run."),
    click.option("--task", "task_id", help="Only rollouts of this task."),
    click.option("--split", type=click.Choice(SPLITS), help="Only rollouts of this split."),
    click.option("--status", type=click.Choice(STATUSES), help="Only rollouts with this status."),
    click.option(
        "--phase", help="Only this phase of a command: baseline, search, gate, test, evaluate, collect, run, …"
    ),
    click.option("--program", help="Only programs whose name contains this text."),
    click.option(
        "--source",
        help="Only rollouts of this source: program, gateway, …; judge for verdicts of judges, hidden by default.",
    ),
    click.option(
        "--failure",
        help="Only this failure kind: parse, context, timeout, model, agent, tool, check, judge, loop, cap.",
    ),
    click.option("--min-score", type=Number(0, 1), help="Lowest score."),
    click.option("--max-score", type=Number(0, 1), help="Highest score."),
    click.option("--since", metavar="WHEN", help="Only started since: 30m, 12h, 7d, or a date such as 2026-11-23."),
    click.option("--limit", type=Integer(1), default=20, show_default=True, help="Maximum number of rollouts to list."),
)


def _filters(function: Any) -> Any:
    return with_options(function, _FILTERS)


@click.command("list")
@_filters
@store_option()
@json_option()
def list_command(
    limit: int, since: str | None, min_score: float | None, max_score: float | None, program: str | None,
    store: str | None, as_json: bool, **equal: str | None,
) -> None:  # fmt: skip
    """List the newest rollouts, one per line: id, time, phase, split, status, score, failure, program, first input.

    The program is followed by its version, a hash of prompts, demonstrations and settings. The versions of a run are
    those of its baseline, its candidates and the compiled program.
    """
    from assay.traces.store.listing import find_rollouts, known_programs

    chosen = {name: value for name, value in equal.items() if value is not None}
    started_since = _since(since)
    with open_store(store) as opened:
        rollouts = list(
            find_rollouts(
                opened, equal=chosen, program=program, since=started_since, least=min_score, most=max_score, limit=limit
            )
        )
        programs = known_programs(opened) if program is not None and not rollouts else []
    _check_program(program, programs)
    if as_json:
        print_json({"rollouts": [asdict(rollout) for rollout in rollouts]})
    elif rollouts:
        _show(rollouts)
    else:
        filters = {**chosen, "program": program, "since": since, "min_score": min_score, "max_score": max_score}
        click.echo(_nothing(filters), err=True)


def _check_program(program: str | None, programs: list[str]) -> None:
    """Refuses a `--program` that is in the name of no recorded program: it is misspelt."""
    from assay.errors import ConfigError

    if program is not None and programs and not any(program.lower() in name.lower() for name in programs):
        raise ConfigError(
            f"no recorded program's name contains {program!r} (--program); there are {', '.join(programs)}"
        )


def _nothing(filters: dict[str, Any]) -> str:
    """The message if no rollout matches."""
    hint = "" if filters.get("source") else " (verdicts of judges are listed with --source judge)"
    active = [
        f"{name.removesuffix('_id').replace('_', ' ')} {value}" for name, value in filters.items() if value is not None
    ]
    if not active:
        return f"the store holds no rollouts{hint}"
    return f"no rollout matches the filters: {', '.join(active)}{hint}"


def _show(rollouts: list[Any]) -> None:
    columns = f"{'id':16} {'time':14} {'phase':10} {'split':5} {'status':7} {'score':>5} {'failure':8}"
    click.echo(f"{columns} program  first input")
    for rollout in rollouts:
        started = time.strftime("%m-%d %H:%M:%S", time.localtime(rollout.started_at))
        first_input = " ".join(str(next(iter(rollout.inputs.values()), "")).split())
        program = rollout.program.replace("\\", "/").rpartition("/")[2]
        program += f"@{rollout.program_version}" if rollout.program_version else ""
        score = "–" if rollout.score is None else f"{rollout.score:.2f}"
        click.echo(
            f"{rollout.id[:16]} {started} {rollout.phase:10} {rollout.split or '–':5} {rollout.status:7} {score:>5} "
            f"{rollout.failure or '–':8} {program}  {first_input[:60]}{'…' if len(first_input) > 60 else ''}"
        )


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
        raise click.UsageError(
            f"--since {text!r} must be a number of minutes, hours or days (30m, 12h, 7d) or a date (2026-11-23)"
        ) from None
