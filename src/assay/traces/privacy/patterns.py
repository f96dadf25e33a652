"""Finds personal values and secrets by pattern, validated by check digits, lengths, ranges and context.

Does not find names (`assay.traces.privacy.names` does). Texts of agents contain many numbers: a number matches only
after a label, or if its format cannot be part of a calculation. Values reserved for documentation are ignored. Every
search is bounded, so that the time is linear in the length of the text.
"""

import ipaddress
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

# -- A personal value found in a text, and the normal form of its spellings. Contains no detectors.


@dataclass(frozen=True, slots=True)
class EntityMatch:
    """A match in a text.

    Args:
        type: One of `assay.traces.privacy.names.TYPES`.
        start, end: Position: `text[start:end]`.
        value: Normal form of the match; for a secret, its kind.
    """

    type: str
    start: int
    end: int
    value: str


def normal(kind: str, value: str) -> str:
    """Normal form of a value, the same for spellings that differ in case, spaces or separators.

    Args:
        kind: Type of the value.
    """
    value = unicodedata.normalize("NFKC", value).casefold().strip()
    if kind == "email":
        value = re.sub(r"%40|&#64;|\s*[\[({]\s*at\s*[\])}]\s*|\s+at\s+|\s+@\s+", "@", value)
        return re.sub(r"\s*[\[({]\s*dot\s*[\])}]\s*|\s+dot\s+", ".", value)
    if kind == "phone":
        number, _, extension = value.partition("x")
        digits = re.sub(r"\D", "", number)
        national = len(digits) == 10 and digits[0] in "23456789" and "+" not in number
        return (
            ("1" if national else "")
            + digits.removeprefix("00")
            + ("x" + re.sub(r"\D", "", extension) if extension else "")
        )
    if kind in ("iban", "card", "ssn", "mac"):
        return re.sub(r"[\W_]", "", value)
    if kind == "ip":
        try:
            return str(ipaddress.ip_address(value))
        except ValueError:
            return value
    return " ".join(value.split())


def small(text: str) -> str:
    """The text in lower case with the same length: letters whose lower-case form is longer are kept."""
    lower = text.lower()
    return lower if len(lower) == len(text) else "".join(c.lower() if len(c.lower()) == 1 else c for c in text)


BLANK = r"(?:[^\S\n]|\n(?!\n))"  # white space without empty lines: texts are split there, so no match may span one
FREE = r"(?<!(?<!\\)\w)"  # no word character before, except the n of an escaped \n in JSON
COMMON_NAMES = frozenset(  # names that are also words: replaced in a full name, not alone
    """and art august autumn baker banks bell best bill bishop black blue bond book bright brook brown bush carol
    chance chase christian church cliff cook cooper crystal dale dawn day dean del den der drew earl faith field
    fisher ford forest fox frank gene grace grant gray green guy hall hand hill holly hope hunter iris ivy jack
    jean joy june king knight lake lane law lee lily little long love major mark marshall mason max may miles
    miller moon noble olive page paris park pat penny piper price rain ray reed rice rich ridge river rob robin
    rock rod rose ruby sandy short singer sky small smart south spring star stone storm sue summer sun taylor
    the trip turner van victor von walker ward waters wells west white will wise wolf wood young""".split()  # noqa: SIM905
)

# -- Finds secrets in a text: keys and tokens by their format, passwords by the label before them.


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


# -- Patterns.


# E-mail addresses: found by the @, extended to both sides
_AT = re.compile(r"[@%&](?:(?<=@)|(?<=%)40|(?<=&)#64;)")
_AT_WORD = re.compile(r" ?[\[({] ?at ?[\])}] ?| at (?=[\w.-]{1,80}(?: dot | ?[\[(] ?dot))", re.I)
_DOT = r"(?:\.| ?[\[({] ?dot ?[\])}] ?| dot )"
_HOST = re.compile(rf"(?:[^\W_][\w-]{{0,62}}{_DOT}){{1,8}}([^\W\d_]{{2,24}})(?![\w(])", re.I)
_LOCAL_BEFORE = re.compile(r"(?:[\w+-]{1,32} dot ){1,3}$", re.I)
_FILES = re.compile(r"png|jpe?g|gif|svg|webp|css|js|ts|json|html|txt|csv|pdf", re.I)
_COMMON = re.compile(
    r"com|org|net|edu|gov|io|co|uk|de|fr|it|es|nl|pl|br|se|in|cz|eu|us|jp|ch|at|be|dk|no|fi|pt|ca|au|ru|cn|info|dev"
    r"|app",
    re.I,
)
_NOBODYS = re.compile(r"(?:.*\.)?(?:example\.(?:com|org|net|edu)|test|example|invalid|localhost)", re.S)
_ESCAPE = re.compile(r"(?<=\\)(?:[nrtbf]|u[0-9a-f]{4})|(?<=%)[0-9A-F]{2}", re.I)


def _emails(text: str, lower: str) -> Iterator[EntityMatch]:
    if "@" in text or "%40" in text or "&#64;" in text:
        for m in _AT.finditer(text):
            spaced = text[m.start() - 1 : m.start()] == " " == text[m.end() : m.end() + 1]
            yield from _email(text, m.start() - spaced, m.end() + spaced, spaced)
    if "dot" in lower or "[at" in lower or "(at" in lower or "{at" in lower:
        for m in _AT_WORD.finditer(text):
            yield from _email(text, m.start(), m.end(), False)


def _email(text: str, at: int, after: int, spaced: bool) -> Iterator[EntityMatch]:
    start = at
    while (
        start > max(0, at - 64)
        and (text[start - 1].isalnum() or text[start - 1] in ".+'_-")
        and text[start - 1] < "\u0250"
    ):
        start -= 1
    # skip escapes of JSON and URLs: the n of \n, the e9 of \u00e9, the 22 of %22
    if escape := _ESCAPE.match(text, start, at):
        start = escape.end()
    while start < at and text[start] in ".'-+":
        start += 1
    host = _HOST.match(text, after) if start < at else None
    if not host or _FILES.fullmatch(host[1]) or (spaced and not _COMMON.fullmatch(host[1])):
        return
    more = (
        _LOCAL_BEFORE.search(text[max(0, start - 100) : start]) if text[start - 5 : start].lower() == " dot " else None
    )
    start -= len(more[0]) if more else 0
    value = normal("email", text[start : host.end()])
    local, _, domain = value.partition("@")
    if local != "git" and not _NOBODYS.fullmatch(domain):
        yield EntityMatch("email", start, host.end(), value)


# Numbers: every format contains a run of at least seven digits
_SEP = r"(?:[ \u00a0.\-/]|\)[ -]?|[ ]?\(|[ ][-/][ ])"
_RUN = re.compile(r"\d(?<!\d\d)(?:[ \u00a0.\-/()]{0,3}+\d){6,}+", re.A)
_CARD = re.compile(
    r"(?<!\d)(?<!\d\.)(?:\d{12,19}|(?<!\d[ -])(?:\d{4}([ .-])\d{4}\1\d{4}(?:\1\d{1,4}(?:\1\d{1,3})?)?|\d{4}[ -]\d{6}[ "
    r"-]\d{4,5})(?![ .-]\d{4}))"
    r"(?!\.?\d)",
    re.A,
)
_SSN = re.compile(r"(?<![\d-])(?!000|666|9)\d{3}-(?!00)\d\d-(?!0000)\d{4}(?![\d-])", re.A)
_PHONES = re.compile(
    rf"""{FREE}(?<![.,]) (?: (?P<international>\+\(?[1-9](?:{_SEP}?\d){{7,14}}) | (?P<zeros>(?<!\d[ -])00[1-9]\d?(?:{_SEP}?\d){{7,13}})
    | (?P<american>(?:\+?1[ .-])?(?:\([2-9]\d\d\)[ -]?[2-9]\d\d[-. ]|[2-9]\d\d(?P<dash>[.-])[2-9]\d\d(?P=dash))\d{{4}})
    | (?P<trunk>(?<!\d[ -])\(?0[1-9](?:{_SEP}?\d){{7,9}})
    | (?P<area>(?!\(\d{{3}}\)[ ]?\d{{3}}-)\([1-9]\d{{1,4}}\)[ -]?\d{{2,5}}(?:[ -]\d{{2,5}}){{1,3}}) )
    (?!\d|[.,:/-]\d)""",  # noqa: E501
    re.X | re.A,
)
_PHONE_LIKE = re.compile(r"[(0](?<!\d0)[1-9]|00[1-9]|[2-9]\d\d[.-][2-9]\d\d[.-]\d{4}", re.A)
_EXTENSION = re.compile(r" ?(?:x|ext\.?|extension) ?\d{1,6}(?!\w)", re.I | re.A)
_FILLER = rf"""(?:{BLANK}|["'\\:=.(#\[-]|(?<=\\)[nrt]|\b(?:is|at|on|from|to|via|by)\b){{0,12}}"""
_LABELLED = re.compile(
    rf"""(?: (?: phone|{FREE}tel(?:e(?:phone|fon[eo]?))?|tél[ée](?:ph|f)one?|mobil\w?|móvil|{FREE}(?:cell|fax|sms)|whatsapp|handy
        |contact[ _]?(?=num)|{FREE}(?:call|ring|text|reach|dial)\ (?:me|us|him|her|them)|{FREE}my\ number)s?[ _-]?(?:num(?:ber)?|nr|no)?
        {_FILLER}(?P<phone>\+?\(?\d(?:{_SEP}?\d){{6,15}})
    |(?:{FREE}ssn|social[ _]security(?:[ _](?:number|no\.?))?|tax[ _]?id)
        {_FILLER}(?P<ssn>(?!000|666)\d{{3}}[ .-]?(?!00)\d\d[ .-]?(?!0000)\d{{4}})
    |(?:card|visa|amex|{FREE}cc)[ _]?(?:num(?:ber)?|nr|no)?{_FILLER}(?P<card>\d(?:[ .-]?\d){{11,18}})
    |{FREE}mac(?:[ _]?addr(?:ess)?)?{_FILLER}(?P<mac>(?=[0-9a-f]{{0,11}}[a-f])[0-9a-f]{{12}}(?!\w)) )(?!\d)""",  # noqa: E501
    re.I | re.X | re.A,
)
_RECKONED_BEFORE = re.compile(r"(?:[\d)\]] *[-+=]|[*^%×÷]|(?<!\w)\w =) *$|(?<![:/])/ *$")
_RECKONED_AFTER = re.compile(
    r" {0,3}\)? {0,3}(?:[*^%×÷=]|(?:simplifies|equals|evaluates|reduces|expands|plus|minus|times|divided)\b|[-+/] "
    r"{0,3}\(?-?\d{1,6}(?!\d|[-. ]\d{3}))"
)
_ISSUERS = re.compile(  # ISO/IEC 7812 ranges of the large networks, with their lengths
    r"4(?:.{12}|.{15}|.{18})|(?:5[1-5]|222[1-9]|22[3-9].|2[3-6]..|27[01].|2720).*(?<=^.{16})|3[47].{13}|(?:6011|65"
    r"|64[4-9]).*(?<=^.{16})"
    r"|3(?:0[0-5]|[68]).*(?<=^.{14})|35(?:2[89]|[3-8].).{12}|(?:2131|1800).{11}|62.{14,17}|(?:5018|5020|5038|5893|6304"
    r"|6759|676[1-3]).{8,15}"
)
_CODES = re.compile(  # ITU-T E.164 calling codes in use
    r"1|7|2[07]|3[0-469]|4[013-9]|5[1-8]|6[0-6]|8[1246]|9[0-58]|2[1-69]\d|3[578]\d|42\d|5[09]\d|6[7-9]\d|8[05]\d"
    r"|88[02367]|9(?:6[0-8]|7[0-79]|9[2-68])"
)


def _luhn(digits: str) -> bool:
    doubled = (sum(divmod(2 * int(d), 10)) for d in digits[-2::-2])
    return len(set(digits)) > 1 and (sum(map(int, digits[::-2])) + sum(doubled)) % 10 == 0


def is_reckoned(text: str, start: int, end: int) -> bool:
    """Whether a number is part of a calculation."""
    return bool(_RECKONED_BEFORE.search(text[max(0, start - 8) : start]) or _RECKONED_AFTER.match(text, end))


def _numbers(text: str, lower: str) -> Iterator[EntityMatch]:
    for run in _RUN.finditer(text):
        start, end = run.span()
        start -= 2 if text[start - 2 : start] == "+(" else text[start - 1 : start] in ("+", "(")
        if end - start > 11:
            yield from _cards(text, start, end)
        if "-" in run[0]:
            yield from (
                EntityMatch("ssn", *m.span(), normal("ssn", m[0]))
                for m in _SSN.finditer(text, start, end)
                if not is_reckoned(text, *m.span())
            )
        if start != run.start() or _PHONE_LIKE.search(text, start, end):
            yield from (
                match
                for m in _PHONES.finditer(text, start, end)
                if _is_phone(text, m)
                for match in _phone(text, *m.span())
            )


def _cards(text: str, start: int, end: int) -> Iterator[EntityMatch]:
    while m := _CARD.search(text, start, end):
        start = m.end()
        # the last group may be another number: 4111 1111 1111 1111 123
        for value in (m[0], m[0].rpartition(m[1] or "\0")[0]):
            digits = re.sub(r"\D", "", value)
            enough = len(digits) > 13 or m[1]  # 13 digits without separators are as often an article number
            if value and enough and _ISSUERS.fullmatch(digits) and _luhn(digits) and not is_reckoned(text, *m.span()):
                yield EntityMatch("card", m.start(), m.start() + len(value), digits)
                break


def _is_phone(text: str, m: re.Match[str]) -> bool:
    digits, kind = re.sub(r"\D", "", m[0]), m.lastgroup if m.lastgroup != "dash" else "american"
    if is_reckoned(text, *m.span()) or digits in "0123456789012" or set(digits) <= {"0", "1"}:
        return False
    groups = re.findall(r"\d+", m[0], re.A)
    if kind == "international":
        before = text[max(0, m.start() - 3) : m.start()]
        summand = re.search(r"\d\)?$", before) or (before.rstrip(" ")[-1:].isdigit() and len(groups) < 3)
        decimal = "." in m[0] and len(groups) == 2 and len(groups[1]) < 7
        return (
            bool(_CODES.match(digits))
            and (digits[0] != "1" or len(digits) == 11)
            and not summand
            and not decimal
            and " - " not in m[0]
        )
    if kind == "zeros":
        return bool(_CODES.match(digits[2:])) and len(groups) > 1
    if kind == "trunk":
        rising = len(groups) > 1 and all(len(a) == 2 and int(b) == int(a) + 1 for a, b in pairwise(groups))
        dotted = "." in m[0] and len(groups) != 5
        return not rising and not dotted and not re.match(r"\d\d[-./]\d\d[-./]\d{4}|\d{5}-\d{4}$", m[0])
    return kind == "american" or (9 <= len(digits) <= 12 and not re.match(r"\((?:19|20)\d\d\)", m[0]))


def _phone(text: str, start: int, end: int) -> Iterator[EntityMatch]:
    extension = _EXTENSION.match(text, end)
    end = extension.end() if extension else end
    value = normal("phone", text[start:end])
    if not re.match(r"1\d{3}55501\d\d(?:x|$)", value):  # 555-0100 to 555-0199 are for fiction
        yield EntityMatch("phone", start, end, value)


# Bank accounts, IP and MAC addresses
_IBAN = re.compile(r"\d(?<=[A-Za-z]{2}\d)\d[ \n-]?[A-Za-z0-9]{4}", re.A)
_IBAN_LETTER = re.compile(r"[^\W_](?<![\u0250-\U0010ffff])")  # a letter or digit; not of a script without spaces
_IBAN_LENGTHS = {  # SWIFT IBAN registry
    code: length
    for length, codes in {
        15: "NO",
        16: "BE",
        18: "DK FI FO GL NL",
        19: "MK SI",
        20: "AT BA EE KZ LT LU XK",
        21: "CH HR LI LV",
        25: "LY PT ST",
        32: "LC",
        33: "RU",
        22: "BG BH CR DE GB GE IE ME RS VA",
        23: "AE GI IL IQ OM TL",
        24: "AD CZ ES MD PK RO SA SE SK TN VG",
        26: "IS TR",
        30: "JO KW MU",
        27: "BI DJ FR GR IT MC MR SM",
        28: "AL AZ BY CY DO GT HU LB NI PL SV",
        29: "BR EG PS QA UA",
        31: "MT SC",
    }.items()
    for code in codes.split()
}
_V4 = re.compile(FREE + r"(?<![.-])\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}(?![\w-]|\.\d)", re.A)
_V4_GATE = re.compile(r"\.\d{1,3}\.\d{1,3}\.\d", re.A)
_V6_GATE = re.compile(r":(?::|(?:[0-9A-Fa-f]{1,4}:){3})")
_V6 = re.compile(r"[0-9a-f](?<!(?<!\\)[\w:.].)[0-9a-f]{0,3}(?::[0-9a-f]{0,4}){2,7}(?![\w:])", re.I | re.A)
_V6_KINDS = re.compile(
    r"(?:[23][0-9a-f]{3}|f[cd][0-9a-f]{2}|fe80):|(?:[0-9a-f]{1,4}:){7}[0-9a-f]", re.I
)  # other prefixes only in full form, because a::b is also code
_VERSION_BEFORE = re.compile(
    r"(?:\bv|version|ver\.?|release|build|section|chapter|figure|table|§|[A-Za-z]/|==|>=|<=|~=|[a-z]@)[ \t:=]*v?$", re.I
)
_IP_BEFORE = re.compile(r"(?:\bip|addr|host|server|from|client|ping|://)\w*[ \t:=\"'(]*$", re.I)
_RESOLVERS = frozenset(
    ["8.8.8.8", "8.8.4.4", "1.1.1.1", "1.0.0.1", "9.9.9.9", "4.4.4.4"]
)  # public resolvers, common in any text
_RESERVED = ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "0.0.0.0/8", "240.0.0.0/4", "2001:db8::/32")
_DOCUMENTATION = [ipaddress.ip_network(net) for net in _RESERVED]
_MAC = re.compile(
    FREE
    + r"(?<![:-])(?:[0-9a-f]{2}([:-])(?:[0-9a-f]{2}\1){4}[0-9a-f]{2}|[0-9a-f]{4}\.[0-9a-f]{4}\.[0-9a-f]{4})(?![\w:-])",
    re.I | re.A,
)
_MAC_GATES = [
    re.compile(gate, re.A)
    for gate in (r":(?:[0-9A-Fa-f]{2}:){4}", r"-(?:[0-9A-Fa-f]{2}-){4}", r"\.[0-9A-Fa-f]{4}\.[0-9A-Fa-f]{4}")
]


def _ibans(text: str, lower: str) -> Iterator[EntityMatch]:
    for m in _IBAN.finditer(text) if _RUN.search(text) else ():  # an IBAN of any country has seven consecutive digits
        end = start = m.start() - 2
        length, value = _IBAN_LENGTHS.get(text[start : start + 2].upper(), 0), ""
        if _IBAN_LETTER.match(text, start - 1) and start and not _ESCAPE.match(text, start - 1):
            continue
        while len(value) < length and end < len(text):
            if text[end].isascii() and text[end].isalnum():
                value += text[end].upper()
            elif text[end] not in " -\n" or not text[end - 1].isalnum():
                break
            end += 1
        complete = length and len(value) == length and not _IBAN_LETTER.match(text, end)
        if complete and int("".join(str(int(c, 36)) for c in value[4:] + value[:4])) % 97 == 1:
            yield EntityMatch("iban", start, end, value.casefold())


def _machines(text: str, lower: str) -> Iterator[EntityMatch]:
    if _V4_GATE.search(text):
        for m in _V4.finditer(text):
            before = text[max(0, m.start() - 16) : m.start()]
            # without a label, 1.2.3.4 is a section or a version
            outline = len(m[0]) == 7 and not _IP_BEFORE.search(before)
            if (
                not outline
                and not _VERSION_BEFORE.search(before)
                and not _is_version(m[0], before, text[m.end() : m.end() + 12])
            ):
                yield from _address(m)
    if _V6_GATE.search(text):
        yield from (match for m in _V6.finditer(text) if _V6_KINDS.match(m[0]) for match in _address(m))
    if any(gate.search(text) for gate in _MAC_GATES):
        for m in _MAC.finditer(text):
            value = normal("mac", m[0])
            if (
                not value.startswith(("02005e", "00005e0053"))
                and len(set(value)) > 1
                and not (m[0][4] == "." and value.isdigit())
            ):
                yield EntityMatch("mac", *m.span(), value)


def _is_version(address: str, before: str, after: str) -> bool:
    """Whether four small numbers are more likely a version: a name and no IP label comes before them."""
    small = all(int(part) < 32 for part in address.split("."))
    named = re.search(
        r"(?:(?:^|[\s(])[A-Z][\w+#-]*|\b(?:app|driver|package|library|firmware|kernel|module|plugin|sdk|api|model|patch|update|client v)) $",  # noqa: E501
        before,
    )
    return small and named is not None and not _IP_BEFORE.search(before) and not re.match(r"[:/]\d", after)


def _address(m: re.Match[str]) -> Iterator[EntityMatch]:
    try:
        address = ipaddress.ip_address(m[0])
    except ValueError:
        return
    public = address.is_loopback or address.is_unspecified or address.is_multicast or str(address) in _RESOLVERS
    if not public and not any(address in net for net in _DOCUMENTATION):
        yield EntityMatch("ip", *m.span(), str(address))


# Labelled dates of birth
_DATE = r"""\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/. ]\d{1,2}[-/. ]\d{2,4}
    |(?:the\ )?\d{1,2}(?:st|nd|rd|th|\.)?\ (?:of\ |de\ )?[^\W\d_]{3,10}\.?,?\ (?:de\ )?'?\d{2,4}
    |[^\W\d_]{3,10}\.?\ \d{1,2}(?:st|nd|rd|th)?,?\ \d{4}|[^\W\d_]{3,10}\ '\d\d|\d{8}|\d{6}"""
_BORN = re.compile(
    rf"""(?:birth(?:[ _]?da(?:te|y)|(?<=of[ _]birth)|(?<=ofbirth))|{FREE}(?:d\.?o\.?b\.?|born)|geburtsdatum|geboren|geb\.|née?\ le|nacimiento
    |nascita)(?:{BLANK}|["'\\:=(.,]|\b(?:on|is|was|am|in)\b){{0,10}}(?<!\w)({_DATE})(?!\w)""",  # noqa: E501
    re.I | re.X,
)


# Labelled values: one search for all labels
_KINDS = {
    "secret": "pass pwd secret token key credential bearer basic -u --user -p' -p\"",
    "born": "birth born dob d.o.b gebo geburts geb. né_le née_le nacim nascita",
    "number": "phone tel tél mobil móvil cell fax whatsapp sms handy contact call_ ring_ text_ reach_ dial_ my_number"
    " ssn social tax card visa amex cc mac",
}
_WORDS = {word.replace("_", " "): kind for kind, words in _KINDS.items() for word in words.split()}
_WORD = re.compile(
    "|".join(
        f"{c}(?:{'|'.join(re.escape(w[1:]) for w in sorted(_WORDS) if w[0] == c)})"
        for c in sorted({w[0] for w in _WORDS})
    )
)


def _words(text: str, lower: str) -> Iterator[EntityMatch]:
    for word in _WORD.finditer(lower):
        kind, at = _WORDS[word[0]], word.start()
        if kind == "secret":
            yield from labelled_secrets(text, at)
        elif kind == "born" and (m := _BORN.match(text, at)):
            yield EntityMatch("dob", *m.span(1), normal("dob", m[1]))
        elif kind == "number" and (m := _LABELLED.match(text, at)):
            of = m.lastgroup or ""
            if of == "phone":
                yield from _phone(text, *m.span(of))
            elif of != "card" or _luhn(re.sub(r"\D", "", m[of])):
                yield EntityMatch(of, *m.span(of), normal(of, m[of]))


# field names that serve as labels
LABEL = re.compile(r"phone|tel|mobil|cell|fax|number|ssn|social|tax|birth|dob|born|card|cc|mac|\bip\b|addr", re.I)
FINDERS: tuple[Callable[[str, str], Iterator[EntityMatch]], ...] = (
    find_secrets,
    _emails,
    _numbers,
    _ibans,
    _machines,
    _words,
)
