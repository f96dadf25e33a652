"""Sees LM calls that other clients make: hooks on the transports of the common SDKs. Records nothing; whoever asks is told.

`httpx` (openai, anthropic, litellm, mistralai, google-genai), `httpcore`, `http.client` (urllib, requests, urllib3, boto3), `aiohttp` and the
transports of DSPy's own engine are hooked by class, also where they are imported later. A request counts as an LM call by its shape: POST to a
path that language models are served at, with a prompt in its body where the body can be seen. Clients that open sockets of their own and
processes that are started cannot be looked into: that they were used is told instead.
"""

import http.client
import importlib.abc
import importlib.machinery
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

from assay.models.threads import accounted_calls, follow

__all__ = ["accounted", "asking", "blind_clients", "is_lm_request", "watch", "went_by"]

_asking: ContextVar[tuple[Callable[[int], None], ...]] = ContextVar("assay_asking", default=())
_saw: Callable[[], None] | None = None  # an LM call went by
_hid: Callable[[str], None] | None = None  # something went by that cannot be looked into
_lock = threading.Lock()
_DSPY = "dspy._vendor.lm15.transports"  # sockets of DSPy's own engine
_HOOKED = ("httpx", "httpx2", "httpcore", "aiohttp", _DSPY)
_BLIND = ("curl_cffi", "pycurl", "niquests", "vertexai", "google.generativeai")  # clients in C or over gRPC
_PATH = re.compile(
    r"/(?:chat/completions|completions?|responses|messages|api/chat|api/generate|v\d/chat|generate|generate_stream|converse|converse-stream|"
    r"invoke|invoke-with-response-stream|predictions|text/chat|text/generation|text-generation/generation|multimodal-generation/generation)$|"
    r"^/models/[^/]+/[^/]+$|/interactions$|:(?:generateContent|streamGenerateContent|rawPredict|streamRawPredict)$"
)
_NO_ANSWER = re.compile(r"/(?:count_tokens|tokenize|detokenize|embeddings?|rerank|moderations)$|:(?:countTokens|embedContent|batchEmbedContents)$")
_GATEWAY = re.compile(r"^/r/[^/]+/")  # a rollout of assay's gateway, which records it
_KEYS = ("authorization", "x-api-key", "api-key", "x-goog-api-key")
_PROMPTS = ("messages", "input", "inputs", "prompt", "contents", "anthropic_version", "inputText", "message")
_PROCESSES = frozenset({"subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork"})
_OWN_PROCESS = "assay-"  # how the names of assay's own processes begin, which record their calls themselves
_SYSTEM_FACTS = ("platform", "distro", "uuid", "ctypes.util")  # they ask the system's own tools what it is
_SEEN_BY_HOOKS = ("http.client", "urllib3.", "httpx", "httpcore", "aiohttp", _DSPY)


@contextmanager
def accounted() -> Iterator[None]:
    """Requests inside, in this thread or task, are of a call that is recorded or counted already."""
    token = accounted_calls.set(accounted_calls.get() + 1)
    try:
        yield
    finally:
        accounted_calls.reset(token)


@contextmanager
def asking(count: Callable[[int], None]) -> Iterator[None]:
    """Requests inside, in this thread or task, are made by a language model's client: `count(1)` for each with a prompt, whatever its path.

    Nested recorders each count a request, and one that is entered twice counts it once.
    """
    counts = _asking.get()
    token = _asking.set(counts if count in counts else (*counts, count))
    try:
        yield
    finally:
        _asking.reset(token)


def went_by() -> None:
    """To be called by an engine that makes an LM call which nothing records."""
    if not accounted_calls.get():
        _count()


def _count() -> None:
    if counts := _asking.get():
        for count in counts:
            count(1)
    elif _saw is not None:
        _saw()


def is_lm_request(method: str, path: str, body: Any = None, *, anywhere: bool = False) -> bool:
    """Whether a request asks a language model, by its shape.

    Args:
        path: of its address; what comes after a question mark does not matter.
        body: text, bytes or the object that is sent as JSON; None where it cannot be seen.
        anywhere: whether the path may be any.
    """
    path = path.partition("?")[0].rstrip("/")
    if method.upper() != "POST" or _NO_ANSWER.search(path) or _GATEWAY.match(path):
        return False
    known = anywhere or _PATH.search(path) is not None
    if isinstance(body, str | bytes | bytearray):
        try:
            body = json.loads(body)
        except (ValueError, RecursionError):
            return False
    if not isinstance(body, dict):
        return known and body is None
    return any(name in body for name in _PROMPTS) if known else isinstance(body.get("model"), str) and isinstance(body.get("messages"), list)


def _asks(method: str, path: str, body: Any = None) -> bool:
    return is_lm_request(method, path, body, anywhere=bool(_asking.get()))


def blind_clients() -> str | None:
    """A client that is loaded, or a process that is at work, and cannot be looked into; None where there is none."""
    if any(not process.name.startswith(_OWN_PROCESS) for process in active_children()):  # of a pool that was started before
        return "processes of multiprocessing are at work"
    return next((f"{name} is loaded, whose calls cannot be seen" for name in _BLIND if name in sys.modules), None)


def watch(saw: Callable[[], None], hid: Callable[[str], None]) -> None:
    """Installs the hooks, once a process; `saw` is called for each LM call that is not `accounted`, `hid` with what cannot be looked into."""
    global _saw, _hid
    with _lock:
        first, _saw, _hid = _saw is None, saw, hid
        if not first:
            return
        for name in _HOOKED:
            if name in sys.modules:
                _hook(sys.modules[name])
        sys.meta_path.insert(0, _Importing())
        _wrap(http.client.HTTPConnection, "putrequest", lambda self, method, url, *_, **__: _asks(method, _path_of(url)))
        _wrap(BaseProcess, "start", _starts_process)
        sys.addaudithook(_audit)
        follow()


def _path_of(url: Any) -> str:
    path = getattr(url, "path", None)
    if isinstance(path, str):
        return path
    text = str(url)
    return "/" + text.partition("://")[2].partition("/")[2] if "://" in text else text


def _hook(module: Any) -> None:
    if module.__name__ == "aiohttp":
        _wrap_async(module.ClientSession, "_request", _aiohttp_asks)
    elif module.__name__ == "httpcore":
        _wrap(module.ConnectionPool, "handle_request", _httpcore_asks)
        _wrap_async(module.AsyncConnectionPool, "handle_async_request", _httpcore_asks)
    elif module.__name__ == _DSPY:
        _wrap(module.StdlibTransport, "stream", _dspy_asks)
        _wrap_async(module.StdlibAsyncTransport, "_do_stream", _dspy_asks)
    else:
        _wrap(module.Client, "send", _httpx_asks)
        _wrap_async(module.AsyncClient, "send", _httpx_asks)


def _to_gateway(headers: Mapping[str, str]) -> bool:
    """Whether a request goes to assay's gateway, which records it."""
    return "x-assay-rollout" in headers or any(str(headers.get(name, "")).removeprefix("Bearer ").startswith("rollout-") for name in _KEYS)


def _httpx_asks(client: Any, request: Any, *_: Any, **__: Any) -> bool:
    return not _to_gateway(request.headers) and _asks(request.method, request.url.path, getattr(request, "_content", None))


def _httpcore_asks(pool: Any, request: Any, *_: Any, **__: Any) -> bool:
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in request.headers}
    return not _to_gateway(headers) and _asks(request.method.decode(), request.url.target.decode(), getattr(request.stream, "_content", None))


def _dspy_asks(transport: Any, request: Any, *_: Any, **__: Any) -> bool:
    headers = {name.lower(): value for name, value in request.headers}
    return not _to_gateway(headers) and _asks(request.method, _path_of(request.url), request.body)


def _aiohttp_asks(session: Any, method: str, url: Any, *_: Any, json: Any = None, data: Any = None, headers: Any = None, **__: Any) -> bool:
    sent = json if json is not None else data if isinstance(data, str | bytes | bytearray) else None
    named = {str(name).lower(): value for name, value in {**session.headers, **dict(headers or {})}.items()}
    return not _to_gateway(named) and _asks(method, _path_of(url), sent)


def _starts_process(process: Any) -> bool:
    """Processes of `multiprocessing`, also those that Python's audit events do not tell of (spawn, forkserver)."""
    if _hid is not None:
        _hid("a process was started")
    return False


def _note(asks: Callable[..., bool], args: Any, kwargs: Any) -> None:
    """Never in the way of the call: a hook that fails has seen something that it cannot read."""
    if accounted_calls.get() or _saw is None or _hid is None:
        return
    try:
        if asks(*args, **kwargs):
            _count()
    except Exception as error:
        _hid(f"a request could not be read ({type(error).__name__})")


def _wrap(owner: Any, name: str, asks: Callable[..., bool]) -> None:
    plain = getattr(owner, name)

    @wraps(plain)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        _note(asks, args, kwargs)
        with accounted():  # what it calls in turn is this request
            return plain(*args, **kwargs)

    setattr(owner, name, hooked)


def _wrap_async(owner: Any, name: str, asks: Callable[..., bool]) -> None:
    plain = getattr(owner, name)

    @wraps(plain)
    async def hooked(*args: Any, **kwargs: Any) -> Any:
        _note(asks, args, kwargs)
        with accounted():
            return await plain(*args, **kwargs)

    setattr(owner, name, hooked)


class _Importing(importlib.abc.MetaPathFinder):
    """Hooks a transport where it is imported after the hooks were installed."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname not in _HOOKED:
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
    """Processes that are started, and connections that none of the hooked transports opens."""
    if event in _PROCESSES:
        if not accounted_calls.get() and _hid is not None and not _within(_SYSTEM_FACTS):
            _hid("a process was started")
    elif event == "socket.connect" and not accounted_calls.get() and _hid is not None:
        _, address = args
        if isinstance(address, tuple) and not _within(_SEEN_BY_HOOKS):
            _hid("a client that is not known opened a connection")


def _within(modules: tuple[str, ...]) -> bool:
    """Whether code of one of these modules is at work in this thread."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(modules):
            return True
        frame = frame.f_back
    return False
