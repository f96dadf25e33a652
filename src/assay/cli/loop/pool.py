"""`assay loop pool`: rollouts of production as tasks."""

from typing import Any

import click

from assay.cli.flags import command_settings, settings_flags
from assay.cli.options import json_option, out_option, store_option
from assay.cli.shared import open_store, pop_values, print_json
from assay.deployment.settings import PoolSettings
from assay.support.numbers import counted
from assay.support.terminal import echo


@click.command("pool")
@click.argument("agent")
@out_option("New file of tasks, .jsonl; without it the tasks are only counted.", "FILE")
@settings_flags(PoolSettings)
@store_option()
@json_option()
def pool_command(agent: str, out: str | None, **values: Any) -> None:
    """Write the benchmark pool of AGENT: its rollouts in production as tasks, for --data of other commands.

    Tasks are deduplicated, anonymized, split as in all commands, and balanced over task types; those on which
    production failed are kept. The gates are the requirements for training on the pool.
    """
    from assay.api.loop.run import collect_pool

    as_json, store = pop_values(values, "as_json", "store")
    open_store(store).close()
    data = collect_pool(agent, out, store=store, **command_settings(values, PoolSettings)).to_dict()
    print_json(data) if as_json else show_pool(data)


def show_pool(data: dict[str, Any]) -> None:
    """Prints the report of a pool."""
    place = "not written" if data["path"] is None else f"{data['path']} ({data['sha256'][:12]})"
    splits = ", ".join(f"{name} {count}" for name, count in data["splits"].items())
    echo(
        f"{counted(data['tasks'], 'tasks')} from {counted(data['rollouts'], 'rollouts')}, {data['hard']} hard or "
        f"failed, {data['new_tasks']} new ({splits}): {place}"
    )
    for gate in data["gates"]:
        value = f"{gate['value']:.3g}" if isinstance(gate["value"], float) else gate["value"]
        echo(f"  {'passed' if gate['passed'] else 'failed'}  {gate['gate']:10} {value}, required {gate['required']}")
    for reason, count in data["left_out"].items():
        echo(f"  {count} left out: {reason}")
    if (drift := data["drift"]) is not None:
        new = ", ".join(drift["new_task_types"]) or "none"
        echo(
            f"  drift: {drift['distance']:.0%} of the task types (new: {new}); median length "
            f"{drift['length']['before']:g} -> {drift['length']['now']:g} characters (p = {drift['length']['p']:.2g})"
        )
