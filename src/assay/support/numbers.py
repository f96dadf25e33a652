"""Numbers as texts, numbers and times in texts: what they state, and which spellings are read.

A number that rounds to zero is written without a minus sign: `-0.000` reads as a loss.

Spellings of numbers were compared on 77 with math-verify 0.9, price-parser 0.5 and Babel 2.19, which read 37, 39 and 31
of them right. math-verify limits its time by a signal, so that it works in the main thread only.
"""

import math
import re
import time
import unicodedata
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise
from math import isfinite
from typing import Any, NamedTuple

from assay.errors import ConfigError
from assay.support.sections import without_thoughts


def counted(number: float, things: str) -> str:
    """A number and what it counts: `1 rollout`, `2 rollouts`, `1,200 LM calls`, `0.0000021 dollars`."""
    figures = f"{number:,}" if isinstance(number, int) else format(Decimal(f"{number:.6g}"), ",f")
    return f"{figures} {things.removesuffix('s') if number == 1 else things}"


def calls_text(calls: int, cached: int) -> str:
    """The LM calls that were made, and how many more the response cache answered, from this run or earlier ones."""
    return f"{calls:,} ({cached:,} more from the cache)"


def price(value: float | None) -> str:
    """Dollars; `unknown` where they are not known. A cost is never rounded to nothing."""
    if value is not None and 0 < value < 0.00005:
        return "< $0.0001"
    return "unknown" if value is None else f"${value:.4f}" if value else "$0"


def figure(value: float | None, digits: int = 3) -> str:
    """A number with these decimals; a dash where there is none."""
    return f"{value:z.{digits}f}" if value is not None and isfinite(value) else "–"


def signed(value: float | None, digits: int = 3) -> str:
    """A difference with its sign: `+0.100`; `+0.000` if it rounds to zero, a dash where there is none."""
    return f"{value:+z.{digits}f}" if value is not None and isfinite(value) else "–"


_SECONDS = {"m": 60, "h": 3600, "d": 86400}
_EARLIEST = 0.0


def since(text: str, *, now: float | None = None) -> float:
    """Seconds since the epoch of `30m`, `12h` or `7d` before `now`, or of a date such as `2026-11-23`.

    Raises:
        ConfigError: `text` is neither.
    """
    number = text[:-1]
    try:
        if text[-1:] in _SECONDS and number.isascii() and number.isdigit() and len(number) < 9:
            at = (time.time() if now is None else now) - int(number) * _SECONDS[text[-1]]
            return max(_EARLIEST, at)
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ConfigError(
            f"`since={text[:100]!r}` must be a number of minutes, hours or days (30m, 12h, 7d) or a date (2026-11-23)"
        ) from None


_STR_ERRORS = (Exception, SystemExit, GeneratorExit)  # `__str__` of an agent's own class may raise any of these
_MOST = 2000  # characters at the end of a text that are read
_MOST_BITS = 14_000  # of a power
_WORDS = {
    12: "dozen",
    10**2: "hundreds? hundert",
    10**3: "thousands? tausend mille?",
    10**5: "lakhs? lacs?",
    10**6: "millions? millionen mill(?:ón|ones) milion[ei] milh(?:ão|ões) miljoen mio mln mn",
    10**7: "crores?",
    10**9: "billions? milliard(?:s|en?)? miljard mrd bln bn",
    10**12: "trillions? billionen trn tn",
}
_IDEOGRAPHS = {"百": 100, "千": 10**3, "万": 10**4, "萬": 10**4, "億": 10**8, "亿": 10**8}
_LETTERS_OF_SCALES = {"k": 10**3, "m": 10**6, "mm": 10**6, "b": 10**9, "t": 10**12}
_EXPRESSION = "\0"  # replaces what has a value that is not computed, such as a root
_CHARACTERS = str.maketrans(
    {"−": "-", "﹣": "-", "➖": "-", "–": "-", "‐": "-", "‑": "-", "‒": "-", "∓": "±", "٫": ".", "٬": ",", "’": "'",
     "×": "*", "·": "*", "⋅": "*", "⁄": "/", "∕": "/", "÷": "/", "π": _EXPRESSION,
     "√": _EXPRESSION, "€": "$", "£": "$", "¥": "$", "₹": "$"}
)  # fmt: skip
_MINUS_AND_SPACE = re.compile(r"([−﹣➖])[^\S\n]+(?=[\d.$€£¥₹])")
_CURRENCY = re.compile(r"(?<!\w)(?:USD|EUR|GBP|CHF|JPY|CNY|INR|US\$|R\$|Rs\.?)(?=\s?[-+\d])")

_LATEX: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"\{,\}", ","),
        (r"\\!|\\(?:left|right|displaystyle)(?![A-Za-z])|\^\s*\{?\s*\\circ\s*\}?", ""),
        (r"\\[,;: ]|~", " "),
        (r"\\([$%])", r"\1"),
        (r"\\(?:times|cdot)(?![A-Za-z])", "*"),
        (r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r"\1"),
        (r"\^\s*\{([^{}]*)\}", r"^\1"),
        (r"_\{[^{}]*\}", ""),
    )
)
_NUMBER = r"\s*([-+]?[\d.,]+)\s*"
_FRACTION = re.compile(rf"(\d?)\s*\\[dtc]?frac\s*(?:\{{{_NUMBER}\}}|(\d))\s*(?:\{{{_NUMBER}\}}|(\d))")
_FUNCTION = re.compile(
    r"\\(?:[dtc]?frac|sqrt|binom|log|ln|exp|sin|cos|tan|pi|tau|phi|infty)(?![A-Za-z])"
    r"\s*(?:\[[^\]{}]*\]|_\w)?(?:\s*\{[^{}]*\})*(?!\s*\{)"
)
_COMMAND = re.compile(r"\\[A-Za-z]+")

_DIGITS = r"(?:(?:(?<!\d )[1-9]\d{0,2}(?:\ \d{3})+(?!\d)|\d+)(?:[.,'_]\d+)*|(?<![.\w])\.\d+)(?:[eE][-+]?\d{1,3}(?!\w))?"
_CHAIN = re.compile(
    rf"(?P<sign>(?:[-+]?\$\s?[-+]?|[-+])?)(?P<first>{_DIGITS})"
    rf"(?P<rest>(?:[-+*/^:—年月]\$?[-+]?{_DIGITS}|\ ?/\ ?\$?{_DIGITS}|\ ?[*x]\ ?10\^[-+]?\d+"
    r"|\ \d+\ ?/\ ?\d+(?!\ ?[/\d]))*)"
)
# letters of scripts that put a space between a word and a number
_LETTERS = r"A-Za-z_\u00c0-\u024f\u0370-\u052f"
_JOINED_BEFORE = re.compile(rf"[\d{_LETTERS}]$|[\d{_LETTERS})\]}}][-+*/^]$|\0[\s*/^+-]*$")
_JOINED_AFTER = re.compile(r"[A-Za-z]+-?\d|\^|[ *]*(?:\0|pi\b)")
_SIGN_BEFORE = re.compile(
    r"(?:(?<![\w-])(minus|negative)[ \t]+|(?<![-—\w])-[ \t]+|(?<!\w)(?:\+[ \t]+|—)|±[ \t]*)$", re.I
)
_BEFORE_A_SIGN = re.compile(r"(?:\A\s*|[=:(\[{<>≈~|*_`\"'$][ \t]*|\b(?:is|are|was|be|equals?)[ \t]+)$")
_LIST_ITEM = re.compile(r"\n[ \t]*$")
_ONE_OF = "|".join("(?P<x{}>{})".format(scale, words.replace(" ", "|")) for scale, words in _WORDS.items())
_SCALED = re.compile(rf"[\s-]*(?:{_ONE_OF})\b\.?", re.I)
_IDEOGRAPH = re.compile(rf"\s?([{''.join(_IDEOGRAPHS)}])")
_LETTER = re.compile(r"( ?)([kKmMbBtT]|MM|mm)(?![\w^]|[-'’]\w)")
_PART = re.compile(r"[\s-]*(?:thirds|(?:ten|hundred|thousand|million|billion)ths?)\b", re.I)  # of one
_AND_A_HALF = re.compile(r"\s+and (?:a|one) half\b", re.I)
_AFTER_CURRENCY = re.compile(r"\s?(?:\$|(?:USD|EUR|GBP|CHF|JPY|CNY|INR|Euros?|dollars?)\b)", re.I)
# between numbers that are not read alone: an operation, a range or a ratio; a list
_OPERATION = re.compile(
    r"[ \t]*[%°]?(?:[ \t]*[-+*/^—±][ \t]*|[ \t]+(?::|x|e|to|or|plus|times|divided by|(?:out )?of(?: the)?)[ \t]+)", re.I
)
_LISTED = re.compile(r"[ \t]*(?:[,;]\s+(?:and\s+|or\s+)?|[ \t](and|&)[ \t]+)", re.I)
_MIXED = re.compile(r"(?:(\d+) (?!0))?(\d[^ /^]*|\.\d+)/([^ /^]+)")
_POWER = re.compile(r"(?:([^*x^/:]+?) ?[*x] ?)?([^*x^/: ]+)\^([-+]?\d{1,5})")
# digits in groups with a decimal point; in groups of India; with a decimal comma
_POINT = re.compile(
    r"[1-9]\d{0,2}([ ,'_])\d{3}(?:\1\d{3})*(?:\.\d+)?|[1-9]\d?(?:,\d\d)+,\d{3}(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+"
)
_COMMA = re.compile(r"[1-9]\d{0,2}(?:([ .'])\d{3}(?:\1\d{3})*,\d+|(?:\.\d{3}){2,})|\d+,\d+")


class _Found(NamedTuple):
    start: int
    end: int
    value: Fraction
    signed: bool
    scaled: bool
    clear: bool  # False: its sign or its scale can be read in two ways


def parse_number(value: Any) -> int | float | None:
    r"""The number that a text states; None if it states none. Integers and fractions are exact before they are rounded.

    Of a text, thoughts are left out (`without_thoughts`). Then the last number counts: of what follows the last `####`
    if there is one, otherwise of the last `\boxed{…}`, otherwise of the whole text (its last 2000 characters).

    - A point is decimal. A comma is decimal, except where it separates groups of three digits: `1,5` is 1.5, `1,234`
      is 1234, `0,125` is 0.125. If both occur, the last one is decimal: `1.234,5` is 1234.5. Points are group
      separators where there are several: `1.234.567`. Further group separators are a space of any width, an
      apostrophe and an underscore: `1 000 000`.
    - Read too: `3/4`, `3 / 4`, `1 1/2`, `½`, `4 and a half`, `\frac{3}{4}`, `1e-3`, `5 × 10^3`, `10⁶`, digits of any
      script. Currencies, units, `%` and ordinals (`12th`) are ignored: `50 %` is 50.
    - Scales: `3 million` (also dozen, hundred, thousand, billion, trillion, lakh, crore, `bn`, `Mio.`, `Mrd.` and the
      words of some other languages, `3万`), `1.5k`, `2M`, `7B`; with a currency also `$5 M`, `$5m`, `5m €`.
    - The signs `-`, `−` and `–` and the words `minus` and `negative` are minus, also before a space where nothing but
      the beginning, `=`, `:`, `is` or a bracket is before them: `– 4`, `x = - 4`. At the beginning of a later line,
      `- 4` is an item of a list.
    - Not numbers, and passed over: dates, times, versions, addresses, phone numbers, ranges, ratios, sums and products
      with and without spaces (`2024-02-29`, `12:30`, `1.2.3`, `5–7`, `5 to 7`, `4 out of 5`, `10 - 5`, `1-1/2`,
      `5 ± 2`), names (`GPT-4`, `x2`, `0x1F`), lists (`1,2,3`, `1, 2, 3`, `1 and 2`, `(1, 2)`), and numbers in an
      expression whose value is not computed (`2\pi`, `\sqrt{2}`, `x^2`). Numbers in words are not read.
    - If the last number can be read in two ways, the text states none: `Total – 4` (a dash or a minus), `±4`, `5 M`
      without a currency (a scale or a unit), `3 hundredths`.
    """
    if isinstance(value, bool | None):
        return None
    if isinstance(value, int | float):
        return value if isinstance(value, int) or math.isfinite(value) else None
    if isinstance(value, list | tuple | dict | set | frozenset):
        return None
    try:
        text = without_thoughts(str(value))
    except _STR_ERRORS:
        return None
    text = text.rpartition("####")[2] or text
    boxed = _boxed(text)
    text = text if boxed is None else boxed
    if len(text) > _MOST:
        text = re.sub(r"\A\S*", "", text[-_MOST:])  # without a number that was cut
    plain = _plain(text)
    numbers = _alone(plain, list(_numbers(plain)))
    return _rounded(numbers[-1].value) if numbers and numbers[-1].clear else None


def whole_number(text: str) -> int | float | None:
    """The number that a text consists of, with at most a currency, `%` or a full stop; otherwise None."""
    plain = _plain(text[:_MOST]).strip()
    found = next(_numbers(plain), None)
    whole = found is not None and found.clear and found.start == 0 and plain[found.end :].strip() in ("", "%", ".", "$")
    return _rounded(found.value) if whole and found is not None else None


def with_plain_numbers(text: str) -> str:
    """The text with all its numbers in one spelling, `1 000 000` and `1,000,000` as `1000000`, and without LaTeX.

    For comparing words. What is not a number stays as it is.
    """
    plain, parts, at = _plain(text), list[str](), 0
    for found in _numbers(plain):
        small = found.clear and found.value.numerator.bit_length() <= _MOST_BITS
        value = _rounded(found.value) if small else None
        if value is not None:
            parts += [plain[at : found.start], f"{value}"]
            at = found.end
    return "".join([*parts, plain[at:]])


def _rounded(value: Fraction) -> int | float | None:
    if value.denominator == 1:
        return value.numerator
    try:
        return float(value)
    except OverflowError:
        return None


def _boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{…}`."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for at in range(start + 6, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + 7 : at]
    return text[start + 7 :]


def _plain(text: str) -> str:
    """The text in ASCII as far as numbers need it, without LaTeX."""
    if not text.isascii():
        text = _MINUS_AND_SPACE.sub(r"\1", text)
        text = "".join(map(_ascii, text, " " + text)).translate(_CHARACTERS)
    text = _CURRENCY.sub("$", re.sub(r"(?<=[\d)])\*\*(?=[-+\d])", "^", text))
    if "\\" not in text and "{" not in text:
        return text
    for pattern, new in _LATEX:
        text = pattern.sub(new, text)
    text = _FRACTION.sub(_fraction, text)
    while (simpler := _FUNCTION.sub(_EXPRESSION, text)) != text:
        text = simpler
    return _COMMAND.sub(" ", text)


def _ascii(character: str, before: str) -> str:
    """One character, given the one before it."""
    if character.isascii():
        return character
    if (digit := unicodedata.decimal(character, None)) is not None:
        return str(digit)
    kind, _, form = unicodedata.decomposition(character).partition(" ")
    if kind == "<super>":
        text = unicodedata.normalize("NFKC", character).replace("−", "-")
        return text if unicodedata.decomposition(before).startswith("<super>") else f"^{text}"
    if kind == "<fraction>":
        written = "".join(chr(int(code, 16)) for code in form.split())
        return f" {written}" if before.isdecimal() else written
    if kind == "<wide>" or unicodedata.category(character) == "Zs":
        return unicodedata.normalize("NFKC", character)
    return "" if unicodedata.category(character) == "Cf" else character


def _fraction(match: re.Match[str]) -> str:
    whole, top, top_digit, bottom, bottom_digit = match.groups()
    return f"{whole} " * bool(whole) + f"{top or top_digit}/{bottom or bottom_digit}"


def _numbers(plain: str) -> Iterator[_Found]:
    for match in _CHAIN.finditer(plain):
        start = max(0, match.start() - 20)
        if _JOINED_BEFORE.search(plain, start, match.start()) or _JOINED_AFTER.match(plain, match.end()):
            continue
        value = _value(match["first"] + match["rest"])
        if value is None:
            continue
        at, clear, negative = match.start(), True, match["sign"].count("-") == 1
        before = _SIGN_BEFORE.search(plain, start, at)
        if before and not _LIST_ITEM.search(plain, start, before.start()):
            at, opens = before.start(), _BEFORE_A_SIGN.search(plain, start, before.start())
            clear = not match["sign"].strip("$ ") and (
                bool(before[1]) or (before[0].strip() in "+-" and opens is not None)
            )
            negative = before[0].strip() != "+"
        end, scale = _scaled(plain, match.end(), "$" in match["sign"])
        if half := _AND_A_HALF.match(plain, match.end()):
            value += Fraction(1, 2)
            end, scale = _scaled(plain, half.end(), False)
        yield _Found(
            at, end, (-value if negative else value) * (scale or 1),
            signed=at < match.start() or match["sign"].strip("$ ") != "",
            scaled=scale != 1, clear=clear and scale is not None,
        )  # fmt: skip


def _scaled(plain: str, end: int, currency: bool) -> tuple[int, int | None]:
    """End and value of the words and signs for thousands and the like after a number; None: it can be read in two ways.

    `M`, `K` and `B` next to a number are scales; after a space, as units are written, and in small letters only with a
    currency.
    """
    scale = 1
    while (word := _SCALED.match(plain, end)) and word.lastgroup:
        scale, end = scale * int(word.lastgroup[1:]), word.end()
    if sign := _IDEOGRAPH.match(plain, end):
        return sign.end(), scale * _IDEOGRAPHS[sign[1]]
    if _PART.match(plain, end):
        return end, None
    if scale == 1 and (letter := _LETTER.match(plain, end)):
        if letter[2] == "k" or currency or _AFTER_CURRENCY.match(plain, letter.end()):
            return letter.end(), _LETTERS_OF_SCALES[letter[2].lower()]
        if letter[2] in "KMBT":
            clear = not letter[1] and letter[2] != "T"
            return letter.end(), _LETTERS_OF_SCALES[letter[2].lower()] if clear else None
    return end, scale


def _alone(plain: str, numbers: list[_Found]) -> list[_Found]:
    """The numbers that are not part of an operation, a range, a ratio or a list."""
    joined = set[int]()
    run = 0  # numbers of the list so far
    for index, (left, right) in enumerate(pairwise(numbers)):
        between = plain[left.end : right.start]
        if not between or _OPERATION.fullmatch(between) or (between.isspace() and (right.signed or left.scaled)):
            joined |= {index, index + 1}
        listed = _LISTED.fullmatch(between)
        run = run + 1 if listed else 0
        first = numbers[index + 1 - run]
        enclosed = plain[: first.start].rstrip()[-1:] in ("", *"([{") and plain[right.end :].lstrip(" $.")[:1] in (
            "",
            *")]}",
        )
        if listed and (run > 1 or listed[1] or enclosed):
            joined |= set(range(index + 1 - run, index + 2))
    return [number for index, number in enumerate(numbers) if index not in joined]


def _value(written: str) -> Fraction | None:
    """Value of a number, fraction, mixed number or power; None for anything else."""
    written = re.sub(" ?/ ?", "/", written)
    if (simple := _decimal(written)) is not None:
        return simple
    if match := _MIXED.fullmatch(written):
        top, bottom = _decimal(match[2]), _decimal(match[3])
        if top is None or not bottom:
            return None
        return top / bottom + (int(match[1]) if match[1] and top < bottom else 0)
    if match := _POWER.fullmatch(written):
        factor, base, exponent = _decimal(match[1] or "1"), _decimal(match[2]), int(match[3])
        if factor is None or base is None or (base == 0 and exponent < 0):
            return None
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        return factor * base**exponent if bits * abs(exponent) <= _MOST_BITS else None
    return None


def _decimal(written: str) -> Fraction | None:
    """Value of digits with separators; None if they are not one number."""
    sign = -1 if written.startswith("-") else 1
    digits, _, exponent = written.lower().removeprefix("-").removeprefix("+").partition("e")
    if len(digits) > 2 * _MOST:
        return None
    if _POINT.fullmatch(digits):
        digits = re.sub(r"[ ,'_]", "", digits)
    elif _COMMA.fullmatch(digits):
        digits = re.sub(r"[ .']", "", digits).replace(",", ".")
    else:
        return None
    return sign * Fraction(digits) * Fraction(10) ** int(exponent or 0)
