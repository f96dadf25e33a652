"""`assay judge score`: judges every row of a dataset."""

from typing import Any

import click

from assay.cli.flags import command_settings, is_artifact, settings_flags
from assay.cli.judge.tables import spent_text
from assay.cli.options import job_options, out_option
from assay.cli.shared import Console, pop_values, print_json, require_coverage
from assay.runs.settings import JudgeScoreSettings
from assay.support.numbers import counted
from assay.support.terminal import rich_console


@click.command("score")
@click.argument("judge")
@out_option("JSONL file to write, with one verdict per item.", "FILE")
@settings_flags(JudgeScoreSettings)
@job_options()
def score_command(judge: str, **values: Any) -> None:
    """Judge every row of a dataset, and print the mean value with its 95 % interval."""
    from assay.api.judge.score import score_rows

    (as_json,) = pop_values(values, "as_json")
    values |= command_settings(values, JudgeScoreSettings, artifact=is_artifact(judge))
    data = score_rows(judge, progress=Console(), **values)
    if as_json:
        print_json(data)
    else:
        _show_scores(data)
    require_coverage(data)


def _show_scores(data: dict[str, Any]) -> None:
    rich = rich_console()
    shares = ", ".join(f"{label} {count}" for label, count in data["verdicts"].items())
    several = (
        f" of {counted(data['rows'], 'rows')}; rows with the same content count once"
        if data["rows"] != data["n"]
        else ""
    )
    rich.print(f"{counted(data['n'], 'items')}{several}: {shares}; unscored {data['unscored']}")
    for reason in data["why_unscored"]:
        rich.print(f"note: unscored: {reason}")
    if data["interval"]:
        rich.print(
            "mean value {:.3f}, 95 % [{:.3f}, {:.3f}] by this judge".format(data["mean"], *data["interval"]),
        )
    if data["labelled"] > 0 and not data["corrected"]:
        cause = (
            "every item has one, so there is nothing to correct"
            if data["labelled"] == data["n"]
            else "this needs at least 20, and two items without a label"
        )
        rich.print(
            f"note: the mean is not corrected by the {counted(data['labelled'], 'items')} with human labels: {cause}",
        )
    if corrected := data["corrected"]:
        text = (
            f"corrected by {corrected['n_people']} human labels: {corrected['mean']:.3f}, 95 % "
            f"[{corrected['low']:.3f}, {corrected['high']:.3f}] "
            f"(raters alone {corrected['people_alone']:.3f}; weight of the verdicts {corrected['weight']:.2f})"
        )
        rich.print(text)
    if data["out"]:
        rich.print(f"verdicts: {data['out']}", soft_wrap=True)
    rich.print(spent_text(data))
