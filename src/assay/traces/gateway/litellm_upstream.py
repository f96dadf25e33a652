"""Upstream that calls any provider through litellm, which translates between dialects. Does not record calls."""

import asyncio
import importlib.util
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from assay.errors import FailureKind, MissingExtra
from assay.models.failures import failure_of_call
from assay.models.prices import Price
from assay.models.redirects import no_redirects
from assay.models.unrecorded import accounted
from assay.support.scrubbing import add_secrets, fields, mask_secrets, message
from assay.support.values import json_text
from assay.traces.gateway.embedded_chat import chunks_of
from assay.traces.gateway.replies import IDLE_S, JSON, STREAM, Reply, UpstreamCall, json_reply, once
from assay.traces.gateway.translation import answered, streamed
from assay.traces.gateway.translation_gemini import chat_of, error_of, untranslatable
from assay.traces.messages import gemini

__all__ = ["LitellmUpstream"]

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
        litellm = _litellm(dialect)
        calls = {
            "chat": "acompletion",
            "completions": "atext_completion",
            "responses": "aresponses",
            "messages": "anthropic_messages",
        }
        function = getattr(litellm, calls[dialect])
        try:
            parameters = {
                key: value for key, value in body.items() if key in _PARAMETERS[dialect]
            }  # a caller must not name another server, or its key
            with accounted(), no_redirects():  # the gateway records it
                answer = await self._in_time(
                    function(**{**parameters, **self.client, "model": self.name, "num_retries": 0})
                )
        except Exception as error:
            status = _STATUS.get(failure_of_call(error)) or int(getattr(error, "status_code", 0) or 500)
            failed = {"error": {"message": message(str(error)), "type": type(error).__name__, "code": status}}
            retry = getattr(getattr(error, "response", None), "headers", {}).get("retry-after")
            yield Reply(
                status, {**JSON, **({"Retry-After": retry} if retry else {})}, once(json.dumps(failed).encode())
            )
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
        models = {"object": "list", "data": [{"id": self.name, "object": "model", "owned_by": "assay"}]}
        return models

    async def close(self) -> None:
        pass


def _litellm(dialect: str) -> Any:
    # litellm would download its price list on import, which takes seconds; prices are not used here.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    if dialect not in ("chat", "completions") and importlib.util.find_spec("mcp") is None:
        raise MissingExtra("mcp", "serve")  # litellm imports it to translate Responses and Anthropic messages
    add_secrets(
        *(
            value
            for name, value in vars(litellm).items()
            if name.endswith(("_key", "_token")) and isinstance(value, str)
        )
    )
    return litellm


async def _events(
    dialect: str, answer: Any, in_time: Callable[[Awaitable[Any]], Awaitable[Any]]
) -> AsyncIterator[bytes]:
    events = aiter(answer)
    while (event := await in_time(anext(events, None))) is not None:
        if isinstance(event, bytes | str):  # already encoded as an event
            yield mask_secrets(event if isinstance(event, str) else event.decode("utf-8", "surrogateescape")).encode(
                "utf-8", "surrogateescape"
            )
            continue
        data = _plain(event)
        head = f"event: {data.get('type')}\n" if dialect in ("responses", "messages") else ""
        yield f"{head}data: {mask_secrets(json_text(data))}\n\n".encode()
    if dialect in ("chat", "completions"):
        yield b"data: [DONE]\n\n"


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json", exclude_none=True) if hasattr(value, "model_dump") else value
