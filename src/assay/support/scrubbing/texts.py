"""Known secrets: passed to this process, or values of environment variables for keys. Removes them from texts."""

import json
import os
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote

from assay.support.scrubbing.names import VARIABLE
from assay.support.scrubbing.shapes import MARK, NOTHING, without_pairs, without_shapes

_configured: dict[str, None] = {}  # keys passed to this process
_changes = 0  # number of additions to `_configured`
_MOST = 1000  # keys kept in `_configured`; the oldest are dropped first

PLAIN = re.compile(r"[ !#-\[\]-~]+")  # texts that JSON writes without escapes


def add_secrets(*secrets: str | None) -> None:
    """Register keys of this process: they are removed from everything that is written. Kept in memory only."""
    global _changes
    for secret in secrets:
        if secret and secret not in _configured and is_maskable(secret):
            _configured[secret] = None
            _changes += 1
            if len(_configured) > _MOST:
                del _configured[next(iter(_configured))]


def mask_secrets(text: str, also: Iterable[str] = ()) -> str:
    """Text with known secrets masked and nothing else changed.

    Args:
        also: further secrets, such as the key of the current request.
    """
    return without(text, forms(also) + all_secrets())


def without(text: str, secrets: Iterable[str]) -> str:
    """A text with these secrets masked; their format is that of `all_secrets`."""
    for secret in secrets:
        if secret in text:
            text = text.replace(secret, MARK)
    return text


def message(text: str, also: Iterable[str] = ()) -> str:
    """An error, log line or note with secrets masked: known ones, known shapes, values after a credential's name."""
    extra = [secret for secret in also if len(secret) > 3 and not NOTHING.fullmatch(secret)]
    text = mask_secrets(text, extra)
    for secret in extra:  # also short ones, which could be words of a text
        text = text.replace(secret, MARK)
    return without_pairs(without_shapes(text))


def error_text(error: BaseException, also: Iterable[str] = ()) -> str:
    """Class and message of an exception, with secrets masked. The message alone where it needs no class."""
    try:
        text = str(error)
    except (Exception, SystemExit, GeneratorExit) as unread:  # `__str__` may be code of a user or library
        text = f"its message cannot be read ({type(unread).__name__})"
    return message(text if text and _is_sentence(error) else f"{type(error).__name__}: {text}", also)


def _is_sentence(error: BaseException) -> bool:
    """Whether the message is a sentence for the user: our own errors and those of DSPy's model clients."""
    return any(
        cls.__module__ == "assay.errors" or (cls.__module__, cls.__name__) == ("dspy.utils.exceptions", "LMError")
        for cls in type(error).__mro__
    )


def is_maskable(secret: str) -> bool:
    """Whether a value can be masked in every text: not a word or path that may have another meaning there."""
    if len(secret) < 8 or NOTHING.fullmatch(secret):
        return False
    return not (secret.isalpha() and secret.islower() and len(secret) < 16)


def forms(secrets: Iterable[str]) -> list[str]:
    """Secrets as plain text, JSON and URLs write them, the longest first."""
    texts: set[str] = set()
    for secret in secrets:
        if is_maskable(secret):
            texts |= {secret, quote(secret, safe="")}
            if not PLAIN.fullmatch(secret):
                texts |= {json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}
    return sorted(texts, key=len, reverse=True)


_cache: tuple[Any, int, list[str]] = (None, 0, [])  # environment, `_changes`, and the secrets computed from them


def all_secrets() -> list[str]:
    """Every known secret in all forms in which it may be written, the longest first."""
    global _cache
    raw = getattr(os.environ, "_data", None)  # compared undecoded: decoding takes 100 times as long
    variables: Any = os.environ if raw is None else raw
    environment_then, changes_then, secrets = _cache
    if environment_then is not None and environment_then == variables and changes_then == _changes:
        return secrets
    changes, environment = _changes, dict(variables)
    _cache = (environment, changes, forms([*_configured, *_environment_secrets()]))
    return _cache[2]


def _environment_secrets() -> list[str]:
    secrets: list[str] = []
    for name, value in list(os.environ.items()):
        if "://" in value:
            secrets += [login.partition(":")[2] for login in re.findall(r"://([^\s/?#@]+)@", value)]
        elif VARIABLE.search(name):
            secrets += [value, *(part.strip() for part in value.split(","))] if "," in value else [value]
    return [value.strip() for value in secrets if value.strip()]
