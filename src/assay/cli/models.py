"""`assay models`: list and pull."""

import click

from assay.cli.options import json_option
from assay.cli.shared import print_json
from assay.support.terminal import echo


@click.group("models")
def command() -> None:
    """List and fetch language models."""


@command.command("list")
@json_option()
def list_models(as_json: bool) -> None:
    """List embedded models and trained adapters, with their files.

    Any other model name is passed to litellm (openai/…, ollama_chat/…).
    """
    from assay.api.models import list_models as models_and_adapters

    report = models_and_adapters().to_dict()
    if as_json:
        print_json(report)
        return
    rows, adapters = report["models"], report["adapters"]
    width = max(len(row["name"]) for row in [*rows, *adapters])
    echo(f"{'name':{width}}  {'size':>7}  {'licence':12}  file")
    for row in rows:
        location = row["path"] or f"not downloaded; run: assay models pull {row['name'].removeprefix('embedded/')}"
        size = f"{row['size'] / 1e6:.0f} MB"
        echo(f"{row['name']:{width}}  {size:>7}  {row['licence']:12}  {location}")
    if adapters:
        echo(f"\n{'adapter':{width}}  {'sha256':13}  folder")
    for adapter in adapters:
        echo(f"{adapter['name']:{width}}  {adapter['sha256'][:12]}…  {adapter['path']}")


@command.command("pull")
@click.argument("name")
def pull(name: str) -> None:
    """Download the embedded model NAME and check its sha256."""
    from assay.api.models import pull_model
    from assay.models.registry import spec

    path = pull_model(name, say=lambda text: echo(text, err=True))
    echo(f"{path} (sha256 {spec(name).sha256[:12]}… verified)")
