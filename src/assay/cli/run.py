"""`assay run`: one prediction, or many from a file or standard input."""

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from assay.cli.flags import command_settings, is_artifact, settings_flags
from assay.cli.options import json_option, out_option, store_option, trust_option
from assay.cli.shared import Console, pairs, print_json, print_models
from assay.cli.wording import in_flags
from assay.runs.settings import CommonSettings, RunSettings
from assay.support.numbers import counted
from assay.support.scrubbing import error_text, results
from assay.support.terminal import echo, rich_console
from assay.support.values import json_text, json_value, value_text


@click.command("run")
@click.argument("program")
@click.argument("inputs", nargs=-1)
@click.option(
    "--file",
    "file",
    metavar="FILE",
    help="File of inputs: a .jsonl, .json, .csv or .parquet file; - for JSON lines on standard input.",
)
@out_option("File for the predictions of --file, as JSON lines; by default standard output.", "FILE")
@settings_flags(CommonSettings, only=("rename",), help={"rename": "Rename a column of --file."})
@settings_flags(RunSettings)
@store_option()
@trust_option()
@json_option()
def command(
    program: str, inputs: tuple[str, ...], file: str | None, out: str | None, as_json: bool, **options: Any
) -> None:
    """Run PROGRAM (an artifact's folder or a program's name) and record its calls.

    Makes one prediction from INPUTS, each NAME=VALUE, or one for each row of --file. Columns that are not inputs of the
    program are left out, except that a row's `id` is part of its prediction, and that its `data_subject`, `tenant`,
    `consent`, `metadata`, `task_type` and `split` are stored. A row that fails becomes an object with
    `error` and its `line`, and the exit code is 1.
    """
    import logging

    from assay.sources.artifact_files import unproven_note

    logging.getLogger("dspy").setLevel(logging.ERROR)
    if bool(inputs) == (file is not None):
        raise click.UsageError("give either inputs as NAME=VALUE, or --file FILE (- for standard input)")
    store, settings = options.pop("store"), command_settings(options, RunSettings, artifact=is_artifact(program))
    if (note := unproven_note(program)) is not None:
        echo(f"note: {note}", err=True)
    if file is not None:
        if _run_rows(program, file, out, pairs(options.pop("rename"), "--rename"), store, settings):
            click.get_current_context().exit(1)
        return
    if out is not None or options.pop("rename"):
        raise click.UsageError("--out and --rename go with --file")
    from assay.api.run import predictor
    from assay.errors import NoJsonForm, ProgramFailed
    from assay.traces.records import RUN_FIELDS

    _check_pairs(program, inputs)
    called, say = _Called(), (lambda _: None) if as_json else Console().say
    with predictor(program, folder=Path.cwd(), store=store, say=say, ended=called.add, **settings) as predict:
        prediction = predict(pairs(inputs, "input"))
    fields = json_value(dict(prediction.items()), placeholders=True)
    if as_json:
        print_json({**fields, **{name: value for name, value in called.to_dict().items() if name not in fields}})
    else:
        _print_fields(fields)
        called.show()
    try:
        json_value({name: value for name, value in prediction.items() if name not in RUN_FIELDS})
    except NoJsonForm as error:
        raise ProgramFailed(f"the answer is not whole: {error}. Return values that have one") from None


class _Called:
    """The LM calls of rollouts by model, shown if others than the rollouts' model answered."""

    def __init__(self) -> None:
        self.model, self.usages = "", list[Any]()

    def add(self, rollout: Any) -> None:
        from assay.traces.store.listing import added_up, usage_by_model

        self.model, self.usages = rollout.model, added_up([*self.usages, *usage_by_model(rollout.transitions)])

    @property
    def _report(self) -> dict[str, Any]:
        return {"model": self.model, "models": [asdict(usage) for usage in self.usages]}

    def to_dict(self) -> dict[str, Any]:
        from assay.reports.markdown import models_text

        return {"models": self._report["models"]} if models_text(self._report) else {}

    def show(self) -> None:
        """On standard error: standard output has the predictions."""
        print_models(rich_console(err=True), self._report)


def _print_fields(fields: dict[str, Any]) -> None:
    from assay.traces.records import RUN_FIELDS

    for key, value in fields.items():
        if key not in RUN_FIELDS:
            echo(f"{key}: {value_text(value)}")
    for step in fields.get("steps", []):
        result = step["result"] if step["error"] is None else f"error: {step['error']}"
        echo(f"  {step['tool']}({', '.join(map(str, step['arguments'].values()))}) = {result}")


def _check_pairs(program: str, inputs: tuple[str, ...]) -> None:
    """Refuses an input that is not NAME=VALUE with the names that the program takes."""
    from assay.api.run import inputs_of
    from assay.errors import AssayError

    wrong = next((text for text in inputs if "=" not in text or re.search(r"\s", text.partition("=")[0])), None)
    if wrong is None:
        return
    try:
        names = inputs_of(program)
    except AssayError:
        names = None
    if not names:
        raise click.UsageError(f"input {wrong!r} must be NAME=VALUE")
    values = [f"{names[0]}={wrong}", *(f"{name}=…" for name in names[1:])]
    takes = f"input {names[0]}" if len(names) == 1 else f"inputs {', '.join(names)}"
    raise click.UsageError(
        f"input {wrong!r} must be NAME=VALUE; {program} takes the {takes}. For example: "
        f"{shlex.join(['assay', 'run', program, *values])}"
    )


def _run_rows(
    program: str, file: str, out: str | None, rename: dict[str, str], store: str | None, settings: dict[str, Any]
) -> int:
    """Writes one line per row. Returns the number of failed rows."""
    from assay.api.run import predictor
    from assay.errors import DataError
    from assay.support.places import check_writable, no_such_file

    failed, console, called = 0, Console(), _Called()
    if file != "-" and ":" not in file and not Path(file).exists():
        raise DataError(no_such_file(file))
    if out:
        check_writable(out, "out", inputs=(file, program, program.rpartition(":")[0]))
    # Of a file all rows are read first: one that cannot be read, or lacks an input in all rows, is refused before
    # anything is run or written.
    total, columns = _surveyed(file, rename) if file != "-" and Path(file).is_file() else (None, None)
    stdout = click.get_current_context().meta.get("stdout", sys.stdout)
    rows = Path(file) if file != "-" and Path(file).is_file() else None
    with (
        predictor(
            program,
            columns=columns,
            folder=Path.cwd() if rows is None else rows.parent,
            rows=rows,
            outputs=(Path(out), _part(out)) if out else (),
            say=console.say,
            ended=called.add,
            store=store,
            **settings,
        ) as predict,
        _growing(out) if out else nullcontext(stdout) as written,
        console.bar(f"run {program}", total) as advance,
    ):
        for place, row in _rows(file):
            answer = _answer(predict, place, row, rename)
            failed += "error" in answer and "line" in answer
            echo(json_text(results(json_value(answer, placeholders=True))), file=written)
            advance(1)
    called.show()
    if failed:
        console.say(f"warning: {counted(failed, 'rows')} failed; each has its error in the output")
    return failed


@contextmanager
def _growing(out: str) -> Iterator[Any]:
    """A file to write line by line. Its name ends with `.part` until it is whole; so it does after a stop."""
    from assay.errors import WriteFailed

    place, part = Path(out), _part(out)
    if place.exists() and not place.is_file():  # a pipe
        part = place
    try:
        with open(part, "w", encoding="utf-8") as file:
            yield file
        part.replace(place)
    except OSError as error:
        reason = error.strerror or error
        raise WriteFailed(f"{out} cannot be written: {reason}. What was written before is in {part}") from error


def _part(out: str) -> Path:
    return Path(f"{out}.part")


def _surveyed(file: str, rename: dict[str, str]) -> tuple[int, set[str]]:
    """Number of rows of a file, and the names of all columns after renaming."""
    from assay.errors import DataError

    total, columns = 0, set[str]()
    for _, row in _rows(file):
        total += 1
        if isinstance(row, dict):  # an error is reported when the row's turn comes
            columns |= row.keys() | (row["inputs"].keys() if isinstance(row.get("inputs"), dict) else set())
    if not total:
        raise DataError(f"{file} has no rows")
    if columns and (missing := sorted(rename.keys() - columns)):
        raise DataError(f"{file}: there is no column {missing[0]!r} to rename; the rows have {sorted(columns)}")
    return total, {rename.get(name, name) for name in columns}


def _answer(predict: Any, place: str, row: Any, rename: dict[str, str]) -> dict[str, Any]:
    """The prediction for a row, or its error: a failed row does not stop the others."""
    from assay.datasets.splits import renamed
    from assay.errors import DataError

    try:
        if isinstance(row, DataError):
            raise row
        row = json_value(row)
        identity = {"id": row["id"]} if row.get("id") not in (None, "") else {}
        return {**identity, **dict(predict(renamed(row, rename, place), where=place).items())}
    except Exception as error:
        at = re.search(r"\d+$", place)
        return {"line": int(at[0]) if at else 0, "error": in_flags(error_text(error))}


def _rows(file: str) -> Iterator[tuple[str, Any]]:
    """Rows with their places. An invalid line of JSON is its error, so that the other lines are run."""
    from assay.datasets.files import attempted_rows, parsed_lines
    from assay.datasets.sources import iter_rows

    if file == "-":
        return parsed_lines(file, enumerate(sys.stdin, 1))
    return attempted_rows(Path(file), default=".jsonl") if Path(file).exists() else iter_rows(file)
