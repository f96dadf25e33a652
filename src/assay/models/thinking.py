"""Thinking budgets: how much a model may think before it answers, and what that means for each engine.

An engine that cannot honour a budget is refused with the reason: most servers ignore fields that they do not know.
"""

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from assay.errors import ConfigError
from assay.support.names import nearest
from assay.support.sections import sections_in

if TYPE_CHECKING:
    from dspy import lm15

EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
# Tokens of an effort word where the engine has only a budget: those that DSPy sends for it (lm15).
EFFORT_TOKENS: Mapping[str, int] = dict(zip(EFFORTS, (1024, 2048, 8192, 16384, 24576, 32768), strict=True))
THOUGHT_FIELDS = ("thought", "reasoning")  # output fields in which a program lets a model think
CHARACTERS = 4  # per token, the usual average in English
_ANTHROPIC_LEAST = 1024  # smallest budget of Anthropic's API
_TAGS = ("<think", "[THINK]", "<|channel|>", "reasoning_content", "enable_thinking")  # in chat templates that think

_OTHERWISE = (
    "A program with an output field 'thought' or 'reasoning' in the format json or lean limits that field instead, if "
    "the budget is set on the program"
)
_WORDS = f"off, auto, {', '.join(EFFORTS)}"
_MOST = 2**31 - 1  # tokens: engines read the budget as a 32-bit integer
_NUMBER = re.compile(r"[+-]?\d{1,4000}")  # Python converts no more digits
# a string of a JSON object, also one that was cut; or a line


class ThinkingError(ConfigError):
    """A value that is not a thinking budget, or a budget that a model cannot honour.

    Args:
        value: the budget in its short form.
        reason: the broken rule, or why it cannot be honoured, as it follows the value.
        advice: the way out.
        setting: name of the setting that has the value.
    """

    def __init__(self, value: Any, reason: str, advice: str = "", *, setting: str = "thinking") -> None:
        text = f"`{setting}={value!r}`{reason}"
        super().__init__(f"{text}. {advice}" if advice else text)
        self.value, self.reason = value, reason

    def of(self, setting: str, advice: str) -> "ThinkingError":
        """The same error of another setting, with another advice."""
        return ThinkingError(self.value, self.reason, advice, setting=setting)


@dataclass(frozen=True)
class Thinking:
    """A limit on thinking: a number of tokens, or an effort word. Neither is `auto`: the model or agent decides.

    Attributes:
        tokens: thinking tokens of one call, from 0 (off) to 2**31 - 1.
        effort: one of `EFFORTS`.
    """

    tokens: int | None = None
    effort: str | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None and self.effort is not None:
            raise ConfigError(f"thinking takes tokens or effort, not both: tokens={self.tokens!r}, {self.effort!r}")
        if self.tokens is not None and (isinstance(self.tokens, bool) or not isinstance(self.tokens, int)):
            raise ThinkingError(self.tokens, f" must be a whole number of tokens, or one of {_WORDS}")
        if self.tokens is not None and self.tokens < 0:
            raise ThinkingError(self.tokens, " must be at least 0 tokens; 0 is off")
        if self.tokens is not None and self.tokens > _MOST:
            raise ThinkingError(self.tokens, f" must be at most {_MOST} tokens; auto sets no limit")
        if self.effort is not None and self.effort not in EFFORTS:
            similar = nearest(self.effort, ("off", "auto", *EFFORTS)) if isinstance(self.effort, str) else None
            hint = f". Did you mean {similar!r}?" if similar else ""
            raise ThinkingError(self.effort, f" must be a number of tokens, or one of {_WORDS}{hint}")

    @classmethod
    def off(cls) -> "Thinking":
        """No thinking."""
        return cls(tokens=0)

    @classmethod
    def auto(cls) -> "Thinking":
        """No limit is sent: the model decides; an `Agent` decides for each step."""
        return cls()

    @classmethod
    def of(cls, value: Any) -> "Thinking | None":
        """A budget from its short form: tokens, an effort word, `off` or `auto`. None stays None.

        Raises:
            ThinkingError: anything else.
        """
        if value is None or isinstance(value, cls):
            return value
        if isinstance(value, Mapping) and set(value) <= {"tokens", "effort"}:
            return cls(**value)
        if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
            value = int(value)
        if isinstance(value, str):
            word = value.strip().lower()
            return cls() if word == "auto" else cls.off() if word == "off" else cls(effort=word)
        return cls(tokens=value)

    @property
    def is_off(self) -> bool:
        return self.tokens == 0

    @property
    def is_auto(self) -> bool:
        return self.tokens is None and self.effort is None

    @property
    def limit(self) -> int | None:
        """Tokens, also of an effort word; None for `auto`."""
        return EFFORT_TOKENS[self.effort] if self.effort is not None else self.tokens

    @property
    def value(self) -> int | str:
        """The short form, as `of` takes it; JSON-ready."""
        if self.is_off:
            return "off"
        return self.effort if self.effort is not None else "auto" if self.tokens is None else self.tokens

    def __str__(self) -> str:
        return f"{self.value} tokens" if isinstance(self.value, int) else self.value


def short_form(value: Any) -> int | str:
    """A budget in its short form: 256, `low`, `off`, `auto`. For settings.

    Raises:
        ValueError: the rule that the value breaks.
    """
    try:
        budget = Thinking.of(value)
    except ThinkingError as error:
        raise ValueError(error.reason.strip()) from None
    return "auto" if budget is None else budget.value


@dataclass(frozen=True)
class Server:
    """The software of a self-hosted server, as it reports it: `vllm`, `llama.cpp`, or "" for others.

    `thinks` is whether its chat template has thinking tags; only llama.cpp tells.
    """

    kind: str = ""
    thinks: bool = False


def server_at(address: str, key: str | None = None) -> Server:
    """Asks a server for its list of models, which names the serving program, and llama.cpp for its chat template."""
    base = address.rstrip("/")
    models = _json(f"{base}/models", key)
    rows = models.get("data") if isinstance(models, Mapping) else None
    owners = {str(row.get("owned_by")) for row in rows or () if isinstance(row, Mapping)}
    if "vllm" in owners:
        return Server("vllm", True)
    if "llamacpp" not in owners:
        return Server()
    parts = urlsplit(base)
    props = _json(f"{parts.scheme}://{parts.netloc}{parts.path.removesuffix('/v1')}/props", key)
    template = props.get("chat_template") if isinstance(props, Mapping) else None
    return Server("llama.cpp", template_thinks(str(template or "")))


def template_thinks(template: str) -> bool:
    """Whether a chat template has thinking tags, without which llama.cpp ignores a budget."""
    return any(tag in template for tag in _TAGS)


def _json(url: str, key: str | None) -> Any:
    import urllib.request

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return json.load(answer)
    except (OSError, ValueError):
        return None


def native_thinking(lm: Any) -> bool:
    """Whether the model of a `dspy.LM` thinks by itself, outside of its answer."""
    backend = getattr(getattr(lm, "recording", None), "backend", None)
    return bool(getattr(backend, "thinks", getattr(lm, "supports_reasoning", False)))


def llama_request(request: "lm15.Request", thinking: Thinking, *, name: str, thinks: bool) -> "lm15.Request":
    """A request with a budget for llama.cpp's chat API, in process or as a server.

    Raises:
        ThinkingError: the chat template has no thinking tags, so that the budget would be ignored.
    """
    if not thinks:
        raise ThinkingError(
            thinking.value,
            f": the chat template of {name} has no thinking tags, so llama.cpp would ignore a budget",
            _OTHERWISE,
        )
    return _extended(request, {"reasoning_budget_tokens": thinking.limit, **_template_switch(thinking)})


def hosted_request(request: "lm15.Request", thinking: Thinking, *, server: Server | None, reasons: bool) -> Any:
    """A request with a budget, as the provider or server of its model takes it.

    Args:
        server: the user's own server; None for a provider.
        reasons: whether the model is known to think.
    Raises:
        ThinkingError: the model, provider or server cannot honour the budget.
    """
    if server is not None:
        return _server_request(request, thinking, server)
    provider, _, name = request.model.rpartition("/")
    provider = provider.partition("/")[0] or "openai"
    refusal = _refusal(provider, name, thinking, reasons)
    if refusal:
        raise ThinkingError(thinking.value, f": {request.model} {refusal}", "" if reasons else _OTHERWISE)
    return reasoning_request(request, thinking)


def reasoning_request(request: "lm15.Request", thinking: Thinking) -> "lm15.Request":
    from dspy import lm15

    tokens = thinking.tokens
    if thinking.is_off:
        reasoning = lm15.Reasoning(effort="off")
    elif tokens is None:
        reasoning = lm15.Reasoning(effort=thinking.effort)
    else:  # the effort is the word nearest to the budget; engines with a budget send only the budget
        effort = min(EFFORTS, key=lambda word: abs(EFFORT_TOKENS[word] - tokens))
        reasoning = lm15.Reasoning(effort=effort, thinking_budget=tokens)
    return replace(request, config=replace(request.config, reasoning=reasoning))


def _refusal(provider: str, name: str, thinking: Thinking, reasons: bool) -> str:
    """Why a provider's model cannot honour a budget; empty if it can."""
    from assay.models.dspy_seam import has_adaptive_thinking

    if not reasons:
        return "is not known to think, and would ignore it or fail"
    if not thinking.tokens:
        return ""
    if provider == "anthropic":
        if has_adaptive_thinking(name):
            return "takes effort words, no token budget: Thinking(effort='low')"
        least = thinking.tokens < _ANTHROPIC_LEAST
        return f"needs a budget of at least {_ANTHROPIC_LEAST} tokens, or 'off'" if least else ""
    return "" if provider == "gemini" else "has no token budget; use an effort word: Thinking(effort='low')"


def _server_request(request: "lm15.Request", thinking: Thinking, server: Server) -> "lm15.Request":
    if server.kind == "vllm":  # a server without --reasoning-config answers the budget with status 400
        return _extended(request, {"thinking_token_budget": thinking.limit, **_template_switch(thinking)})
    if server.kind == "llama.cpp":
        return llama_request(request, thinking, name=request.model, thinks=server.thinks)
    raise ThinkingError(
        thinking.value,
        f": the server of {request.model} does not say that it is vLLM or llama.cpp, and another one would ignore the "
        "budget. Name a vLLM server's model hosted_vllm/NAME",
        _OTHERWISE,
    )


def _template_switch(thinking: Thinking) -> dict[str, Any]:
    return {"chat_template_kwargs": {"enable_thinking": False}} if thinking.is_off else {}


def _extended(request: "lm15.Request", fields: Mapping[str, Any]) -> "lm15.Request":
    extensions = {**(request.config.extensions or {}), **fields}
    return replace(request, config=replace(request.config, extensions=extensions))


def budget_of(request: Mapping[str, Any]) -> int | None:
    """Thinking budget in tokens of a recorded request, from whichever field holds it; None if it has none."""
    config = request.get("config")
    if not isinstance(config, Mapping):
        return None
    parts = (config.get(name) for name in ("reasoning", "extensions"))
    reasoning, extensions = (part if isinstance(part, Mapping) else {} for part in parts)
    known = [extensions.get("thinking_token_budget"), extensions.get("reasoning_budget_tokens")]
    known += [reasoning.get("thinking_budget"), EFFORT_TOKENS.get(str(reasoning.get("effort")))]
    known += [0] if reasoning.get("effort") == "off" else []
    for name in THOUGHT_FIELDS:
        field = schema_of(request).get(name)
        if isinstance(field, Mapping) and isinstance(field.get("maxLength"), int):
            known.append(field["maxLength"] // CHARACTERS)
    return next((int(value) for value in known if isinstance(value, int)), None)


def thought_tokens(
    request: Mapping[str, Any], text: str, tokens: Sequence[str], count: Callable[[str], int]
) -> int | None:
    """Tokens of the thought field in an answer that a schema constrains; None if it has no such field.

    Args:
        tokens: texts of the answer's tokens; empty if the engine does not report them.
        count: number of tokens of a text, for that case.
    """
    name = next((name for name in THOUGHT_FIELDS if name in schema_of(request)), None)
    if name is None:
        return None
    text = "".join(tokens) or text
    section = next((section for section in sections_in(text, schema_of(request)) if section.name == name), None)
    if section is None:
        return None
    begin, end = section.start, section.end
    if text.startswith('"', begin):  # JSON
        begin, end = begin + 1, end - section.complete
    if not tokens:
        return count(text[begin:end]) if end > begin else 0
    starts = [0]
    for token in tokens:
        starts.append(starts[-1] + len(token))
    return sum(start < end and after > begin for start, after in itertools.pairwise(starts))


def schema_of(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Properties of the JSON schema that constrains the answer to a recorded request; empty without one."""
    part: Any = request.get("config")
    for key in ("response_format", "schema", "properties"):
        part = part.get(key) if isinstance(part, Mapping) else None
    return part if isinstance(part, Mapping) else {}
