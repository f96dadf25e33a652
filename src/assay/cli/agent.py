"""`assay agent`: runs somebody's agent for a trainer on another machine."""

import os

import click

from assay.cli.shared import Console, json_option, print_json

__all__ = ["command"]


@click.group("agent")
def command() -> None:
    """Run an agent for a training (`assay train … --agent remote`)."""


@command.command("run")
@click.argument("agent")
@click.option("--server", required=True, metavar="URL", help="Address that the trainer printed.")
@click.option("--key", envvar="ASSAY_AGENT_KEY", required=True, help="The trainer's --agent-key, or $ASSAY_AGENT_KEY.")
@click.option(
    "--patience-s",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="Seconds without the server after which the command ends.",
)
@click.option("--tasks", type=click.IntRange(min=1), help="Number of tasks after which the command ends.")
@json_option()
def run(agent: str, server: str, key: str, patience_s: float, tasks: int | None, as_json: bool) -> None:
    """Execute tasks of a trainer with AGENT, a command or MODULE:CALLABLE, one at a time.

    The agent gets the task and the address of the policy as it does from the trainer itself; a callable can read
    the address from the environment too. Start one command for each task that is to run at the same time. It ends
    with the training.
    """
    from assay.programs.foreign.remote import TaskServer, work
    from assay.programs.foreign.runners import runner_of

    os.environ.pop("ASSAY_AGENT_KEY", None)  # no agent may reward itself
    console = Console()
    counts = work(
        runner_of(agent, environment=True), TaskServer(server, key), patience_s=patience_s, say=console.say, tasks=tasks
    )
    if as_json:
        print_json({"tasks": counts})
    console.say("tasks: " + (", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "none"))
