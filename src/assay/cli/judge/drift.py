"""`assay judge drift`: a frozen set of verdicts, replayed."""

from typing import Any

import click

from assay.cli.flags import command_settings, is_artifact, settings_flags
from assay.cli.judge.tables import spent_text
from assay.cli.options import job_options
from assay.cli.shared import Console, pop_values, print_json, require_coverage
from assay.runs.settings import JudgeDriftSettings
from assay.support.terminal import rich_console


@click.command("drift")
@click.argument("judge")
@settings_flags(JudgeDriftSettings)
@job_options(resume=False)
def drift_command(judge: str, **values: Any) -> None:
    """Replay a frozen set of verdicts on JUDGE, and raise an alarm that names what changed. Exit code 1 on an alarm."""
    from assay.api.judge.drift import replay_anchors

    (as_json,) = pop_values(values, "as_json")
    values |= command_settings(values, JudgeDriftSettings, artifact=is_artifact(judge))
    data = replay_anchors(judge, progress=Console(), **values)
    if as_json:
        print_json(data)
    elif "frozen" in data:
        text = (
            f"froze {data['frozen']} verdicts in {data['anchors']}; "
            f"two runs differ by {data['noise']:.3f} of the scale; {spent_text(data)}"
        )
        rich_console().print(text)
    else:
        _show_drift(data)
    require_coverage(data)
    if data.get("alarms"):
        click.get_current_context().exit(1)


def _show_drift(data: dict[str, Any]) -> None:
    from assay.reports.cards import drift_facts  # imports numpy

    rich = rich_console()
    for name, (before, after) in data["changed"].items():
        rich.print(f"changed: {name}: {before} -> {after}")
    rich.print(drift_facts(data))
    for alarm in data["alarms"]:
        rich.print(f"ALARM: {alarm}")
    rich.print(f"{'drifted' if data['alarms'] else 'no drift'}; {spent_text(data)}")
