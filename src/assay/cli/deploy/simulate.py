"""`assay deploy simulate`: how often a plan decides rightly."""

from typing import Any

import click

from assay.cli.flags import command_settings, settings_flags
from assay.cli.options import json_option
from assay.cli.shared import Console, pop_values, print_json
from assay.runs.settings import SimulateSettings
from assay.support.terminal import echo


@click.command("simulate")
@settings_flags(SimulateSettings)
@json_option()
def simulate_command(**values: Any) -> None:
    """Run a plan on simulated traffic with known truth, and count how often it promotes and rolls back.

    Decisions and assignment are those of production. Plan a deployment with it: --effect 0 shows the false promotions
    and rollbacks, --effect 0.25 how many requests a gain of a quarter takes.
    """
    from assay.api.deploy.start import simulate_plan

    (as_json,) = pop_values(values, "as_json")
    report = simulate_plan(progress=Console(), **command_settings(values, SimulateSettings))
    if as_json:
        print_json(report.to_dict())
        return
    for name in ("promoted", "rolled_back", "undecided"):
        share = getattr(report, name)
        echo(f"{name.replace('_', ' '):12} {share:6.1%} of {report.runs} simulated deployments")
    echo(
        f"median of live requests: {report.requests_median:,.0f}, {report.candidate_requests_median:,.0f} of them on "
        "the candidate"
    )
    echo("median by step: " + ", ".join(f"{count:,.0f}" for count in report.step_requests))
    echo("ended by: " + ", ".join(f"{rule} {count}" for rule, count in sorted(report.rules.items())))
