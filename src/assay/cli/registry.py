"""`assay registry`: versions of agents."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import click

from assay.cli.flags import command_settings, settings_flags
from assay.cli.options import json_option, reason_option, store_option
from assay.cli.shared import open_store, print_json
from assay.reports.results import result_lines
from assay.reports.texts import readable, setting_texts
from assay.runs.settings import RegisterSettings, RouteSettings, SuiteSettings
from assay.support.numbers import counted
from assay.support.terminal import echo

_EVIDENCE = 40  # printed lines of it


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The values in nested objects and lists, each with its path; a list of plain values is one of them."""
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from _leaves(part, f"{name} {key}".strip())
    elif isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
        for number, part in enumerate(value, 1):
            yield from _leaves(part, f"{name} {number}")
    else:
        yield from setting_texts({name: value})


def _say_unproven(version: dict[str, Any]) -> None:
    from assay.sources.artifact_files import unproven_note

    if (note := unproven_note(version["name"], version["evidence"])) is not None:
        echo(f"note: {note}", err=True)


@click.group("registry")
def command() -> None:
    """Manage versions of agents, their aliases and feature flags."""


@command.command("register")
@click.argument("agent")
@click.argument("artifact", type=click.Path())
@settings_flags(RegisterSettings)
@store_option()
@json_option()
def register_command(agent: str, artifact: str, store: str | None, as_json: bool, **values: Any) -> None:
    """Register the folder ARTIFACT as the next version of AGENT. The first version becomes its champion."""
    from assay.api.registry import register

    version = register(agent, artifact, store=store, **command_settings(values, RegisterSettings)).to_dict()
    _say_unproven(version)
    print_json(version) if as_json else echo(f"{version['name']}  {version['sha256'][:12]}  {version['artifact']}")


@command.command("list")
@click.argument("agent", required=False)
@store_option()
@json_option()
def list_command(agent: str | None, store: str | None, as_json: bool) -> None:
    """List the versions of AGENT, or of all agents: name, time, model, aliases, artifact."""
    from assay.api.registry import agent_versions

    open_store(store).close()  # here and below: an error if there is no store, instead of an empty one that is created
    rows = agent_versions(agent, store=store)
    if as_json:
        print_json({"versions": rows})
        return
    if not rows:
        echo("no agent is registered; assay registry register AGENT ARTIFACT registers one", err=True)
    for row in rows:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["registered_at"]))
        echo(f"{row['name']:24} {at}  {row['model']:28} {', '.join(row['aliases']) or '–':22} {row['artifact']}")
        _say_unproven(row)


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
            echo(f"{name}: {data[name]}")
    if data["problem"] is not None:
        echo(f"note: {data['problem']}", err=True)
    _say_unproven(data)
    if named := [alias for alias, number in data["aliases"].items() if number == data["number"]]:
        echo(f"aliases: {', '.join(named)}")
    evidence = dict(data["evidence"])
    result = evidence.get("result")  # of an artifact; a person may have registered anything
    lines = list(result_lines(result)) if isinstance(result, dict) else []
    if lines:
        del evidence["result"]
    lines += [f"{name}: {text}" for name, text in _leaves(evidence)]
    echo("evidence (--json has all figures):" if lines else "evidence: none")
    for line in lines[:_EVIDENCE]:
        echo(f"  {readable(line)[:200]}")
    if len(lines) > _EVIDENCE:
        echo(f"  and {counted(len(lines) - _EVIDENCE, 'more lines')}")
    for change in data["alias_history"]:
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(change["at"]))
        moved = f"= {change['agent']}@{change['number']}" if change["number"] else "removed"
        echo(f"{at}  {change['alias']} {moved}  {change['by']}: {change['why']}")
    for name, value in data["flags"].items():
        echo(f"flag {name} = {value}")


@command.command("alias")
@click.argument("version")
@click.argument("alias")
@reason_option()
@store_option()
@json_option()
def alias_command(version: str, alias: str, reason: str, store: str | None, as_json: bool) -> None:
    """Set ALIAS (champion, previous, or your own name) to VERSION."""
    from assay.api.registry import set_agent_alias, show_version

    open_store(store).close()
    named = set_agent_alias(version, alias, reason=reason, store=store)
    if (problem := show_version(named.name, store=store)["problem"]) is not None:
        echo(f"note: {problem}", err=True)
    _say_unproven(named.to_dict())
    print_json({"alias": alias, "version": named.name}) if as_json else echo(f"{alias} = {named.name}")


@command.command("flag")
@click.argument("agent")
@click.argument("name")
@click.argument("value", required=False)
@reason_option()
@store_option()
@json_option()
def flag_command(agent: str, name: str, value: str | None, reason: str, store: str | None, as_json: bool) -> None:
    """Set the flag NAME of AGENT to VALUE; without VALUE remove it. It holds within a second, without a restart.

    Flags: kill (true: everything to the champion), percentage (share of the candidate), pin:unit:NAME and
    pin:tenant:NAME (a version's number), exclude:unit:NAME and exclude:tenant:NAME (true).
    """
    from assay.api.registry import set_agent_flag

    open_store(store).close()
    flags = set_agent_flag(agent, name, _value(value), reason=reason, store=store)
    print_json({"flags": flags}) if as_json else echo(f"flags: {json.dumps(flags)}")


@command.command("suite")
@click.argument("agent")
@settings_flags(SuiteSettings)
@reason_option()
@store_option()
@json_option()
def suite_command(agent: str, reason: str, store: str | None, as_json: bool, **values: Any) -> None:
    """Set the validation suite that every candidate of AGENT must pass; without --data and --rubric show it."""
    from assay.api.registry import agent_suite, set_agent_suite

    settings = command_settings(values, SuiteSettings)
    remove = settings.pop("remove", False)
    if remove and settings:
        raise click.UsageError("--remove excludes the settings of a suite")
    open_store(store).close()
    if remove or settings:
        if not remove and settings.get("data") is None and settings.get("rubric") is None:
            raise click.UsageError("a threshold would have no effect without --data and --rubric")
        suite = set_agent_suite(agent, reason=reason, store=store, **settings)
    else:
        suite = agent_suite(agent, store=store)
    fields = None if suite is None else asdict(suite)
    if as_json:
        print_json({"suite": fields})
    elif fields is None:
        echo(f"{agent} has no validation suite")
    else:
        echo(f"validation suite of {agent}: {json.dumps(fields)}")


@command.command("route")
@click.argument("agent")
@settings_flags(RouteSettings)
@reason_option()
@store_option()
@json_option()
def route_command(agent: str, reason: str, store: str | None, as_json: bool, **values: Any) -> None:
    """Let the measured quality per task type choose between versions of AGENT; without --version show the choice.

    Versions must have been champions. An active deployment overrides it.
    """
    from assay.api.registry import routing, set_routing

    settings = command_settings(values, RouteSettings)
    versions, remove = settings.pop("versions", ()), settings.pop("remove", False)
    if versions and remove:
        raise click.UsageError("--version and --remove exclude each other")
    open_store(store).close()
    if versions or remove:
        rows = set_routing(agent, versions, reason=reason, store=store, **settings)
    else:
        rows = routing(agent, store=store)
    if as_json:
        print_json({"routing": rows})
        return
    if not rows:
        echo(f"{agent} has no routing: its champion gets all requests outside of a deployment", err=True)
    for row in rows:
        score = "–" if row["score"] is None else f"{row['score']:.3f} of {row['n']}"
        echo(f"{row['task_type']:20} {row['version']:24} {row['probability']:6.1%}  {score}")


def _value(text: str | None) -> Any:
    if text is None:
        return None
    try:
        return json.loads(text.lower())  # `True` and `FALSE` are typed too
    except ValueError:
        raise click.UsageError(f"{text!r} must be true, false or a number") from None


@command.command("diff")
@click.argument("a")
@click.argument("b")
@store_option()
@json_option()
def diff_command(a: str, b: str, store: str | None, as_json: bool) -> None:
    """Show what differs between the versions A and B: settings, model, data, prompts, code."""
    from assay.api.registry import diff_versions

    open_store(store).close()
    data = diff_versions(a, b, store=store)
    if as_json:
        print_json(data)
        return
    changes = {**data["changed"], **data["prompts"]}
    if not changes and not data["code"]["files"]:
        echo("no difference in settings, model, data, prompts or code", err=True)
    for name, (before, after) in changes.items():
        echo(readable(f"{name}\n  - {before}\n  + {after}"))
    _print_code(data)


def _print_code(data: Mapping[str, Any]) -> None:
    code = data["code"]
    if installed := [data[side] for side in ("a", "b") if code[side] is None]:
        echo(
            f"the code of {' and '.join(installed)} is installed and not in the artifact: it is not compared", err=True
        )
    for change in code["files"]:
        hashes = " -> ".join(sha256[:12] if sha256 else "missing" for sha256 in (change["a"], change["b"]))
        echo(f"code {readable(change['file'])}: {hashes}")
        if change["diff"]:
            echo(readable(change["diff"]))
        if change["left_out"]:
            echo(f"... {change['left_out']} more lines of the difference")


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
        echo(f"no rollout of {agent} in production so far", err=True)
    for row in rows:
        score = "–" if row["score"] is None else f"{row['score']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        echo(f"{row['version']:24} {row['task_type']:20} {score:24} {row['n']} scored, {row['unscored']} not")
