"""Removes keys and passwords from everything that is written: store, response cache, logs, exports, JSON, messages.

Three rules. A *known* secret (the value of an environment variable for keys, a key passed to a model or gateway, the
key of a request) is removed everywhere, including the texts of models and agents. The value of a credential *field*
(`authorization`, `api_key`, `password`, …) is removed at any depth of a request. *Shapes* (`Bearer …`, `sk-…`, a
password in a URL) are removed from messages and settings, but never from what a model read or wrote: these texts stay
byte-exact. Does not find secrets that users mention in a text: `assay.traces.privacy` does.

Most texts contain no shape. A case-insensitive pattern is slow, so that its letters are searched for first, in the text
as `str.casefold` returns it. The letter i is never searched for, because `re.I` knows more forms of it.
"""

import base64
import binascii
import json
import logging
import operator
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal, TextIO, cast
from urllib.parse import quote, unquote

from assay.support.values import is_json, rewritten, with_values

MARK = "[key]"
# each name of a credential contains one of these
_NAMES = ("key", "token", "secret", "auth", "cred", "bearer", "pass", "cook", "jwt", "pw")
SEARCH_WORDS = (*_NAMES, "\\u", ":/", ":\\/")  # names may be escaped; also addresses
_STARTS = (  # of the alternatives of `_TOKENS`
    "sk-", "k_live_", "k_test_", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "xox", "AKIA",
    "ASIA", "AIza", "ya29.", "hf_", "gsk_", "r8_", "fw_", "xai-", "pplx-", "nvapi-", "eyJ",
)  # fmt: skip
_FEW = 40  # in texts of fewer characters, searching `_TOKENS` is faster than searching all its starts
_SECRETISH = r"(?=[\w.~+/=:-]*(?:[\d_.~+/=-]|[a-z][A-Z]|[A-Z][a-z]+[A-Z])|[\w.~+/=:-]{20})"  # not a word of a sentence
SECRET_SHAPE = re.compile(rf"(?:(?i:bearer|basic|token)\s+)?{_SECRETISH}[\w.~+/=:*-]{{6,}}")
_SCHEME = re.compile(rf"\b(?P<scheme>(?i:bearer|basic))(?P<gap>\s+|%20|\+){_SECRETISH}(?P<value>[\w.~+/=:*-]{{6,}})")
_TOKENS = re.compile(
    r"(?<![A-Za-z0-9])(?:sk-[\w*.-]{8,}|[spr]k_(?:live|test)_\w{8,}|(?:gh[pousr]|github_pat)_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[a-z]-[\w-]{10,}|(?:AKIA|ASIA)[A-Z2-7]{16}|AIza[\w-]{30,}|ya29\.[\w-]{16,}|hf_[A-Za-z0-9]{20,}"
    r"|(?:gsk|r8|fw)_\w{16,}|(?:xai|pplx|nvapi)-[\w-]{16,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)",
    re.A,
)
_LOGIN = re.compile(r"://(?<=[a-z0-9+.-]{2}://)(?P<login>[^\s/?#@\"'<>]{1,300})@", re.I)
_DATABASES = ("postgresql", "psycopg")  # ends of schemes where a login without a password is a user's name
_QUERY = re.compile(
    r"(?P<name>[?&;](?:key|sig|code|auth|jwt|pwd?|[\w-]*(?:api[-_]?key|access[-_]?key(?:[-_]?id)?|token|secret"
    r"|passw(?:or)?d|passcode|authorization|signature|credential)))=(?P<value>[^&\s\"'<>#]{4,})",
    re.I,
)
# in an address that a model wrote, these are often not names of credentials
_ALSO_WORDS = re.compile(r"[?&;](?:key|code|auth|sig)", re.I)
_WEBHOOK = re.compile(
    r"(?P<before>hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/|discord(?:app)?\.com/api/webhooks/)"
    r"(?P<value>[\w/-]{8,})",
    re.I,
)
_PEM = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY.*?(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)", re.S
)
_PAIR = re.compile(  # the end of a name, and its value, in a message
    r"(?P<name>(?:authorization|authorization[-_]token|api[-_ ]?key|[-_]key|token|secret|passw(?:or)?d|passcode|jwt"
    r"|(?<![A-Za-z0-9])pw|credentials?|cookie)"
    r"(?:\\*[\"'])?\s{0,3}(?:=>|[:=])\s{0,3}(?:\\*[\"'])?(?:(?:bearer|basic"
    r"|token)\s+)?)(?P<value>[^\s\"'\\,;&<>(){}\[\]]{4,})",
    re.I,
)
NOTHING = re.compile(  # values that are not secrets
    r"\[key\]?|[x*.•-]+|none|null|nil|true|false|empty|dummy|fake|test|missing|required|invalid|field|string|bearer"
    r"|basic|local|ollama|vllm|changeme|undefined|expected|placeholder|provided|lm-?studio|not-?needed|no-?key"
    r"|sk-no-key-required|your[-_ ].*|\$?\{.*|<.*|\d{1,6}|/.*|~.*|\d+\.\d+",
    re.I | re.S,
)


def announced(text: str) -> bool:
    """Whether a text may contain the name of a credential."""
    return any(map(text.casefold().__contains__, _NAMES))


def in_json(text: str) -> bool:
    """Whether a JSON text may contain a credential or an address."""
    return any(map(text.casefold().__contains__, SEARCH_WORDS))


def without_shapes(text: str, removed: list[str] | None = None) -> str:
    """The text with everything that looks like a credential masked; the credentials are appended to `removed`."""

    def mask(before: str, secret: str, after: str = "") -> str:
        if removed is not None:
            removed.extend([secret, unquote(secret)])
        return f"{before}{MARK}{after}"

    def without_login(match: re.Match[str]) -> str:
        _, colon, password = match["login"].partition(":")
        if password == "PASSWORD" or (not colon and match.string.endswith(_DATABASES, 0, match.start())):
            return match[0]  # a hint, or a user's name
        return mask("://", password or match["login"], "@")

    plain = text.casefold()
    if "bearer" in plain or "bas" in plain:
        text = _SCHEME.sub(
            lambda m: m[0] if NOTHING.fullmatch(m["value"]) else mask(m["scheme"] + m["gap"], m["value"]), text
        )
    if len(text) < _FEW or any(map(text.__contains__, _STARTS)):
        text = _TOKENS.sub(lambda m: mask("", m[0]), text)
    if "://" in text and "@" in text:
        text = _LOGIN.sub(without_login, text)
    if "=" in text and ("://" in text or "?" in text):
        text = _QUERY.sub(lambda m: mask(m["name"] + "=", m["value"]), text)
    if "hook" in plain:
        text = _WEBHOOK.sub(lambda m: mask(m["before"], m["value"]), text)
    return _PEM.sub(lambda m: mask("", m[0]), text) if "PRIVATE KEY" in text else text


def without_pairs(text: str) -> str:
    """A message with the values masked that follow a name such as `token=` or `password:`."""
    if not ("=" in text or ":" in text) or not announced(text):
        return text
    return _PAIR.sub(lambda m: m[0] if NOTHING.fullmatch(m["value"]) else m["name"] + MARK, text)


def without_logins(text: str) -> str:
    """An address that a model reads or writes, with passwords, signatures and tokens masked; possible words stay."""
    if text.startswith("data:"):
        return text

    def looks_secret(value: str) -> bool:
        return len(value) >= 16 and SECRET_SHAPE.fullmatch(unquote(value)) is not None

    text = _LOGIN.sub(lambda m: f"://{MARK}@" if ":" in m["login"] or looks_secret(m["login"]) else m[0], text)
    text = _QUERY.sub(
        lambda m: m[0] if _ALSO_WORDS.fullmatch(m["name"]) and not looks_secret(m["value"]) else f"{m['name']}={MARK}",
        text,
    )
    return _WEBHOOK.sub(lambda m: m["before"] + MARK, text)


# Endings of names, letters only. `token` alone may also be a piece of text (in log-probabilities), `key` that of a map.
_STRONG = re.compile(
    r"(?:authorization|authorizationtoken|apikey|apikeystring|apitoken|accesstoken|refreshtoken|authtoken|bearertoken"
    r"|sessiontoken|oauthtoken|clientsecret|jwttoken|^jwt"
    r"|securitytoken|identitytoken|adtoken|sastoken|secretkey|secretaccesskey|accesskey|accesskeyid|privatekey"
    r"|subscriptionkey)$"
)
# credentials only outside of the texts of models and agents
_WEAK = re.compile(
    r"(?:^token|^auth|^bearer|^pwd|cookie|secret|password|passwd|passphrase|passcode|^pw|^credentials?)$"
)
VARIABLE = re.compile(
    r"(?:^|_)(?:API_?)?(?:KEYS?|TOKENS?|SECRETS?|PASS(?:WORD|WD|PHRASE)?|CREDENTIALS?|AUTH)(?:_(?:ID|\d+))?$"
    r"|(?:APIKEY|PASSWORD|SECRET|TOKEN)$",
    re.I,
)
_HEADERS = frozenset(("headers", "extraheaders", "defaultheaders", "httpheaders", "requestheaders", "customheaders"))
_URLS = frozenset(("url", "uri", "imageurl", "fileuri", "fileurl", "serverurl"))  # fields of addresses, letters only
_TEXTS = frozenset((  # fields that contain texts of models or agents
    "messages", "message", "input", "inputs", "instructions", "system", "prompt", "suffix", "content",
    "contents", "parts", "choices", "output", "text", "result", "reasoning", "refusal", "candidates",
    "description", "answer", "delta",
))  # fmt: skip
ERRORS = frozenset(("error", "errors", "failed_generation"))
NOTES = ERRORS | {
    "reason", "reasons", "why_failed", "notes", "note", "warning", "warnings", "failures", "unrecorded_reason",
    "undecided", "detail",
}  # fmt: skip
# Numbers and pieces of texts; and entities of a task, by which an export removes personal data.
_UNCHANGED = frozenset(("logprobs", "top_logprobs", "completion_probabilities", "token_ids", "embedding", "entities"))


def is_credential(name: str, value: Any = None, *, texts: bool = False) -> bool:
    """Whether a field, header or argument of this name holds a credential.

    Args:
        value: value of the field.
        texts: the field is in the texts of a model or agent, where `token` and `password` may be words of the subject:
            the value must then also look like a credential.
    """
    kind = kind_of(name)
    if kind == "strong" and texts:
        return isinstance(value, str) and SECRET_SHAPE.fullmatch(value) is not None
    return kind == "strong" or (kind == "weak" and not texts)


@lru_cache(maxsize=4096)
def kind_of(name: str) -> str:
    """Kind of a field by its name.

    Returns:
        `strong`: always a credential; `weak`: a credential outside of texts; `headers`; `texts`; `errors`: error
        messages; `json`: JSON or text; `url`: an address; `unchanged`: never masked; empty: none of these.
    """
    plain = "".join(c for c in name.lower() if c.isalnum())
    if name in _UNCHANGED:
        return "unchanged"
    if _STRONG.search(plain) is not None:
        return "strong"
    if _WEAK.search(plain) is not None or (name.isupper() and VARIABLE.search(name) is not None):
        return "weak"
    if name == "arguments" or plain in _URLS:
        return "json" if name == "arguments" else "url"
    return "headers" if plain in _HEADERS else "texts" if name in _TEXTS else "errors" if name in NOTES else ""


def credentials_in(value: str) -> list[str]:
    """Secrets in a credential's value: the value, or the part after `Bearer`; after `Basic` also what it decodes to."""
    value = value.strip()
    scheme, _, rest = value.partition(" ")
    secrets = [value]
    if rest and scheme.lower() in ("bearer", "basic", "token", "apikey"):
        secrets = [rest.strip()]
        if scheme.lower() == "basic":
            try:
                login = base64.b64decode(rest, validate=True).decode()
                secrets += [login, login.partition(":")[2]]
            except (binascii.Error, ValueError):
                pass
    return [text for text in secrets if text]


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


def scrubbed(stream: TextIO, *, texts: bool = False) -> TextIO:
    """A text stream that removes secrets from each piece written. A secret split over two pieces is not detected.

    Args:
        texts: texts of models and agents are written, from which only known secrets are removed; else messages.
    """
    return cast(TextIO, Filtered(stream, mask_secrets if texts else message))


def unscrubbed(stream: TextIO) -> TextIO:
    """The underlying stream, for a secret that must be shown: a key generated for its owner."""
    while isinstance(stream, Filtered):
        stream = stream.inner
    return stream


class Filtered:
    """A text stream that changes each text before it is written to the stream `inner`."""

    def __init__(self, inner: TextIO, change: Callable[[str], str]) -> None:
        self.inner, self._change = inner, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __enter__(self) -> "Filtered":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(self, text: str) -> int:
        self.inner.write(self._change(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


def scrub_logs() -> None:
    """Remove secrets from the records of all loggers of this process, from now on."""
    default_factory = logging.getLogRecordFactory()
    if getattr(default_factory, "scrubs", False):
        return

    def scrubbed_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = default_factory(*args, **kwargs)
        try:
            record.msg, record.args = message(record.getMessage()), ()
        except Exception:  # arguments do not fit the format: logging reports that itself
            return record
        if record.exc_info and record.exc_info[0] is not None:
            record.exc_text = message(logging.Formatter().formatException(record.exc_info))
        return record

    scrubbed_record.scrubs = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(scrubbed_record)
