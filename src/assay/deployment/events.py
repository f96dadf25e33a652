"""Events of deployments and loops: webhooks and commands are called, in threads, with a time limit, after the decision.

An event is sent once. What could not be sent is counted and logged, and never delays or undoes a decision: the history
in the store has them all.
"""

import asyncio
import logging
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from assay.errors import ConfigError
from assay.support.scrubbing import add_secrets, error_text
from assay.support.settings import Settings, one_of, setting
from assay.support.values import json_text

EVENTS = ("promoted", "rolled_back", "paused", "next", "alarm", "fallback", "waiting", "failed")
_LOG = logging.getLogger("assay.events")
_WAITING = 1000  # events that wait for a hook, at most
_HEADERS = {"Content-Type": "application/json", "User-Agent": "assay"}


@dataclass(frozen=True, kw_only=True)
class Hook(Settings):
    """What is called on events: an address (POST with a JSON body) or a command (JSON on standard input)."""

    url: str | None = setting(None, "Address of a webhook, http or https.")
    url_env: str | None = setting(None, "Environment variable with the address, where it holds a secret.")
    command: Sequence[str] = setting((), "Command with its arguments; run without a shell.")
    events: Sequence[str] = setting(EVENTS, "Events that are sent.")
    timeout_s: float = setting(5.0, "Time limit in seconds.", gt=0, le=300)

    def __post_init__(self) -> None:
        super().__post_init__()
        if sum((self.url is not None, self.url_env is not None, bool(self.command))) != 1:
            raise ConfigError("a hook needs one of url, url_env and command")
        if self.url is not None and (
            urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).netloc
        ):
            raise ConfigError(f"url={self.url!r} must be an http or https address")
        for name in self.events:
            if name not in EVENTS:
                raise ConfigError(f"events={name!r} {one_of(name, EVENTS)}")

    @property
    def name(self) -> str:
        """For messages; without the path of an address, which may hold a secret."""
        return str(self.command[0]) if self.command else urlsplit(self.address or "").netloc or str(self.url_env)

    @property
    def address(self) -> str | None:
        return self.url if self.url_env is None else os.environ.get(self.url_env)

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value not in (None, (), [])}


class Notifier:
    """Sends events to hooks, each in a thread of its own, so that one that hangs delays no other.

    Attributes:
        sent: events that a hook has accepted.
        failed: those that it has not, or that found too many others waiting.
    """

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self.hooks, self.sent, self.failed = tuple(hooks), 0, 0
        self._lock = threading.Lock()
        self._queues: dict[int, queue.Queue[bytes | None]] = {}
        self._threads: list[threading.Thread] = []

    def notify(self, event: str, **fields: Any) -> None:
        """Hands an event over. Does not wait."""
        body = json_text({"event": event, "at": time.time(), **fields}).encode()
        for at, hook in enumerate(self.hooks):
            if event not in hook.events:
                continue
            with self._lock:
                if at not in self._queues:
                    self._queues[at] = queue.Queue(_WAITING)
                    thread = threading.Thread(target=self._sending, args=(hook, self._queues[at]), daemon=True)
                    self._threads.append(thread)
                    thread.start()
            try:
                self._queues[at].put_nowait(body)
            except queue.Full:
                self._count(hook, "too many events wait for it")

    def close(self, timeout_s: float | None = None) -> None:
        """Waits until the events are sent, at most `timeout_s`, by default the longest time limit of a hook."""
        limit = max((hook.timeout_s for hook in self.hooks), default=0.0) + 1 if timeout_s is None else timeout_s
        until = time.monotonic() + limit
        for waiting in self._queues.values():
            with suppress(queue.Full):
                waiting.put_nowait(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def to_dict(self) -> dict[str, int]:
        return {"sent": self.sent, "failed": self.failed}

    def _sending(self, hook: Hook, waiting: "queue.Queue[bytes | None]") -> None:
        while (body := waiting.get()) is not None:
            try:
                _run(hook, body) if hook.command else _post(hook, body)
            except Exception as error:  # whatever a server or a command does
                self._count(hook, error_text(error))
            else:
                with self._lock:
                    self.sent += 1

    def _count(self, hook: Hook, reason: str) -> None:
        with self._lock:
            self.failed += 1
        _LOG.warning("the event could not be sent to %s: %s", hook.name, reason)


def _post(hook: Hook, body: bytes) -> None:
    """One POST. The limit holds for all of it, also for a server that sends a byte from time to time."""
    import aiohttp

    if (address := hook.address) is None:
        raise ConfigError(f"the environment variable {hook.url_env} is not set")
    if hook.url_env is not None:
        add_secrets(address)

    async def post(url: str) -> int:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=hook.timeout_s)) as session,
            session.post(url, data=body, headers=_HEADERS, allow_redirects=False) as answer,
        ):
            return answer.status

    if not 200 <= (status := asyncio.run(post(address))) < 300:
        raise ConnectionError(f"status {status}")


def _run(hook: Hook, body: bytes) -> None:
    process = subprocess.Popen(
        list(hook.command), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        process.communicate(body, timeout=hook.timeout_s)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"not finished after {hook.timeout_s:g} s") from None
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # with its children
        process.wait()
    if process.returncode:
        raise RuntimeError(f"exit status {process.returncode}")
