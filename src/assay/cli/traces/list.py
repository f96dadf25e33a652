"""`assay traces list`: the newest rollouts, one per line."""

import time
from dataclasses import asdict
from typing import Any

import click

from assay.cli.flags import command_settings, settings_flags
from assay.cli.options import json_option, store_option
from assay.cli.shared import echo_line, open_store, print_json
from assay.runs.settings import TracesListSettings
from assay.support.numbers import figure
from assay.support.terminal import echo
from assay.support.values import value_text

_PROGRAM = 32  # width of the column; longer names move the rest of their line


@click.command("list")
@settings_flags(TracesListSettings)
@store_option()
@json_option()
def list_command(store: str | None, as_json: bool, **values: Any) -> None:
    """List the newest rollouts, one per line: id, time, score, status, program, source, phase, split, failure,
    first input. In a terminal, lines are cut at its width.

    The program is followed by its version, a hash of prompts, demonstrations and settings. The versions of a run are
    those of its baseline, its candidates and the compiled program.
    """
    from assay.api.rollouts import list_rollouts

    settings = command_settings(values, TracesListSettings)
    with open_store(store) as opened:
        rollouts = list_rollouts(opened, **settings)
    if as_json:
        print_json({"rollouts": [asdict(rollout) for rollout in rollouts]})
    elif rollouts:
        _show(rollouts)
    else:
        filters = {name: value for name, value in settings.items() if name != "limit"}
        echo(_nothing(filters), err=True)


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
    width = min(_PROGRAM, max(len(_program(rollout)) for rollout in rollouts))
    columns = (
        f"{'id':16} {'time':14} {'score':>5} {'status':7} {'program':{width}} {'source':7} {'phase':10} {'split':5}"
    )
    echo_line(f"{columns} {'failure':8} first input")
    for rollout in rollouts:
        started = time.strftime("%m-%d %H:%M:%S", time.localtime(rollout.started_at))
        first_input = " ".join(value_text(next(iter(rollout.inputs.values()), "")).split())
        score = figure(rollout.score, 2)
        echo_line(
            f"{rollout.id[:16]} {started} {score:>5} {rollout.status:7} {_program(rollout):{width}} {rollout.source:7} "
            f"{rollout.phase:10} {rollout.split or '–':5} {rollout.failure or '–':8} "
            f"{first_input[:60]}{'…' if len(first_input) > 60 else ''}"
        )


def _program(rollout: Any) -> str:
    """Its file or name with the version."""
    name = str(rollout.program).replace("\\", "/").rpartition("/")[2]
    return f"{name}@{rollout.program_version}" if rollout.program_version else name or "–"
