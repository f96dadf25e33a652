# ruff: noqa: E501 (word lists and patterns)
"""Telephone numbers, dates and streets of many countries, with `phonenumbers` and word lists.

Extends `assay.traces.privacy.patterns`.

- A numeric date matches in a sentence (a line of at least four words, no log timestamp) or as the whole value of a
  labelled field or a JSON value. With a two-digit year it matches only in a sentence, after a word such as `on`.
- A date with a written month and an ordinal number (`3rd of May, 1990`) matches everywhere.
- A telephone number matches after a label, or in groups of digits if it is valid in its country's numbering plan and
  cannot be a difference of integers (`11 - 797 - 682`) or an integer in thousands (`5 650 000`).

Every search is bounded, so that the time is linear in the length of the text.
"""

import datetime
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module

import regex

from assay.traces.privacy.patterns import EntityMatch, is_reckoned, normal

# -- National identity and tax numbers: a label in the text, followed by a number that `python-stdnum` validates.


_KINDS = {  # label in the text -> modules of stdnum
    "codice fiscale": ("it.codicefiscale",),
    "nif|nie|dni": ("es.nif", "es.nie", "es.dni", "pt.nif"),
    "cpf": ("br.cpf",),
    "nir": ("fr.nir",),
    "pesel": ("pl.pesel",),
    "bsn|burgerservicenummer": ("nl.bsn",),
    "personnummer": ("se.personnummer", "no.fodselsnummer"),
    "cpr": ("dk.cpr",),
    "rodné číslo|rodne cislo": ("cz.rc",),
    "steuer-?id|idnr|identifikationsnummer": ("de.idnr",),
    "nhs(?: number)?": ("gb.nhs",),
    "utr": ("gb.utr",),
    "aadhaar": ("in_.aadhaar",),
    "pan(?: number)?": ("in_.pan",),
    "ahv|avs": ("ch.ssn",),
    "curp": ("mx.curp",),
    "rfc": ("mx.rfc",),
    "tfn": ("au.tfn",),
    "itin|atin|ein": ("us.itin", "us.ein"),
}
_LABELLED = regex.compile(
    rf"(?<!\w)(?P<word>{'|'.join(f'(?:{words})' for words in _KINDS)})(?!\w)[^\n\w]{{0,6}}(?:(?:number|no\.?|is"
    rf"|nr\.?)[^\n\w]{{1,3}}){{0,2}}(?P<value>[A-Z0-9](?:[ ./-]?[A-Z0-9]){{6,20}})(?!\w)",
    regex.I,
)


def national_numbers(text: str, lower: str) -> Iterator[EntityMatch]:
    """Numbers that a label names and whose check digits are right."""
    for m in _LABELLED.finditer(text):
        modules = next(modules for words, modules in _KINDS.items() if regex.fullmatch(words, m["word"], regex.I))
        if _is_number(m["value"], modules):
            yield EntityMatch("id", m.start("value"), m.end("value"), regex.sub(r"[\W_]", "", m["value"]).casefold())


@lru_cache(maxsize=5_000)
def _is_number(value: str, modules: tuple[str, ...]) -> bool:
    return any(import_module(f"stdnum.{name}").is_valid(value) for name in modules)


# -- Forms.


_PHONE = regex.compile(
    r"""(?<![\w.@/#$€£-])(?<!\d[ ,)])\+?\(?\d(?:[ \u00a0.\-/()]{0,3}+\d){6,17}+(?:\ ?(?:x|ext\.?)\ ?\d{1,6})?(?![\w@%€$]|[.,:]\d|\ ?[=*^×÷])""",
    regex.V1 | regex.X,
)
_CUE = regex.compile(
    r"(?<!\w)(?:phone|tel(?:e(?:fon[eo]?|phone))?|mobil[e]?|móvil|cell|fax|sms|text|whatsapp|handy|hotline|line|number"
    r"|call|ring|reach|dial|contact|"
    r"back on|sender|regards|under|attn|reachable)\b[^\n\d]{0,40}(?:\n(?!\n)[^\n\d]{0,40}){0,3}$",
    regex.I,
)
_NO_CUE = regex.compile(
    r"(?:id|order|ticket|invoice|isbn|item|row|account|article|index|serial|number of|value|version|call id|function[ "
    r"_]?call|call (?:took|takes|lasted|cost|returned)|build|release|vol\.?|pp?\.|=)\W{0,3}$",
    regex.I,
)
_REGIONS = (
    "US",
    "GB",
    "DE",
    "FR",
    "ES",
    "IT",
    "NL",
    "PL",
    "BR",
    "SE",
    "IN",
    "CZ",
    "AT",
    "CH",
    "AU",
    "MX",
    "BE",
    "PT",
    "DK",
    "NO",
    "FI",
    "IE",
    "JP",
)
# The same as a calculation: numbers without leading zeros between minus signs, and thousands
_MINUS = regex.compile(r"\(?-?(?:0|[1-9]\d*)\)?(?:\ ?-\ ?\(?-?(?:0|[1-9]\d*)\)?)+", regex.V1)
_THOUSANDS = regex.compile(r"[1-9]\d?(?:[ \u00a0]\d{3}){2}")
_AMERICAN = regex.compile(r"\d{3}( ?- ?)\d{3}\1\d{4}")
_DECIMAL = regex.compile(r"\(\d+\.\d+\)")
_ASKED = regex.compile(
    r"(?<!\w)(?:what(?:'s| is)|how much is|calculate|compute|work out|evaluate|solve|simplify|subtract(?:ing)?"
    r"|expression|result of|value of)\W{1,3}$",
    regex.I,
)
_CALCULATION = regex.compile(r"[\d)\]] ?[-+*/=^%×÷] ?$|= ?$")


@lru_cache(maxsize=20_000)
def _valid(text: str) -> bool:
    """Whether a telephone number is valid for its country code or in the numbering plan of one of `_REGIONS`."""
    import phonenumbers

    for region in (None,) if text.startswith("+") else _REGIONS:
        try:
            if phonenumbers.is_valid_number(phonenumbers.parse(text, region)):
                return True
        except phonenumbers.NumberParseException:
            continue
    return False


def _phones(text: str, lower: str) -> Iterator[EntityMatch]:
    for m in _PHONE.finditer(text):
        start, end = m.span()
        number = m[0]
        digits = sum(c.isdigit() for c in number.partition("x")[0])
        before = text[max(0, start - 120) : start]
        if (
            digits > 15
            or _CALCULATION.search(before)
            or is_reckoned(text, start, end)
            or _NO_CUE.search(before)
            or regex.match(r"1\D?\d{3}\D{0,2}55501\d\d", regex.sub(r"[ .()-]", "", number))
        ):
            continue
        labelled = _CUE.search(before) is not None
        groups = regex.findall(r"\d+", number)
        if (
            _is_date(number)
            or _is_address(number)
            or (not labelled and (len(groups) < 3 or number.count(".") == 1 or _is_arithmetic(number, before)))
            or (not labelled and not _valid(number))
        ):
            continue
        if not labelled and number[0] != "+" and not _in_sentence(text, start, end, 3):
            continue
        if not labelled and regex.fullmatch(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}", number):
            continue
        if labelled and len(groups) == 1 and digits == 8 and _is_day(number):
            continue
        if not labelled and not (number[0] in "+(0" or max(map(len, groups)) <= 4):
            continue
        # groups of equal length are lists, such as 0755 0644 0600 or 01 02 03 04
        if not labelled and len({len(group) for group in groups}) == 1 and number[0] != "+":
            continue
        value = normal("phone", number)
        if not regex.match(r"1\d{3}55501\d\d(?:x|$)", value):
            yield EntityMatch("phone", start, end, value)


def _is_arithmetic(number: str, before: str) -> bool:
    """Whether an unlabelled number is rather part of a calculation or of a text with numbers.

    `415-333-2671` remains a telephone number, `415 - 333 - 2671` does after anything but a question for its value.
    """
    if _THOUSANDS.fullmatch(number) or _DECIMAL.match(number):
        return True
    if not _MINUS.fullmatch(number):
        return False
    if _AMERICAN.fullmatch(number):
        return " " in number and _ASKED.search(before) is not None
    return " - " in number or _ASKED.search(before) is not None


def _is_date(text: str) -> bool:
    return regex.match(r"(?:\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/. ]\d{1,2}[-/. ]\d{4})(?!\d)", text) is not None


def _is_address(text: str) -> bool:
    return regex.fullmatch(r"\d{1,3}(?:\.\d{1,3}){3}", text) is not None


def _is_day(text: str) -> bool:
    return regex.fullmatch(r"(?:19|20)\d\d(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])", text) is not None


_MONTHS = {
    name: number
    for number, names in enumerate(
        (
            "january jan januar jänner janvier enero gennaio janeiro januari stycznia ledna",
            "february feb februar février febrero febbraio fevereiro februari lutego února",
            "march mar märz mars marzo março maart marca března",
            "april apr avril abril aprile kwietnia dubna",
            "may mai mayo maggio maio mei maja května maj",
            "june jun juni juin junio giugno junho czerwca června",
            "july jul juli juillet julio luglio julho lipca července",
            "august aug août agosto augustus augusti sierpnia srpna",
            "september sep sept septembre septiembre settembre setembro września září",
            "october oct okt oktober octobre octubre ottobre outubro października října",
            "november nov novembre noviembre novembro listopada listopadu",
            "december dec dez dezember décembre diciembre dicembre dezembro grudnia prosince",
        ),
        1,
    )
    for name in names.split()
}
_NUMERIC = regex.compile(
    r"(?:(?<![\w.,/:=+-])|(?<=\\[nrt]))(?:(?P<y>(?:1[89]|20)\d\d)(?P<a>[-/.])(?P<m>\d{1,2})(?P=a)(?P<d>\d{1,2})"
    r"|(?P<d2>\d{1,2})(?P<b>[-/.])(?P<m2>\d{1,2})(?P=b)(?P<y2>(?:1[89]|20)\d\d))"
    r"(?!\d|[-/.]\d|[T ,]{1,2}\d\d:\d\d:\d\d|\w| ?[*^=×÷])"
)
_WRITTEN = regex.compile(
    r"(?<!\w)(?:\p{Lu}\p{L}{4,12},\ )?(?:(?P<d>\d{1,2})(?:(?P<th>st|nd|rd|th)|\.|er|º)?\ (?:of\ "
    r"|de\ )?(?P<m>\p{L}{3,12})\.?,?\ (?:de\ |del\ )?(?P<y>(?:1[89]|20)\d\d)"
    r"|(?P<m2>\p{Lu}\p{L}{2,11})\.?\ (?P<d2>\d{1,2})(?P<th>st|nd|rd|th)?,?\ (?P<y2>(?:1[89]|20)\d\d))(?!\w)"
)
_SHORT = regex.compile(  # two-digit year: 5/3/24
    r"(?<=(?<!\w)(?i:on|due|since|until|till|dated?|before|after|born|issued|signed|expire[sd]?):?\ )"
    r"(?:(?P<a>\d{1,2})/(?P<b>\d{1,2})/(?P<y>\d\d)|(?P<a>\d\d)\.(?P<b>\d\d)\.(?P<y>\d\d))(?![\w/.-]\d|\w|/| ?[*^=×÷])"
)
_FIELD_BEFORE = regex.compile(
    r"""(?:^|(?:\n|\\n)[ \t]*|(?:^|\n|\\n)[ \t]*(?P<key>[\p{L}_ ]{2,30}):[ \t]+|(?P<key>[\p{L}_ ]{2,30})\\{0,3}"\ ?:\ ?\\{0,3}"|<(?P<key>[\p{L}_]{2,30})>[ \t]*)$"""
)
_FIELD_AFTER = regex.compile(r"[ \t]*(?:\.?[ \t]*(?:\n|\\n|$|</)|\\{0,3}\")")
_MARKER_BEFORE = regex.compile(r"(?:\#\#\ \]\]|:|<\w{1,50}>)[ \t]*(?:\n|\\n)[ \t]*$")
_NO_DAY = regex.compile(r"creat|updat|modif|timestamp|version|release|build|publish|cutoff", regex.I)
_TAG = regex.compile(r"</?\w{1,50}\ ?/?>")
_LETTERS = regex.compile(r"\p{L}{2,}")
_NOT_PERSONAL = regex.compile(
    r"(?:version|release[d]?|copyright|©|\(c\)|rfc|iso|commit|build|updated)\W{0,3}(?:on )?$", regex.I
)
_SENTENCE = 4  # minimum words of a sentence


def _dates(text: str, lower: str) -> Iterator[EntityMatch]:
    for m in _NUMERIC.finditer(text):
        year, month, day = (m["y"], m["m"], m["d"]) if m["y"] else (m["y2"], m["m2"], m["d2"])
        if _real(int(year), int(month), int(day)) and (_in_sentence(text, *m.span()) or _is_field(text, *m.span())):
            yield EntityMatch("date", m.start(), m.end(), f"{m[0]}")
    for m in _SHORT.finditer(text) if "/" in text or "." in text else ():
        if _real(2000 + int(m["y"]), int(m["a"]), int(m["b"])) and _in_sentence(text, m.start(), m.end(), 3):
            yield EntityMatch("date", m.start(), m.end(), f"{m[0]}")
    for m in _WRITTEN.finditer(text):
        year, name, day = (m["y"], m["m"], m["d"]) if m["y"] else (m["y2"], m["m2"], m["d2"])
        month = _MONTHS.get(name.lower())
        if (
            month
            and _real(int(year), month, int(day))
            and (m["th"] or _in_sentence(text, *m.span()) or _is_field(text, *m.span()))
        ):
            yield EntityMatch("date", m.start(), m.end(), f"{int(year):04d}-{month:02d}-{int(day):02d}")


def _real(year: int, month: int, day: int) -> bool:
    """Whether the date exists as year-month-day or year-day-month."""
    for first, second in ((month, day), (day, month)):
        try:
            datetime.date(year, first, second)
        except ValueError:
            continue
        return True
    return False


def _is_field(text: str, start: int, end: int) -> bool:
    """Whether a date is the whole value of a field in a DSPy prompt, a labelled line or a JSON value."""
    before = text[max(0, start - 60) : start]
    m = _FIELD_BEFORE.search(before)
    if m is None or not _FIELD_AFTER.match(text, end) or (m["key"] and _NO_DAY.search(m["key"])):
        return False
    return bool(m["key"]) or _MARKER_BEFORE.search(before) is not None


def _in_sentence(text: str, start: int, end: int, words: int = _SENTENCE) -> bool:
    first, last = (
        text.rfind("\n", max(0, start - 300), start) + 1 or max(0, start - 300),
        text.find("\n", end, end + 300),
    )
    around = text[first:start] + " " + text[end : last if last >= 0 else end + 300]
    return len(_LETTERS.findall(_TAG.sub(" ", around))) >= words and not _NOT_PERSONAL.search(
        text[max(0, start - 20) : start]
    )


_U = r"\p{Lu}[\p{L}'’.-]{0,30}"
_ENGLISH = (
    "Alley Annex Avenue Ave Bayou Beach Bend Bluff Bluffs Bottom Boulevard Blvd Branch Bridge Brook Brooks Burg Burgs "
    "Bypass Camp Canyon Cape Causeway Center "
    "Centers Circle Circles Cliff Cliffs Close Club Common Corner Corners Course Court Courts Cove Coves Creek "
    "Crescent Crest Crossing Crossroad Curve Dale Dam "
    "Divide Drive Drives Dr Estate Estates Esplanade Expressway Extension Extensions Fall Falls Ferry Field Fields "
    "Flat Flats Ford Fords Forest Forge Forges "
    "Fork Forks Fort Freeway Garden Gardens Gate Gateway Glen Glens Green Greens Grove Groves Harbor Harbors Haven "
    "Heights Highway Hwy Hill Hills Hollow Inlet "
    "Island Islands Isle Junction Junctions Key Keys Knoll Knolls Lake Lakes Land Landing Lane Ln Light Lights Loaf "
    "Lock Locks Lodge Loop Mall Manor Manors "
    "Meadow Meadows Mews Mill Mills Mission Motorway Mount Mountain Mountains Neck Orchard Oval Overpass Parade Park "
    "Parks Parkway Parkways Pass Passage Path "
    "Pike Pine Pines Place Plain Plains Plaza Point Points Port Ports Prairie Quay Radial Ramp Ranch Rapid Rapids Rest "
    "Ridge Ridges Rise River Road Rd Roads Route Row "
    "Rue Run Shoal Shoals Shore Shores Skyway Spring Springs Spur Spurs Square Squares Station Stravenue Stream Street "
    "St Streets Summit Terrace Throughway "
    "Trace Track Trafficway Trail Trailer Tunnel Turnpike Underpass Union Unions Valley Valleys Via Viaduct View Views "
    "Village Villages Ville Vista Walk Walks "
    "Wall Way Ways Well Wells Chowk Circle Ganj Marg Nagar Path Zila Colony Strand Strip Subway Arcade Boulevarde Brow "
    "Byway Concourse Copse Dell Dip Elbow End "
    "Entrance Fairway Firetrail Frontage Grange Ground Hub Interchange Key Laneway Link Lookout Mead Motu Nook Outlook "
    "Pathway Pocket Promenade Quadrant Quadrangle "
    "Reserve Retreat Ridgeway Rotary Round Siding Slope Sound Terrace Thoroughfare Tor Triangle Upper Vale Circuit "
    "Circus Bank Bypass Deviation Edge Foreshore Ct Sq Pkwy"
)
_ROMANCE = (
    "rue avenue av. boulevard bd chemin place allée impasse quai route cours passage sentier Calle C/ Avenida Av. "
    "Avda. Plaza Paseo Pasaje Ronda Rambla Camino Cuesta "
    "Glorieta Alameda Acceso Callejón Cañada Carretera Travesía Calzada Urbanización Vía Via Viale Piazza Piazzetta "
    "Piazzale Corso Largo Strada Stretto Vicolo Borgo "
    "Contrada Canale Incrocio Rotonda Salita Rua Travessa Praça Estrada Rodovia Viela Vila Recanto Residencial Setor "
    "Sítio Trecho Trevo Vale Vereda Viaduto "
    "Passarela Parque Pátio Quadra Núcleo Morro Lagoa Loteamento Ladeira Lago Jardim Favela Fazenda Feira Esplanada "
    "Estação Distrito Conjunto Condomínio Colônia Chácara "
    "Campo Área Aeroporto Andador Privada Circuito Periférico Corredor Viaducto Prolongación Retorno Diagonal "
    "Continuación Eje Boulevard Cerrada Peatonal Ampliación "
    "Circunvalación ul. ulica al. aleja pl. plac os. osiedle calle viale rua avenida"
)
_ENDINGS = (
    "straße strasse str. weg platz allee gasse ring damm ufer hof steig markt graben straat laan plein kade gracht "
    "singel dreef steeg pad baan dijk boulevard "
    "gatan gata vägen väg gränd stigen torget allén"
)


def _either(words: str) -> str:
    return "|".join(regex.escape(word) for word in sorted(set(words.split()), key=lambda word: (-len(word), word)))


_NUMBER = r"\d{1,5}(?!\d)(?:\ ?[a-zA-Z](?!\p{L}))?(?:[-/]\d{1,4}[a-z]?)*"
_UNIT = r"(?:,?\ (?:Apt|Apartment|Suite|Unit|Flat|Apto|apto\.|Piso|Puerta|Edif\.?|Interior|Depto\.?|Porte|m\.|lok\.)\.?\ ?\#?\w{1,6}){0,3}"
_STREETS = (
    (  # number, name, English street type
        regex.compile(rf"\ (?:{_either(_ENGLISH)})(?!\p{{L}})"),
        regex.compile(
            rf"(?<![\p{{L}}\d.,:/-])(?:(?:Flat|Studio|Unit|Level|Suite)\ \d{{1,4}}\p{{L}}?,?\ ?(?:/\ ?)?)?(?:\d{{1,3}}/)?\d{{1,5}}\p{{L}}?,?\ (?:{_U}\ ){{1,3}}(?:{_either(_ENGLISH)})(?!\p{{L}}){_UNIT}"
        ),
    ),
    (  # Romance or Slavic street type, name, number; French numbers come first
        regex.compile(rf"(?<!\p{{L}})(?:{_either(_ROMANCE)})\ ", regex.I),
        regex.compile(
            rf"(?<![\p{{L}}\d])(?:\d{{1,4}}(?:\ ?(?:bis|ter))?,?\ (?i:rue|avenue|boulevard|chemin|place|allée|impasse"
            rf"|quai|route|cours|passage|sentier)\ (?:(?:de|du|des|d'|la|le|les|l')\ ?){{0,3}}{_U}(?:\ {_U}){{0,3}}"
            rf"|(?:{_either(_ROMANCE)}|[Rr]ue|[Cc]hemin)\ (?:(?:de|del|da|do|dos|das|di|della|la|las|los|le|du|des"
            rf"|san)\ ){{0,3}}{_U}(?:\ (?:de|da|do|y|e|la|di|del)){{0,2}}(?:\ {_U}){{0,5}},?\ (?:nr\ |n\.\ ?|nº\ ?"
            rf"|n°\ ?)?{_NUMBER}(?:\ \d{{1,3}}(?!\d))?{_UNIT}"
            rf"|(?:{_either(_ROMANCE)})\ (?:de\ |do\ |da\ )?{_U}(?:\ {_U}){{0,4}}(?=,|\.?\n|\ in\ ))"
        ),
    ),
    (  # word ending in a Germanic street type, number
        regex.compile(rf"(?:{_either(_ENDINGS)})\ \d", regex.I),
        regex.compile(
            rf"(?<!\p{{L}})(?:{_U}[- ]){{0,3}}(?:\p{{Lu}}[\p{{L}}'-]{{0,40}}?)?(?i:{_either(_ENDINGS)})\ {_NUMBER}"
        ),
    ),
    (  # any name with a number after a word that introduces an address
        regex.compile(
            r"(?:\b(?:at|to|live[sd]?|address|street|house|resid\w+|landlord of)\b|address\"|\"street\")", regex.I
        ),
        regex.compile(
            rf"(?:(?<=\b(?:at|to|address|street|of|in)[:\"]{{0,2}}\ \"?)"
            rf"|(?<=\n)(?=[^\n]*\p{{L}},?\ {_NUMBER}{_UNIT}[ .,]*(?:\n|$)))"
            rf"(?:\p{{Lu}}[\p{{L}}'’.-]{{1,30}}(?:\ (?:{_U}|de|da|do|del|la|v|u|na)){{0,3}},?\ {_NUMBER}"
            rf"|H\.\ ?No\.\ \d{{1,4}}|\d{{1,4}}/\d{{1,4}},?\ {_U}(?:\ {_U}){{0,2}})(?!\p{{L}}|\ ?%|[.:]\d)"
        ),
    ),
)
_NO_STREET = regex.compile(
    r"(?:chapter|step|section|version|figure|table|page|level|line|row|task|phase|room|ticket|case|order|invoice"
    r"|question|answer|example|item|exercise|lesson|issue|request|january|february|march|april|may|june|july|august"
    r"|september|october|november|december|"
    r"python|rust|java|django|unit|part|volume|model|windows|monday|tuesday|wednesday|thursday|friday|saturday"
    r"|sunday)\b"
    r"|(?:.* )?(?-i:ring|pad) \d",  # English words that are also Germanic street types
    regex.I,
)


_DAY = regex.compile(
    rf"^\p{{L}}+ (?:19|20)\d\d$|\b(?:{_either(' '.join(name for name in _MONTHS if len(name) > 2))})\.? \d", regex.I
)


def _streets(text: str, lower: str) -> Iterator[EntityMatch]:
    for gate, pattern in _STREETS:
        if gate.search(text):
            for m in pattern.finditer(text):
                if not _NO_STREET.match(m[0]) and not _DAY.search(m[0]):
                    yield EntityMatch("address", m.start(), m.end(), normal("address", m[0]))


FINDERS = (national_numbers, _phones, _dates, _streets)
