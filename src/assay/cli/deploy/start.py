"""`assay deploy start`: checks a version and starts its rollout."""

from typing import Any

import click

from assay.cli.flags import command_settings, settings_flags
from assay.cli.options import dry_run_option, json_option, store_option, trust_option
from assay.cli.shared import Console, open_store, pop_values, print_json
from assay.runs.settings import StartSettings
from assay.support.numbers import counted, signed
from assay.support.terminal import echo


@click.command("start")
@click.argument("candidate")
@settings_flags(StartSettings)
@dry_run_option("Check the candidate, replay a few recorded rollouts, print the expected requests; start nothing.")
@store_option()
@trust_option()
@json_option()
def start_command(candidate: str, **values: Any) -> None:
    """Roll CANDIDATE (AGENT@NUMBER or AGENT@ALIAS) out in stages in place of the agent's champion.

    The assignment holds for users or conversations: serve the agent with assay serve --agent, or call
    assay.deployed(AGENT) in your process. The next step is taken as soon as the rules of the plan allow it: by assay
    serve --agent itself, otherwise by assay deploy advance.
    """
    from assay.api.deploy.start import start_deployment

    as_json, store, dry_run = pop_values(values, "as_json", "store", "dry_run")
    settings = command_settings(values, StartSettings)
    open_store(store).close()
    data = start_deployment(candidate, store=store, dry_run=dry_run, progress=Console(), **settings).to_dict()
    if as_json:
        print_json(data)
        return
    for name, label in (("breaks", "breaks"), ("changes", "changes"), ("unchecked", "not checked:")):
        for text in data[name]:
            echo(f"{label} {text}")
    if data["replays"]["n"]:
        echo(_replayed(data["replays"]))
    if data["suite"] is not None:
        suite = data["suite"]
        score = "unscored" if suite["score"] is None else f"{suite['score']:.3f}"
        echo(f"validation suite: {score}, {suite['pass_rate']:.1%} of {counted(suite['n'], 'tasks')} passed")
    for name, report in data["expected"].items():
        steps = ", ".join(f"{count:,.0f}" for count in report["step_requests"])
        cut = report["rules"].get("requests", 0)
        cut_off = f", {cut} of them cut off undecided because the plan is long" if cut else ""
        echo(
            f"a candidate that is {'better by twice the goal' if name == 'better' else 'as good'}: promoted in "
            f"{report['promoted']:.0%}, rolled back in {report['rolled_back']:.0%}, after a median of "
            f"{report['requests_median']:,.0f} rollouts; by step: {steps} "
            f"({report['runs']} simulated deployments{cut_off}; base rate 0.7)"
        )
    for text in data["not_tried"]:
        echo(f"not tried: {text}")
    if data["deployment"]:
        agent = candidate.partition("@")[0]
        echo(f"started: {data['deployment']}; its state: assay deploy status {agent}")
        echo(
            f"assay serve --agent {agent} takes the next steps by itself; where no gateway serves the agent, "
            f"assay deploy advance {agent} does"
        )


def _replayed(replays: dict[str, Any]) -> str:
    """One line about the recorded rollouts that the candidate ran."""
    text = f"replayed {replays['n']} recorded rollouts: {replays['answered']} answered"
    if replays["answered"]:
        text += ", with all recorded outputs" if not replays["missing"] else ", some without recorded outputs"
    if (gain := replays["gain"]) is None:
        return f"{text}; not scored"
    return (
        f"{text}; score {replays['champion']:.3f} recorded, {replays['candidate']:.3f} replayed, difference "
        f"{signed(gain['mean'])} [{signed(gain['low'])}, {signed(gain['high'])}], n={gain['n']}"
    )
