"""`assay agent`: runs somebody's agent for a trainer on another machine."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge

from assay.commands.groups import Reported
from assay.models.roles import check_address
from assay.support.options import Flag, Positive, function_of
from assay.support.report import Report

_KEY = "ASSAY_AGENT_KEY"


@dataclass(frozen=True, kw_only=True, repr=False)
class TasksExecuted(Report):
    """What an agent has done for a trainer.

    Attributes:
        tasks: number of tasks by outcome.
    """

    tasks: dict[str, int]

    def lines(self) -> Iterator[str]:
        yield "tasks: " + (", ".join(f"{count} {outcome}" for outcome, count in self.tasks.items()) or "none")


class RunAgent(Reported):
    """Execute tasks of a trainer with AGENT, a command or MODULE:CALLABLE, one at a time.

    The agent gets the task and the address of the policy as it does from the trainer itself; a callable can read
    the address from the environment too. Start one command for each task that is to run at the same time. It ends
    with the training.

    Raises:
        ConfigError: the key or the address is wrong, or the agent cannot be started.
        AssayError: the server was never reached.
    """

    agent: Annotated[str, Flag(key=False)] = field(kw_only=False)
    """A command, or MODULE:CALLABLE."""
    server: Annotated[str, Flag(metavar="URL")]
    """Address that the trainer printed."""
    key: Annotated[str, Flag(env=_KEY, key=False)]
    """The trainer's --agent-key, or $ASSAY_AGENT_KEY."""
    patience_s: Annotated[float, Ge(0), Flag(metavar="SECONDS")] = 60.0
    """Seconds without the server after which the command ends."""
    tasks: Annotated[Positive | None, Flag(key=False)] = None
    """Number of tasks after which the command ends."""

    def check(self) -> None:
        check_address(self.server, "server")

    def run(self) -> TasksExecuted:
        from assay.programs.runners import TaskServer, runner_of, work

        os.environ.pop(_KEY, None)  # no agent may reward itself
        runner, server = runner_of(self.agent, environment=True), TaskServer(self.server, self.key)
        say = self.reporter.say
        return TasksExecuted(tasks=work(runner, server, patience_s=self.patience_s, say=say, tasks=self.tasks))


run_agent = function_of(RunAgent, "run_agent")
