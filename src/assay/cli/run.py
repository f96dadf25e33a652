"""`assay run`: one prediction."""

from typing import Any

import click

from assay.cli.shared import pairs, print_json

__all__ = ["command"]


@click.command("run")
@click.argument("program")
@click.argument("inputs", nargs=-1, required=True)
@click.option("--model", help="Language model; by default the one the artifact was compiled for.")
@click.option("--api-base", help="Address of an OpenAI-compatible server for --model.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")
def command(program: str, inputs: tuple[str, ...], model: str | None, api_base: str | None, as_json: bool) -> None:
    """One prediction of PROGRAM (an artifact's folder or a program's name) on INPUTS, each NAME=VALUE."""
    import logging

    logging.getLogger("dspy").setLevel(logging.ERROR)
    import dspy

    from assay.deployment.artifact import is_artifact, load_artifact
    from assay.errors import ConfigError
    from assay.models import get_lm
    from assay.programs import load_program, program_inputs

    given = pairs(inputs, "input")
    artifact = load_artifact(program) if is_artifact(program) else None
    built: Any = artifact.runnable() if artifact else load_program(program)
    wanted = program_inputs(artifact.program if artifact else built)
    if wanted is not None and set(given) != set(wanted):
        raise ConfigError(f"{program} takes the inputs {wanted}, got {sorted(given)}")
    name = model or (artifact.manifest["model"] if artifact else "embedded/smollm2-135m")
    client: dict[str, Any] = {"api_base": api_base} if api_base else {}
    with dspy.context(lm=get_lm(name, **client)):
        prediction = built(**given)
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
