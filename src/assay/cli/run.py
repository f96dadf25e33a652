"""`assay run`: one prediction."""

import click

from assay.cli.shared import json_option, pairs, print_json

__all__ = ["command"]


@click.command("run")
@click.argument("program")
@click.argument("inputs", nargs=-1, required=True)
@click.option("--model", help="Language model; by default the one the artifact was compiled for.")
@click.option("--api-base", help="Address of an OpenAI-compatible server for --model.")
@click.option("--store", help="Database of traces; by default .assay/assay.db or $ASSAY_STORE.")
@json_option()
def command(program: str, inputs: tuple[str, ...], model: str | None, api_base: str | None, store: str | None, as_json: bool) -> None:
    """One prediction of PROGRAM (an artifact's folder or a program's name) on INPUTS, each NAME=VALUE; recorded."""
    import logging

    logging.getLogger("dspy").setLevel(logging.ERROR)
    from assay import api

    prediction = api.run(program, pairs(inputs, "input"), model=model, api_base=api_base, store=store)
    fields = dict(prediction.items())
    if as_json:
        print_json(fields)
        return
    for key, value in fields.items():
        if key != "steps":
            click.echo(f"{key}: {value}")
    for step in fields.get("steps", []):
        result = step["result"] if step["error"] is None else f"error: {step['error']}"
        click.echo(f"  {step['tool']}({', '.join(map(str, step['arguments'].values()))}) = {result}")
