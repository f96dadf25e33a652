"""`assay deploy status`, `advance`, `pause`, `resume`, `promote`, `rollback`, `history`."""

import time
from typing import Any

import click

from assay.cli.flags import command_settings, drop_unused_judge, settings_flags
from assay.cli.options import dry_run_option, json_option, reason_option, rubric_option, store_option, trust_option
from assay.cli.shared import Console, open_store, print_json, show_judges
from assay.cli.wording import in_flags
from assay.runs.settings import AdvanceSettings
from assay.support.numbers import counted
from assay.support.terminal import echo


@click.command("status")
@click.argument("deployment")
@store_option()
@json_option()
def status_command(deployment: str, store: str | None, as_json: bool) -> None:
    """Show where DEPLOYMENT (an id, or an agent) stands, and the decision that its numbers give now."""
    from assay.api.deploy.status import deployment_status

    open_store(store).close()
    _show(deployment_status(deployment, store=store).to_dict(), as_json)


@click.command("advance")
@click.argument("deployment")
@rubric_option("Rubric that scores rollouts without a score, and those that a shadow step replays.")
@settings_flags(AdvanceSettings)
@dry_run_option("Print the decision; write nothing.")
@store_option()
@trust_option()
@json_option()
def advance_command(
    deployment: str, rubric: str | None, dry_run: bool, store: str | None, as_json: bool, **values: Any
) -> None:
    """Evaluate DEPLOYMENT and take its next step if one is due. It may be called at any time."""
    from assay.api.deploy.status import advance_deployment

    settings = command_settings(values, AdvanceSettings, project=rubric is not None)
    drop_unused_judge(settings)
    open_store(store).close()
    report = advance_deployment(deployment, rubric=rubric, dry_run=dry_run, store=store, progress=Console(), **settings)
    _show(report.to_dict(), as_json)


def _show(data: dict[str, Any], as_json: bool) -> None:
    from assay.deployment.readings import stated

    if as_json:
        print_json(data)
        return
    echo(
        f"{data['agent']}@{data['candidate']} in place of {data['agent']}@{data['champion']}: {data['status']}, step "
        f"{data['step']} of {data['steps']} ({data['stage']}), {data['share']:.0%} on the candidate"
    )
    for arm, values in data["arms"].items():
        unscored = f", {values['unscored']} unscored" if values["unscored"] else ""
        score = (
            "–"
            if values["score"] is None
            else (f"{values['score']:.3f}, lower bound {values['low']:.3f}, upper bound {values['high']:.3f}")
        )
        echo(f"  {arm:9} {counted(values['n'], 'rollouts'):>15}{unscored}  {score}")
    for reading in data["readings"]:
        champion, candidate, gain, low, high = (
            "–" if (value := reading[name]) is None else f"{value:{sign}.3f}"
            for name, sign in (("champion", ""), ("candidate", ""), ("gain", "+"), ("low", "+"), ("high", "+"))
        )
        echo(
            f"  {reading['metric']}: champion {champion}, candidate {candidate}, gain {gain}, lower bound {low}, "
            f"upper bound {high}"
            f"{stated(reading['missing_by'])}"
        )
    if data["variance_removed"] is not None:
        echo(f"  the covariate removed {data['variance_removed']:.0%} of the variance of the difference")
    show_judges(data["judges"])
    waits = data["decision"] == "continue" and data["status"] != "running"
    decision = f"last decision ({data['rule']})" if waits else f"decision: {data['decision']} ({data['rule']})"
    echo(f"{decision}: {in_flags(data['reason'])}")


@click.command("history")
@click.argument("deployment")
@store_option()
@json_option()
def history_command(deployment: str, store: str | None, as_json: bool) -> None:
    """List the decisions of DEPLOYMENT, oldest first: when, by whom, which rule, and why."""
    from assay.api.deploy.status import deployment_history

    open_store(store).close()
    rows = deployment_history(deployment, store=store)
    if as_json:
        print_json({"decisions": rows})
        return
    if not rows:
        echo("no decision so far", err=True)
    for row in rows:
        at = time.strftime("%m-%d %H:%M:%S", time.localtime(row["at"]))
        echo(f"{at}  step {row['stage'] + 1}  {row['action']:9} {row['rule']:13} {row['by']}: {row['reason']}")


_HELP = {
    "pause": "Pause DEPLOYMENT: the share does not change, and no step is taken.",
    "resume": "Continue a paused DEPLOYMENT.",
    "promote": "Make the candidate of DEPLOYMENT the champion now.",
    "rollback": "Roll DEPLOYMENT back to the champion, also after promotion.",
}


def _order(action: str) -> click.Command:
    @click.command(action, help=_HELP[action])
    @click.argument("deployment")
    @reason_option()
    @store_option()
    @json_option()
    def order(deployment: str, reason: str, store: str | None, as_json: bool) -> None:
        from assay.api.deploy.status import order_deployment

        open_store(store).close()
        ordered = order_deployment(deployment, action, reason=reason, store=store)
        if as_json:
            print_json({"deployment": ordered.id, "status": ordered.state.status, "share": ordered.share})
        else:
            echo(f"{ordered.id}: {ordered.state.status}, {ordered.share:.0%} on the candidate")

    return order


order_commands = tuple(map(_order, _HELP))
