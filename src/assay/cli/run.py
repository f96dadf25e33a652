"""`assay run`: one prediction, or many from a file or standard input."""

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from assay.cli.shared import Console, json_option, pairs, print_json, program_endpoint

__all__ = ["command"]


@click.command("run")
@click.argument("program")
@click.argument("inputs", nargs=-1)
@click.option("--file", "file", metavar="FILE", help="Many inputs: JSON lines, one object a line; - for standard input.")
@click.option("--out", metavar="FILE", help="Where the predictions of --file go, JSON lines; by default standard output.")
@click.option("--model", help="Language model; by default the one the artifact was compiled for.")
@program_endpoint
@click.option("--store", help="Database of traces; by default .assay/assay.db or $ASSAY_STORE.")
@json_option()
def command(program: str, inputs: tuple[str, ...], file: str | None, out: str | None, as_json: bool, **options: Any) -> None:
    """Predictions of PROGRAM (an artifact's folder or a program's name); recorded.

    One on INPUTS, each NAME=VALUE, or one for each line of --file. A line that fails becomes an object with `error` and its
    `line`, and the exit code is 1.
    """
    import logging

    logging.getLogger("dspy").setLevel(logging.ERROR)
    if bool(inputs) == (file is not None):
        raise click.UsageError("give either inputs as NAME=VALUE, or --file FILE (- for standard input)")
    if file is not None:
        if _many(program, file, out, options):
            click.get_current_context().exit(1)
        return
    if out is not None:
        raise click.UsageError("--out goes with --file")
    from assay import api

    fields = dict(api.run(program, pairs(inputs, "input"), **options).items())
    if as_json:
        print_json(fields)
        return
    for key, value in fields.items():
        if key != "steps":
            click.echo(f"{key}: {value}")
    for step in fields.get("steps", []):
        result = step["result"] if step["error"] is None else f"error: {step['error']}"
        click.echo(f"  {step['tool']}({', '.join(map(str, step['arguments'].values()))}) = {result}")


def _many(program: str, file: str, out: str | None, options: dict[str, Any]) -> int:
    """Writes a line for each line; how many failed."""
    from assay import api
    from assay.errors import DataError

    if file != "-" and not Path(file).is_file():
        raise DataError(f"no such file: {file}")
    failed, console = 0, Console()
    total = None if file == "-" else sum(1 for _ in _lines(file))
    stdout = click.get_current_context().meta.get("stdout", sys.stdout)
    target: Any = open(out, "w", encoding="utf-8") if out else nullcontext(stdout)  # noqa: SIM115  (entered below)
    with api.predictor(program, **options) as predict, target as written, console.bar(f"run {program}", total) as advance:
        for number, line in _lines(file):
            row = _answer(predict, number, line)
            failed += "error" in row and "line" in row
            written.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            written.flush()
            advance(1)
    if failed:
        console.say(f"warning: {failed} lines failed; each has its error in the output")
    return failed


def _answer(predict: Any, number: int, line: str) -> dict[str, Any]:
    """The prediction for a line, or what was wrong with it: one line's failure must not end the others."""
    try:
        given = json.loads(line)
        if not isinstance(given, dict):
            raise ValueError(f"expected a JSON object, found {type(given).__name__}")
        return dict(predict(given.get("inputs") if isinstance(given.get("inputs"), dict) else given).items())
    except Exception as error:
        return {"line": number, "error": f"{type(error).__name__}: {error}"}


def _lines(file: str) -> Iterator[tuple[int, str]]:
    if file == "-":
        yield from ((number, line) for number, line in enumerate(sys.stdin, 1) if line.strip())
        return
    with open(file, encoding="utf-8") as opened:
        yield from ((number, line) for number, line in enumerate(opened, 1) if line.strip())
