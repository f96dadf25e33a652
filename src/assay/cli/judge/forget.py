"""`assay judge forget`: removes a rater's labels."""

import click

from assay.cli.options import json_option, store_option
from assay.cli.shared import print_json
from assay.support.numbers import counted
from assay.support.terminal import rich_console


@click.command("forget")
@click.argument("rater")
@store_option()
@json_option()
def forget_command(rater: str, store: str | None, as_json: bool) -> None:
    """Remove all labels of RATER from the store, and name every judge that was compiled from them."""
    from assay.api.judge.forget import forget_rater

    data = forget_rater(rater, store=store)
    if as_json:
        print_json(data)
        return
    rich = rich_console()
    rich.print(f"{counted(data['removed'], 'labels')} of {rater} removed")
    for judge in data["judges"]:
        rich.print(f"compiled from labels of {rater}, compile it again without them: {judge}", soft_wrap=True)
