"""`assay traces import`: traces of other tools."""

import click

from assay.cli.shared import json_option, print_json, store_option

__all__ = ["import_command"]


@click.command("import")
@click.argument("kind", type=click.Choice(["otlp", "langfuse", "mlflow"]))
@click.argument("file")
@click.option("--score", metavar="NAME", help="Name of the score to import if a trace has several.")
@store_option()
@json_option()
def import_command(kind: str, file: str, score: str | None, store: str | None, as_json: bool) -> None:
    """Import FILE: OpenTelemetry spans (GenAI conventions), or an export of Langfuse or MLflow."""
    from assay.traces.importers import import_traces
    from assay.traces.store import Store

    with Store(store) as opened:
        report = import_traces(opened, kind, file, score=score).to_dict()
    if as_json:
        print_json(report)
        return
    for name, value in report.items():
        if name != "reasons":
            click.echo(f"{name:18} {value}")
    for reason in report["reasons"]:
        click.echo(f"skipped: {reason}", err=True)
