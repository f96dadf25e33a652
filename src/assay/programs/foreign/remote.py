"""Agents on other machines: the runner that leases tasks out, and the loop of `assay agent run`, which runs them."""

import http.client
import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from assay.errors import AssayError, ConfigError, NoJsonForm
from assay.programs.foreign.runners import AgentFailed, AgentRunner, AgentTask, RunnerLost
from assay.programs.wrapping import as_prediction
from assay.support.scrubbing import error_text
from assay.support.values import json_text, json_value

if TYPE_CHECKING:
    from assay.traces.gateway.routes import Leases

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
