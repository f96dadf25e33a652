"""Agents of any framework, for trainings by reward: makes a program of one, and serves the policy to it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dspy

from assay.errors import ConfigError
from assay.evaluation import Progress
from assay.jobs.project_file import is_of_project
from assay.jobs.rl_settings import RLSettings
from assay.programs.foreign.agent import ForeignAgent
from assay.programs.foreign.remote import RemoteRunner
from assay.programs.foreign.runners import CallableRunner, runner_of
from assay.programs.loading import full_name
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
            raise ConfigError(f"`program={program!r}` must be a name, an artifact's path or a dspy.Module")
        return program if isinstance(program, dspy.Module) else full_name(str(program))
    if agent is None or program is not None:
        raise ConfigError("give either a `program` or an `agent` to train")
    if not isinstance(agent, str):
        return ForeignAgent(qualified_name(agent), CallableRunner(agent))
    return ForeignAgent(agent, RemoteRunner(Leases()) if agent == REMOTE else runner_of(agent))


@contextmanager
def serving(program: str | dspy.Module, store: Store, config: RLSettings, progress: Progress) -> Iterator[None]:
    """Inside, an agent can call the model of each of its runs. Does nothing for a program.

    Raises:
        ConfigError: settings of an agent for a program, or an address beyond loopback without a key.
    """
    if not isinstance(program, ForeignAgent):
        for name in config.changed("agent_model", "agent_key", "agent_listen"):
            if not is_of_project(name, getattr(config, name)):
                raise ConfigError("would have no effect: a program is trained, not an agent", field=name)
        yield
        return
    if config.prompt_format is not None and not is_of_project("prompt_format", config.prompt_format):
        raise ConfigError("would have no effect: an agent writes its prompts itself", field="prompt_format")
    host, port = address_of(config.agent_listen)
    accepts = [config.agent_model] if config.agent_model else []
    gateway = PolicyGateway(store, config.policy.model, host=host, port=port, key=config.agent_key, accepts=accepts)
    if isinstance(program.runner, RemoteRunner):
        if config.agent_key is None:
            raise ConfigError(
                "is required by runners on other machines: give the key that `assay agent run` sends", field="agent_key"
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
        raise ConfigError(f"must be HOST:PORT, such as 127.0.0.1:0, not {text!r}", field="agent_listen")
    return host.strip("[]"), int(port)
