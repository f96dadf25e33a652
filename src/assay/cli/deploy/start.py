"""`assay deploy start`: checks a version and starts its rollout."""

from typing import Any

import click

from assay.cli.flags import command_settings, settings_flags
from assay.cli.options import dry_run_option, json_option, store_option, trust_option
from assay.cli.shared import Console, open_store, pop_values, print_json
from assay.runs.settings import StartSettings

__all__ = ["start_command"]


@click.command("start")
@click.argument("candidate")
@settings_flags(StartSettings)
@dry_run_option("Check the candidate and print the expected requests; start nothing.")
@store_option()
@trust_option()
@json_option()
def start_command(candidate: str, **values: Any) -> None:
    """Roll CANDIDATE (AGENT@NUMBER or AGENT@ALIAS) out in stages in place of the agent's champion.

    The assignment holds for users or conversations: serve the agent with assay serve --agent, or call
    assay.deployed(AGENT) in your process. assay deploy advance takes the next step when the rules of the plan allow it.
    """
    from assay.api.deploy.start import start_deployment

    as_json, store, dry_run = pop_values(values, "as_json", "store", "dry_run")
    settings = command_settings(values, StartSettings)
    open_store(store).close()
    data = start_deployment(candidate, store=store, dry_run=dry_run, progress=Console(), **settings).to_dict()
    if as_json:
        print_json(data)
        return
    for name in ("breaks", "changes"):
        for text in data[name]:
            click.echo(f"{'breaks' if name == 'breaks' else 'changes'} {text}")
    if data["suite"] is not None:
        suite = data["suite"]
        score = "unscored" if suite["score"] is None else f"{suite['score']:.3f}"
        click.echo(f"validation suite: {score}, {suite['pass_rate']:.1%} of {suite['n']} tasks passed")
    for name, report in data["expected"].items():
        steps = ", ".join(f"{count:,.0f}" for count in report["step_requests"])
        click.echo(
            f"a candidate that is {'better by twice the goal' if name == 'better' else 'as good'}: promoted in "
            f"{report['promoted']:.0%}, rolled back in {report['rolled_back']:.0%}, after a median of "
            f"{report['requests_median']:,.0f} rollouts; by step: {steps} (simulated, base rate 0.7)"
        )
    if data["deployment"]:
        click.echo(f"started: {data['deployment']}; next: assay deploy status {candidate.partition('@')[0]}")
