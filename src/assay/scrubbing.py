"""Keys and passwords out of what is written: the store, the response cache, logs, exports, JSON output and messages.

Three rules. A *known* secret (the value of an environment variable for keys, a key that a model or gateway was given, the key that came with a
request) is taken out wherever it is, texts of models and agents included. The value of a *field* for credentials (`authorization`, `api_key`,
`password`, …) is taken out at any depth of a request. *Shapes* (`Bearer …`, `sk-…`, a password in a URL) are taken out of messages and settings,
never out of what a model read or wrote: those texts stay byte for byte. Does not find secrets that people tell in a text: `assay.traces.privacy`.
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

from assay.jsontexts import is_json, rewritten, with_values

__all__ = [
    "MARK", "all_known", "credentials_in", "fields", "is_credential", "know", "known", "message", "results", "said", "scrub_logs", "scrubbed",
    "unscrubbed", "without",
]  # fmt: skip

MARK = "[key]"
_configured: dict[str, None] = {}  # keys that this process was given
_changes = 0  # how often one was added
_MOST = 1000  # of them are remembered; the oldest go first

# -- which names hold credentials

# Of fields, letters alone: how a name ends. `token` alone is also a piece of text (of log-probabilities), `key` also that of a mapping.
_STRONG = re.compile(
    r"(?:authorization|authorizationtoken|apikey|apikeystring|apitoken|accesstoken|refreshtoken|authtoken|bearertoken|sessiontoken|oauthtoken|clientsecret|jwttoken|^jwt"
    r"|secretkey|secretaccesskey|accesskey|accesskeyid|privatekey|subscriptionkey)$"
)
_WEAK = re.compile(
    r"(?:^token|^auth|^bearer|^pwd|cookie|secret|password|passwd|passphrase|passcode|^pw|^credentials?)$"
)  # where no model's or agent's text is
_VARIABLE = re.compile(
    r"(?:^|_)(?:API_?)?(?:KEYS?|TOKENS?|SECRETS?|PASS(?:WORD|WD|PHRASE)?|CREDENTIALS?|AUTH)(?:_(?:ID|\d+))?$|(?:APIKEY|PASSWORD|SECRET|TOKEN)$", re.I
)
_ANNOUNCED = re.compile(
    r"key|token|secret|auth|cred|bearer|pass|cookie|jwt|pwd?|\\u|:(?:/|\\/)", re.I
)  # in JSON that may hold a credential or address
_HEADERS = frozenset(("headers", "extraheaders", "defaultheaders", "httpheaders", "requestheaders", "customheaders"))
_PLAIN_HEADERS = re.compile(r"accept.*|content-.*|user-agent|host|connection|anthropic-(?:version|beta)|openai-(?:beta|organization|project)", re.I)
_PLAIN = re.compile(r"[ !#-\[\]-~]+")  # written alike in JSON
_FLAG = re.compile(r"--?[\w-]*(?:api-?key|token|secret|passw(?:or)?d|passcode|jwt|authorization)", re.I)
_FLAG_VALUE = re.compile(rf"(?<![\w-])(?P<flag>{_FLAG.pattern})=(?P<quote>[\"']?)(?P<value>[^\s\"']+)", re.I)
_ITEM = re.compile(
    r"(?P<name>[\w-]{2,60})(?P<sign>=|:\s*)(?P<value>(?:(?:bearer|basic|token)\s+)?\S{4,})", re.I
)  # of a list: GITHUB_TOKEN=…, X-Api-Key: …
_URLS = frozenset(("url", "uri", "imageurl", "fileuri", "fileurl", "serverurl"))  # fields of addresses, letters alone
_TEXTS = frozenset(  # fields below which a model's or agent's texts are
    (
        "messages", "message", "input", "inputs", "instructions", "system", "prompt", "suffix", "content", "contents", "parts", "choices", "output",
        "text", "result", "reasoning", "refusal", "candidates", "description", "answer", "delta",
    )
)  # fmt: skip
_ERRORS = frozenset(("error", "errors", "failed_generation"))
_NOTES = _ERRORS | {"reason", "reasons", "why_failed", "notes", "note", "warning", "warnings", "failures", "unrecorded_reason", "undecided", "detail"}
# Numbers and pieces of texts; what a task knows of people, which an export takes out by what is said here.
_LEFT = frozenset(("logprobs", "top_logprobs", "completion_probabilities", "token_ids", "embedding", "entities"))

# -- shapes

_SECRETISH = r"(?=[\w.~+/=:-]*(?:[\d_.~+/=-]|[a-z][A-Z]|[A-Z][a-z]+[A-Z])|[\w.~+/=:-]{20})"  # no word of a sentence
_LIKE_ONE = re.compile(rf"(?:(?i:bearer|basic|token)\s+)?{_SECRETISH}[\w.~+/=:*-]{{6,}}")
_SCHEME = re.compile(rf"\b(?P<scheme>(?i:bearer|basic))(?P<gap>\s+|%20|\+){_SECRETISH}(?P<value>[\w.~+/=:*-]{{6,}})")
_TOKENS = re.compile(
    r"(?<![A-Za-z0-9])(?:sk-[\w*.-]{8,}|[spr]k_(?:live|test)_\w{8,}|(?:gh[pousr]|github_pat)_\w{16,}|glpat-[\w-]{16,}|xox[a-z]-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z2-7]{16}|AIza[\w-]{30,}|ya29\.[\w-]{16,}|hf_[A-Za-z0-9]{20,}|(?:gsk|r8|fw)_\w{16,}|(?:xai|pplx|nvapi)-[\w-]{16,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)",
    re.A,
)
_LOGIN = re.compile(r"(?P<before>[a-z][a-z0-9+.-]{1,20}://)(?P<login>[^\s/?#@\"'<>]{1,300})@", re.I)
_QUERY = re.compile(
    r"(?P<name>[?&;](?:key|sig|code|auth|jwt|pwd?|[\w-]*(?:api[-_]?key|access[-_]?key(?:[-_]?id)?|token|secret|passw(?:or)?d|passcode|authorization"
    r"|signature|credential)))=(?P<value>[^&\s\"'<>#]{4,})",
    re.I,
)
_ALSO_WORDS = re.compile(r"[?&;](?:key|code|auth|sig)", re.I)  # in an address that a model wrote often no credential's name
_WEBHOOK = re.compile(
    r"(?P<before>hooks\.slack(?:-gov)?\.com/(?:services|workflows|triggers)/|discord(?:app)?\.com/api/webhooks/)(?P<value>[\w/-]{8,})", re.I
)
_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY.*?(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)", re.S)
_PAIR = re.compile(  # a name and its value in a message
    r"(?P<name>(?<![A-Za-z])[\w-]{0,40}?(?:authorization|authorization[-_]token|api[-_ ]?key|[-_]key|token|secret|passw(?:or)?d|passcode|jwt"
    r"|(?<![A-Za-z0-9])pw|credentials?|cookie)"
    r"(?:\\*[\"'])?\s{0,3}(?:=>|[:=])\s{0,3}(?:\\*[\"'])?(?:(?:bearer|basic|token)\s+)?)(?P<value>[^\s\"'\\,;&<>(){}\[\]]{4,})",
    re.I,
)
_NOTHING = re.compile(
    r"\[key\]?|[x*.•-]+|none|null|nil|true|false|empty|dummy|fake|test|missing|required|invalid|field|string|bearer|basic|local|ollama|vllm|changeme"
    r"|undefined|expected|placeholder|provided|lm-?studio|not-?needed|no-?key|sk-no-key-required|your[-_ ].*|\$?\{.*|<.*|\d{1,6}|/.*|~.*|\d+\.\d+",
    re.I | re.S,
)


def know(*secrets: str | None) -> None:
    """Keys that were given to this process: they are in nothing that is written from now on. Kept in memory alone."""
    global _changes
    for secret in secrets:
        if secret and secret not in _configured and _is_telling(secret):
            _configured[secret] = None
            _changes += 1
            if len(_configured) > _MOST:
                del _configured[next(iter(_configured))]


def known(text: str, also: Iterable[str] = ()) -> str:
    """A text without the secrets that are known, and nothing else changed.

    Args:
        also: further ones, such as the key that came with this request.
    """
    return without(text, _forms(also) + all_known())


def without(text: str, secrets: Iterable[str]) -> str:
    """A text without these secrets, as `all_known` gives them."""
    for secret in secrets:
        if secret in text:
            text = text.replace(secret, MARK)
    return text


def message(text: str, also: Iterable[str] = ()) -> str:
    """An error, a log line or a note without secrets: known ones, those of a known shape, and what a name announces."""
    given = [secret for secret in also if len(secret) > 3 and not _NOTHING.fullmatch(secret)]
    text = known(text, given)
    for secret in given:  # also those that could be a word of a text
        text = text.replace(secret, MARK)
    text = _shapes(text)
    if "=" in text or ":" in text:
        text = _PAIR.sub(lambda m: m[0] if _NOTHING.fullmatch(m["value"]) else m["name"] + MARK, text)
    return text


def said(error: BaseException, also: Iterable[str] = ()) -> str:
    """What is written of an exception: its class and its message without secrets."""
    try:
        told = str(error)
    except (Exception, SystemExit, GeneratorExit) as unread:  # `__str__` of somebody else's exception
        told = f"its message cannot be read ({type(unread).__name__})"
    return message(f"{type(error).__name__}: {told}", also)


def _shapes(text: str, found: list[str] | None = None) -> str:
    """The text without what looks like a credential; what was taken out is added to `found`."""

    def taken(kept: str, secret: str, after: str = "") -> str:
        if found is not None:
            found.extend([secret, unquote(secret)])
        return f"{kept}{MARK}{after}"

    text = _SCHEME.sub(lambda m: m[0] if _NOTHING.fullmatch(m["value"]) else taken(m["scheme"] + m["gap"], m["value"]), text)
    text = _TOKENS.sub(lambda m: taken("", m[0]), text)
    if "://" in text or "?" in text:
        text = _LOGIN.sub(lambda m: taken(m["before"], m["login"].partition(":")[2] or m["login"], "@"), text)
        text = _QUERY.sub(lambda m: taken(m["name"] + "=", m["value"]), text)
    text = _WEBHOOK.sub(lambda m: taken(m["before"], m["value"]), text)
    return _PEM.sub(lambda m: taken("", m[0]), text) if "PRIVATE KEY" in text else text


def _address(text: str) -> str:
    """An address that a model reads or writes without its password, signature or token; words that only may be one stay."""
    if text.startswith("data:"):
        return text

    def is_one(value: str) -> bool:
        return len(value) >= 16 and _LIKE_ONE.fullmatch(unquote(value)) is not None

    text = _LOGIN.sub(lambda m: f"{m['before']}{MARK}@" if ":" in m["login"] or is_one(m["login"]) else m[0], text)
    text = _QUERY.sub(lambda m: m[0] if _ALSO_WORDS.fullmatch(m["name"]) and not is_one(m["value"]) else f"{m['name']}={MARK}", text)
    return _WEBHOOK.sub(lambda m: m["before"] + MARK, text)


# -- values of fields

Mode = Literal["plain", "texts", "errors"]  # what the strings are: settings, what a model or agent reads or writes, or messages of errors


def fields(
    value: Any, also: Sequence[str] = (), *, found: list[str] | None = None, texts: bool = False, known_too: bool = True
) -> Any:  # fmt: skip
    """A request, an answer or settings without credentials, at any depth; the value itself where there are none.

    Args:
        also: further known secrets, as in `known`.
        known_too: whether what is known is taken out; not where the whole is read again as a text.
        found: takes what was removed from fields, so that it can be removed where a server says it back.
        texts: whether it is a model's or agent's text: then only what is known, and fields that can be nothing but credentials.
    """
    secrets = [*_forms(also), *(all_known() if known_too else ())] if also or known_too else []
    return _Fields(secrets if _may_hold(value, secrets) else [], found, _ERRORS).of(value, "texts" if texts else "plain")


def _may_hold(value: Any, secrets: Sequence[str]) -> bool:
    """Whether secrets may be in a request or an answer: searched for in its JSON at once, which for long conversations is ten times as fast as in
    each of its texts. Not for secrets that JSON writes with escapes."""
    if not secrets or not isinstance(value, dict | list) or not all(map(_PLAIN.fullmatch, secrets)):
        return bool(secrets)
    import orjson

    try:
        text = orjson.dumps(value)
    except TypeError:  # lone surrogates, keys or values that JSON does not know
        return True
    return any(secret.encode() in text for secret in secrets)


def results(value: Any) -> Any:
    """Results as they are shown or written: their texts as they are but for known secrets, their errors, reasons and notes as messages."""
    return _Fields(all_known(), None, _NOTES).of(value, "texts")


_SCALARS, _NUMBERS, _LISTS = (str, int, float, type(None)), (int, float), (list, tuple)  # unions are made anew each time, which takes longest
_TOLD = frozenset(("strong", "errors", "json", "url"))  # fields that say something of texts, too
_CONTAINERS = (dict, list, tuple)


def _names_in(value: Any) -> set[str]:
    """The names of all fields, at any depth, but `arguments` only where some may hold a credential. Goes level by level, which takes half the
    time of going field by field."""
    names: set[Any] = set()
    told = False
    level = [value]
    while level:
        below = []
        for item in level:
            if isinstance(item, dict):
                names.update(item)
                told = told or (isinstance(text := item.get("arguments"), str) and _ANNOUNCED.search(text) is not None)
                item = item.values()
            below += [part for part in item if isinstance(part, _CONTAINERS)]
        level = below
    return {str(name) for name in names if told or name != "arguments"}


class _Fields:
    """Args:
    errors: fields whose texts are messages of errors.
    """

    def __init__(self, secrets: Sequence[str], found: list[str] | None, errors: frozenset[str]) -> None:
        self.secrets, self.found, self.errors = secrets, found, errors

    def of(self, value: Any, mode: Mode) -> Any:
        if mode == "texts" and not self.secrets and isinstance(value, _CONTAINERS) and not any(_kind(name) in _TOLD for name in _names_in(value)):
            return value  # as most conversations
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
        """A text of settings without shapes of credentials, and of JSON in it without fields for them."""
        if is_json(text) and _ANNOUNCED.search(text):
            with suppress(ValueError, RecursionError):
                value = json.loads(text)
                bare = self._of(value, "plain")
                text = text if bare is value else rewritten(text, value, bare)
            text = self._json(text, "plain")
        if "=" in text:
            text = _FLAG_VALUE.sub(lambda m: f"{m['flag']}={m['quote']}{self._value(m['value'])}", text)
        return _shapes(text, self.found)

    def _json(self, text: str, mode: Mode) -> str:
        """JSON in a text without the values of fields for credentials; every other byte as it is."""

        def changed(name: str, value: str) -> str:
            kind = _kind(name)
            if kind in ("strong", "weak") and is_credential(name, value, texts=mode == "texts"):
                return self._value(value)
            if kind == "url" and mode == "texts":
                return _address(value)
            return self._json(value, mode) if is_json(value) and _ANNOUNCED.search(value) else value

        try:
            return with_values(text, changed)
        except RecursionError:
            return text

    def _value(self, value: str) -> str:
        """What stands after the name of a credential, masked where it may be one."""
        return value if MARK in value or _NOTHING.fullmatch(value) else str(self._masked(value))

    def _item(self, text: str) -> str:
        """An item of a list as a command takes it: `GITHUB_TOKEN=…`, `X-Api-Key: …`."""
        if (found := _ITEM.fullmatch(text)) is None:
            return text
        name, sign, value = found["name"], found["sign"], found["value"]
        told = is_credential(name) if sign == "=" else _kind(name) == "strong"
        return f"{name}{sign}{self._value(value)}" if told else text

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
        as_it_is = mode == "texts" and not self.secrets
        for name, item in value.items():
            if as_it_is and isinstance(item, _SCALARS) and _kind(str(name)) not in _TOLD:
                continue  # most of what there is
            bare = self._field(name, item, mode) if isinstance(name, str) else self._of(item, mode)
            if name == "value" and mode == "plain" and isinstance(told := value.get("name", value.get("key")), str) and is_credential(told):
                bare = self._masked(item)  # {"name": "Authorization", "value": "…"}
            if bare is not item:
                changed = dict(value) if changed is None else changed
                changed[name] = bare
        return value if changed is None else changed

    def _field(self, name: str, item: Any, mode: Mode) -> Any:
        kind = _kind(name)
        if kind == "":
            return self._of(item, mode)
        if kind == "left":
            return item
        if kind == "headers" and mode == "plain" and isinstance(item, dict) and "type" not in item:  # with a type it is an argument's schema
            return {k: v if _PLAIN_HEADERS.fullmatch(str(k)) else self._masked(v) for k, v in item.items()}
        if kind in ("strong", "weak") and not isinstance(item, dict | bool) and is_credential(name, item, texts=mode == "texts"):
            return self._masked(item)
        if name in self.errors and (mode == "plain" or self.errors is _NOTES):
            return self._of(item, "errors")
        if kind == "json" and isinstance(item, str) and mode != "errors":
            text = self._text(item, "texts")
            return _Fields((), None, self.errors)._json(text, "texts") if is_json(text) and _ANNOUNCED.search(text) else text
        if kind == "url" and isinstance(item, str) and mode == "texts":
            return _address(self._text(item, mode))
        return self.of(item, "texts") if mode == "plain" and kind in ("texts", "json") else self._of(item, mode)

    def _masked(self, item: Any) -> Any:
        if isinstance(item, list | tuple):
            return [self._masked(part) for part in item]
        if isinstance(item, dict):
            return {name: self._masked(part) for name, part in item.items()}
        if item is None or isinstance(item, bool) or item in ("", MARK):
            return item
        if self.found is not None:
            self.found += credentials_in(str(item))
        return MARK


def is_credential(name: str, value: Any = None, *, texts: bool = False) -> bool:
    """Whether a field, header or argument of this name holds a credential.

    Args:
        value: what it holds.
        texts: whether it is among a model's or agent's texts, where `token` and `password` may be what they are about: then its value must
            also look like one.
    """
    kind = _kind(name)
    if kind == "strong" and texts:
        return isinstance(value, str) and _LIKE_ONE.fullmatch(value) is not None
    return kind == "strong" or (kind == "weak" and not texts)


@lru_cache(maxsize=4096)
def _kind(name: str) -> str:
    """What a field of this name holds: a credential for sure (`strong`) or where no text is (`weak`), headers, texts, messages of errors
    (`errors`), JSON or texts (`json`), an address (`url`), what is `left` as it is, or nothing of these."""
    plain = "".join(c for c in name.lower() if c.isalnum())
    if name in _LEFT:
        return "left"
    if _STRONG.search(plain) is not None:
        return "strong"
    if _WEAK.search(plain) is not None or (name.isupper() and _VARIABLE.search(name) is not None):
        return "weak"
    if name == "arguments" or plain in _URLS:
        return "json" if name == "arguments" else "url"
    return "headers" if plain in _HEADERS else "texts" if name in _TEXTS else "errors" if name in _NOTES else ""


def credentials_in(value: str) -> list[str]:
    """The secrets of a credential's value: itself, or the part after `Bearer`; of one after `Basic` also what it decodes to."""
    value = value.strip()
    scheme, _, rest = value.partition(" ")
    found = [value]
    if rest and scheme.lower() in ("bearer", "basic", "token", "apikey"):
        found = [rest.strip()]
        if scheme.lower() == "basic":
            try:
                login = base64.b64decode(rest, validate=True).decode()
                found += [login, login.partition(":")[2]]
            except (binascii.Error, ValueError):
                pass
    return [text for text in found if text]


# -- what is known


def _is_telling(secret: str) -> bool:
    """Whether a value can be taken out of every text: no word or path that means something else there."""
    if len(secret) < 8 or _NOTHING.fullmatch(secret):
        return False
    return not (secret.isalpha() and secret.islower() and len(secret) < 16)


def _forms(secrets: Iterable[str]) -> list[str]:
    """Secrets as a text, JSON and an address write them, the longest first."""
    found: set[str] = set()
    for secret in secrets:
        if _is_telling(secret):
            found |= {secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], quote(secret, safe="")}
    return sorted(found, key=len, reverse=True)


_seen: tuple[Any, int, list[str]] = (None, 0, [])  # the environment, `_changes`, and all that is known of them


def all_known() -> list[str]:
    """Every known secret in all forms that it is written in, the longest first."""
    global _seen
    raw = getattr(os.environ, "_data", None)  # compared as it is: decoding it costs 100 times as much
    variables: Any = os.environ if raw is None else raw
    before, configured, forms = _seen
    if before is not None and before == variables and configured == _changes:
        return forms
    changes, now = _changes, dict(variables)
    _seen = (now, changes, _forms([*_configured, *_of_environment()]))
    return _seen[2]


def _of_environment() -> list[str]:
    found: list[str] = []
    for name, value in list(os.environ.items()):
        if "://" in value:
            found += [login.partition(":")[2] for login in re.findall(r"://([^\s/?#@]+)@", value)]
        elif _VARIABLE.search(name):
            found += [value, *(part.strip() for part in value.split(","))] if "," in value else [value]
    return [value.strip() for value in found if value.strip()]


# -- streams and logs


def scrubbed(stream: TextIO, *, texts: bool = False) -> TextIO:
    """A text stream without secrets: each piece that is written is read first. A secret that is written in two pieces is not seen.

    Args:
        texts: whether models' and agents' texts are written, of which only known secrets are taken out; else messages.
    """
    return cast(TextIO, _Stream(stream, known if texts else message))


def unscrubbed(stream: TextIO) -> TextIO:
    """The stream beneath, for the one secret that is made to be shown: a key that its owner needs."""
    return stream._stream if isinstance(stream, _Stream) else stream


class _Stream:
    def __init__(self, stream: TextIO, read: Callable[[str], str]) -> None:
        self._stream, self._read = stream, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(self, text: str) -> int:
        self._stream.write(self._read(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


def scrub_logs() -> None:
    """Log records of this process, of whatever logger, hold no secrets from now on."""
    plain = logging.getLogRecordFactory()
    if getattr(plain, "scrubs", False):
        return

    def record_of(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = plain(*args, **kwargs)
        try:
            record.msg, record.args = message(record.getMessage()), ()
        except Exception:  # arguments that do not fit: logging itself says so
            return record
        if record.exc_info and record.exc_info[0] is not None:
            record.exc_text = message(logging.Formatter().formatException(record.exc_info))
        return record

    record_of.scrubs = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(record_of)
