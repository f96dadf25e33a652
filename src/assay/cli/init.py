"""`assay init`: a project that compiles as it is."""

import click

from assay.cli.options import json_option
from assay.cli.shared import print_json
from assay.support.terminal import echo


@click.command("init")
@click.argument("folder", default=".", metavar="[DIR]")
@json_option()
def command(folder: str, as_json: bool) -> None:
    """Write a project into DIR (by default the working directory): a program, a rubric, data and assay.toml.

    It compiles as it is: run `assay compile` in it. Nothing is overwritten.
    """
    from assay.api.init import init_project

    written = init_project(folder)
    if as_json:
        print_json({"folder": folder, "files": [str(path) for path in written]})
        return
    for path in written:
        echo(f"wrote {path}")
    echo(f"next: {'' if folder == '.' else f'cd {folder} && '}assay compile")
