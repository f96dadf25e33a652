"""`assay traces forget`: delete the data of one person."""

import click

from assay.cli.options import json_option, store_option
from assay.cli.shared import open_store, print_json
from assay.cli.wording import counted

__all__ = ["forget_command"]


@click.command("forget")
@click.argument("subject")
@store_option()
@json_option()
def forget_command(subject: str, store: str | None, as_json: bool) -> None:
    """Delete all rollouts of the data subject SUBJECT, and list the exports and artifacts made from them."""
    from assay.api.traces import forget_subject

    open_store(store).close()  # refuses a store that does not exist, which `forget_subject` would create
    report = forget_subject(subject, store=store)
    if as_json:
        print_json(report)
        return
    click.echo(f"{counted(report['removed'], 'rollouts')} of {subject!r} removed")
    click.echo(
        f"{counted(report['facts_removed'], 'remembered facts')}, "
        f"{counted(report['prompts_emptied'], 'prompts')} of other rollouts that contained their tasks emptied, "
        f"{counted(report['cached_answers_removed'], 'cached answers')} removed"
    )
    if report["unowned_answers_removed"]:
        click.echo(
            f"{counted(report['unowned_answers_removed'], 'cached answers')} of an older version removed: "
            "the version did not record whose they are"
        )
    for path in report["made_from_them"]:
        click.echo(f"made from them before: {path}")
