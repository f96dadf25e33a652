"""`assay traces stats`: counts, tokens and dollars."""

from typing import Any

import click

from assay.cli.flags import command_settings, settings_flags
from assay.cli.options import json_option, store_option
from assay.cli.shared import open_store, print_json
from assay.runs.settings import OfRunSettings
from assay.support.numbers import calls_text, counted, price
from assay.support.terminal import echo


@click.command("stats")
@settings_flags(OfRunSettings)
@store_option()
@json_option()
def stats_command(store: str | None, as_json: bool, **values: Any) -> None:
    """Counts, tokens and dollars of the recorded rollouts.

    `unrecorded` counts LM calls that were made but could not be recorded; it is unknown where assay cannot detect them.
    """
    from assay.traces.store.counts import file_stats
    from assay.traces.store.location import store_file

    run_id = OfRunSettings(**command_settings(values, OfRunSettings)).run_id
    # A SQLite file is read without opening a `Store`, which loads SQLAlchemy.
    file = store_file(store)
    counts = file_stats(file, run_id) if file is not None else None
    if counts is None:
        with open_store(store) as opened:
            counts = opened.stats(run_id=run_id)
    if as_json:
        print_json(counts)
        return
    for label, text in _lines(counts):
        echo(f"{label:18} {text}")


def _lines(counts: dict[str, Any]) -> list[tuple[str, str]]:
    """Label with unit and value of each printed line."""

    def by(name: str) -> str:
        return ", ".join(f"{part} {count:,}" for part, count in counts[name].items()) or "–"

    if counts["unrecorded"] is None:
        calls = counted(counts["unrecorded_seen"], "LM calls")
        unrecorded = f"unknown, at least {calls} ({counts['unrecorded_reason']})"
    else:
        unrecorded = counted(counts["unrecorded"], "LM calls")
    complete = counts["unrecorded"] == 0
    unpriced = "a call has no known price" if complete else "LM calls that were not recorded have no price"
    mean = "–" if counts["mean_score"] is None else f"{counts['mean_score']:.3f}"
    cost = f"unknown: {unpriced}" if counts["cost_usd"] is None else price(counts["cost_usd"])
    made = calls_text(counts["transitions"] - counts["cached"], counts["cached"])
    return [
        ("rollouts", f"{counts['rollouts']:,}"), ("  by status", by("statuses")), ("  by split", by("splits")),
        ("  scored", f"{counts['scored']:,}, mean score {mean}"), ("LM calls", made),
        ("  failed", f"{counts['errors']:,}"),
        ("unrecorded", unrecorded),
        ("prompt tokens", f"{counts['prompt_tokens']:,} (calls from the cache included)"),
        ("completion tokens", f"{counts['completion_tokens']:,} (calls from the cache included)"),
        ("cost", cost),
    ]  # fmt: skip
