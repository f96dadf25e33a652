"""`assay judge lint`: criteria that ask two things, or about what a judge cannot see."""

import click

from assay.cli.options import json_option, trust_option
from assay.cli.shared import print_json
from assay.support.numbers import counted
from assay.support.terminal import rich_console


@click.command("lint")
@click.argument("rubric")
@trust_option()
@json_option()
def lint_command(rubric: str, as_json: bool) -> None:
    """Report criteria in RUBRIC that ask two things, ask about what a judge cannot see, or occur twice. Exit code 1
    if there are any."""
    from assay.api.judge.lint import lint

    findings = lint(rubric)
    if as_json:
        print_json({"findings": [each.to_dict() for each in findings]})
    else:
        for finding in findings:
            rich_console().print(f"{finding.criterion}: {finding.rule}: {finding.text}")
        rich_console().print(counted(len(findings), "findings") if findings else "nothing found")
    if findings:
        click.get_current_context().exit(1)
