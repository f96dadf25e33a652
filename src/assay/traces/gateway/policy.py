"""The model in training as the upstream of agents that were written with anything. It samples as the training does."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from assay.errors import ModelError
from assay.models.limits import asking_model
from assay.models.lm import LanguageModel
from assay.models.unrecorded import accounted
from assay.support.values import json_text
from assay.traces.gateway.agents import AgentUpstream, Answered, invalid
from assay.traces.gateway.texts import TextSwap
from assay.traces.gateway.translation import as_called, chat_request

# Fields of a chat request that reach the model if its engine knows them. How it samples is the training's own: the
# policy is updated as the distribution that it was sampled from.
_ALWAYS = ("messages", "model")
_OPTIONAL = ("tools", "tool_choice", "parallel_tool_calls", "response_format", "stop")
_SAMPLING = ("temperature", "top_p")
# A caller's settings that have no effect, in the names of all dialects.
_IGNORED = frozenset((*_SAMPLING, "topP", "top_k", "topK", "min_p", "seed", "presence_penalty", "frequency_penalty"))


class _ChatBackend(Protocol):
    """What the backend of a model in training has besides: llama.cpp's or the trainer's."""

    adapters: Sequence[str]
    chat_fields: frozenset[str]  # fields of a chat request that it supports, of those in `_OPTIONAL`

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        """The reply to a chat request, as of OpenAI's API."""


class PolicyUpstream(AgentUpstream):
    """Answers the calls of one rollout with a model in training.

    Temperature, seed and length limit are the model's; a caller may only lower the limit.
    """

    def __init__(
        self, lm: LanguageModel, sample: int, *, accepts: Sequence[str] = (), texts: TextSwap | None = None
    ) -> None:
        super().__init__(lm, sample, accepts=accepts, texts=texts)
        self._asked = Counter[bytes]()

    @property
    def _backend(self) -> _ChatBackend:
        return cast(_ChatBackend, self.lm.recording.backend)

    def _sampled(self, chat: Mapping[str, Any]) -> dict[str, Any]:
        """The request with the settings that the training samples with."""
        request = {name: chat[name] for name in (*_ALWAYS, *_OPTIONAL) if chat.get(name) not in (None, [])}
        settings, limit = self.lm.kwargs, chat.get("max_tokens") or chat.get("max_completion_tokens")
        most = int(settings["max_tokens"])
        request["max_tokens"] = min(limit, most) if isinstance(limit, int) and limit > 0 else most
        request |= {name: settings[name] for name in _SAMPLING if settings.get(name) is not None}
        if settings.get("seed") is not None:
            request["seed"] = self._seed(settings["seed"], chat["messages"])
        return request

    def answered_body(self, dialect: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The request with the settings that are sampled with, in place of the caller's.

        A training on recorded calls reads their temperature.
        """
        sampled = {**self.lm.kwargs, **self.lm.recording.backend.sampling}
        settings = {name: sampled[name] for name in _SAMPLING if sampled.get(name) is not None}
        if dialect == "gemini":
            settings = {"topP" if name == "top_p" else name: value for name, value in settings.items()}
            config = body.get("generationConfig")
            config = config if isinstance(config, dict) else {}
            return {**body, "generationConfig": _without_settings(config) | settings}
        return _without_settings(body) | settings

    def _seed(self, seed: int, messages: Any) -> int:
        """A seed of the call's own, as `LanguageModel` derives it; one more for the same messages is another sample."""
        identity = json_text([seed, self.sample, messages], sort_keys=True).encode("utf-8", "replace")
        digest = hashlib.sha256(identity).digest()
        self._asked[digest] += 1
        return (int.from_bytes(digest[:4], "big") + self._asked[digest]) % (1 << 31)

    def _answer(self, dialect: str, body: Mapping[str, Any]) -> Answered:
        backend, meter = self._backend, self.lm.recording.meter
        chat = self._sampled(chat_request(dialect, body, self.model or self.name, tools=self.tools))
        if unknown := sorted(chat.keys() & {*_OPTIONAL} - backend.chat_fields):
            status, error = invalid(
                f"the engine of {self.name} cannot answer a request with {', '.join(unknown)}: leave it out"
            )
            return Answered(status=status, error=error)
        if tuple(backend.adapters) != self.adapters:
            raise ModelError("the weights that this rollout began with are no longer served")
        reply = dict[str, Any]()
        with asking_model(), meter.sending() as sent:
            try:
                with accounted():
                    reply = backend.chat(chat)
            finally:
                usage = reply.get("usage") or {}
                meter.settle(
                    sent, prompt_tokens=usage.get("prompt_tokens"), completion_tokens=usage.get("completion_tokens"),
                    cost_usd=0.0, failed="choices" not in reply,
                )  # fmt: skip
        if "choices" not in reply:
            error = reply.get("error", reply)
            return Answered(status=int(error.get("code") or 400) if isinstance(error, dict) else 400, error=reply)
        return Answered(completion=as_called(reply, dialect, dict(body)))


def _without_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in _IGNORED}
