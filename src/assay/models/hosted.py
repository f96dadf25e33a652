"""Models that are called over HTTP, by the names that DSPy's engines and litellm know."""

import dataclasses
import importlib.util
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cached_property, wraps
from typing import Any, cast

import dspy
from dspy import lm15
from dspy.utils.exceptions import (
    ContextWindowExceededError,
    LMError,
    LMNotConfiguredError,
    LMServerError,
    LMUnsupportedFeatureError,
)

from assay.errors import ConfigError
from assay.models.calls import is_refused
from assay.models.codec import chat_body, failure_in, response_of, text_of, with_completion
from assay.models.dspy_seam import call_with_messages, calls_itself
from assay.models.entries import current_entry
from assay.models.roles import check_address, check_variables
from assay.models.scope import having
from assay.models.thinking import Server, Thinking, ThinkingError, hosted_request, reasoning_request, server_at
from assay.support.scrubbing import add_secrets, fields

# -- An engine of the user as a backend of the recording.


class CustomBackend:
    """Backend for a user's own DSPy engine."""

    weights = ""
    adapters: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = {}
    concurrency = 4

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.weights = getattr(engine, "weights", "")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("supports_"):
            return bool(getattr(self.engine, name, False))
        if name == "supported_params":
            return frozenset(getattr(self.engine, name, ()) or ())
        raise AttributeError(name)

    @property
    def thinks(self) -> bool:
        return bool(self.supports_reasoning)

    def with_thinking(self, request: lm15.Request, thinking: Thinking) -> lm15.Request:
        if not self.thinks:
            raise ThinkingError(
                thinking.value,
                f": the engine of {request.model} does not declare supports_reasoning, and would ignore a budget",
            )
        return reasoning_request(request, thinking)

    def complete(self, request: lm15.Request) -> tuple[lm15.Response, float | None]:
        return self.engine.complete(request), getattr(self.engine, "price_usd", None)

    def count_tokens(self, text: str) -> int:
        counter = getattr(self.engine, "count_tokens", None)
        return int(counter(text)) if counter else rough_tokens(text)


def rough_tokens(text: str) -> int:
    return (len(text) + 3) // 4


# -- Model calls follow no redirect, because a redirect would send the body and the key to the host that it names.
#
# litellm and the SDKs under it tell `httpx` to follow redirects, and it then sends the body on. DSPy's own transports
# follow none.


_refused: ContextVar[bool] = ContextVar("assay_no_redirects", default=False)
_installed, _installing = False, threading.Lock()


def no_redirects() -> AbstractContextManager[bool]:
    """Inside, requests made through httpx in this thread or task end at a redirect; their client raises an error."""
    _install()
    return having(_refused, True)


def _install() -> None:
    global _installed
    with _installing:
        if _installed:
            return
        for name in ("httpx", "httpx2"):  # litellm and mcp use either
            if importlib.util.find_spec(name) is not None:
                module = importlib.import_module(name)
                module.Client.send = _ending_at_redirects(module.Client.send)
                module.AsyncClient.send = _ending_at_redirects(module.AsyncClient.send)
        _installed = True


def _ending_at_redirects(send: Any) -> Any:
    """Wrap `send`, synchronous or not: the coroutine of an asynchronous one is returned to its caller."""

    @wraps(send)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        return send(*args, **({**kwargs, "follow_redirects": False} if _refused.get() else kwargs))

    return guarded


# -- Messages for errors of model clients: which server or key is missing, and what to do.


_START = {"ollama": " (ollama serve)", "ollama_chat": " (ollama serve)", "hosted_vllm": " (vllm serve NAME)"}


def missing_keys(error: BaseException) -> Sequence[str]:
    """The environment variables for the provider's missing key; empty for any other error."""
    return getattr(error, "env_keys", ()) if isinstance(error, LMNotConfiguredError) else ()


def error_reason(error: BaseException, key: str = "api_key_env", *, base: str = "api_base") -> str:
    """The text of a model client's exception, with what to do about it.

    Args:
        key, base: our arguments for the variable with the model's key and for its address.
    """
    if keys := missing_keys(error):
        model = getattr(error, "model", None) or "the provider"
        return f"{model} needs an API key: set {' or '.join(keys)}, or name the variable that has it (`{key}`)"
    text = str(error).strip().rstrip(".")
    if is_refused(error):
        model = getattr(error, "model", None) or getattr(error.__cause__, "model", None) or ""
        start = _START.get(model.partition("/")[0], "")
        return f"{text}: no server listens there. Start it{start}, or correct its address (`{base}`)"
    if (status := getattr(error, "status", None)) in (401, 403):  # the client's own advice follows in paragraphs
        said = text.partition("\n")[0].rstrip(".")
        return f"{said}: the server refused the key. Name the variable that has the right one (`{key}`)"
    if status == 404:
        return (
            f"{text}: the server has no such model or path. Check the model's name, and that the address (`{base}`) "
            "ends as the server documents it, mostly with /v1"
        )
    return text if isinstance(error, LMError) else f"{type(error).__name__}: {text}"


os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else the import of litellm waits seconds for a download

_DEFAULT_TIMEOUT_S = 120.0  # without a timeout, a server that hangs would hang the run
_PROVIDERS = ("anthropic/", "gemini/")  # whose own API an address speaks; others speak OpenAI's
# For DSPy's own call below a call of ours, which is in the user's callbacks, history and usage already. The engine
# above sends its answer into the caller's stream; of a streamed reply the text is not kept.
_UNSEEN: dict[str, Any] = {
    "callbacks": [], "usage_tracker": None, "caller_modules": [], "send_stream": None, "disable_history": False,
}  # fmt: skip
_SELF_HOSTED = ("hosted_vllm/", "ollama_chat/", "ollama/", "lm_studio/", "llamafile/")


def quiet_litellm() -> Any:
    """The litellm module, with the advice off that it prints to standard output for unknown models."""
    import litellm

    litellm.suppress_debug_info = True
    return litellm


class HostedBackend:
    """Backend for a model that DSPy's engines or litellm know by name. The price is litellm's; None if unknown."""

    weights = ""
    adapters: tuple[str, ...] = ()
    sampling: Mapping[str, Any] = {}
    concurrency = 8

    def __init__(self, lm: dspy.LM) -> None:
        self.lm = lm.copy(cache=False, num_retries=0)
        self.lm.callbacks = []
        for key in ("temperature", "max_tokens", "max_completion_tokens", "rollout_id", "seed"):
            self.lm.kwargs.pop(key, None)  # generation settings come with each request
        self.lm.kwargs.setdefault("timeout", _DEFAULT_TIMEOUT_S)
        self._server: Server | None = None  # what the user's own server says of itself, once asked
        self._no_schema = False  # set once the server has refused a schema
        # part of the cache key: another server may serve other weights under the same name
        self.address = str(self.lm.kwargs.get("api_base") or self.lm.kwargs.get("base_url") or "")
        check_address(self.address, instead="pass the key as api_key")
        if not self.address:
            check_variables(self.lm.model)
        keys: list[str] = []
        fields(self.lm.kwargs, removed=keys)  # the key, and those in headers
        add_secrets(*keys)

    def load(self) -> None:
        """Import the clients: seconds, which belong to no call's latency."""
        if not calls_itself(self.lm):
            quiet_litellm()
        _install()

    # What a model supports is asked once: DSPy looks through its table of all models each time.

    @cached_property
    def supports_function_calling(self) -> bool:
        return bool(self.lm.supports_function_calling)

    @cached_property
    def supports_reasoning(self) -> bool:
        return bool(self.lm.supports_reasoning)

    @cached_property
    def _takes_schemas(self) -> bool:
        return self._self_hosted or bool(self.lm.supports_response_schema)

    @cached_property
    def _params(self) -> frozenset[str]:
        return frozenset(self.lm.supported_params)

    @property
    def supports_response_schema(self) -> bool:
        return not self._no_schema and self._takes_schemas

    @property
    def supported_params(self) -> frozenset[str]:
        return self._params | {"response_format"} if self.supports_response_schema else self._params

    @property
    def server(self) -> Server | None:
        """The user's own server; None for a provider, also behind another address. Asked once."""
        if not self._self_hosted or self.lm.model.startswith(_PROVIDERS):
            return None
        if self._server is None:
            if self.lm.model.startswith("hosted_vllm/"):
                self._server = Server("vllm", True)
            else:
                key = self.lm.kwargs.get("api_key")
                self._server = server_at(self.address, str(key) if key else None) if self.address else Server()
        return self._server

    @property
    def thinks(self) -> bool:
        """Whether the model thinks outside of its answer, as far as is known."""
        server = self.server
        return self.supports_reasoning if server is None else server.thinks

    def with_thinking(self, request: lm15.Request, thinking: Thinking) -> lm15.Request:
        """The request with a thinking budget; see `hosted_request`."""
        request = hosted_request(request, thinking, server=self.server, reasons=self.supports_reasoning)
        return cast("lm15.Request", request)

    @property
    def _self_hosted(self) -> bool:
        """Whether the user runs the server (vLLM, llama.cpp, Ollama): litellm's table does not know its features."""
        return bool(self.address) or self.lm.model.startswith(_SELF_HOSTED)

    def fitting(self, request: lm15.Request) -> lm15.Request:
        """The request, without its schema if the server is known to refuse schemas."""
        return _without_schema(request) if self._no_schema else request

    def plainer(self, request: lm15.Request, error: Exception) -> lm15.Request | None:
        """The request without its schema, if a self-hosted server may have refused it because of that; else None."""
        if (
            isinstance(error, ContextWindowExceededError)
            or not self._self_hosted
            or request.config.response_format is None
        ):
            return None
        return _without_schema(request)

    def without_schemas(self) -> None:
        """Send no schema from now on: the server answered a request without one."""
        self._no_schema = True

    def complete(self, request: lm15.Request) -> tuple[lm15.Response, float | None]:
        lm, entries = self.lm.copy(), list[dict[str, Any]]()
        lm.update_history = entries.append  # which alone carries the price
        with dspy.context(**_UNSEEN), no_redirects():
            if lm.model_type == "text":  # takes no typed request
                prompt, options = _completion(request)
                dspy.LM.__call__(lm, prompt, **options)
                answer = entries[-1]["response"]
            else:
                answer = self._called(lm, request, entries)
        response = with_completion(response_of(lm.model, answer))
        ignored = [note for note in response.adaptations if note.field.startswith("config.reasoning")]
        if ignored and (entry := current_entry.get()) is not None and entry.thinking is not None:
            raise ConfigError(f"thinking: {self.lm.model} did not take the budget as it is: {ignored[0].reason}")
        if (failure := failure_in(response.provider_data, text_of(response))) is not None:
            raise LMServerError(f"the server answered with status 200 and {failure}")
        return response, entries[-1]["cost"]

    def _called(self, lm: Any, request: lm15.Request, entries: list[dict[str, Any]]) -> Any:
        try:
            return dspy.LM.__call__(lm, request)
        except LMUnsupportedFeatureError:  # nothing was sent: audio and documents, which litellm sends
            if lm.engine != "auto" or lm.model_type != "chat":
                raise
            call_with_messages(lm, _with_limit(chat_body(request, media=True)))
            return entries[-1]["response"]

    def count_tokens(self, text: str) -> int:
        return int(quiet_litellm().token_counter(model=self.lm.model, text=text))


def _completion(request: lm15.Request) -> tuple[str, dict[str, Any]]:
    """The prompt and the options of a text completion."""
    options = _with_limit(chat_body(request))
    texts = [_text(message.get("content")) for message in options.pop("messages")]
    return "\n\n".join(texts), options


def _with_limit(body: dict[str, Any]) -> dict[str, Any]:
    """A body with the limit of tokens under the name that DSPy's models take."""
    limit = body.pop("max_completion_tokens", None)
    return body if limit is None else {**body, "max_tokens": limit}


def _text(content: Any) -> str:
    """Text of a message's content, which is a string or a list of parts."""
    return content if isinstance(content, str) else "".join(str(part.get("text") or "") for part in content or ())


def _without_schema(request: lm15.Request) -> lm15.Request:
    return dataclasses.replace(request, config=dataclasses.replace(request.config, response_format=None))
