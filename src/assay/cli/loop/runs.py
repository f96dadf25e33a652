"""`assay loop run`, `start`, `stop`, `status` and `install`."""

import sys
import time
from pathlib import Path
from typing import Any

import click

from assay.cli.flags import command_settings, settings_flags
from assay.cli.options import Decorator, dry_run_option, json_option, out_option, store_option, trust_option
from assay.cli.shared import Console, open_store, print_json, show_judges
from assay.cli.wording import in_flags
from assay.runs.settings import LoopInstallSettings
from assay.support.terminal import echo

_FILE = "Loop file on this machine, if its path differs from the one given to assay loop start."


def _file_option(help: str = _FILE, *, required: bool = False) -> Decorator:
    return click.option("--file", metavar="FILE", required=required, help=help)


@click.command("run")
@click.argument("agent")
@_file_option()
@dry_run_option("Print what would be done; write nothing.")
@store_option()
@trust_option()
@json_option()
def run_command(agent: str, file: str | None, dry_run: bool, store: str | None, as_json: bool) -> None:
    """Advance the active deployment of AGENT; without one collect the pool, check its gates, improve, register, deploy.

    It may be called at any time, on several machines: one process at a time runs the loop, and the next one
    continues after a kill. Exit code 1 if a step failed.
    """
    from assay.api.loop.run import run_loop

    open_store(store).close()
    data = run_loop(agent, file=file, dry_run=dry_run, store=store, progress=Console()).to_dict()
    if as_json:
        print_json(data)
    else:
        for step in data["steps"]:
            echo(f"{step['step']:9} {step['status']:8} {in_flags(step['reason'])}")
        echo(f"{data['action']}: {in_flags(data['reason'])}")
    if data["action"] == "failed":
        sys.exit(1)


@click.command("start")
@click.argument("agent")
@_file_option("YAML file with the settings of the loop.", required=True)
@store_option()
@json_option()
def start_command(agent: str, file: str, store: str | None, as_json: bool) -> None:
    """Enable assay loop run for AGENT with the settings in FILE. Starts no process; assay loop install schedules it."""
    from assay.api.loop.state import start_loop

    open_store(store).close()
    data = start_loop(agent, file, store=store)
    print_json(data) if as_json else echo(
        f"the loop of {agent} is started; next: assay loop run {agent} --dry-run, assay loop install {agent}"
    )


@click.command("stop")
@click.argument("agent")
@store_option()
@json_option()
def stop_command(agent: str, store: str | None, as_json: bool) -> None:
    """End the loop of AGENT: a process that runs it stops before its next step. An active deployment continues."""
    from assay.api.loop.state import stop_loop

    open_store(store).close()
    data = stop_loop(agent, store=store)
    print_json(data) if as_json else echo(f"the loop of {agent} is stopped")


@click.command("status")
@click.argument("agent")
@_file_option()
@store_option()
@json_option()
def status_command(agent: str, file: str | None, store: str | None, as_json: bool) -> None:
    """Show where the loop of AGENT stands, and seven figures against their limits."""
    from assay.api.loop.state import loop_status

    open_store(store).close()
    data = loop_status(agent, file=file, store=store).to_dict()
    print_json(data) if as_json else _show(data)


def _show(data: dict[str, Any]) -> None:
    state = "started" if data["enabled"] else "stopped"
    holder = f", run by {data['holder']}" if data["holder"] else ""
    due = f", due in {data['due_in_s'] / 3600:.1f} h" if data["due_in_s"] else ""
    echo(f"loop of {data['agent']}: {state}{holder}; cycle {data['cycle']}, next {data['next_step']}{due}")
    if data["problem"]:
        echo(f"  {in_flags(data['problem'])}")
    for step in data["steps"]:
        at = time.strftime("%m-%d %H:%M", time.localtime(step["started_at"]))
        echo(f"  {at}  {step['step']:9} {step['status']:8} {step['reason'] or ''}")
    if (active := data["deployment"]) is not None:
        echo(f"  deployment {active['id'][:12]}: {active['status']}, {active['share']:.0%} on the candidate")
    for figure in data["figures"]:
        value = "–" if figure["value"] is None else f"{figure['value']:z.3f}"
        span = "" if figure["low"] is None else f" [{figure['low']:z.3f}, {figure['high']:z.3f}]"
        limit = "no limit" if figure["limit"] is None else f"limit {figure['limit']:g}"
        mark = {True: "ok", False: "ALARM", None: "–"}[figure["ok"]]
        echo(f"{mark:5}  {figure['name']:12} {value}{span}, {limit} (n = {figure['n']})")
    show_judges(data["judges"])


@click.command("install")
@click.argument("agent")
@settings_flags(LoopInstallSettings)
@out_option("Folder for the files; without it they are printed.", "DIR")
@_file_option()
@store_option()
@json_option()
def install_command(
    agent: str, out: str | None, file: str | None, store: str | None, as_json: bool, **values: Any
) -> None:
    """Write a systemd service with its timer, or a cron line, that calls assay loop run AGENT. Installs nothing."""
    from assay.api.loop.state import has_loop, schedule_files
    from assay.support.places import check_writable, write_whole

    if out is not None:
        check_writable(Path(out) / "FILE", "out")
    files = schedule_files(agent, file=file, store=store, **command_settings(values, LoopInstallSettings))
    if out is not None:
        for name, text in files.items():
            write_whole(Path(out) / name, text)
    if not has_loop(agent, store=store):
        echo(f"note: this store has no loop of {agent}: assay loop start {agent} --file FILE starts one", err=True)
    if as_json:
        print_json({"files": files, "out": out})
        return
    for name, text in files.items():
        echo(f"{Path(out) / name}" if out is not None else f"# {name}\n{text}")
