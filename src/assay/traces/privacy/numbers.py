"""National identity and tax numbers: a label in the text, followed by a number that `python-stdnum` validates."""

from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module

import regex

from assay.traces.privacy.matches import EntityMatch

__all__ = ["national_numbers"]

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
