"""`assay collect`: groups of scored rollouts into the store."""

import json
from typing import Any

import click

from assay.cli.flags import command_job, settings_flags
from assay.cli.options import job_options
from assay.cli.shared import (
    Console,
    dry_run,
    pairs,
    pop_values,
    print_json,
    print_models,
    require_coverage,
    warn_of_failures,
    warn_of_gaps,
)
from assay.cli.wording import curriculum_lines, in_flags, stop_note
from assay.datasets.rows import near_notes
from assay.runs.settings import CollectSettings
from assay.support.numbers import calls_text, price
from assay.support.terminal import rich_console


@click.command("collect")
@click.argument("program", required=False)
@settings_flags(CollectSettings, sizes=())
@click.option("--temperatures", metavar="T,T…", help="Temperatures to cycle through over the rollouts of a task.")
@job_options(dry_run=True)
def command(program: str | None, **values: Any) -> None:
    """Run PROGRAM (a name or an artifact's folder) n times on each task, score every run, and keep them as groups in
    the store."""
    from assay.api.collect import collect
    from assay.errors import ModelError

    as_json, store, resume, dry, temperatures, over = pop_values(
        values, "as_json", "store", "resume", "dry_run", "temperatures", "over"
    )
    program, settings = command_job(values, program, CollectSettings)
    if turns := _turns(temperatures, over):
        settings["over"] = turns
    if dry:
        return dry_run("collect", program, settings, as_json=as_json, store=store)
    report = collect(program, store=store, resume=resume, progress=Console(), **settings)
    data = report.to_dict()
    if as_json:
        print_json(data)
    else:
        _show(program, data)
    if (reason := report.evaluation.why_unscored) is not None:
        raise ModelError(f"none of the {len(report.evaluation)} tasks could be scored: {reason}")
    require_coverage(data)


def _turns(temperatures: str | None, over: tuple[str, ...]) -> list[dict[str, Any]]:
    """All combinations of the values in `--over`; samples use them in turn."""
    import itertools

    turns = {name: text.split(",") for name, text in pairs(over, "--over").items()}
    if temperatures:
        turns["temperature"] = temperatures.split(",")
    try:
        read = {name: [json.loads(value) for value in texts] for name, texts in turns.items()}
    except json.JSONDecodeError as error:
        raise click.UsageError(
            f"{error.doc!r} is not a number: --temperatures 0.3,1.0 or --over max_steps=2,10"
        ) from None
    return [dict(zip(read, values, strict=True)) for values in itertools.product(*read.values())] if read else []


def _show(program: str, data: dict[str, Any]) -> None:
    from rich.table import Table

    rich, result = rich_console(), data["result"]
    table = Table(title=f"{program}: rollouts collected", title_justify="left", show_header=False)
    table.add_row("run", data["run"])
    table.add_row("rollouts, from earlier runs", f"{data['rollouts']}, {data['kept_from_before']}")
    table.add_row("tasks, groups with nonzero variance", f"{data['tasks']}, {data['groups_with_spread']}")
    table.add_row("mean score", "–" if result["score"] is None else f"{result['score']:.3f}")
    table.add_row("LM calls", calls_text(data["calls"], data["cached"]))
    table.add_row("tokens, dollars", f"{data['tokens']:,}, {price(data['cost_usd'])}")
    rich.print(table)
    print_models(rich, data)
    warn_of_failures(rich, result, is_error=True)
    warn_of_gaps(rich, data)
    for line in curriculum_lines(data["curriculum"]):
        rich.print(line)
    for note in [*data["notes"], *near_notes(data["data"]), *stop_note(data["stopped"])]:
        rich.print(f"note: {in_flags(note)}")
