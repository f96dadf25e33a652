"""`assay registry`: versions of agents."""

import json
import time
from dataclasses import asdict
from typing import Any

import click

from assay.cli.shared import json_option, open_store, print_json, store_option

__all__ = ["command"]


@click.group("registry")
def command() -> None:
    """Manage versions of agents, their aliases and feature flags."""


@command.command("register")
@click.argument("agent")
@click.argument("artifact", type=click.Path())
@click.option("--parent", metavar="VERSION", help="Version that the new one was made from, such as support@1.")
@click.option("--alias", help="Alias to set to the new version.")
@click.option("--tenant", help="Tenant that the version belongs to.")
@store_option()
@json_option()
def register_command(agent: str, artifact: str, store: str | None, as_json: bool, **more: str | None) -> None:
    """Register the folder ARTIFACT as the next version of AGENT. The first version becomes its champion."""
    from assay.api.registry import register

    version = register(agent, artifact, store=store, **more).to_dict()
    print_json(version) if as_json else click.echo(
        f"{version['name']}  {version['sha256'][:12]}  {version['artifact']}"
    )


@command.command("list")
@click.argument("agent", required=False)
@store_option()
@json_option()
def list_command(agent: str | None, store: str | None, as_json: bool) -> None:
    """List the versions of AGENT, or of all agents: name, time, model, aliases, artifact."""
    from assay.api.registry import agent_versions

    open_store(store).close()
    rows = agent_versions(agent, store=store)
    if as_json:
        print_json({"versions": rows})
        return
    if not rows:
        click.echo("no agent is registered; assay registry register AGENT ARTIFACT registers one", err=True)
    for row in rows:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["registered_at"]))
        click.echo(f"{row['name']:24} {at}  {row['model']:28} {', '.join(row['aliases']) or '–':22} {row['artifact']}")


@command.command("show")
@click.argument("version")
@store_option()
@json_option()
def show_command(version: str, store: str | None, as_json: bool) -> None:
    """Show VERSION (AGENT@NUMBER, AGENT@ALIAS, or AGENT for its champion), and the history of its agent."""
    from assay.api.registry import show_version

    open_store(store).close()
    data = show_version(version, store=store)
    if as_json:
        print_json(data)
        return
    for name in ("name", "artifact", "sha256", "model", "adapters", "parent", "tenant", "registered_by"):
        if data[name] not in (None, [], ()):
            click.echo(f"{name}: {data[name]}")
    click.echo(f"evidence: {json.dumps(data['evidence'], default=str)[:2000]}")
    for change in data["alias_history"]:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(change["at"]))
        click.echo(f"{at}  {change['alias']} = {change['agent']}@{change['number']}  {change['by']}: {change['why']}")
    for name, value in data["flags"].items():
        click.echo(f"flag {name} = {value}")


@command.command("alias")
@click.argument("version")
@click.argument("alias")
@click.option("--why", default="", help="Reason, stored in the history.")
@store_option()
@json_option()
def alias_command(version: str, alias: str, why: str, store: str | None, as_json: bool) -> None:
    """Set ALIAS (champion, previous, or your own name) to VERSION."""
    from assay.api.registry import set_agent_alias

    open_store(store).close()
    named = set_agent_alias(version, alias, why=why, store=store)
    print_json({"alias": alias, "version": named.name}) if as_json else click.echo(f"{alias} = {named.name}")


@command.command("flag")
@click.argument("agent")
@click.argument("name")
@click.argument("value", required=False)
@click.option("--why", default="", help="Reason, stored in the history.")
@store_option()
@json_option()
def flag_command(agent: str, name: str, value: str | None, why: str, store: str | None, as_json: bool) -> None:
    """Set the flag NAME of AGENT to VALUE; without VALUE remove it. It holds within a second, without a restart.

    Flags: kill (true: everything to the champion), percentage (share of the candidate), pin:unit:NAME and
    pin:tenant:NAME (a version's number), exclude:unit:NAME and exclude:tenant:NAME (true).
    """
    from assay.api.registry import set_agent_flag

    open_store(store).close()
    flags = set_agent_flag(agent, name, _value(value), why=why, store=store)
    print_json({"flags": flags}) if as_json else click.echo(f"flags: {json.dumps(flags)}")


@command.command("suite")
@click.argument("agent")
@click.option("--data", metavar="D", help="Tasks of the suite: a file or a spec. Their val split is run.")
@click.option("--rubric", metavar="R", help="Rubric of the suite: a YAML file or a shipped name.")
@click.option("--threshold", default=0.0, show_default=True, help="Mean score that a candidate must reach.")
@click.option("--pass-rate", default=0.0, show_default=True, help="Share of the tasks that a candidate must pass.")
@click.option("--pass-at", default=0.5, show_default=True, help="Score at which a task is passed.")
@click.option("--why", default="", help="Reason, stored in the history.")
@store_option()
@json_option()
def suite_command(
    agent: str, data: str | None, rubric: str | None, store: str | None, as_json: bool, **more: Any
) -> None:
    """Set the validation suite that every candidate of AGENT must pass; without --data and --rubric remove it."""
    from assay.api.registry import set_agent_suite

    open_store(store).close()
    suite = set_agent_suite(agent, data, rubric, store=store, **more)
    shown = None if suite is None else asdict(suite)
    print_json({"suite": shown}) if as_json else click.echo(f"validation suite of {agent}: {json.dumps(shown)}")


@command.command("route")
@click.argument("agent")
@click.option("--version", "versions", type=int, multiple=True, help="Number of a version; give at least two.")
@click.option("--floor", default=0.05, show_default=True, help="Smallest probability of a version.")
@click.option("--cost-weight", default=0.0, show_default=True, help="Score that a dollar of cost is worth.")
@click.option("--window-days", default=30.0, show_default=True, help="Rollouts of so many days count.")
@click.option("--remove", is_flag=True, help="Send everything to the champion again.")
@click.option("--why", default="", help="Why; kept in the history.")
@store_option()
@json_option()
def route_command(
    agent: str, versions: tuple[int, ...], remove: bool, store: str | None, as_json: bool, **more: Any
) -> None:
    """Let the measured quality per task type choose between versions of AGENT; without --version show the choice.

    Versions must have been champions. While a deployment is active it decides alone.
    """
    from assay.api.registry import routing, set_routing

    if versions and remove:
        raise click.UsageError("--version and --remove exclude each other")
    open_store(store).close()
    rows = set_routing(agent, versions, store=store, **more) if versions or remove else routing(agent, store=store)
    if as_json:
        print_json({"routing": rows})
        return
    for row in rows:
        score = "–" if row["score"] is None else f"{row['score']:.3f} of {row['n']}"
        click.echo(f"{row['task_type']:20} {row['version']:24} {row['probability']:6.1%}  {score}")


def _value(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text.lower())
    except ValueError:
        raise click.UsageError(f"{text!r} must be true, false or a number") from None


@command.command("diff")
@click.argument("a")
@click.argument("b")
@store_option()
@json_option()
def diff_command(a: str, b: str, store: str | None, as_json: bool) -> None:
    """Show what differs between the versions A and B: settings, model, data, prompts."""
    from assay.api.registry import diff_versions

    open_store(store).close()
    data = diff_versions(a, b, store=store)
    if as_json:
        print_json(data)
        return
    changes = {**data["changed"], **data["prompts"]}
    if not changes:
        click.echo("no difference in settings, model, data or prompts", err=True)
    for name, (before, after) in changes.items():
        click.echo(f"{name}\n  - {before}\n  + {after}")


@command.command("capabilities")
@click.argument("agent")
@store_option()
@json_option()
def capabilities_command(agent: str, store: str | None, as_json: bool) -> None:
    """Show the scores of AGENT's versions in production, per task type, with 95 % intervals."""
    from assay.api.registry import capabilities

    open_store(store).close()
    rows = capabilities(agent, store=store)
    if as_json:
        print_json({"capabilities": rows})
        return
    if not rows:
        click.echo(f"no rollout of {agent} in production so far", err=True)
    for row in rows:
        score = "–" if row["score"] is None else f"{row['score']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        click.echo(f"{row['version']:24} {row['task_type']:20} {score:24} {row['n']} scored, {row['unscored']} not")
