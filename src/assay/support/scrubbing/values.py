"""Removes the values of credential fields from requests, answers, settings and results, at any depth."""

import json
import operator
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Literal

from assay.support.json_texts import is_json, rewritten, with_values
from assay.support.scrubbing.names import ERRORS, NOTES, credentials_in, is_credential, kind_of
from assay.support.scrubbing.shapes import MARK, NOTHING, in_json, without_logins, without_shapes
from assay.support.scrubbing.texts import PLAIN, all_secrets, forms, message, without

_PLAIN_HEADERS = re.compile(
    r"accept.*|content-.*|user-agent|host|connection|anthropic-(?:version|beta)|openai-(?:beta|organization|project)",
    re.I,
)
_FLAG = re.compile(r"--?[\w-]*(?:api-?key|token|secret|passw(?:or)?d|passcode|jwt|authorization)", re.I)
_FLAG_VALUE = re.compile(rf"(?<![\w-])(?P<flag>{_FLAG.pattern})=(?P<quote>[\"']?)(?P<value>[^\s\"']+)", re.I)
# items of a list: GITHUB_TOKEN=…, X-Api-Key: …
_ITEM = re.compile(r"(?P<name>[\w-]{2,60})(?P<sign>=|:\s*)(?P<value>(?:(?:bearer|basic|token)\s+)?\S{4,})", re.I)
# content of the strings: settings, texts that a model or agent reads or writes, or error messages
Mode = Literal["plain", "texts", "errors"]


def fields(
    value: Any,
    also: Sequence[str] = (),
    *,
    removed: list[str] | None = None,
    texts: bool = False,
    mask_known: bool = True,
) -> Any:
    """A request, an answer or settings with credentials masked, at any depth; the same object if there are none.

    Args:
        also: further known secrets, as in `mask_secrets`.
        removed: receives the values removed from fields, so that they can be removed where a server repeats them.
        texts: the value is a text of a model or agent: masks known secrets, and fields that are always credentials.
        mask_known: mask known secrets; False if the caller masks them in the serialised value.
    """
    secrets = [*forms(also), *(all_secrets() if mask_known else ())] if also or mask_known else []
    return _Fields(secrets if _may_hold(value, secrets) else [], removed, ERRORS).of(
        value, "texts" if texts else "plain"
    )


def _may_hold(value: Any, secrets: Sequence[str]) -> bool:
    """Whether secrets may be in a request or an answer.

    Searches its JSON at once, which for long conversations is ten times as fast as searching each text. Returns True
    for secrets that JSON writes with escapes.
    """
    if not secrets or not isinstance(value, dict | list) or not all(map(PLAIN.fullmatch, secrets)):
        return bool(secrets)
    import orjson

    try:
        text = orjson.dumps(value)
    except TypeError:  # lone surrogates, or keys and values that JSON does not support
        return True
    return any(secret.encode() in text for secret in secrets)


def may_hold(value: Any, also: Iterable[str] = ()) -> bool:
    """Whether known secrets, or those in `also`, may be in a request or an answer."""
    return _may_hold(value, [*forms(also), *all_secrets()])


def results(value: Any) -> Any:
    """Results for display or storage: texts with only known secrets masked; errors, reasons and notes as messages."""
    return _Fields(all_secrets(), None, NOTES).of(value, "texts")


_SCALARS, _NUMBERS, _LISTS = (  # constants, because `isinstance` with a union builds it anew each time
    (str, int, float, type(None)),
    (int, float),
    (list, tuple),
)
_CHANGED_IN_TEXTS = frozenset(
    ("strong", "errors", "json", "url")
)  # kinds of fields that are masked inside of texts too
_CONTAINERS = (dict, list, tuple)
# JSON's scalars, compared by exact type: `isinstance` takes twice as long
_PLAIN_TYPES = frozenset((str, int, float, bool, type(None)))


def _names_in(value: Any) -> set[str]:
    """Names of all fields at any depth; `arguments` only where one may contain a credential.

    Proceeds level by level, which takes half as long as field by field.
    """
    names: set[Any] = set()
    with_arguments = False
    level = [value]
    while level:
        below = []
        for item in level:
            if isinstance(item, dict):
                names.update(item)
                if not with_arguments and "arguments" in item:
                    with_arguments = isinstance(text := item["arguments"], str) and in_json(text)
                item = item.values()
            elif not isinstance(item, _LISTS):
                continue
            below += [part for part in item if type(part) not in _PLAIN_TYPES]
        level = below
    return {str(name) for name in names if with_arguments or name != "arguments"}


def _has_fields(value: Any) -> bool:
    """Whether texts of a model or agent have fields, at any depth, that may hold a credential."""
    return not _CHANGED_IN_TEXTS.isdisjoint(map(kind_of, _names_in(value)))


class _Fields:
    """Masks credentials in one value.

    Args:
        secrets: known secrets, in all forms.
        removed: receives the values removed from fields.
        errors: names of fields whose texts are error messages.
    """

    def __init__(self, secrets: Sequence[str], removed: list[str] | None, errors: frozenset[str]) -> None:
        self.secrets, self.removed, self.errors = secrets, removed, errors

    def of(self, value: Any, mode: Mode) -> Any:
        if mode == "texts" and not self.secrets and isinstance(value, _CONTAINERS) and not _has_fields(value):
            return value  # the case of most conversations
        return self._of(value, mode)

    def _of(self, value: Any, mode: Mode) -> Any:
        if isinstance(value, str):
            return value if mode == "texts" and not self.secrets else self._text(value, mode)
        if isinstance(value, dict):
            return self._mapping(value, mode)
        if isinstance(value, _LISTS):
            return self._list(value, mode)
        return value

    def _text(self, text: str, mode: Mode) -> str:
        if self.secrets:
            text = without(text, self.secrets)
        if mode == "texts" or len(text) < 8:
            return text
        return message(text) if mode == "errors" else self._setting(text)

    def _setting(self, text: str) -> str:
        """A text of settings, with shapes of credentials masked, and credential fields of JSON in it."""
        if is_json(text) and in_json(text):
            with suppress(ValueError, RecursionError):
                value = json.loads(text)
                masked = self._of(value, "plain")
                text = text if masked is value else rewritten(text, value, masked)
            text = self._json(text, "plain")
        if "=" in text and "-" in text:
            text = _FLAG_VALUE.sub(lambda m: f"{m['flag']}={m['quote']}{self._value(m['value'])}", text)
        return without_shapes(text, self.removed)

    def _json(self, text: str, mode: Mode) -> str:
        """A text with credential fields of JSON in it masked; every other byte is unchanged."""

        def changed(name: str, value: str) -> str:
            kind = kind_of(name)
            if kind in ("strong", "weak") and is_credential(name, value, texts=mode == "texts"):
                return self._value(value)
            if kind == "url" and mode == "texts":
                return without_logins(value)
            return self._json(value, mode) if is_json(value) and in_json(value) else value

        try:
            return with_values(text, changed)
        except RecursionError:
            return text

    def _value(self, value: str) -> str:
        """The value after a credential's name, masked if it may be a secret."""
        return value if MARK in value or NOTHING.fullmatch(value) else str(self._masked(value))

    def _item(self, text: str) -> str:
        """An item of a list of command arguments, such as `GITHUB_TOKEN=…` or `X-Api-Key: …`, masked."""
        if not ("=" in text or ":" in text) or (match := _ITEM.fullmatch(text)) is None:
            return text
        name, sign, value = match["name"], match["sign"], match["value"]
        credential = is_credential(name) if sign == "=" else kind_of(name) == "strong"
        return f"{name}{sign}{self._value(value)}" if credential else text

    def _list(self, value: Sequence[Any], mode: Mode) -> Any:
        new = [item if isinstance(item, _NUMBERS) else self._of(item, mode) for item in value]
        if mode == "plain":
            new = [self._item(item) if isinstance(item, str) else item for item in new]
        if mode == "plain" and len(new) > 1:  # ["--api-key", "…"]
            for at, (flag, item) in enumerate(pairwise(value), 1):
                if isinstance(flag, str) and isinstance(item, str) and _FLAG.fullmatch(flag):
                    new[at] = self._masked(item)
        return value if all(map(operator.is_, new, value)) else new

    def _mapping(self, value: dict[Any, Any], mode: Mode) -> Any:
        changed: dict[Any, Any] | None = None
        unchanged = mode == "texts" and not self.secrets
        for name, item in value.items():
            if unchanged and isinstance(item, _SCALARS) and kind_of(str(name)) not in _CHANGED_IN_TEXTS:
                continue  # the case of most fields
            masked = self._field(name, item, mode) if isinstance(name, str) else self._of(item, mode)
            if name == "value" and mode == "plain":
                label = value.get("name", value.get("key"))
                if isinstance(label, str) and is_credential(label):
                    masked = self._masked(item)  # {"name": "Authorization", "value": "…"}
            if masked is not item:
                changed = dict(value) if changed is None else changed
                changed[name] = masked
        return value if changed is None else changed

    def _field(self, name: str, item: Any, mode: Mode) -> Any:
        kind = kind_of(name)
        if kind == "":
            return self._of(item, mode)
        if kind == "unchanged":
            return item
        # with a `type` it is the schema of an argument
        if kind == "headers" and mode == "plain" and isinstance(item, dict) and "type" not in item:
            return {k: v if _PLAIN_HEADERS.fullmatch(str(k)) else self._masked(v) for k, v in item.items()}
        if (
            kind in ("strong", "weak")
            and not isinstance(item, dict | bool)
            and is_credential(name, item, texts=mode == "texts")
        ):
            return self._masked(item)
        if name in self.errors and (mode == "plain" or self.errors is NOTES):
            return self._of(item, "errors")
        if kind == "json" and isinstance(item, str) and mode != "errors":
            text = self._text(item, "texts")
            return _Fields((), None, self.errors)._json(text, "texts") if is_json(text) and in_json(text) else text
        if kind == "url" and isinstance(item, str) and mode == "texts":
            return without_logins(self._text(item, mode))
        return self.of(item, "texts") if mode == "plain" and kind in ("texts", "json") else self._of(item, mode)

    def _masked(self, item: Any) -> Any:
        if isinstance(item, list | tuple):
            return [self._masked(part) for part in item]
        if isinstance(item, dict):
            return {name: self._masked(part) for name, part in item.items()}
        if item is None or isinstance(item, bool) or item in ("", MARK):
            return item
        if self.removed is not None:
            self.removed += credentials_in(str(item))
        return MARK
