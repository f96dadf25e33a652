"""Finds secrets in a text: keys and tokens by their format, passwords by the label before them."""

import math
import re
from collections import Counter
from collections.abc import Iterator

from assay.traces.privacy.matches import BLANK, EntityMatch

__all__ = ["find_secrets", "labelled_secrets", "named_secret"]

_TAIL = re.compile(r"[-_.](?=[A-Za-z0-9_-]{16})")
_HEAD = re.compile(
    r"(?:[spr]k|whsec|gh[pousr]|github|gl(?:pat|ptt|dt|rt)|xox[a-z]|xapp|ya29|GOCSPX|hf|gsk|npm|dop|ntn|lin|shp(?:at|ss"
    r"|ca|pa)|r8|fw|sq0[a-z]{3}|xai|pplx"
    r"|nvapi|pypi|SG)$"
)
_SHAPES = re.compile(
    r"""(?<!(?<!\\)[A-Za-z0-9])(?:
      (?P<anthropic>sk-ant-[\w-]{16,}) | (?P<openai>sk-(?=[\w-]{0,80}\d)[\w-]{20,}) | (?P<stripe>(?:[spr]k_(?:live|test)|whsec)_\w{16,})
    | (?P<github>(?:gh[pousr]|github_pat)_\w{20,}) | (?P<gitlab>gl(?:pat|ptt|dt|rt)-[\w-]{20,}) | (?P<slack>xox[a-z]-[\w-]{10,}|xapp-\d-[\w-]{10,})
    | (?P<aws>(?:AKIA|ASIA)[A-Z2-7]{16}(?![A-Za-z0-9])) | (?P<google>AIza[\w-]{35}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{20,})
    | (?P<huggingface>hf_[A-Za-z0-9]{30,}) | (?P<jwt>eyJ[\w-]{8,1000}\.[\w-]{8,}(?:\.[\w-]*){1,3})
    | (?P<service>(?:gsk|npm|dop_v1|ntn|lin_api|shp(?:at|ss|ca|pa)|r8|fw|sq0[a-z]{3})[_-]\w{20,}|(?:xai|pplx|nvapi|pypi)-[\w-]{20,}
        |SG\.[\w-]{16,100}\.[\w-]{16,}))""",  # noqa: E501
    re.X | re.A,
)
_PEM = re.compile(r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_PEM_END = re.compile(r"-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_PEM_BODY = re.compile(r"(?:[A-Za-z0-9+/=\s:,-]|\\+[nr])*")
_LOGIN = re.compile(r"://([^\s/@:\"'<>\\]{0,100}:[^\s/\"'<>\\]{1,200}|[\w-]{20,200})@")
_HEADER = re.compile(r"(?:bearer|basic)[ \t]{1,3}(?=[\w.~+/=-]{0,200}\d)([\w.~+/=-]{16,})", re.I | re.A)
_FLAG = re.compile(
    r"""(?<!\w)(?:(?:-u|--user)[ =]["']?[\w.@-]{1,60}:([^\s"']{1,200})|-p(?:"([^"\n]{1,100})"|'([^'\n]{1,100})'))""",
    re.A,
)
_NAMED = re.compile(
    rf"""(?P<name>pass(?:word|wd|phrase|code)?|pwd|secret|credential|token|key)(?P<rest>[\w-]{{0,20}})(?:\\{{0,4}}["'])?
        (?P<gap>{BLANK}{{0,3}}(?:=>|:=|=|:|\ is(?=\s)){BLANK}{{0,3}})
        (?:(?P<quote>\\{{0,4}}["'`])(?P<quoted>[^\n]{{1,300}}?)(?P=quote)|(?P<bare>[^\s"'`<>\\]{{3,300}}))""",
    re.I | re.X,
)
_PASSWORD = re.compile(r"pass(?:word|wd|phrase|code)|(?<![a-z])pass(?![a-z])|pwd|secret(?!ar)|credential")
_ABOUT = (
    "count",
    "length",
    "policy",
    "field",
    "id",
    "name",
    "type",
    "hint",
)  # endings of field names that describe a password, such as password_policy
_PLACEHOLDER = re.compile(
    r"""\[secret\b.*|[x*.•-]+|<.*>|\$?\{.*\}?|\$\(?[a-z_]\w*\)?|%\(\w+\)s?|%\w+%|%[sd]|your[\b_-].*|my[_-]?(?:password|secret|token|key)|changeme|none|null|true|false|nil
        |undefined|str(?:ing)?|int|bytes|bool|optional|required|any|object|text|redacted|hidden|\w*(?:pass(?:word|wd)|secret|token|_key)\w*""",
    re.I | re.X | re.S,
)
_CODE = re.compile(r"[A-Za-z_]\w*(?:(?:\.[A-Za-z_]\w*)*[(\[]|(?:\.[A-Za-z_]\w*)+[,;)]*$)")


def named_secret(name: str, value: str) -> str | None:
    """Kind of secret of a named value: `password`, `token` or None.

    Any word may be a password. A token or key must look random: at least 16 characters with letters and digits, and at
    least 3 bits of entropy per character.
    """
    name = name.lower()
    if len(value) > 4000 or _PLACEHOLDER.fullmatch(value):
        return None
    if _PASSWORD.search(name):
        return None if len(value) < 3 or len(value.split()) > 8 or name.endswith(_ABOUT) else "password"
    if not re.search(r"token|key|auth", name) or len(value) < 16 or not re.fullmatch(r"[\w+/=.~:-]+", value, re.A):
        return None
    shares = [n / len(value) for n in Counter(value).values()]
    mixed = any(c.isdigit() for c in value) and any(c.isalpha() for c in value)
    return "token" if mixed and -sum(p * math.log2(p) for p in shares) >= 3 else None


def find_secrets(text: str, lower: str) -> Iterator[EntityMatch]:
    """Find keys, tokens and logins by their format."""
    if "AKIA" in text or "ASIA" in text or "AIza" in text or "eyJ" in text:
        yield from map(_shape, _SHAPES.finditer(text))
    else:
        heads = (_HEAD.search(text, max(0, tail.start() - 7), tail.start()) for tail in _TAIL.finditer(text))
        yield from (_shape(m) for head in heads if head and (m := _SHAPES.match(text, head.start())))
    if "PRIVATE KEY" in text:
        at = 0
        while begin := _PEM.search(text, at):
            end, body = _PEM_END.search(text, begin.end()), _PEM_BODY.match(text, begin.end())
            at = end.end() if end else body.end() if body else begin.end()
            yield EntityMatch("secret", begin.start(), at, "private-key")
    if "://" in text and "@" in text:
        yield from (
            EntityMatch("secret", *m.span(1), "login")
            for m in _LOGIN.finditer(text)
            if not _PLACEHOLDER.fullmatch(m[1].partition(":")[2])
        )


def _shape(m: re.Match[str]) -> EntityMatch:
    return EntityMatch("secret", m.start(), m.end(), "jwt" if m.lastgroup == "jwt" else f"{m.lastgroup}-key")


def labelled_secrets(text: str, at: int) -> Iterator[EntityMatch]:
    """Find secrets after the label at this position.

    Args:
        at: Position of a label such as `password` or `-u`.
    """
    if (m := _FLAG.match(text, at)) and not _PLACEHOLDER.fullmatch(m[m.lastindex or 0]):
        yield EntityMatch("secret", *m.span(m.lastindex or 0), "password")
    if m := _HEADER.match(text, at):
        yield EntityMatch("secret", *m.span(1), "bearer")
    if not (m := _NAMED.match(text, at)):
        return
    group = "quoted" if m["quoted"] else "bare"
    value, (start, end) = m[group], m.span(group)
    before = re.search(r"[\w-]{0,20}$", text[max(0, at - 20) : at])
    name = (before[0] if before else "") + m["name"] + m["rest"]
    if group == "bare":
        value = re.split(r"[&;,](?=\w+=)", value, maxsplit=1)[0].rstrip(".,;:)]}")
        end = start + len(value)
        word = value.isidentifier() and not any(c.isdigit() for c in value)
        ends_line = text[end : end + 1] in ("", "\n", "\r", '"', "'", "\\")
        if _CODE.match(value) or (word and m["gap"] != "=" and not (":" in m["gap"] and ends_line)):
            return  # an expression in code, or a word in a sentence
    if kind := named_secret(name, value):
        yield EntityMatch("secret", start, end, kind)
