"""Runners of agents that were written with anything: in this process, as a command, or on other machines.

A runner executes an agent on a task and returns its answer. It does not serve models: the task has the base URL. A run
is checked several times a second, and ended by what the check raises. For other machines a runner leases tasks out, and
the loop of `assay agent run` runs them.
"""

import contextvars
import http.client
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol
from urllib.parse import urlsplit

from assay.errors import AssayError, ConfigError, NoJsonForm
from assay.programs.copies import FolderCopies
from assay.programs.wrapping import as_prediction
from assay.sources.modules import attribute_of
from assay.support.awaited import completed
from assay.support.names import nearest
from assay.support.scrubbing import error_text
from assay.support.systems import kill_group
from assay.support.values import json_text, json_value

if TYPE_CHECKING:
    from assay.traces.gateway.routes import Leases

_CHARS = 500  # of a standard error


class StandardError:
    """A pipe for a process to write to, of which the last characters are kept. Read it once, at the end."""

    def __init__(self) -> None:
        self._read, write = os.pipe()
        self.file: BinaryIO = os.fdopen(write, "wb", buffering=0)
        self._last = bytearray()
        self._reader = threading.Thread(target=self._keep, name="assay-stderr", daemon=True)
        self._reader.start()

    def _keep(self) -> None:
        while part := os.read(self._read, 1 << 16):
            self._last[:] = (self._last + part)[-4 * _CHARS :]  # bytes of so many characters
        os.close(self._read)

    def __enter__(self) -> "StandardError":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def tail(self) -> str:
        """The last characters that were written, at most 500."""
        self.file.close()  # the process has its own descriptor
        self._reader.join(0.2)  # ends with the process; what a living one has written is read by then
        return self._last.decode("utf-8", "replace").strip()[-_CHARS:]


# -- What an agent gets for a task, how its answer is read, and how it fails. Runs nothing.


MOST_BYTES = 1 << 20  # of an agent's standard output
TOO_MUCH = f"the agent printed more than {MOST_BYTES >> 20} MiB; its answer is what it prints"


class AgentFailed(RuntimeError):
    """The agent gave no answer: it raised, exited with an error, or printed something that cannot be read."""


class RunnerLost(ConnectionError):
    """The process that ran the agent ended, or its machine no longer sends requests. Never the agent's failure."""


@dataclass(frozen=True, kw_only=True)
class AgentTask:
    """A task as an agent gets it: as a mapping (`to_dict`), and in environment variables (`environment`).

    Attributes:
        id: of the task; its rollouts share it.
        rollout: id of this run.
        base_url: OpenAI's base URL, with `/v1`.
        api_key: valid for this run only.
        texts: for an agent that reads them from its task, by name; None for any other.
        files: contents of files, by path, for an agent that runs in a copy of its folder; not told to the agent.
    """

    id: str
    rollout: str
    inputs: dict[str, Any]
    model: str
    base_url: str
    api_key: str
    texts: dict[str, str] | None = None
    files: Mapping[str, str] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The document on the agent's standard input, and the argument of a callable."""
        left_out = {"files", *(["texts"] if self.texts is None else [])}
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def to_json(self) -> bytes:
        """`to_dict` as JSON."""
        return json_text(self.to_dict()).encode()

    def environment(self) -> dict[str, str]:
        """Variables that SDKs of OpenAI and Anthropic read, and the same under names of their own."""
        root = self.base_url.removesuffix("/v1")
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": self.api_key,
            "ASSAY_BASE_URL": self.base_url,
            "ASSAY_API_KEY": self.api_key,
            "ASSAY_MODEL": self.model,
            "ASSAY_TASK_ID": self.id,
            "ASSAY_ROLLOUT_ID": self.rollout,
        }


def answer_of_output(output: bytes) -> Any:
    """The answer in what a command printed: the JSON object of its last line, else the whole text.

    Raises:
        AgentFailed: nothing was printed, too much, or not UTF-8.
    """
    if len(output) > MOST_BYTES:
        raise AgentFailed(TOO_MUCH)
    try:
        text = output.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise AgentFailed(f"the agent printed bytes that are not UTF-8: {error}") from None
    if not text:
        raise AgentFailed("the agent exited with 0 and printed nothing; it must print its answer")
    try:
        fields = json.loads(text.splitlines()[-1], parse_constant=_not_json)
    except (ValueError, RecursionError):
        return text
    return fields if isinstance(fields, dict) else text


def _not_json(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def named_callable(agent: str) -> bool:
    """Whether an agent is named as `package.module:CALLABLE` or `path/file.py:CALLABLE`, and not a command."""
    module, colon, attribute = agent.rpartition(":")
    return bool(colon and module) and attribute.replace(".", "_").isidentifier() and not any(map(str.isspace, agent))


def command_of(agent: str) -> list[str]:
    """The words of a command. No shell is used.

    Raises:
        ConfigError: it is empty, or a quote is not closed.
    """
    try:
        words = shlex.split(agent)
    except ValueError as error:
        raise ConfigError(f"`agent={agent!r}` cannot be read as a command: {error}") from None
    if not words:
        raise ConfigError("`agent` is empty: give a command, or MODULE:CALLABLE")
    return words


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
        self._copies: FolderCopies | None = None
        self._lock = threading.Lock()

    def run(self, task: AgentTask, check: Callable[[], None]) -> Any:
        with (
            tempfile.TemporaryFile() as task_file, tempfile.TemporaryFile() as out, StandardError() as err,
            _texts_file(task.texts) as variables, self._placed(task.files) as (words, folder),
        ):  # fmt: skip
            task_file.write(task.to_json())
            task_file.seek(0)
            process = self._start(words, folder, {**task.environment(), **variables}, task_file, out, err.file)
            code = self._exit_code(process, out, check)
            stderr = err.tail()
            if code < 0:
                raise RunnerLost(f"the agent's process was killed by {_signal_name(-code)}; it said: {stderr!r}")
            if code:
                raise AgentFailed(f"the agent exited with {code}; it said: {stderr!r}")
            out.seek(0)
            return answer_of_output(out.read(MOST_BYTES + 1))

    @contextmanager
    def _placed(self, files: Mapping[str, str] | None) -> Iterator[tuple[list[str], Path | None]]:
        """The command and its working directory: a copy of this one, if the task has files."""
        if files is None:
            yield self.words, None
            return
        with self._lock:
            self._copies = self._copies or FolderCopies()
        with self._copies.used(files) as copy:
            yield self._copies.moved(self.words, copy), copy

    def _start(
        self, words: list[str], folder: Path | None, variables: Mapping[str, str], task_file: BinaryIO, out: BinaryIO,
        err: BinaryIO,
    ) -> "subprocess.Popen[bytes]":  # fmt: skip
        inherited = {name: value for name, value in os.environ.items() if name not in _KEYS}
        try:
            return subprocess.Popen(
                words,
                cwd=folder,
                stdin=task_file,
                stdout=out,
                stderr=err,
                env={**inherited, **variables},
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(
                f"`agent={shlex.join(self.words)!r}` cannot be started: {error.strerror or error}. Give a command, or "
                "MODULE:CALLABLE"
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
            kill_group(process)


@contextmanager
def _texts_file(texts: Mapping[str, str] | None) -> Iterator[dict[str, str]]:
    """The variable with a file that has the texts as a JSON object, if there are any."""
    if texts is None:
        yield {}
        return
    with tempfile.NamedTemporaryFile("w", suffix=".json", prefix="assay-texts-", encoding="utf-8") as file:
        file.write(json_text(dict(texts)))
        file.flush()
        yield {"ASSAY_TEXTS": file.name}


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
            raise ConfigError(f"`agent={agent!r}` is not a command: write 'python {agent}', or {words[0]}:FUNCTION")
        return CommandRunner(words)
    module, _, name = agent.rpartition(":")
    if module.endswith(".py") and not Path(module).is_file():
        raise ConfigError(f"`agent={agent!r}`: there is no file {module}")
    try:
        function = attribute_of(agent)
    except (ImportError, AttributeError) as error:
        if isinstance(error, AttributeError) and error.name == name and error.obj is not None:
            near = nearest(name, [other for other in vars(error.obj) if not other.startswith("_")])
            hint = f". Did you mean {near!r}?" if near else ""
            raise ConfigError(f"`agent={agent!r}`: {module} has no {name!r}{hint}") from error
        raise ConfigError(f"`agent={agent!r}` cannot be loaded: {error}") from error
    if not callable(function) or isinstance(function, type):
        kind = "a class" if isinstance(function, type) else type(function).__name__
        raise ConfigError(f"`agent={agent!r}` is {kind}; it must be a function of the task")
    return CallableRunner(function, environment=environment)


_REQUEST_S = 60.0  # that a request to the server may take
_RETRY_S = 1.0
_LONGEST_RETRY_S = 5.0
_LOST_AFTER = 3  # heartbeats: the trainer then gives the task to another runner, see `Leases`
_MOST_BYTES = 8 << 20  # of an answer: the gateway takes bodies of 10 MB


class RemoteRunner:
    """Gives each task to a runner that asked for one, and waits for its result."""

    def __init__(self, leases: "Leases") -> None:
        self.leases = leases

    def run(self, task: AgentTask, check: Callable[[], None]) -> Any:
        """As `AgentRunner.run`."""
        from assay.traces.gateway.routes import LostLease

        # the server's address is the runner's to know: it may reach it by another name
        document = {**json.loads(task.to_json()), "base_url": urlsplit(task.base_url).path}
        try:
            reply = self.leases.result(document, check)
        except LostLease as error:
            raise RunnerLost(str(error)) from None
        if "lost" in reply:
            raise RunnerLost(str(reply["lost"])[:1000])
        if "failed" in reply:
            raise AgentFailed(str(reply["failed"])[:1000])
        return reply["answer"]


class _Over(Exception):
    """The lease has ended: its result is not taken any more."""


class TaskServer:
    """The trainer's gateway, as a runner sees it.

    Raises:
        ConfigError: the address is none.
    """

    def __init__(self, url: str, key: str) -> None:
        if "://" not in url:
            raise ConfigError(f"`server={url!r}` is not a URL: write http://{url}")
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise ConfigError(f"`server={url!r}` must be the address that the trainer printed")
        self.url, self._key = url.rstrip("/").removesuffix("/v1"), key
        self.reached = time.monotonic()  # when it last answered

    def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float = _REQUEST_S) -> dict[str, Any] | None:
        """The answer to a request; None for an empty one.

        Raises:
            ConfigError: the key is wrong, or the address is none of a trainer's gateway.
            _Over: the lease has ended.
            OSError: the server cannot be reached, or a proxy answers in its place.
        """
        data = json_text(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        request = urllib.request.Request(self.url + path, data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                text = answer.read()
                reply = json.loads(text) if text else None
        except urllib.error.HTTPError as error:
            reply = error.read().decode("utf-8", "replace")[:300]
            if error.code == 410:
                self.reached = time.monotonic()
                raise _Over(reply) from None
            if error.code in (401, 403):
                raise ConfigError(
                    f"{self.url} refuses the key: `key` must be the trainer's `agent_key` (ASSAY_AGENT_KEY)"
                ) from None
            if error.code == 404:
                raise ConfigError(f"{self.url} leases no tasks: is it a trainer with `agent='remote'`?") from None
            raise ConnectionError(f"{self.url} answers with {error.code}: {reply}") from None
        except (http.client.HTTPException, ValueError) as error:
            raise ConnectionError(f"the answer of {self.url} cannot be read: {error_text(error)}") from None
        self.reached = time.monotonic()
        return reply


def work(
    runner: AgentRunner, server: TaskServer, *, patience_s: float, say: Callable[[str], None], tasks: int | None = None
) -> dict[str, int]:
    """Executes tasks of a server until it has gone for `patience_s`, or `tasks` are done. Returns counts by outcome.

    Args:
        say: gets a line for each task, and one when the server cannot be reached and when it is reached again.
    Raises:
        ConfigError: the key or the address is wrong, or the agent cannot be started.
        AssayError: the server was never reached.
    """
    name, counts, away = f"{socket.gethostname()}/{os.getpid()}", Counter[str](), False
    server.reached = time.monotonic()
    while tasks is None or counts.total() < tasks:
        try:
            leased = server.post("/assay/tasks/lease", {"runner": name})
            if away:
                away = False
                say(f"{server.url} is reached")
            if leased is not None:
                outcome = _execute(runner, server, leased, patience_s=patience_s, say=say)
                counts[outcome] += 1
                say(f"task {leased['task']['id']}: {outcome}")
        except _Over:
            counts["late"] += 1
            say("a task was given up by the server before its result came")
        except OSError as error:
            if time.monotonic() - server.reached > patience_s:
                if counts:
                    break  # the training has ended
                raise AssayError(
                    f"{server.url} cannot be reached: {_reason(error)}. Check the address, and that "
                    "`assay train … --agent remote` runs there"
                ) from None
            if not away:  # the trainer may start later than its runners
                away = True
                say(f"{server.url} cannot be reached: {_reason(error)}. Trying again for up to {patience_s:g} s")
            time.sleep(_RETRY_S)
    return dict(counts)


def _reason(error: Exception) -> str:
    """Why a request failed, without the wrapper of urllib."""
    cause = getattr(error, "reason", None)
    return error_text(cause if isinstance(cause, Exception) else error)


class _Heartbeats:
    """Tells the server that a task is still worked on."""

    def __init__(self, server: TaskServer, path: str, every_s: float) -> None:
        self._server, self._path, self._every_s = server, path, every_s
        self._heard = time.monotonic()
        self._next, self._failure = self._heard + every_s, ""

    def send(self) -> None:
        """Sends a heartbeat if one is due; after one that failed the next is due sooner."""
        if (now := time.monotonic()) < self._next:
            return
        try:
            self._server.post(f"{self._path}/alive", {}, timeout_s=max(_RETRY_S, self._every_s))
        except OSError as error:
            self._next, self._failure = time.monotonic() + min(_RETRY_S, self._every_s), _reason(error)
        else:
            self._heard, self._next, self._failure = time.monotonic(), now + self._every_s, ""

    @property
    def failing_since(self) -> float:
        """When the last one arrived, if the next one failed; else now."""
        return self._heard if self._failure else time.monotonic()

    def check(self) -> None:
        """As `send`.

        Raises:
            RunnerLost: none has arrived for so long that the server has given the task to another runner.
        """
        self.send()
        if time.monotonic() - self._heard > _LOST_AFTER * self._every_s:
            raise RunnerLost(f"no heartbeat arrived for {_LOST_AFTER * self._every_s:g} s: {self._failure}")


def _execute(
    runner: AgentRunner, server: TaskServer, leased: Mapping[str, Any], *, patience_s: float, say: Callable[[str], None]
) -> str:
    """Runs a task and sends its result; the outcome in a word."""
    path, document = f"/assay/tasks/{leased['lease']}", dict(leased["task"])
    task = replace(AgentTask(**document), base_url=server.url + document["base_url"])
    beats = _Heartbeats(server, path, leased["heartbeat_s"])
    try:
        answer = json_value(dict(as_prediction(runner.run(task, beats.check)).items()))
        result: dict[str, Any] = {"answer": answer}
        if (size := len(json_text(result))) > _MOST_BYTES:
            raise AgentFailed(f"the agent's answer has {size:,} bytes; at most {_MOST_BYTES:,} are sent")
    except NoJsonForm as error:  # of the agent's answer
        result = {"failed": str(error)}
    except (_Over, AssayError):
        raise
    except RunnerLost as error:
        result = {"lost": str(error)}
    except Exception as error:
        result = {"failed": error_text(error)}
    try:
        sent = _send_result(server, path, result, beats, patience_s=patience_s, say=say)
    except _Over:
        if "lost" not in result:
            raise
        sent = False  # the server knows
    return next(iter(result)).replace("answer", "done") if sent else "lost"


def _send_result(
    server: TaskServer, path: str, result: Mapping[str, Any], beats: _Heartbeats, *, patience_s: float,
    say: Callable[[str], None],
) -> bool:  # fmt: skip
    """Sends a result, again after a failure, for `patience_s`. Returns whether it arrived.

    Raises:
        _Over: the lease has ended.
    """
    since, pause, told = beats.failing_since, _RETRY_S / 4, False
    while True:
        try:
            server.post(f"{path}/result", result)
            return True
        except OSError as error:
            if time.monotonic() - since > patience_s:
                return False
            if not told:
                told = True
                say(f"a result cannot be sent: {_reason(error)}. Trying again for up to {patience_s:g} s")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_RETRY_S)
        with suppress(_Over):  # perhaps because the result has arrived: the next request says so
            beats.send()  # the lease must not end meanwhile
