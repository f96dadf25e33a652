"""`assay traces forget`: delete the data of one person."""

from typing import Any

import click

from assay.cli.flags import command_settings, settings_flags
from assay.cli.options import json_option, store_option
from assay.cli.shared import open_store, print_json
from assay.runs.settings import TracesForgetSettings
from assay.support.numbers import counted
from assay.support.terminal import echo


@click.command("forget")
@click.argument("subject")
@settings_flags(TracesForgetSettings)
@store_option()
@json_option()
def forget_command(subject: str, store: str | None, as_json: bool, **values: Any) -> None:
    """Delete all rollouts of the data subject SUBJECT and what agents remember of them (facts of a memory), and list
    the exports and artifacts made from them, and rollouts and facts of others that quote or name them.

    --versions retire also takes the versions made from them out of use. A champion stays in production: deploy another.
    """
    from assay.api.traces import forget_subject

    open_store(store).close()  # refuses a store that does not exist, which `forget_subject` would create
    report = forget_subject(subject, store=store, **command_settings(values, TracesForgetSettings))
    if as_json:
        print_json(report)
        return
    echo(f"{counted(report['removed'], 'rollouts')} of {subject!r} removed")
    echo(
        f"{counted(report['facts_removed'], 'remembered facts')}, "
        f"{counted(report['prompts_emptied'], 'prompts')} of other rollouts that contained their tasks emptied, "
        f"{counted(report['cached_answers_removed'], 'cached answers')} removed"
    )
    if report["unowned_answers_removed"]:
        echo(
            f"{counted(report['unowned_answers_removed'], 'cached answers')} without a recorded request removed: "
            "whose they are is unknown"
        )
    for rollout in report["quoting_facts"]:
        echo(f"quotes a remembered fact about them: rollout {rollout}")
    for fact in report["naming_facts"]:
        echo(f"has their name, and is kept: fact {fact} about another person")
    for path in report["made_from_them"]:
        echo(f"made from them before: {path}")
    for run in report["runs_on_them"]:
        echo(f"ran on what was made from them: {run}")
    for table, count in report["emptied"]["rows"].items():
        echo(f"repeated their texts, which were erased: {count:,} of {table}")
    for path in report["emptied"]["files"]:
        echo(f"repeated their texts, which were erased: {path}")
    for path in report["holding"]:
        echo(f"holds a text of theirs, and is not changed: {path}")
    _show_unsearched(report["not_searched"])
    for row in report["versions"]:
        _show_version(row)


def _show_unsearched(left: dict[str, Any]) -> None:
    if left["short_texts"] or left["shared_texts"]:
        echo(
            f"not searched: {left['short_texts']:,} of their texts that are too short, {left['shared_texts']:,} that "
            "others wrote too"
        )
    if left["tasks_without_texts"]:
        tasks = counted(left["tasks_without_texts"], "tasks")
        echo(f"not searched: the texts of {tasks} whose inputs are not stored: never run, or erased before")
    for path in left["files"]:
        echo(f"not searched: {path}")
    for folder in left["models"]:
        echo(f"not known of what it was made: the model {folder}, which a training started from")
    if left["free_pages"]:
        echo("WARNING: the database is in use, so its free pages were not removed: repeat this later", err=True)


def _show_version(row: dict[str, Any]) -> None:
    aliases = f" ({', '.join(row['aliases'])})" if row["aliases"] else ""
    rolled_back = f"; its deployment {row['deployment']} is rolled back" if row["deployment"] else ""
    done = "retired" if row["retired"] else "holds their data"
    echo(f"{row['version']}{aliases}: {done}{rolled_back}")
    if row["is_champion"]:
        echo(
            f"WARNING: {row['version']} is the champion and stays in production with data of the erased person. Deploy "
            "a version without it, or set the alias champion",
            err=True,
        )
