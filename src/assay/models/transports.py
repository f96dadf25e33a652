"""Detects LM calls of other clients, by hooks on the transports of the common SDKs. Records nothing: counts only.

Hooked by class, also if imported later: `httpx` (openai, anthropic, litellm, mistralai, google-genai), `httpcore`,
`http.client` (urllib, requests, urllib3, boto3), `aiohttp` and the transports of DSPy's own engine. A request counts as
an LM call by its shape: POST to a path where language models are served, with a prompt in its body if the body is
visible. Clients that open their own sockets, and child processes, cannot be inspected: their use is reported instead.
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

from assay.models.dspy_seam import TRANSPORTS
from assay.models.threads import accounted_calls, follow

_asking: ContextVar[tuple[Callable[[int], None], ...]] = ContextVar("assay_asking", default=())
_on_call: Callable[[], None] | None = None  # called for each LM call that is not accounted
_on_blind: Callable[[str], None] | None = None  # called with a description of what cannot be inspected
_lock = threading.Lock()
_HOOKED = ("httpx", "httpx2", "httpcore", "aiohttp", TRANSPORTS)
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
_SEEN_BY_HOOKS = ("http.client", "urllib3.", "httpx", "httpcore", "aiohttp", TRANSPORTS)


@contextmanager
def accounted() -> Iterator[None]:
    """Inside, requests of this thread or task belong to a call that is already recorded or counted."""
    token = accounted_calls.set(accounted_calls.get() + 1)
    try:
        yield
    finally:
        accounted_calls.reset(token)


@contextmanager
def asking(count: Callable[[int], None]) -> Iterator[None]:
    """Inside, requests of this thread or task are a language model's: `count(1)` for each with a prompt, at any path.

    Each nested recorder counts a request; a recorder that is entered twice counts it once.
    """
    counts = _asking.get()
    token = _asking.set(counts if count in counts else (*counts, count))
    try:
        yield
    finally:
        _asking.reset(token)


def went_by() -> None:
    """Report an LM call that is not recorded; called by an engine that makes one."""
    if not accounted_calls.get():
        _count()


def _count() -> None:
    if counts := _asking.get():
        for count in counts:
            count(1)
    elif _on_call is not None:
        _on_call()


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


def blind_clients() -> str | None:
    """A loaded client or running process that cannot be inspected, as a phrase; None if there is none."""
    # processes of a pool may have been started before the hooks were installed
    if any(not process.name.startswith(_ASSAY_PROCESS) for process in active_children()):
        return "processes of multiprocessing are at work"
    return next((f"{name} is loaded, whose calls cannot be seen" for name in _BLIND if name in sys.modules), None)


def watch(on_call: Callable[[], None], on_blind: Callable[[str], None]) -> None:
    """Install the hooks, once per process.

    Args:
        on_call: called for each LM call that is not `accounted`.
        on_blind: called with a description of each use of what cannot be inspected.
    """
    global _on_call, _on_blind
    with _lock:
        first, _on_call, _on_blind = _on_call is None, on_call, on_blind
        if not first:
            return
        for name in _HOOKED:
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


def _path_of(url: Any) -> str:
    path = getattr(url, "path", None)
    if isinstance(path, str):
        return path
    text = str(url)
    return "/" + text.partition("://")[2].partition("/")[2] if "://" in text else text


def _hook(module: Any) -> None:
    if module.__name__ == "aiohttp":
        _wrap_async(module.ClientSession, "_request", _aiohttp_detects)
    elif module.__name__ == "httpcore":
        _wrap(module.ConnectionPool, "handle_request", _httpcore_detects)
        _wrap_async(module.AsyncConnectionPool, "handle_async_request", _httpcore_detects)
    elif module.__name__ == TRANSPORTS:
        kinds = (("StdlibTransport", "stream", _wrap), ("StdlibAsyncTransport", "_do_stream", _wrap_async))
        for kind, name, wrap in kinds:
            if hasattr(getattr(module, kind, None), name):  # DSPy's models are recorded without it
                wrap(getattr(module, kind), name, _dspy_detects)
    else:
        _wrap(module.Client, "send", _httpx_detects)
        _wrap_async(module.AsyncClient, "send", _httpx_detects)


def _to_gateway(headers: Mapping[str, str]) -> bool:
    """Whether a request goes to assay's gateway, which records it."""
    return "x-assay-rollout" in headers or any(
        str(headers.get(name, "")).removeprefix("Bearer ").startswith("rollout-") for name in _KEYS
    )


def _httpx_detects(client: Any, request: Any, *_: Any, **__: Any) -> bool:
    return not _to_gateway(request.headers) and _is_lm_request(
        request.method, request.url.path, getattr(request, "_content", None)
    )


def _httpcore_detects(pool: Any, request: Any, *_: Any, **__: Any) -> bool:
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in request.headers}
    return not _to_gateway(headers) and _is_lm_request(
        request.method.decode(), request.url.target.decode(), getattr(request.stream, "_content", None)
    )


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
    if _on_blind is not None:
        _on_blind("a process was started")
    return False


def _note(detects: Callable[..., bool], args: Any, kwargs: Any) -> None:
    """Count a request if it is an LM call. Never raises: a request that cannot be read is reported instead."""
    if accounted_calls.get() or _on_call is None or _on_blind is None:
        return
    try:
        if detects(*args, **kwargs):
            _count()
    except Exception as error:
        _on_blind(f"a request could not be read ({type(error).__name__})")


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
    """Reports child processes, and connections that none of the hooked transports opened."""
    if event in _PROCESSES:
        if not accounted_calls.get() and _on_blind is not None and not _within(_SYSTEM_FACTS):
            _on_blind("a process was started")
    elif event == "socket.connect" and not accounted_calls.get() and _on_blind is not None:
        _, address = args
        if isinstance(address, tuple) and not _within(_SEEN_BY_HOOKS):
            _on_blind("a client that is not known opened a connection")


def _within(modules: tuple[str, ...]) -> bool:
    """Whether code of one of these modules is on the stack of this thread."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(modules):
            return True
        frame = frame.f_back
    return False
