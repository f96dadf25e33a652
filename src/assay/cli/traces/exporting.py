"""`assay traces export`: rollouts as traces for other tools."""

from typing import Any

import click

from assay.cli.flags import command_settings, settings_flags
from assay.cli.options import json_option, store_option
from assay.cli.shared import open_store, print_json
from assay.cli.value_types import Choice
from assay.runs.settings import TracesExportSettings
from assay.support.numbers import counted
from assay.support.terminal import echo


@click.command("export")
@click.argument("kind", type=Choice(["otlp"]))
@click.argument("file", required=False)
@settings_flags(TracesExportSettings)
@store_option()
@json_option()
def export_command(kind: str, file: str | None, store: str | None, as_json: bool, **values: Any) -> None:
    """Export rollouts as OpenTelemetry spans (GenAI conventions) to FILE, or send them to an OTLP/HTTP endpoint.

    FILE has JSON lines, or protobuf if its name ends with .pb; assay traces import otlp reads both. Rollouts of the
    gate and test splits, of tenants and without consent are left out.
    """
    from assay.api.rollouts import export_rollouts

    settings = command_settings(values, TracesExportSettings)
    with open_store(store) as opened:
        data = export_rollouts(opened, kind, file, **settings).to_dict()
    if as_json:
        print_json(data)
        return
    withheld = f"; {counted(data['withheld'], 'rollouts')} left out (split, tenant or consent)"
    echo(
        f"{counted(data['rollouts'], 'rollouts')} with {counted(data['transitions'], 'LM calls')}: {data['path']}"
        + (withheld if data["withheld"] else "")
    )
