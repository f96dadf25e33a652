"""`assay judge audit`: tests a judge for known failure modes."""

from typing import Any

import click

from assay.cli.flags import command_settings, is_artifact, settings_flags
from assay.cli.judge.tables import spent_text
from assay.cli.options import job_options
from assay.cli.shared import Console, pop_values, print_json, require_coverage
from assay.cli.wording import in_flags
from assay.reports.cards import bias_text, required_words, tried_text
from assay.runs.settings import JudgeAuditSettings
from assay.support.numbers import counted
from assay.support.terminal import rich_console


@click.command("audit")
@click.argument("judge")
@settings_flags(JudgeAuditSettings)
@job_options(resume=False)
def audit_command(judge: str, **values: Any) -> None:
    """Test JUDGE for known failure modes. Exit code 1 if it fails one, for use in CI."""
    from assay.api.judge.audit import audit_judge
    from assay.errors import ModelError

    (as_json,) = pop_values(values, "as_json")
    values |= command_settings(values, JudgeAuditSettings, artifact=is_artifact(judge))
    try:
        data = audit_judge(judge, progress=Console(), **values)
    except ModelError as error:
        if as_json:
            print_json({"passed": None, "error": str(error)})
        raise
    if as_json:
        print_json(data)
    else:
        _show_audit(data)
    require_coverage(data)
    if not data["passed"]:
        click.get_current_context().exit(1)


def _show_audit(data: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    rich, table = (
        rich_console(),
        Table(
            title=f"audit: an attack is passed if at least {data['pass_at']:.0%} of its cases are right",
            title_justify="left",
        ),
    )
    for column in ("attack", "right", "cases", "verdicts moved", ""):
        table.add_column(column, justify="left" if column in ("attack", "") else "right")
    for name, entry in data["attacks"].items():
        moved = "" if entry["flip_rate"] is None else f"{entry['flip_rate']:.0%}"
        table.add_row(
            name,
            f"{entry['share']:.0%}",
            str(entry["n"]),
            moved,
            "passed" if entry["passed"] else Text("FAILED", style="bold"),
        )
    rich.print(table)
    for name, entry in data["biases"].items():
        rich.print(f"bias: {bias_text(name, entry)}")
    for note in data["notes"]:
        rich.print(f"note: {in_flags(note)}")
    for name in data["not_tried"]:
        reason = "in every case the text of the attack contains the right answer"
        if name == "truncation":
            reason = "for no good output is it known that its first half lacks the answer; add a column 'answer'"
        rich.print(f"note: {name} was not tried: {reason}")
    for alarm in data["flip_alarms"]:
        rich.print(f"alarm: {alarm}")
    for name, entry in data["attacks"].items():
        for wrong in [] if entry["passed"] else entry["wrong"][:1]:
            value = "none" if wrong["value"] is None else f"{wrong['value']:.2f}"
            rich.print(f"{name}: {wrong['output']!r} got {value}; required: {required_words(wrong)}")
    rich.print(tried_text(data))
    verdict = "passed" if data["passed"] else "FAILED"
    alarms = f" (alarms: {len(data['flip_alarms'])})" if data["flip_alarms"] else ""
    rich.print(
        f"{verdict}{alarms}; {counted(data['verdicts'], 'verdicts')}, {data['unscored']} unscored; {spent_text(data)}",
    )
