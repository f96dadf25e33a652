"""A personal value that was found in a text, and the normal form of its spellings. Finds nothing: `privacy_patterns` and its like do."""

import ipaddress
import re
import unicodedata
from dataclasses import dataclass

__all__ = ["BLANK", "FREE", "Found", "normal", "small"]


@dataclass(frozen=True, slots=True)
class Found:
    """A stretch of a text: `text[start:end]`. `value` is its normal form; a secret's is only its kind."""

    type: str
    start: int
    end: int
    value: str


def normal(kind: str, value: str) -> str:
    """One form for all spellings of a value: case, spaces and separators do not tell two apart."""
    value = unicodedata.normalize("NFKC", value).casefold().strip()
    if kind == "email":
        value = re.sub(r"%40|&#64;|\s*[\[({]\s*at\s*[\])}]\s*|\s+at\s+|\s+@\s+", "@", value)
        return re.sub(r"\s*[\[({]\s*dot\s*[\])}]\s*|\s+dot\s+", ".", value)
    if kind == "phone":
        number, _, extension = value.partition("x")
        digits = re.sub(r"\D", "", number)
        national = len(digits) == 10 and digits[0] in "23456789" and "+" not in number
        return ("1" if national else "") + digits.removeprefix("00") + ("x" + re.sub(r"\D", "", extension) if extension else "")
    if kind in ("iban", "card", "ssn", "mac"):
        return re.sub(r"[\W_]", "", value)
    if kind == "ip":
        try:
            return str(ipaddress.ip_address(value))
        except ValueError:
            return value
    return " ".join(value.split())


def small(text: str) -> str:
    """The text in small letters, of the same length (a few letters have a longer small form: they stay)."""
    lower = text.lower()
    return lower if len(lower) == len(text) else "".join(c.lower() if len(c.lower()) == 1 else c for c in text)


BLANK = r"(?:[^\S\n]|\n(?!\n))"  # white space, but no empty line: what one parts is never one find, so that texts can be read in parts
FREE = r"(?<!(?<!\\)\w)"  # no letter or digit before, but for the n of a \n: texts hold JSON
