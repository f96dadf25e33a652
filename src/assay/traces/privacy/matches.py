"""A personal value found in a text, and the normal form of its spellings. Contains no detectors."""

import ipaddress
import re
import unicodedata
from dataclasses import dataclass

__all__ = ["BLANK", "COMMON_NAMES", "FREE", "EntityMatch", "normal", "small"]


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
