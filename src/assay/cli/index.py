"""`assay index`: documents for retrieval."""

from typing import Any

import click

from assay.cli.flags import command_settings, settings_flags
from assay.cli.options import json_option, store_option, trust_option
from assay.cli.shared import Console, pop_values, print_json
from assay.runs.settings import IndexSettings
from assay.support.numbers import counted
from assay.support.terminal import echo


@click.command("index")
@click.argument("folder", metavar="DIR")
@settings_flags(IndexSettings)
@store_option()
@trust_option()
@json_option()
def command(folder: str, **values: Any) -> None:
    """Index the text files of DIR for agents that retrieve documents, such as answer_from_documents.

    Run it again after changes: only new and changed files are read, and deleted ones are removed.
    """
    from assay.api.index import index

    as_json, store = pop_values(values, "as_json", "store")
    report = index(folder, store=store, progress=Console(), **command_settings(values, IndexSettings)).to_dict()
    if as_json:
        print_json(report)
        return
    for line in _lines(report):
        echo(line)
    if not any(report[count] for count in ("added", "changed", "unchanged", "removed")):
        echo(f"note: {folder} has no text files, so nothing was indexed")


def _lines(report: dict[str, Any]) -> list[str]:
    done = ", ".join(f"{report[name]:,} {name}" for name in ("added", "changed", "unchanged", "removed"))
    lines = [
        f"index {report['index']} in {report['store']}: {counted(report['documents'], 'documents')}, "
        f"{counted(report['passages'], 'passages')}",
        f"files: {done}",
    ]
    if report["skipped"]:
        skipped = ", ".join(f"{count:,} {reason}" for reason, count in report["skipped"].items())
        lines.append(f"skipped: {skipped}")
    lines += [f"  {reason}: {', '.join(names)}" for reason, names in report["examples"].items()]
    if report["embedded"] is not None:
        lines.append(f"vectors: {report['embedded']:,} added")
    return lines
