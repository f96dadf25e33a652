"""Upstreams of a gateway: HTTP servers that support the caller's dialect, or any other provider through litellm.

Answers are returned unchanged, including status and errors. Does not record calls.
"""

import asyncio
import importlib.util
import json
import os
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote, unquote

import aiohttp
import orjson
from multidict import CIMultiDict
from yarl import URL

from assay.errors import ConfigError, FailureKind, MissingExtra
from assay.models.calls import failure_of_call
from assay.models.hosted import no_redirects
from assay.models.prices import FREE, Price
from assay.models.roles import check_address, check_variables, is_embedded
from assay.models.unrecorded import accounted
from assay.support.scrubbing import MARK, add_secrets, fields, is_maskable, mask_secrets, message
from assay.support.values import json_text
from assay.traces.gateway.connections import keep_alive
from assay.traces.gateway.replies import (
    IDLE_S,
    JSON,
    KEYS,
    STREAM,
    Reply,
    UpstreamCall,
    json_reply,
    once,
    request_headers,
    response_headers,
)
from assay.traces.gateway.translation import (
    answered,
    as_called,
    chat_of,
    chat_request,
    chunks_of,
    error_of,
    refused,
    streamed,
    untranslatable,
)
from assay.traces.messages import gemini
from assay.traces.messages.dialects import DIALECTS

# -- Upstream that calls any provider through litellm, which translates between dialects. Does not record calls.


_STATUS = {FailureKind.TIMEOUT: 504, FailureKind.CONTEXT: 400}  # litellm's own timeouts have varying statuses
_SAMPLING = (
    "temperature", "top_p", "stream", "tools", "tool_choice", "parallel_tool_calls", "user", "service_tier", "store",
    "metadata",
)  # fmt: skip
# Fields that are passed to litellm. Others are dropped: its arguments include server addresses and keys.
_PARAMETERS = {
    "chat": frozenset((
        *_SAMPLING, "messages", "max_tokens", "max_completion_tokens", "n", "stop", "seed", "presence_penalty",
        "frequency_penalty", "logit_bias", "logprobs", "top_logprobs", "response_format", "reasoning_effort",
        "stream_options", "modalities", "verbosity",
    )),
    "completions": frozenset((
        *_SAMPLING, "prompt", "suffix", "best_of", "echo", "max_tokens", "n", "stop", "seed", "presence_penalty",
        "frequency_penalty", "logit_bias", "logprobs", "stream_options",
    )),
    "responses": frozenset((
        *_SAMPLING, "input", "instructions", "max_output_tokens", "previous_response_id", "reasoning", "text",
        "truncation", "include", "max_tool_calls", "top_logprobs", "background",
    )),
    "messages": frozenset((*_SAMPLING, "messages", "system", "max_tokens", "stop_sequences", "top_k", "thinking")),
}  # fmt: skip


_CALLED = {  # functions of litellm
    "chat": "acompletion", "completions": "atext_completion", "responses": "aresponses",
    "messages": "anthropic_messages",
}  # fmt: skip


@dataclass
class LitellmUpstream:
    """Any model by litellm's name, in all dialects. Gemini's is translated to chat here, the others by litellm."""

    name: str
    client: Mapping[str, Any] = field(default_factory=dict)
    weights: str = ""
    adapters: tuple[str, ...] = ()
    price: Price | None = None
    idle_s: float = IDLE_S

    def __post_init__(self) -> None:
        keys: list[str] = []
        fields(dict(self.client), removed=keys)
        add_secrets(*keys)

    @property
    def named(self) -> str:
        """As `HttpUpstream.named`."""
        return self.name

    @asynccontextmanager
    async def ask(self, call: UpstreamCall) -> AsyncIterator[Reply]:
        dialect, body = call.dialect, call.body
        if dialect == "gemini":
            async with self._by_chat(call) as reply:
                yield reply
            return
        function = getattr(_litellm(dialect), _CALLED[dialect])
        # a caller must not name another server, or its key
        parameters = {key: value for key, value in body.items() if key in _PARAMETERS[dialect]}
        try:
            with accounted(), no_redirects():  # the gateway records it
                arguments = {**parameters, **self.client, "model": self.name, "num_retries": 0}
                answer = await self._in_time(function(**arguments))
        except Exception as error:
            status = _STATUS.get(failure_of_call(error)) or int(getattr(error, "status_code", 0) or 500)
            failed = {"error": {"message": message(str(error)), "type": type(error).__name__, "code": status}}
            retry = getattr(getattr(error, "response", None), "headers", {}).get("retry-after")
            headers = {**JSON, **({"Retry-After": retry} if retry else {})}
            yield Reply(status, headers, once(json.dumps(failed).encode()))
            return
        if body.get("stream"):
            yield Reply(200, STREAM, _events(dialect, answer, self._in_time))
        else:
            yield Reply(200, JSON, once(mask_secrets(json_text(_plain(answer))).encode()))

    @asynccontextmanager
    async def _by_chat(self, call: UpstreamCall) -> AsyncIterator[Reply]:
        """Answers a request of Gemini's dialect through chat."""
        if (why := untranslatable(call.body)) is not None:
            yield json_reply(400, error_of(400, f"{self.name} cannot answer this: {why}"))
            return
        chat_request = chat_of(call.body, self.name, stream=gemini.streams(call.path))
        async with self.ask(UpstreamCall("chat", chat_request, b"", call.headers)) as reply:
            if reply.status >= 400:
                yield reply
            elif chat_request["stream"]:
                yield streamed("gemini", chunks_of(reply.chunks), self.name, call.query)
            else:
                completion = json.loads(b"".join([chunk async for chunk in reply.chunks]))
                yield answered("gemini", completion, self.name, call.query, stream=False)

    async def _in_time(self, answer: Awaitable[Any]) -> Any:
        """Awaits a part of the answer.

        Raises:
            TimeoutError: nothing arrived for `idle_s` seconds.
        """
        try:
            async with asyncio.timeout(self.idle_s) as limit:
                return await answer
        except TimeoutError:
            if not limit.expired():
                raise
            raise TimeoutError(f"the upstream sent nothing for {self.idle_s:g} s") from None

    def models(self) -> dict[str, Any]:
        """The list of models, in OpenAI's format."""
        return {"object": "list", "data": [{"id": self.name, "object": "model", "owned_by": "assay"}]}

    async def close(self) -> None:
        pass


def _litellm(dialect: str) -> Any:
    # litellm would download its price list on import, which takes seconds; prices are not used here.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    if dialect not in ("chat", "completions") and importlib.util.find_spec("mcp") is None:
        raise MissingExtra("mcp", "serve")  # litellm imports it to translate Responses and Anthropic messages
    keys = (value for name, value in vars(litellm).items() if name.endswith(("_key", "_token")))
    add_secrets(*(key for key in keys if isinstance(key, str)))
    return litellm


async def _events(
    dialect: str, answer: Any, in_time: Callable[[Awaitable[Any]], Awaitable[Any]]
) -> AsyncIterator[bytes]:
    events = aiter(answer)
    while (event := await in_time(anext(events, None))) is not None:
        if isinstance(event, bytes | str):  # already encoded as an event
            text = event if isinstance(event, str) else event.decode("utf-8", "surrogateescape")
            yield mask_secrets(text).encode("utf-8", "surrogateescape")
            continue
        data = _plain(event)
        head = f"event: {data.get('type')}\n" if dialect in ("responses", "messages") else ""
        yield f"{head}data: {mask_secrets(json_text(data))}\n\n".encode()
    if dialect in ("chat", "completions"):
        yield b"data: [DONE]\n\n"


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json", exclude_none=True) if hasattr(value, "model_dump") else value


# -- Upstreams.


_NAME = 200  # maximum characters of a model's name from a caller or server
_DEPLOYMENT = re.compile(r"(?<=/openai/deployments/)[^/]+|(?<=/engines/)[^/]+")
_AZURE = "/openai/"  # prefix of Azure's paths; Azure takes the key in its own header
_CALLS = tuple(path.removeprefix("/v1") for name, path in DIALECTS.items() if name != "gemini")
_PROVIDERS = {  # base address, environment variables of its key, native dialects
    "openai": ("https://api.openai.com", ("OPENAI_API_KEY",), ("chat", "completions", "responses")),
    "anthropic": ("https://api.anthropic.com", ("ANTHROPIC_API_KEY",), ("messages",)),
    "gemini": ("https://generativelanguage.googleapis.com", ("GEMINI_API_KEY", "GOOGLE_API_KEY"), ("gemini",)),
}


@dataclass
class HttpUpstream:
    """A server with OpenAI's, Anthropic's or Google's HTTP API. Forwards bytes unchanged except for the model's name.

    Args:
        name: the model's name in transitions.
        base: address before the version in the path.
        model: the model's name at the server; None keeps the caller's.
        key: sent to the server; None forwards the caller's own.
        logprobs: request token ids and logprobs if the caller did not (chat only).
        idle_s: time without a byte after which an answer has failed.
    """

    name: str
    base: str
    model: str | None = None
    version: str = "/v1"  # in place of the version of OpenAI's paths; "" without one
    query: str = ""  # of the address; sent with every request
    key: str | None = None
    weights: str = ""
    adapters: tuple[str, ...] = ()
    dialects: tuple[str, ...] = tuple(DIALECTS)
    logprobs: bool = False
    price: Price | None = None
    idle_s: float = IDLE_S
    other: "LitellmUpstream | None" = None  # answers the dialects that the server does not support
    _session: aiohttp.ClientSession | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        add_secrets(self.key)

    @property
    def named(self) -> str:
        """The model's name in transitions; "" if callers choose the model (`name` is then an address)."""
        return "" if self.model is None and self.name == self.base else self.name

    @asynccontextmanager
    async def ask(self, call: UpstreamCall) -> AsyncIterator[Reply]:
        """Sends a request of one dialect."""
        dialect, body = call.dialect, call.body
        if dialect not in self.dialects and self.other is not None:
            async with self.other.ask(replace(call, query="", path="")) as reply:
                yield reply
            return
        changed: dict[str, Any] = {}
        if self.model is not None and dialect != "gemini" and body.get("model") != self.model:
            changed["model"] = self.model
        if self.logprobs and dialect == "chat" and "logprobs" not in body:
            changed["logprobs"], changed["top_logprobs"] = True, 1
        data = _as_json({**body, **changed}) if changed else call.raw
        path = call.path or DIALECTS[dialect]
        if self.model is not None and dialect == "gemini":
            path = gemini.with_model(path, self.model)
        elif self.model is not None:
            path = _DEPLOYMENT.sub(quote(self.model, safe=""), path)
        sent_headers = CIMultiDict(call.headers)
        sent_headers.setdefault("Content-Type", "application/json")
        with accounted():  # the gateway records it
            answer = await self._request("POST", path, call.query, sent_headers, data, lent=True)
        async with answer:
            yield _reply(answer, self.key)

    @asynccontextmanager
    async def relay(
        self, method: str, path: str, query: str, headers: Mapping[str, str], data: Any, *, lent: bool
    ) -> AsyncIterator[Reply]:
        """Forwards any other request unchanged, without parsing it.

        Args:
            lent: whether this upstream's key is sent in place of the caller's own.
        """
        with accounted():  # the gateway counts it
            answer = await self._request(method, path, query, headers, data, lent=lent)
        async with answer:
            yield _reply(answer, self.key)

    async def _request(
        self, method: str, path: str, query: str, headers: Mapping[str, str], data: Any, *, lent: bool
    ) -> aiohttp.ClientResponse:
        is_azure = path.startswith(_AZURE) or "/openai/deployments/" in self.base
        path = self._located(path)
        query = "&".join(filter(None, (self.query, query)))
        if self.key is not None and lent and gemini.is_google(path):  # the caller's own key may be in the query too
            query = "&".join(part for part in query.split("&") if part.partition("=")[0] != "key")
        address = URL(self.base + path + (f"?{query}" if query else ""), encoded=True)
        sent_headers = request_headers(headers)
        if self.key is not None and lent:
            for name in KEYS:
                sent_headers.popall(name, None)
            if self.key:
                sent_headers.update(_key_headers(path, self.key, azure=is_azure))
        sent_headers["Accept-Encoding"] = "identity"
        if not isinstance(data, bytes):
            sent_headers.update({key: value for key, value in headers.items() if key.lower() == "content-length"})
        unasked = ("User-Agent", "Accept", "Content-Type")  # which aiohttp would add
        return await self.session.request(
            method, address, data=data, headers=sent_headers, skip_auto_headers=unasked, allow_redirects=False
        )

    def _located(self, path: str) -> str:
        """The path of a request at this server. A caller may send the path of the server's address too."""
        before = URL(self.base).raw_path.rstrip("/")
        if before and path.startswith(f"{before}/"):
            path = path.removeprefix(before)
        if not path.startswith("/v1/") or (not self.version and path.startswith(DIALECTS["messages"])):
            return path  # clients of Anthropic's API add the version themselves
        return self.version + path.removeprefix("/v1")

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=self.idle_s)
            # No limit here: the listener limits the callers' connections.
            connector = aiohttp.TCPConnector(limit=0, socket_factory=_keep_alive_socket)
            cookies = aiohttp.DummyCookieJar()  # one caller's cookies must not be sent for another
            self._session = aiohttp.ClientSession(
                connector=connector, cookie_jar=cookies, timeout=timeout, read_bufsize=1 << 18
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


@dataclass
class EmbeddedUpstream(HttpUpstream):
    """An embedded model: requests are converted to llama.cpp's chat, answers to the caller's dialect.

    Answers carry the model's name, token ids and logprobs.

    Args:
        tools: whether the model's chat template supports tools.
    """

    tools: bool = False

    @asynccontextmanager
    async def ask(self, call: UpstreamCall) -> AsyncIterator[Reply]:
        dialect, body, short = call.dialect, call.body, self.model or self.name
        if dialect == "gemini":
            body = {**body, "model": gemini.model_in(call.path), "stream": gemini.streams(call.path)}
        if (refusal := refused(dialect, body, (self.name, short))) is not None:
            yield json_reply(*refusal)
            return
        chat_body = chat_request(dialect, body, short, tools=self.tools)
        inner = dialect if dialect == "completions" else "chat"
        raw = json.dumps(chat_body, ensure_ascii=True).encode()
        async with super().ask(UpstreamCall(inner, chat_body, raw, {})) as reply:
            if reply.status >= 400:
                yield reply
            elif chat_body.get("stream"):
                yield streamed(dialect, chunks_of(reply.chunks), self.name, call.query)
            else:
                completion = as_called(json.loads(b"".join([chunk async for chunk in reply.chunks])), dialect, body)
                # a stream if it was constrained to a tool call, which is known only once it is complete
                yield answered(dialect, completion, self.name, call.query, stream=bool(body.get("stream")))

    def answered_body(self, dialect: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The request for the record: a copy of the caller's `body` where something else was answered."""
        return body

    def models(self) -> dict[str, Any]:
        """The list of models, in OpenAI's format."""
        return {"object": "list", "data": [{"id": self.name, "object": "model", "created": 0, "owned_by": "assay"}]}


def _keep_alive_socket(address: Any) -> socket.socket:
    family, kind, protocol, _, _ = address
    sock = socket.socket(family, kind, protocol)
    keep_alive(sock)
    return sock


def _key_headers(path: str, key: str, *, azure: bool) -> dict[str, str]:
    """The headers in which the API of a path takes a key."""
    if azure:
        return {"api-key": key}
    if gemini.is_google(path) and "/projects/" not in path:  # Vertex AI's take a token
        return {"x-goog-api-key": key}
    return {"Authorization": f"Bearer {key}", "x-api-key": key}


def _reply(answer: aiohttp.ClientResponse, key: str | None) -> Reply:
    if answer.status in (301, 302, 303, 307, 308):
        return Reply(502, JSON, once(_redirect_error(answer)))
    headers = response_headers(answer.headers)
    chunks: AsyncIterator[bytes] = answer.content.iter_any()
    if not key or not is_maskable(key):  # a server without keys takes any word, which may be a word of its answers
        return Reply(answer.status, headers, chunks)
    # The key is not the caller's: it is removed if the server echoes it.
    headers = CIMultiDict((name, value.replace(key, MARK)) for name, value in headers.items())
    return Reply(answer.status, headers, without_key(chunks, key.encode()))


async def without_key(chunks: AsyncIterator[bytes], key: bytes) -> AsyncIterator[bytes]:
    """The bytes without the key. A part's end that may be the key's beginning is held until the next part."""
    pending = b""
    async for chunk in chunks:
        data = (pending + chunk).replace(key, MARK.encode())
        pending_length = next((n for n in range(min(len(key) - 1, len(data)), 0, -1) if data.endswith(key[:n])), 0)
        pending = data[len(data) - pending_length :]
        if pending_length < len(data):
            yield data[: len(data) - pending_length]
    if pending:
        yield pending


def _redirect_error(answer: aiohttp.ClientResponse) -> bytes:
    """Error for a redirect, which is neither followed nor forwarded: body and key would be sent to its target.

    Names only the host, as the address may contain a key.
    """
    try:
        target = answer.url.join(URL(answer.headers.get("Location", "")))
        address = f"{target.scheme}://{target.host}:{target.port}"
    except (ValueError, TypeError):
        address = "an address that cannot be read"
    message = (
        f"the upstream answers with a redirect ({answer.status}) to {address}, which is not followed: "
        "give the address of the server itself"
    )
    return json.dumps({"error": {"message": message, "type": "assay_gateway", "code": 502}}).encode()


def unanswered_text(upstream: HttpUpstream | LitellmUpstream, error: Exception) -> str:
    """Why a call got no answer, with the host and port of the server, without the rest of its address."""
    place = f" at {URL(upstream.base).origin()}" if isinstance(upstream, HttpUpstream) else ""
    refused = isinstance(getattr(error, "os_error", error), ConnectionRefusedError)
    return f"the upstream{place} does not answer: {'no server listens there' if refused else type(error).__name__}"


async def silent_server(address: str) -> str:
    """Host and port of an address at which no server accepts a connection within a second; "" if one does."""
    url = URL(address)
    try:
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_connection(url.host, url.port)
    except (OSError, TimeoutError):
        return str(url.origin())
    writer.close()
    return ""


def _as_json(body: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError:  # lone surrogates, numbers beyond 64 bits
        return json.dumps(body, ensure_ascii=True).encode()


def requested_model(body: Mapping[str, Any], path: str) -> str:
    """The model that a request names in its body or, for Azure, in its path; "unknown" if in neither."""
    deployment = _DEPLOYMENT.search(path)
    name = body.get("model") or (unquote(deployment[0]) if deployment else "")
    return name[:_NAME] if isinstance(name, str) and name else "unknown"


def answering_model(response: Mapping[str, Any] | None) -> str | None:
    """The model that an answer names; None if it names none."""
    body = (response or {}).get("body") or {}
    name = body.get("model") or body.get("modelVersion")  # Gemini's
    return name[:_NAME] if isinstance(name, str) and name else None


def _taken_apart(address: str) -> tuple[str, str, str]:
    """An address as clients take it: what is before the version of OpenAI's paths, the version, and the query.

    `https://host` has the version `/v1`; `https://host/api/v4` its own; `https://host/v1beta/openai` none after it. The
    path of a call at the end is not part of the address.
    """
    address, _, query = address.partition("#")[0].partition("?")
    address = address.rstrip("/")
    call = next((path for path in _CALLS if address.endswith(path)), "")
    address = address.removesuffix(call).rstrip("/")
    scheme, _, rest = address.partition("://")
    before, _, last = rest.rpartition("/")
    if not before:
        return address, "/v1", query
    if re.fullmatch(r"v\d+\w*", last):
        return f"{scheme}://{before}", f"/{last}", query
    return address, "", query


def upstream_of(
    model: str | None, *, base: str | None = None, key: str | None = None, price: Any = None, idle_s: float = IDLE_S
) -> HttpUpstream | LitellmUpstream:  # fmt: skip
    """The upstream for a model's name.

    Args:
        model: `embedded/NAME`, or a name of litellm's; None with a `base`: whatever the caller asks for.
        base: address of a server that speaks OpenAI chat completions, and perhaps the other dialects.
        key: the server's; by default that of the provider's environment variable, and for a `base` the caller's own.
        price: as for `get_lm`; by default the cost of calls is unknown, except that an embedded model costs nothing.
        idle_s: time without a byte after which an answer has failed.
    Raises:
        ConfigError: no provider of this model is known, or the address cannot be used.
    """
    own = Price.of(price)
    if base is not None:
        base = re.sub("^https?://", lambda scheme: scheme[0].lower(), base.strip(), flags=re.IGNORECASE)
        if not re.match("https?://[^/?#]", base):
            raise ConfigError(f"`upstream={base!r}` must be an address that starts with http:// or https://")
        check_address(base, "upstream", "give the key as upstream_key")
        address, version, query = _taken_apart(base)
        known = model.split("/", 1)[1] if model and model.startswith("openai/") else model
        return HttpUpstream(
            model or address, address, model=known, version=version, query=query, key=key, price=own, idle_s=idle_s
        )
    if model is None:
        raise ConfigError("name a model, or the address of a server with --upstream")
    if is_embedded(model):
        if own is not None:
            raise ConfigError(f"price would have no effect on {model}, which runs in this process and costs nothing")
        from assay.models.embedded import LlamaBackend, server_url

        backend = LlamaBackend(model)
        short = re.split("[/:]", model, maxsplit=1)[1]
        return EmbeddedUpstream(
            model, server_url(model), model=short, key="", weights=backend.weights, adapters=backend.adapters,
            price=FREE, tools=backend.supports_function_calling, idle_s=idle_s,
        )  # fmt: skip
    provider, _, rest = model.partition("/")
    check_variables(model)
    if provider not in _PROVIDERS and not _is_known(model):
        raise ConfigError(
            f"`model={model!r}` names no provider that litellm knows: write PROVIDER/NAME (openai/…, anthropic/…, "
            "ollama_chat/…), or `upstream='http://…'`, the address of a server of your own"
        )
    litellm = LitellmUpstream(model, {"api_key": key} if key else {}, price=own, idle_s=idle_s)
    if provider in _PROVIDERS:
        address, variables, dialects = _PROVIDERS[provider]
        key = key or next((value for name in variables if (value := os.environ.get(name))), None)
        return HttpUpstream(
            model, address, model=rest, key=key, price=own, dialects=dialects, other=litellm, idle_s=idle_s
        )
    return litellm


def _is_known(model: str) -> bool:
    from assay.models.lm import has_provider  # loads DSPy and litellm

    return has_provider(model)
