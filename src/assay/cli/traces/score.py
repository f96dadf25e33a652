"""`assay traces score`: score stored rollouts by a rubric."""

from typing import Any

import click

from assay.cli.flags import command_settings, drop_unused_judge, settings_flags
from assay.cli.options import json_option, min_coverage_option, store_option, trust_option
from assay.cli.shared import Console, open_store, print_json, require_coverage
from assay.runs.settings import TracesScoreSettings
from assay.support.numbers import counted, price
from assay.support.terminal import echo


@click.command("score")
@settings_flags(TracesScoreSettings)
@min_coverage_option()
@trust_option()
@store_option()
@json_option()
def score_command(store: str | None, as_json: bool, **values: Any) -> None:
    """Score stored rollouts (of the gateway, or imported) by a rubric, step rewards included.

    A rollout on which a criterion could not be decided keeps the score it had, or stays unscored.
    """
    from assay.api.traces import score_rollouts

    settings = command_settings(values, TracesScoreSettings)
    drop_unused_judge(settings)
    open_store(store).close()  # refuses a store that does not exist, which `score_rollouts` would create
    report = score_rollouts(settings.pop("rubric"), store=store, progress=Console(), **settings)
    if as_json:
        print_json(report)
    else:
        _show(report)
    require_coverage(report)


def _show(report: dict[str, Any]) -> None:
    mean = "" if report["mean"] is None else f", mean {report['mean']:.3f}"
    echo(
        f"{counted(report['scored'], 'rollouts')} scored{mean}; {report['unscored']} could not be scored and are "
        "unchanged" + (f", {report['skipped']} already had a score" if report["skipped"] else "")
    )
    if report["calls"]:
        cost = "cost unknown" if report["cost_usd"] is None else price(report["cost_usd"])
        echo(f"judges: {counted(report['calls'], 'calls')}, {report['tokens']:,} tokens, {cost}")
    if by_rubric := report["skipped_of_other_rubrics"]:
        rubrics = ", ".join(f"{count} of {name or 'a rubric without a name'}" for name, count in by_rubric.items())
        echo(f"note: existing scores of other rubrics than {report['rubric']}: {rubrics}. --again replaces them")
    if report["running"]:
        verb = "is" if report["running"] == 1 else "are"
        echo(
            f"{counted(report['running'], 'rollouts')} {verb} still running and not scored. A gateway ends "
            f"rollouts when "
            "it is stopped, or --idle-s after their last call; assay traces close ends those of a killed gateway"
        )
