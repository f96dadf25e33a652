"""`assay runs`: list, show."""

import time
from typing import Any

import click

from assay.cli.flags import command_settings, settings_flags
from assay.cli.options import json_option, store_option
from assay.cli.shared import echo_line, open_store, print_json
from assay.runs.settings import RunsListSettings
from assay.support.terminal import echo

_SUFFIXES = {"judge": " (verdicts of judges)", "check": " (calls of checks)", "outside": " (calls outside of a task)"}


@click.group("runs")
def command() -> None:
    """List and inspect runs of commands: compile, evaluate, tune, …"""


@command.command("list")
@settings_flags(RunsListSettings)
@store_option()
@json_option()
def list_(store: str | None, as_json: bool, **values: Any) -> None:
    """List the newest runs, one per line: id, start, command, status, duration, program, model.

    The command `check of train sft` is the check of the program on one task that `assay train sft --program` makes
    before it trains.
    """
    from assay.traces.store.listing import list_runs

    settings = RunsListSettings(**command_settings(values, RunsListSettings))
    with open_store(store) as opened:
        runs = list_runs(opened, limit=settings.limit)
    if as_json:
        print_json({"runs": runs})
        return
    if not runs:
        echo("the store holds no runs", err=True)
    for run in runs:
        echo_line(
            f"{run['id']:18} {_when(run['started_at'])} {_command(run):18} {run['status']:8} {_duration(run):>7}  "
            f"{run['program'] or '–'}  {run['model'] or '–'}"
        )


@command.command("show")
@click.argument("run_id")
@store_option()
@json_option()
def show(run_id: str, store: str | None, as_json: bool) -> None:
    """Show one run: its settings, rollouts by phase and result. RUN_ID may be the first characters of the id."""
    from assay.reports.markdown import models_text
    from assay.reports.results import result_lines
    from assay.reports.texts import setting_texts
    from assay.traces.store.listing import result_of, show_run

    with open_store(store) as opened:
        run = show_run(opened, run_id)
    run["result"] = result_of(store, run)
    if as_json:
        print_json(run)
        return
    resumed = "" if run["resumed_at"] is None else f"resumed {_when(run['resumed_at'])}  "
    echo(f"{run['id']}  {_command(run)}  {run['status']}  {_when(run['started_at'])}  {resumed}{_duration(run)}")
    for name, text in setting_texts(run["config"]):
        echo(f"  {name}: {text}".replace("\n", "\n    "))
    for part in run["rollouts"]:
        mean = "" if part["mean_score"] is None else f", mean score {part['mean_score']:.3f}"
        suffix = _SUFFIXES.get(part["source"], "")
        phase = {"preflight": "preflight, one task and each judge before the run"}.get(part["phase"], part["phase"])
        echo(f"  {phase or '–'}: {part['n']} {part['status']}{mean}{suffix}")
    if (missed := run["unrecorded"]) != 0:
        echo(f"  LM calls not recorded: {'an unknown number' if missed is None else missed}")
    result = run["result"] or {}
    if text := models_text(result):
        echo(f"  LM calls by model: {text}")
    if result.get("stopped"):
        echo(f"  stopped early: {result['stopped']}")
    for line in result_lines(result):
        echo(f"  {line}")


def _command(run: dict[str, Any]) -> str:
    """The command of a run, with the method of a training."""
    if run["kind"] == "preflight":
        return "check of train sft"
    method = run["config"].get("algorithm") if run["kind"] == "train" else None
    return f"{run['kind']} {method}" if method else str(run["kind"])


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _duration(run: dict[str, Any]) -> str:
    return "–" if run["seconds"] is None else f"{run['seconds']:.0f} s"
