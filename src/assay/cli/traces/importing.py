"""`assay traces import`: traces of other tools."""

from typing import Any

import click

from assay.cli.flags import command_settings, settings_flags
from assay.cli.options import json_option, store_option
from assay.cli.shared import print_json
from assay.cli.value_types import Choice
from assay.runs.settings import TracesImportSettings
from assay.support.terminal import echo


@click.command("import")
@click.argument("kind", type=Choice(["otlp", "langfuse", "mlflow"]))
@click.argument("file")
@settings_flags(TracesImportSettings)
@store_option()
@json_option()
def import_command(kind: str, file: str, store: str | None, as_json: bool, **values: Any) -> None:
    """Import FILE: OpenTelemetry spans (GenAI conventions), or an export of Langfuse or MLflow."""
    from assay.api.rollouts import import_rollouts
    from assay.traces.store import Store

    settings = command_settings(values, TracesImportSettings)
    with Store(store) as opened:
        report = import_rollouts(opened, kind, file, **settings).to_dict()
    if as_json:
        print_json(report)
        return
    for name, value in report.items():
        if name not in ("reasons", "repeated"):
            echo(f"{name:18} {value}")
    for place in report["repeated"]:
        echo(f"duplicate: {place}", err=True)
    for reason in report["reasons"]:
        echo(f"skipped: {reason}", err=True)
