"""`assay improve`: prompts and weights in turn."""

from functools import partial
from typing import Any

import click

from assay.cli.flags import command_job, settings_flags
from assay.cli.options import job_options, name_option
from assay.cli.repeat import words_of_run
from assay.cli.shared import Console, dry_run, pop_values, print_json, print_models, print_openings, require_coverage
from assay.cli.wording import in_flags, stop_note
from assay.datasets.rows import near_notes
from assay.runs.settings import ImproveSettings
from assay.support.terminal import rich_console


@click.command("improve")
@click.argument("program", required=False)
@settings_flags(ImproveSettings)
@name_option("Name of this improvement; its adapters are called NAME-1, NAME-2, …")
@job_options(dry_run=True, out="New folder to write the artifact to.")
def command(program: str | None, **values: Any) -> None:
    """Improve PROGRAM: prompts, then weights, then prompts again.

    Each step is kept only if it passes the gate; the sealed test is reported at the end. A reached cap ends the
    command with the best version so far; --resume with a higher cap continues. When new data arrives, run it again
    on the artifact with another name.
    """
    from assay.api.improve.run import improve

    as_json, store, out, resume, name, dry = pop_values(values, "as_json", "store", "out", "resume", "name", "dry_run")
    program, settings = command_job(values, program, ImproveSettings)
    for step in ("sft", "grpo"):
        if step in settings:  # by their flags in `assay train`
            settings[step] = {key.replace("-", "_"): value for key, value in settings[step].items()}
    if dry:
        return dry_run("improve", program, settings, as_json=as_json, store=store, name=None if resume else name)
    words = partial(words_of_run, "train", {"algorithm": "grpo"})  # its settings have the flags of `assay train grpo`
    report = improve(
        program, name=name, out=out, store=store, resume=resume, progress=Console(), words=words, **settings
    ).to_dict()
    if as_json:
        print_json(report)
    else:
        print_report(report)
    require_coverage(report)


def print_report(report: dict[str, Any]) -> None:
    from rich.table import Table

    from assay.reports.training import in_numbers, interval

    rich = rich_console()
    table = Table("step", "gate, paired 95 %", "", "model", title="steps")
    for step in report["steps"]:
        table.add_row(
            step["step"], interval(step["gate"]), "kept" if step["kept"] else "not kept", step.get("model", "")
        )
    rich.print(table)
    for step in report["steps"]:
        if step.get("note"):
            rich.print(f"note: {step['step']}: {in_flags(step['note'])}")
    for note in [
        *report["notes"],
        *near_notes(report["data"]),
        *stop_note(report["stopped"]),
    ]:
        rich.print(f"note: {in_flags(note)}")
    if report["test"]:
        table = Table("", "start", "end", "gain, paired 95 %", title=f"sealed tasks, {report['test']['before']['n']}")
        for row in in_numbers({"test": report["test"]}):
            table.add_row(*row)
        rich.print(table)
    elif not any(step["kept"] for step in report["steps"]):
        rich.print("no step was kept, so there is nothing to compare: the program is unchanged")
    print_openings(rich, report["test_openings"])
    print_models(rich, report)
    rich.print(f"model: {report['model']}\nartifact: {report['artifact']}", soft_wrap=True)
