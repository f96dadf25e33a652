"""`assay rubric`: what a rubric can use."""

import json

import click

from assay.cli.options import json_option
from assay.cli.shared import print_json
from assay.support.terminal import echo


@click.group("rubric")
def command() -> None:
    """List what a rubric can use."""


@command.command("checks")
@json_option()
def checks_command(as_json: bool) -> None:
    """List the shipped checks with their arguments, which a criterion sets in `with`."""
    from assay.api.rubric import list_checks

    checks = list_checks()
    if as_json:
        print_json({"checks": checks})
        return
    for check in checks:
        echo(f"{check['name']}: {check['summary']}")
        for argument in check["arguments"]:
            default = "required" if argument["required"] else f"default {json.dumps(argument['default'])}"
            echo(f"    {argument['name']}: {argument['type']}, {default}")
