"""Runners: execute an agent on a task, in this process or as a command, and return its answer.

Do not serve models: the task has the base URL. A run is checked several times a second, and ended by what the check
raises.
"""

import contextvars
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from assay.errors import ConfigError
from assay.programs.foreign.tasks import (
    MOST_BYTES,
    TOO_MUCH,
    AgentFailed,
    AgentTask,
    RunnerLost,
    answer_of_output,
    command_of,
    named_callable,
)
from assay.programs.standard_error import StandardError
from assay.sources.modules import attribute_of
from assay.support.awaited import completed
from assay.support.settings import nearest

__all__ = ["AgentRunner", "CallableRunner", "CommandRunner", "runner_of"]

CHECK_S = 0.1  # longest time between two checks
_KEYS = ("ASSAY_KEY", "ASSAY_AGENT_KEY", "ASSAY_UPSTREAM_KEY")  # with them an agent could set its own reward


class AgentRunner(Protocol):
    """Executes an agent."""

    def run(self, task: AgentTask, check: Callable[[], None]) -> Any:
        """The agent's answer.

        Args:
            check: called at least every `CHECK_S` seconds; the run ends with what it raises.
        Raises:
            AgentFailed: the agent gave no answer.
            RunnerLost: the process that ran it is gone; another run may succeed.
            ConfigError: the agent cannot be started at all.
        """


class CallableRunner:
    """Calls a function with the task as a mapping, in a thread of this process.

    A call after its time limit keeps its thread: Python cannot end one. Its calls to the model are refused.

    Args:
        environment: sets the variables of the task in this process. Only for one run at a time.
    """

    def __init__(self, function: Callable[[dict[str, Any]], Any], *, environment: bool = False) -> None:
        self.function, self._sets_environment = function, environment

    def __deepcopy__(self, memo: object) -> "CallableRunner":
        return self

    def run(self, task: AgentTask, check: Callable[[], None]) -> Any:
        results: list[Any] = []
        errors: list[BaseException] = []
        if self._sets_environment:
            os.environ.update(task.environment())

        def work() -> None:
            try:
                results.append(completed(self.function(task.to_dict())))
            except BaseException as error:  # raised again in the waiting thread
                errors.append(error)

        # a context of its own: the agent's calls of other models are none of this rollout's
        thread = threading.Thread(target=contextvars.Context().run, args=(work,), name="assay-agent", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(CHECK_S)
            check()
        if errors:
            if isinstance(errors[0], Exception):
                raise errors[0]
            raise AgentFailed(f"the agent ended itself with {type(errors[0]).__name__}: {errors[0]}") from errors[0]
        if results[0] is None:
            raise AgentFailed("the agent returned None; it must return its answer")
        return results[0]


class CommandRunner:
    """Starts a command per task: the task as JSON on standard input, its answer from standard output.

    It runs in a process group of its own, which is killed when the run ends, however it ends. Of its standard error the
    end is kept, for the message of a failure.
    """

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def run(self, task: AgentTask, check: Callable[[], None]) -> Any:
        with tempfile.TemporaryFile() as task_file, tempfile.TemporaryFile() as out, StandardError() as err:
            task_file.write(task.to_json())
            task_file.seek(0)

            def watch() -> None:
                check()
                err.shorten()

            code = self._exit_code(self._start(task.environment(), task_file, out, err.file), out, watch)
            stderr = err.tail()
            if code < 0:
                raise RunnerLost(f"the agent's process was killed by {_signal_name(-code)}; it said: {stderr!r}")
            if code:
                raise AgentFailed(f"the agent exited with {code}; it said: {stderr!r}")
            out.seek(0)
            return answer_of_output(out.read(MOST_BYTES + 1))

    def _start(
        self, variables: Mapping[str, str], task_file: BinaryIO, out: BinaryIO, err: BinaryIO
    ) -> "subprocess.Popen[bytes]":
        inherited = {name: value for name, value in os.environ.items() if name not in _KEYS}
        try:
            return subprocess.Popen(
                self.words,
                stdin=task_file,
                stdout=out,
                stderr=err,
                env={**inherited, **variables},
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(
                f"agent={shlex.join(self.words)!r} cannot be started: {error.strerror or error}. Give a command, or "
                "MODULE:CALLABLE",
                flag="--agent",
            ) from None

    def _exit_code(self, process: "subprocess.Popen[bytes]", out: BinaryIO, check: Callable[[], None]) -> int:
        try:
            while True:
                try:
                    return process.wait(CHECK_S)
                except subprocess.TimeoutExpired:
                    check()
                if os.fstat(out.fileno()).st_size > MOST_BYTES:
                    raise AgentFailed(TOO_MUCH)
        finally:
            _kill_group(process)


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Ends the process and what it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    process.wait()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def runner_of(agent: str, *, environment: bool = False) -> AgentRunner:
    """The runner of an agent by name: `MODULE:CALLABLE`, `path/file.py:CALLABLE`, or a command.

    Args:
        environment: see `CallableRunner`.
    Raises:
        ConfigError: there is no such callable, or the command cannot be read.
    """
    if not named_callable(agent):
        words = command_of(agent)
        if words[0].endswith(".py") and not shutil.which(words[0]):
            raise ConfigError(
                f"agent={agent!r} is no command: write 'python {agent}', or {words[0]}:FUNCTION", flag="--agent"
            )
        return CommandRunner(words)
    module, _, name = agent.rpartition(":")
    if module.endswith(".py") and not Path(module).is_file():
        raise ConfigError(f"agent={agent!r}: there is no file {module}", flag="--agent")
    try:
        function = attribute_of(agent)
    except (ImportError, AttributeError) as error:
        if isinstance(error, AttributeError) and error.name == name and error.obj is not None:
            near = nearest(name, [other for other in vars(error.obj) if not other.startswith("_")])
            hint = f". Did you mean {near!r}?" if near else ""
            raise ConfigError(f"agent={agent!r}: {module} has no {name!r}{hint}", flag="--agent") from error
        raise ConfigError(f"agent={agent!r} cannot be loaded: {error}", flag="--agent") from error
    if not callable(function) or isinstance(function, type):
        kind = "a class" if isinstance(function, type) else type(function).__name__
        raise ConfigError(f"agent={agent!r} is {kind}; it must be a function of the task", flag="--agent")
    return CallableRunner(function, environment=environment)
