"""Agents that were written with anything, for `assay.train`: makes a program of one, and serves the policy to it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dspy

from assay.errors import ConfigError
from assay.evaluation import Progress
from assay.programs.foreign.agent import ForeignAgent
from assay.programs.foreign.remote import RemoteRunner
from assay.programs.foreign.runners import CallableRunner, runner_of
from assay.programs.loading import full_name
from assay.runs.project_file import is_of_project
from assay.runs.settings import TrainSettings
from assay.sources.modules import qualified_name
from assay.traces import Store
from assay.traces.gateway.policy import PolicyGateway
from assay.traces.gateway.routes import Leases

REMOTE = "remote"  # the agent runs on machines that ask for tasks


def agent_program(agent: str | Callable[..., Any] | None, program: str | dspy.Module | None) -> str | dspy.Module:
    """The program to train: the given one, with the class in its name, or one that runs the agent.

    Raises:
        ConfigError: both were given, or neither; or the agent cannot be loaded.
    """
    if agent is None and program is not None:
        if not isinstance(program, str | Path | dspy.Module):
            raise ConfigError(f"program={program!r} must be a name, an artifact's path or a dspy.Module")
        return program if isinstance(program, dspy.Module) else full_name(str(program))
    if agent is None or program is not None:
        raise ConfigError("give either a program or an agent to train", flag="PROGRAM, --agent")
    if not isinstance(agent, str):
        return ForeignAgent(qualified_name(agent), CallableRunner(agent))
    return ForeignAgent(agent, RemoteRunner(Leases()) if agent == REMOTE else runner_of(agent))


@contextmanager
def serving(
    program: str | dspy.Module, store: Store, config: TrainSettings, key: str | None, progress: Progress
) -> Iterator[None]:
    """Inside, an agent can call the model of each of its runs. Does nothing for a program.

    Raises:
        ConfigError: settings of an agent for a program, or an address beyond loopback without a key.
    """
    if not isinstance(program, ForeignAgent):
        listens = config.changed("agent_listen") and not is_of_project("agent_listen", config.agent_listen)
        if config.agent_model is not None or key is not None or listens:
            raise ConfigError(
                "agent_model, agent_key and agent_listen would have no effect: a program is trained, not an agent"
            )
        yield
        return
    if config.prompt_format is not None and not is_of_project("prompt_format", config.prompt_format):
        raise ConfigError(
            f"prompt_format={config.prompt_format!r} would have no effect: an agent writes its prompts itself"
        )
    host, port = address_of(config.agent_listen)
    accepts = [config.agent_model] if config.agent_model else []
    gateway = PolicyGateway(store, config.policy.model, host=host, port=port, key=key, accepts=accepts)
    if isinstance(program.runner, RemoteRunner):
        if key is None:
            raise ConfigError(
                "runners on other machines need a key: set agent_key, and pass the same key to `assay agent run`",
                flag="--agent-key",
            )
        gateway.add_routes(program.runner.leases.add_to)
    program.gateway = gateway
    try:
        progress.say(f"{config.policy.model} is served to {program.name} at {gateway.address}/v1")
        yield
    finally:
        gateway.close()
        program.gateway = None


def address_of(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`.

    Raises:
        ConfigError: it is something else.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"agent_listen={text!r} must be HOST:PORT, such as 127.0.0.1:0", flag="--agent-listen")
    return host.strip("[]"), int(port)
