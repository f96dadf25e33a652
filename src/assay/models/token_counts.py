"""Counts of tokens by the engine of a model, cached."""

import contextlib
import hashlib
from collections import OrderedDict
from typing import Any
from weakref import WeakKeyDictionary

from assay.models.custom_backend import rough_tokens
from assay.models.lm import LanguageModel

_COUNTS = 16_384  # token counts kept per backend
# Per backend, so that counts end with it.
_counts: WeakKeyDictionary[Any, OrderedDict[bytes, int]] = WeakKeyDictionary()


def _count(backend: Any, text: str) -> int:
    counts = _counts.setdefault(backend, OrderedDict())
    key = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=16).digest()
    if (count := counts.get(key)) is None:
        count = counts[key] = int(backend.count_tokens(text))
        if len(counts) > _COUNTS:
            with contextlib.suppress(KeyError):  # another thread removed the last one
                counts.popitem(last=False)
    return count


def count_tokens(lm: Any, text: str) -> int:
    """Number of tokens of `text` by the model's tokenizer; one token per four characters if there is none."""
    if not isinstance(lm, LanguageModel):
        return rough_tokens(text)
    try:
        return _count(lm.recording.backend, text)
    except Exception:  # an unavailable tokenizer must not stop an agent; the docstring states the fallback
        return rough_tokens(text)
