"""`assay agent`: runs somebody's agent for a trainer on another machine."""

import os
from typing import Any

import click

from assay.cli.flags import command_settings, settings_flags
from assay.cli.options import json_option, key_option
from assay.cli.shared import Console, print_json
from assay.runs.settings import AgentRunSettings


@click.group("agent")
def command() -> None:
    """Run an agent for a training (`assay train … --agent remote`)."""


@command.command("run")
@click.argument("agent")
@settings_flags(AgentRunSettings)
@key_option("The trainer's --agent-key, or $ASSAY_AGENT_KEY.", "ASSAY_AGENT_KEY", required=True)
@json_option()
def run(agent: str, key: str, as_json: bool, **values: Any) -> None:
    """Execute tasks of a trainer with AGENT, a command or MODULE:CALLABLE, one at a time.

    The agent gets the task and the address of the policy as it does from the trainer itself; a callable can read
    the address from the environment too. Start one command for each task that is to run at the same time. It ends
    with the training.
    """
    from assay.api.agent import run_agent

    settings = command_settings(values, AgentRunSettings)
    os.environ.pop("ASSAY_AGENT_KEY", None)  # no agent may reward itself
    console = Console()
    counts = run_agent(agent, key=key, progress=console, **settings)
    if as_json:
        print_json({"tasks": counts})
    console.say("tasks: " + (", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "none"))
