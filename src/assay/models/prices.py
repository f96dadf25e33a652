"""Prices of calls: those that the user gives for a model, else litellm's, to which `litellm.register_model` adds.

Unknown is None, never 0. Settings import this module, so it loads DSPy and litellm only for a price.
"""

import functools
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson

from assay.errors import ConfigError
from assay.models.roles import is_embedded

_MILLION = 1_000_000


@dataclass(frozen=True)
class Price:
    """A price of the user's, in US dollars for a million tokens."""

    prompt: float
    answer: float

    @classmethod
    def of(cls, value: Any) -> "Price | None":
        """A price from `0.15,0.60` or two numbers; None stays None.

        Raises:
            ConfigError: it is not two numbers of at least 0.
        """
        if value is None or isinstance(value, Price):
            return value
        parts = value.split(",") if isinstance(value, str) else value
        try:
            prompt, answer = (float(part) for part in parts)
        except (TypeError, ValueError):
            prompt = answer = math.nan
        if not (0 <= prompt < math.inf and 0 <= answer < math.inf):
            raise ConfigError(f"`price={value!r}` {_RULE}")
        return cls(prompt, answer)

    def cost(self, prompt_tokens: int, completion_tokens: int) -> float:
        return (prompt_tokens * self.prompt + completion_tokens * self.answer) / _MILLION


FREE = Price(0.0, 0.0)
_RULE = "must be two numbers of at least 0, in US dollars for a million tokens of prompt and answer: 0.15,0.60"


def price_text(value: str | Sequence[float]) -> str:
    """A price in its stored form, for settings.

    Raises:
        ValueError: the rule that the value breaks.
    """
    try:
        price = Price.of(value)
    except ConfigError:
        raise ValueError(_RULE) from None
    return "" if price is None else f"{price.prompt:g},{price.answer:g}"


def price(model: str, prompt_tokens: int, completion_tokens: int, *, own: Price | None = None) -> float | None:
    """Dollars for so many tokens, 0 for embedded models, None where no price is known."""
    if own is not None:
        return own.cost(prompt_tokens, completion_tokens)
    if is_embedded(model):
        return 0.0
    from assay.models.hosted import quiet_litellm

    if not _may_be_listed(model):
        return None
    litellm = quiet_litellm()
    try:
        entry = litellm.model_cost[litellm.get_model_info(model)["key"]]
        if not any("cost" in name for name in entry):  # litellm then counts 0
            return None
        costs = litellm.cost_per_token(model=model, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
        return float(sum(costs))
    except Exception:  # litellm raises its own kinds for models it has no price for
        return None


def _may_be_listed(model: str) -> bool:
    """Whether litellm, which takes seconds to import, may have a price: it strips versions and regions from names."""
    loaded, local = "litellm" in sys.modules, os.environ.get("LITELLM_LOCAL_MODEL_COST_MAP", "")
    if loaded or local.lower() != "true" or model.startswith("ollama"):  # it asks the server for models of Ollama
        return True
    return _is_named(model.lower())


@functools.lru_cache(maxsize=256)
def _is_named(model: str) -> bool:
    return any(listed in model for listed in _listed_names())


@functools.cache
def _listed_names() -> frozenset[str]:
    """Names in litellm's table, without providers; the empty name, which is in all names, if it cannot be read."""
    spec = find_spec("litellm")
    try:
        file = Path(str(spec and spec.origin)).with_name("model_prices_and_context_window_backup.json")
        return frozenset(name.rpartition("/")[2].lower() for name in orjson.loads(file.read_bytes()))
    except (OSError, ValueError):
        return frozenset({""})


def cost_of(backend: Any, model: str, usage: Any, reported: float | None, *, own: Price | None) -> float | None:
    """Dollars of an answered call.

    Args:
        usage: its counts of tokens (`lm15.Usage`).
        reported: by an engine of the user's, or the client's estimate from its own table. That one knows the rates of
            cached, audio and reasoning tokens, but not the prices of `litellm.register_model`: a call with no such
            tokens has litellm's price.
    """
    from assay.models.hosted import CustomBackend

    listed = price(model, usage.input_tokens or 0, usage.output_tokens or 0, own=own)
    special = usage.cache_read_tokens or usage.cache_write_tokens or usage.reasoning_tokens
    special = special or usage.input_audio_tokens or usage.output_audio_tokens
    if own is None and reported is not None and (special or isinstance(backend, CustomBackend)):
        return reported
    return reported if listed is None else listed
