"""LM calls that no recorder receives: how many were seen, and why there may be others.

They are counted by hooks on the transports of the common SDKs, by class, also if imported later: `httpcore` (httpx,
openai, anthropic, litellm, mistralai, google-genai), `http.client` (urllib, requests, urllib3, boto3), `aiohttp` and
the transports of DSPy's own engine. A request counts as an LM call by its shape: POST to a path where language models
are served, with a prompt in its body if the body is visible. Clients that open their own sockets, and child processes,
cannot be inspected: if one is used, the count is unknown.
"""

import http.client
import importlib.abc
import importlib.machinery
import json
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

from assay.models.scope import accounted_calls, follow, having

_asking: ContextVar[tuple[Callable[[int], None], ...]] = ContextVar("assay_asking", default=())
_lock = threading.Lock()
_hooked = ["httpcore", "httpcore2", "aiohttp"]  # and the transports of DSPy, which is not imported for a count
_BLIND = ("curl_cffi", "pycurl", "niquests", "vertexai", "google.generativeai")  # clients in C or over gRPC
_PATH = re.compile(
    r"/(?:chat/completions|completions?|complete|infill|invocations|responses|responses/compact|messages|"
    r"threads(?:/[^/]+)?/runs|api/chat|api/generate|v\d/chat|generate|generate_stream|"
    r"converse|converse-stream|invoke|invoke-with-response-stream|predictions|text/chat|text/generation|"
    r"text-generation/generation|multimodal-generation/generation)$|"
    r"^/models/[^/]+/[^/]+$|/interactions$|"
    r":(?:generateContent|streamGenerateContent|rawPredict|streamRawPredict)$"
)
_NO_ANSWER = re.compile(
    r"/(?:count_tokens|tokenize|detokenize|embeddings?|rerank|moderations)$|"
    r":(?:countTokens|embedContent|batchEmbedContents)$"
)
_GATEWAY = re.compile(r"^/r/[^/]+/")  # a rollout's path at assay's gateway, which records the call
_KEYS = ("authorization", "x-api-key", "api-key", "x-goog-api-key")
_PROMPTS = (
    *("messages", "input", "inputs", "prompt", "contents", "anthropic_version", "inputText", "message"),
    *("sampling_params", "input_prefix", "assistant_id"),
)
_PROCESSES = frozenset({"subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork"})
_ASSAY_PROCESS = "assay-"  # prefix of the names of assay's own processes, which record their calls themselves
_SYSTEM_FACTS = ("platform", "distro", "uuid", "ctypes.util")  # run system tools to identify the system
_STANDARD = ("http.client", "urllib3.")  # clients that are hooked in the standard library


@dataclass(frozen=True)
class Unrecorded:
    """Number of unrecorded LM calls.

    Args:
        calls: Calls that were detected.
        reason: Why there may be more, which makes the count unknown; None if it is exact.
        refused: Recorded calls, of known price, whose row the store refused.
        lost: Calls that were counted before they were sent, and have no row because a process was killed.
    """

    calls: int = 0
    reason: str | None = None
    refused: int = 0
    lost: int = 0

    @property
    def seen(self) -> int:
        """The number of calls that are known."""
        return self.calls + self.refused + self.lost

    @property
    def count(self) -> int | None:
        """The number of calls; None if unknown."""
        return self.seen if self.reason is None else None

    def __add__(self, other: "Unrecorded") -> "Unrecorded":
        return Unrecorded(
            self.calls + other.calls, self.reason or other.reason, self.refused + other.refused, self.lost + other.lost
        )

    def __str__(self) -> str:
        least = f", at least {self.seen}" if self.seen else ""
        return str(self.seen) if self.reason is None else f"unknown ({self.reason}{least})"

    def cost(self, recorded_usd: float | None) -> float | None:
        """Cost of a run in dollars; None if it has unrecorded calls, because their price is unknown.

        Args:
            recorded_usd: Cost of the recorded calls.
        """
        return recorded_usd if self.calls == 0 and self.reason is None else None

    def priced(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Report of an evaluation with its `cost_usd` corrected by `cost`.

        Unrecorded calls cannot be assigned to a part of the run, so no part has a known cost.
        """
        return {**report, "cost_usd": self.cost(report["cost_usd"])}

    def to_dict(self) -> dict[str, Any]:
        """`unrecorded` (None if unknown, then also `unrecorded_seen` and `unrecorded_reason`)."""
        known: dict[str, Any] = {"unrecorded": self.count}
        return (
            known if self.reason is None else {**known, "unrecorded_seen": self.seen, "unrecorded_reason": self.reason}
        )


NOTHING = Unrecorded()


class UnrecordedCalls:
    """Count of a recorder, or of one of its rollouts.

    Args:
        before: Initial count.
        parent: Count of the recorder, to which the count of a rollout is added.
    """

    def __init__(self, before: Unrecorded = NOTHING, *, parent: "UnrecordedCalls | None" = None) -> None:
        self.total, self.parent = before, parent

    def add(self, calls: int) -> None:
        with _lock:
            for count in self._both():
                count.total = replace(count.total, calls=max(0, count.total.calls + calls))

    def hide(self, reason: str) -> None:
        """Mark the count as unknown. The first reason is kept."""
        with _lock:
            for count in self._both():
                count.total = replace(count.total, reason=count.total.reason or reason)

    def _both(self) -> "list[UnrecordedCalls]":
        return [self] if self.parent is None else [self, self.parent]

    def opened(self, current_count: "Callable[[], UnrecordedCalls | None]") -> "UnrecordedCalls":
        """Start the count of a rollout; it ends with `closed`.

        Args:
            current_count: Returns the count of the open rollout of the current thread or task. If there is none, as in
                a thread that a program started, a call is assigned to the rollout that was opened last.
        """
        count = UnrecordedCalls(parent=self)
        with _lock:
            _open.append(count)
        watch_calls(current_count)
        return count

    def closed(self) -> None:
        with _lock:
            _open.remove(self)
        # processes of a pool may have been started before the hooks were installed
        if any(not process.name.startswith(_ASSAY_PROCESS) for process in active_children()):
            self.hide("processes of multiprocessing are at work")
        elif (name := next((name for name in _BLIND if name in sys.modules), None)) is not None:
            self.hide(f"{name} is loaded, whose calls cannot be seen")


_open: list[UnrecordedCalls] = []  # in this process
_current_count: Callable[[], UnrecordedCalls | None] | None = None  # None until the hooks are installed


def watch_calls(current_count: Callable[[], UnrecordedCalls | None]) -> None:
    """Count the calls of all clients from now on, also in threads that are started from now on.

    Args:
        current_count: As for `UnrecordedCalls.opened`.
    """
    global _current_count
    with _lock:
        first, _current_count = _current_count is None, current_count
        if not first:
            return
        from assay.models.dspy_seam import TRANSPORTS

        _hooked.append(TRANSPORTS)
        for name in _hooked:
            if name in sys.modules:
                _hook(sys.modules[name])
        sys.meta_path.insert(0, _Importing())
        _wrap(
            http.client.HTTPConnection,
            "putrequest",
            lambda self, method, url, *_, **__: _is_lm_request(method, _path_of(url)),
        )
        _wrap(BaseProcess, "start", _starts_process)
        sys.addaudithook(_audit)
        follow()


def _current() -> UnrecordedCalls | None:
    return None if _current_count is None else _current_count()


def accounted() -> AbstractContextManager[int]:
    """Inside, requests of this thread or task belong to a call that is already recorded or counted."""
    return having(accounted_calls, accounted_calls.get() + 1)


def asking(count: Callable[[int], None]) -> AbstractContextManager[object]:
    """Inside, requests of this thread or task are a language model's: `count(1)` for each with a prompt, at any path.

    Each nested recorder counts a request; a recorder that is entered twice counts it once.
    """
    counts = _asking.get()
    return having(_asking, counts if count in counts else (*counts, count))


def went_by() -> None:
    """Report an LM call that is not recorded; called by an engine that makes one."""
    if not accounted_calls.get():
        _count()


def _count() -> None:
    if counts := _asking.get():
        for count in counts:
            count(1)
    elif (current := _current() or (_open[-1] if _open else None)) is not None:
        current.add(1)


def _hide(reason: str) -> None:
    """Mark the count of the open rollout as unknown, or of all open rollouts in a thread of unknown origin."""
    for count in [current] if (current := _current()) is not None else list(_open):
        count.hide(reason)


def is_lm_request(method: str, path: str, body: Any = None, *, anywhere: bool = False) -> bool:
    """Whether a request calls a language model, by its shape.

    Args:
        path: path of the address; a query is ignored.
        body: text, bytes, or the object that is sent as JSON; None if it is not visible.
        anywhere: accept any path.
    """
    path = path.partition("?")[0].rstrip("/")
    if method.upper() != "POST" or _NO_ANSWER.search(path) or _GATEWAY.match(path):
        return False
    is_lm_path = anywhere or _PATH.search(path) is not None
    if isinstance(body, str | bytes | bytearray):
        try:
            body = json.loads(body)
        except (ValueError, RecursionError):
            return False
    if not isinstance(body, dict):
        return is_lm_path and body is None
    return (
        any(name in body for name in _PROMPTS)
        if is_lm_path
        else isinstance(body.get("model"), str) and isinstance(body.get("messages"), list)
    )


def _is_lm_request(method: str, path: str, body: Any = None) -> bool:
    return is_lm_request(method, path, body, anywhere=bool(_asking.get()))


def _path_of(url: Any) -> str:
    path = getattr(url, "path", None)
    if isinstance(path, str):
        return path
    text = str(url)
    return "/" + text.partition("://")[2].partition("/")[2] if "://" in text else text


def _hook(module: Any) -> None:
    if module.__name__ == "aiohttp":
        _wrap_async(module.ClientSession, "_request", _aiohttp_detects)
    elif module.__name__ in ("httpcore", "httpcore2"):
        _wrap(module.ConnectionPool, "handle_request", _httpcore_detects)
        _wrap_async(module.AsyncConnectionPool, "handle_async_request", _httpcore_detects)
    else:
        kinds = (("StdlibTransport", "stream", _wrap), ("StdlibAsyncTransport", "_do_stream", _wrap_async))
        for kind, name, wrap in kinds:
            if hasattr(getattr(module, kind, None), name):  # DSPy's models are recorded without it
                wrap(getattr(module, kind), name, _dspy_detects)


def _to_gateway(headers: Mapping[str, str]) -> bool:
    """Whether a request goes to assay's gateway, which records it."""
    return "x-assay-rollout" in headers or any(
        str(headers.get(name, "")).removeprefix("Bearer ").startswith("rollout-") for name in _KEYS
    )


def _httpcore_detects(pool: Any, request: Any, *_: Any, **__: Any) -> bool:
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in request.headers}
    return not _to_gateway(headers) and _is_lm_request(
        request.method.decode(), request.url.target.decode(), _content(request.stream)
    )


def _content(stream: Any) -> Any:
    """Body of a request if it is bytes: of httpcore itself or of httpx."""
    body = getattr(stream, "_content", getattr(stream, "_stream", None))
    return body if isinstance(body, bytes) else None


def _dspy_detects(transport: Any, request: Any, *_: Any, **__: Any) -> bool:
    headers = {name.lower(): value for name, value in request.headers}
    return not _to_gateway(headers) and _is_lm_request(request.method, _path_of(request.url), request.body)


def _aiohttp_detects(
    session: Any, method: str, url: Any, *_: Any, json: Any = None, data: Any = None, headers: Any = None, **__: Any
) -> bool:
    sent = json if json is not None else data if isinstance(data, str | bytes | bytearray) else None
    lower_headers = {str(name).lower(): value for name, value in {**session.headers, **dict(headers or {})}.items()}
    return not _to_gateway(lower_headers) and _is_lm_request(method, _path_of(url), sent)


def _starts_process(process: Any) -> bool:
    """Reports processes of `multiprocessing`, including those without an audit event (spawn, forkserver)."""
    _hide("a process was started")
    return False


def _note(detects: Callable[..., bool], args: Any, kwargs: Any) -> None:
    """Count a request if it is an LM call. Never raises: a request that cannot be read is reported instead."""
    if accounted_calls.get():
        return
    try:
        if detects(*args, **kwargs):
            _count()
    except Exception as error:
        _hide(f"a request could not be read ({type(error).__name__})")


def _wrap(owner: Any, name: str, detects: Callable[..., bool]) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        _note(detects, args, kwargs)
        with accounted():  # calls made inside belong to this request
            return original(*args, **kwargs)

    setattr(owner, name, hooked)


def _wrap_async(owner: Any, name: str, detects: Callable[..., bool]) -> None:
    original = getattr(owner, name)

    @wraps(original)
    async def hooked(*args: Any, **kwargs: Any) -> Any:
        _note(detects, args, kwargs)
        with accounted():
            return await original(*args, **kwargs)

    setattr(owner, name, hooked)


class _Importing(importlib.abc.MetaPathFinder):
    """Hooks a transport that is imported after the hooks were installed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname not in _hooked:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _hook(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _audit(event: str, args: Any) -> None:
    """Reports child processes, and connections that none of the hooked transports opened."""
    if (event not in _PROCESSES and event != "socket.connect") or accounted_calls.get():
        return
    if event in _PROCESSES and not _within(_SYSTEM_FACTS):
        _hide("a process was started")
    elif event == "socket.connect" and isinstance(args[1], tuple) and not _within((*_STANDARD, *_hooked)):
        _hide("a client that is not known opened a connection")


def _within(modules: tuple[str, ...]) -> bool:
    """Whether code of one of these modules is on the stack of this thread."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(modules):
            return True
        frame = frame.f_back
    return False
