"""Shapes of credentials in a text: `Bearer …`, `sk-…`, a password in an address, `token=…`. Reads no fields.

Most texts contain none. A case-insensitive pattern is slow, so that its letters are searched for first, in the text as
`str.casefold` returns it. The letter i is never searched for, because `re.I` knows more forms of it.
"""

import re
from urllib.parse import unquote

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

    plain = text.casefold()
    if "bearer" in plain or "bas" in plain:
        text = _SCHEME.sub(
            lambda m: m[0] if NOTHING.fullmatch(m["value"]) else mask(m["scheme"] + m["gap"], m["value"]), text
        )
    if len(text) < _FEW or any(map(text.__contains__, _STARTS)):
        text = _TOKENS.sub(lambda m: mask("", m[0]), text)
    if "://" in text and "@" in text:
        text = _LOGIN.sub(lambda m: mask("://", m["login"].partition(":")[2] or m["login"], "@"), text)
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
