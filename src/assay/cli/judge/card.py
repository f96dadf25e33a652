"""`assay judge card`: the reliability card of a compiled judge."""

import click

from assay.cli.judge.tables import show_agreement, show_card
from assay.cli.options import json_option, report_option
from assay.cli.shared import print_json
from assay.support.terminal import rich_console


@click.command("card")
@click.argument("judge")
@report_option()
@json_option()
def card_command(judge: str, report: str | None, as_json: bool) -> None:
    """Show the reliability card of a compiled JUDGE."""
    from pathlib import Path

    from assay.errors import NoArtifact
    from assay.sources.artifact_files import read_json, read_manifest

    path = Path(judge) / "card.json"
    if not path.is_file():
        raise NoArtifact(
            f"{judge} has no card: it is not a folder written by assay judge compile, or its run was stopped "
            f"before it was measured"
        )
    read_manifest(Path(judge))  # one of another format is refused
    card = read_json(path, path.parent)
    if as_json:
        print_json(card)
    else:
        show_agreement(rich_console(), card)
        show_card(rich_console(), card)
    if report is not None:
        from assay.api.pages import write_card_page

        write_card_page(report, judge)
