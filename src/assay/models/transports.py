"""Sees LM calls that other clients make: hooks on the transports of the common SDKs. Records nothing; whoever asks is told.

`httpx` (openai, anthropic, litellm, mistralai, google-genai), `http.client` (urllib, requests, urllib3, boto3) and `aiohttp` are hooked by
class, also where they are imported later. A request counts as an LM call by its shape: POST to a path that language models are served at, with a
prompt in its body where the body can be seen. Clients that open sockets of their own and processes that are started cannot be looked into: that
they were used is told instead.
"""

import http.client
import importlib.abc
import importlib.machinery
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import ModuleType
from typing import Any

__all__ = ["accounted", "blind_clients", "is_lm_request", "watch"]

_accounted: ContextVar[int] = ContextVar("assay_accounted", default=0)
_saw: Callable[[], None] | None = None  # an LM call went by
_hid: Callable[[str], None] | None = None  # something went by that cannot be looked into
_lock = threading.Lock()
_HOOKED = ("httpx", "httpx2", "aiohttp")
_BLIND = ("curl_cffi", "pycurl", "niquests", "vertexai", "google.generativeai")  # clients in C or over gRPC
_PATH = re.compile(
    r"/(?:chat/completions|completions?|responses|messages|api/chat|api/generate|v\d/chat|generate|generate_stream|converse|converse-stream|"
    r"invoke|invoke-with-response-stream)$|:(?:generateContent|streamGenerateContent|rawPredict|streamRawPredict)$"
)
_GATEWAY = re.compile(r"^/r/[^/]+/")  # a rollout of assay's gateway, which records it
_PROMPTS = ("messages", "input", "inputs", "prompt", "contents", "anthropic_version", "inputText", "message")
_PROCESSES = frozenset({"subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork"})
_SYSTEM_FACTS = ("platform", "distro", "uuid", "ctypes.util")  # they ask the system's own tools what it is
_SEEN_BY_HOOKS = ("http.client", "urllib3.", "httpx", "httpcore", "aiohttp")


@contextmanager
def accounted() -> Iterator[None]:
    """Requests inside, in this thread or task, are of a call that is recorded or counted already."""
    token = _accounted.set(_accounted.get() + 1)
    try:
        yield
    finally:
        _accounted.reset(token)


def is_lm_request(method: str, path: str, body: Any = None) -> bool:
    """Whether a request asks a language model, by its shape.

    Args:
        path: of its address; what comes after a question mark does not matter.
        body: text, bytes or the object that is sent as JSON; None where it cannot be seen.
    """
    path = path.partition("?")[0].rstrip("/")
    if method.upper() != "POST" or not _PATH.search(path) or _GATEWAY.match(path):
        return False
    if isinstance(body, str | bytes | bytearray):
        try:
            body = json.loads(body)
        except (ValueError, RecursionError):
            return False
    return body is None or (isinstance(body, dict) and any(name in body for name in _PROMPTS))


def blind_clients() -> str | None:
    """A client that is loaded and cannot be looked into; None where there is none."""
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
        _wrap(http.client.HTTPConnection, "putrequest", lambda self, method, url, *_, **__: is_lm_request(method, _path_of(url)))
        sys.addaudithook(_audit)


def _path_of(url: Any) -> str:
    path = getattr(url, "path", None)
    if isinstance(path, str):
        return path
    text = str(url)
    return "/" + text.partition("://")[2].partition("/")[2] if "://" in text else text


def _hook(module: ModuleType) -> None:
    if module.__name__ == "aiohttp":
        _wrap_async(module.ClientSession, "_request", _aiohttp_asks)
    else:
        _wrap(module.Client, "send", _httpx_asks)
        _wrap_async(module.AsyncClient, "send", _httpx_asks)


def _httpx_asks(client: Any, request: Any, *_: Any, **__: Any) -> bool:
    told = str(request.headers.get("authorization", "")), request.headers.get("x-assay-rollout")
    if told[1] or told[0].startswith("Bearer rollout-"):  # of assay's gateway
        return False
    return is_lm_request(request.method, request.url.path, getattr(request, "_content", None))


def _aiohttp_asks(session: Any, method: str, url: Any, *_: Any, json: Any = None, data: Any = None, **__: Any) -> bool:
    sent = json if json is not None else data if isinstance(data, str | bytes | bytearray) else None
    return is_lm_request(method, _path_of(url), sent)


def _note(asks: Callable[..., bool], args: Any, kwargs: Any) -> None:
    """Never in the way of the call: a hook that fails has seen something that it cannot read."""
    if _accounted.get() or _saw is None or _hid is None:
        return
    try:
        if asks(*args, **kwargs):
            _saw()
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
        if not _accounted.get() and _hid is not None and not _within(_SYSTEM_FACTS):
            _hid("a process was started")
    elif event == "socket.connect" and not _accounted.get() and _hid is not None:
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
