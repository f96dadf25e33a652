"""Anonymizes text for export: personal values become surrogates, secrets become marks such as `[secret password]`.

A surrogate is a keyed hash of the value's normal form, written in a format reserved for documentation (example.org,
555-01xx, 240.0.0.0/4, …). A value has the same surrogate everywhere, and anonymizing twice changes nothing.

Personal values are detected by pattern (`assay.traces.privacy.patterns`) and by a list from the caller. Names are
detected only if name lists or a name model (Presidio with spaCy) are installed; otherwise `finds_names` is False.
"""

import bisect
import hmac
import json
import os
import re
import secrets
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from datetime import date
from itertools import count
from pathlib import Path
from typing import Any

from assay.errors import ConfigError, DataError, MissingExtra
from assay.support.places import writing
from assay.support.values import check_format
from assay.traces.privacy.forms import FINDERS as FORMS
from assay.traces.privacy.names import KEY, THINGS, WORDS, KnownValue, known_in, mentioned_words, name_engine, unescaped
from assay.traces.privacy.patterns import FINDERS, LABEL, EntityMatch, named_secret, normal, small

# -- Key files and other files that only their owner can read.


def key_of(path: str | Path) -> bytes:
    """Read a key file, or create one that only its owner can read.

    Raises:
        ConfigError: Others can read the file, or it has no key.
        MissingExtra: `cryptography` is not installed.
    """
    path, fernet = Path(path), load_fernet()
    if not path.exists():
        write_private(path, fernet.generate_key(), new=True)
    elif os.name == "posix" and path.stat().st_mode & 0o077:
        raise ConfigError(f"the key file {str(path)!r} is readable by others; run chmod 600 on it, or use a new file")
    key = path.read_bytes()
    try:
        fernet(key)
    except ValueError:
        raise ConfigError(
            f"{str(path)!r} does not contain a key; give a file that does not exist yet to create one"
        ) from None
    return key


def load_fernet() -> Any:
    """The class `cryptography.fernet.Fernet`.

    Raises:
        MissingExtra: `cryptography` is not installed.
    """
    try:
        from cryptography.fernet import Fernet
    except ImportError as error:
        raise MissingExtra("cryptography", "privacy") from error
    return Fernet


def write_private(path: Path, content: bytes, *, new: bool = False) -> None:
    """Write a file that only its owner can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if new else os.O_TRUNC)
    with (
        nullcontext(path) if new else writing(path) as place,  # a full disk must not cost the table that is there
        os.fdopen(os.open(place, flags, 0o600), "wb") as file,
    ):
        file.write(content)


# -- Anonymizer.


_SHAPES = re.compile(  # all surrogates and marks, and no real value
    r"(?P<secret>\[secret [a-z-]+\])|(?P<word>(?:Person|Place|Organisation|Address|Id) "
    r"[0-9a-f]{8}(?:-[0-9a-f]{8})*(?!\w))"
    r"|(?P<email>person[0-9a-f]{8}@example\.org)|(?P<phone>\+1-[2-9]\d\d-555-01\d\d(?:x\d{4})?(?!\w))"
    r"|(?P<iban>[A-Z]{2}00\d{11,29}(?!\w))"
    r"|(?<!\d)(?:(?P<card>400000\d{10})|(?P<ssn>(?:000|666)-\d\d-\d{4})|(?P<dob>1[1-8]\d\d-\d\d-\d\d))(?!\d)"
    r"|(?P<ip>(?<![\d.])2[45]\d(?:\.\d{1,3}){3}(?!\d)|2001:db8(?::[0-9a-f]{1,4}){6}(?!\w))"
    r"|(?P<mac>02:00:5e(?::[0-9a-f]{2}){3}(?!\w))"
)
_SHAPE_IN = re.compile(  # the same with a literal prefix for each alternative: several times faster to search
    r"\[secret [a-z-]+\]|Person [0-9a-f]{8}(?:-[0-9a-f]{8})*|Place [0-9a-f]{8}|Organisation [0-9a-f]{8}|Address "
    r"[0-9a-f]{8}|Id [0-9a-f]{8}"
    r"|person[0-9a-f]{8}@example\.org|\+1-[2-9]\d\d-555-01\d\d(?:x\d{4})?|00(?<=[A-Z]{2}00)\d{11,29}|400000\d{10}(?!\d)"
    r"|000-\d\d-\d{4}|666-\d\d-\d{4}"
    r"|1[1-8]\d\d-\d\d-\d\d(?!\d)|2[45]\d(?:\.\d{1,3}){3}|2001:db8(?::[0-9a-f]{1,4}){6}|02:00:5e(?::[0-9a-f]{2}){3}"
)
_DIGIT, _LETTER = re.compile(r"\d"), re.compile(r"[^\W\d_]{2}")
_ROUNDS = 4  # a replacement can uncover another match, and a name model can decide differently on the new text
PART_CHARS = 1500  # minimum characters of a part that is anonymized and cached separately
_CACHE = 20_000_000  # maximum characters in the cache
_NUMERIC_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}", re.A)
_TABLE_VERSION = 1


def restore(text: str, table: Mapping[str, str]) -> str:
    """Replace the surrogates in a text by their original values, in the spelling of their first occurrence.

    Args:
        table: Original value by surrogate, see `Anonymizer.table`.
    """
    return _SHAPES.sub(lambda m: table.get(m[0], m[0]), text)


class Anonymizer:
    """Anonymizer of one export. Thread-safe; one thread at a time anonymizes.

    `counts` has the number of replacements by type, `engine_name` the engine in use, `finds_names` whether it detects
    names.

    If two values hash to the same surrogate, the later one gets another. Exports with the same `key` therefore agree
    except for such collisions (about 6 of 1,000 telephone numbers); with the `table` of the first export they agree
    completely.

    Args:
        key: Secret key of at least 16 bytes. None: a random key.
        engine: `patterns` (no names), `gazetteers` (persons and places by lists), `presidio` (a spaCy model), `names`
            (lists, Presidio or both; at least one must be installed), or `auto` (as `names`, or `patterns` if neither
            is installed).
        table: Surrogates of an earlier export to continue with.
    Raises:
        ConfigError: The key is shorter than 16 bytes, or the engine is unknown.
        MissingExtra: A package that the engine needs is not installed.
    """

    def __init__(
        self, key: bytes | None = None, *, engine: str = "auto", table: Mapping[str, str] | None = None
    ) -> None:
        if key is not None and len(key) < 16:
            raise ConfigError(
                f"key has {len(key)} bytes and can be guessed; use at least 16, for instance secrets.token_bytes(32)"
            )
        self._key = secrets.token_bytes(32) if key is None else bytes(key)
        self._names, self.engine_name = name_engine(engine)
        self.finds_names = self._names is not None
        self.counts: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._surrogates: dict[tuple[str, str], str] = {}  # (type, normal form) -> surrogate
        self._owner: dict[str, tuple[str, str]] = {}
        self._table: dict[str, str] = dict(table or {})
        self._cache: dict[tuple[str, tuple[KnownValue, ...], bool], tuple[str, Counter[str]]] = {}
        self._cached = 0
        for surrogate, original in self._table.items():
            kind = _kind_of(surrogate)
            if kind and not (kind == "person" and "-" in surrogate):  # the parts of a full name have their own entries
                owner = (kind, normal(kind, original))
                self._surrogates[owner], self._owner[surrogate] = surrogate, owner

    def text(self, text: str, known: Sequence[KnownValue] = ()) -> str:
        """Replace personal values in a text. Returns the same object if there are none.

        Args:
            known: Values that the caller knows to be personal.
        """
        return self._text(text, tuple(known), names=True)

    def value(self, value: Any, known: Sequence[KnownValue] = ()) -> Any:
        """Replace personal values in JSON-like data of any depth. Field names serve as labels (`{"phone":
        "2127365000"}`).

        Personal keys are replaced too, except names found by the name model; a duplicate key gets the suffix `#2`.
        Tuples become lists and replaced integers (such as a card number) text; other values are unchanged.
        """
        known, out = tuple(known), [None]
        stack: list[tuple[Any, str, Any, Any]] = [(value, "", out, 0)]
        seen: dict[tuple[int, str], Any] = {}  # shared and recursive references are kept
        while stack:
            item, label, target, position = stack.pop()
            if isinstance(item, str) or (type(item) is int and 10**8 < item < 10**20):
                target[position] = self._leaf(item, label, known)
            elif not isinstance(item, dict | list | tuple):
                target[position] = item
            elif (id(item), label) in seen:
                target[position] = seen[id(item), label]
            elif isinstance(item, dict):
                new: dict[Any, Any] = {}
                target[position] = seen[id(item), label] = new
                for key, part in item.items():
                    new_key = self._text(key, known, names=False) if isinstance(key, str) else key
                    if new_key in new:
                        new_key = next(name for n in count(2) if (name := f"{new_key}#{n}") not in new)
                    new[new_key] = None
                    not_person = key == "name" and not THINGS.isdisjoint(item)  # not a person's name
                    stack.append((part, "" if not_person else key if isinstance(key, str) else label, new, new_key))
            else:
                target[position] = seen[id(item), label] = [None] * len(item)
                stack += [(part, label, target[position], n) for n, part in enumerate(item)]
        return out[0]

    def find(self, text: str, known: Sequence[KnownValue] = ()) -> list[EntityMatch]:
        """Matches of the first round, in order and without overlap."""
        with self._lock:
            return self._spans(text, tuple(known), names=True)

    def _text(self, text: str, known: tuple[KnownValue, ...], *, names: bool) -> str:
        if len(text) < 3:
            return text
        if len(text) > 2 * PART_CHARS and "PRIVATE KEY" not in text and len(parts := list(_parts(text))) > 1:
            mentions, result = self._mentions(text, parts) if names else {}, ""
            for part in parts:
                mentioned = (value for word, value in mentions.items() if word in part)
                result += self._text(part, (*known, *mentioned), names=names)
            return text if result == text else result
        with self._lock:
            entry = self._cache.get((text, known, names))
            if entry is None:
                entry = self.anonymize_part(text, known, names)
                if self._cached > _CACHE:
                    self._cache.clear()
                    self._cached = 0
                self._cache[text, known, names] = entry
                self._cached += len(text) + 100
            if entry[1]:
                self.counts.update(entry[1])
            return entry[0]

    def _mentions(self, text: str, parts: Sequence[str]) -> dict[str, KnownValue]:
        """Words of full names in any part, which the other parts may mention alone."""
        if self._names is None:
            return {}
        with self._lock:
            names = [part[m.start : m.end] for part in parts for m in self._names(part) if m.type == "person"]
        return {word: KnownValue("person", word) for word in sorted(mentioned_words(text, names))}

    def anonymize_part(self, text: str, known: tuple[KnownValue, ...], names: bool) -> tuple[str, Counter[str]]:
        """An anonymized text and the number of its matches by kind. Does not use the cache."""
        counts: Counter[str] = Counter()
        for _ in range(_ROUNDS):
            spans = self._spans(text, known, names)
            if not spans:
                break
            parts, at = [], 0
            for span in spans:
                surrogate = self._replacement(span.type, span.value, text[span.start : span.end])
                quote = "" if surrogate.isdigit() else _quote_of(text, span)
                parts += [text[at : span.start], quote, surrogate, quote]
                at = span.end
            counts.update(span.type for span in spans)
            text = "".join([*parts, text[at:]])
        return text, counts

    def _leaf(self, item: str | int, label: str, known: tuple[KnownValue, ...]) -> Any:
        value = str(item)
        kind = named_secret(label, value) if label and isinstance(item, str) else None
        if kind:
            with self._lock:
                self.counts["secret"] += 1
            return f"[secret {kind}]"
        # Written as JSON, because patterns for names and dates require a JSON field.
        named = (KEY.fullmatch(label) or _NUMERIC_DATE.fullmatch(value)) and '"' not in label + value
        if label and (named or LABEL.search(label)):
            before, after = (f'"{label}": "', '"') if named else (f"{label}: ", "")
            labelled = self._text(f"{before}{value}{after}", known, names=True)
            if labelled.startswith(before) and labelled.endswith(after):
                new = labelled[len(before) : len(labelled) - len(after)]
                return item if new == value else new
        new = self._text(value, known, names=True)
        return item if new == value else new

    def _spans(self, text: str, known: tuple[KnownValue, ...], names: bool) -> list[EntityMatch]:
        lower = small(text)
        ranked = [(1 if match.type != "secret" else 0, match) for finder in FINDERS for match in finder(text, lower)]
        if _DIGIT.search(text) and _LETTER.search(text):
            ranked += [(1, match) for finder in FORMS for match in finder(text, lower)]
        if known:
            ranked += [(0 if match.type == "secret" else 1, match) for match in known_in(text, lower, known)]
        if names and self._names is not None:
            ranked += [(2, match) for match in self._names(text)]
        if not ranked:
            return []
        return _without_overlap(ranked, [(m.start(), m.end(), m[0][0] == "[") for m in _SHAPE_IN.finditer(text)])

    def _replacement(self, kind: str, value: str, original: str) -> str:
        if kind == "secret":
            return f"[secret {value}]"
        if kind == "person":
            words = [word for part in re.split(r"[\s,]+", unescaped(original)) if (word := part.strip(".'’-"))]
            tokens = [self._unique("person", normal("person", word), word) for word in words or [value]]
            surrogate = "Person " + "-".join(token.removeprefix("Person ") for token in tokens)
        else:
            surrogate = self._unique(kind, value, original)
        self._table.setdefault(surrogate, unescaped(original))
        return surrogate

    def _unique(self, kind: str, value: str, original: str) -> str:
        owner = (kind, value)
        if owner not in self._surrogates:
            for turn in range(10_000):
                digest = hmac.digest(self._key, f"{kind}\0{turn}\0{value}".encode("utf-8", "surrogatepass"), "sha256")
                surrogate = surrogate_of(kind, value, digest, turn)
                if self._owner.setdefault(surrogate, owner) == owner:
                    break
            else:
                raise DataError(
                    f"all surrogates of type {kind!r} are used; split the export into several with different keys"
                )
            self._surrogates[owner] = surrogate
            self._table.setdefault(surrogate, original)
        return self._surrogates[owner]

    @property
    def table(self) -> dict[str, str]:
        """Original value by surrogate, in the spelling of the first occurrence. Secrets are not included."""
        with self._lock:
            return dict(self._table)

    def save_table(self, path: str | Path, key_path: str | Path) -> None:
        """Write the encrypted `table` to a file.

        Args:
            path: File to write.
            key_path: Key file outside the folder of `path`; created if missing.
        Raises:
            ConfigError: The key file is in the folder of the table, is readable by others or has no key.
            MissingExtra: `cryptography` is not installed.
        """
        path, key_path = Path(path).resolve(), Path(key_path).resolve()
        if key_path.is_relative_to(path.parent):
            raise ConfigError(
                f"key_path={str(key_path)!r} is inside the table's folder {str(path.parent)!r}; keep the key elsewhere"
            )
        key = key_of(key_path)
        content = json.dumps({"version": _TABLE_VERSION, "surrogates": self.table}).encode()
        write_private(path, load_fernet()(key).encrypt(content))

    @staticmethod
    def read_table(path: str | Path, key_path: str | Path) -> dict[str, str]:
        """Read a table that `save_table` wrote.

        Returns:
            Original value by surrogate.
        Raises:
            DataError: A file cannot be read, the key belongs to another table, or the table has another format.
            MissingExtra: `cryptography` is not installed.
        """
        fernet = load_fernet()
        from cryptography.fernet import InvalidToken

        try:
            content = json.loads(fernet(Path(key_path).read_bytes()).decrypt(Path(path).read_bytes()))
        except (OSError, ValueError, InvalidToken) as error:
            raise DataError(
                f"cannot read the table {str(path)!r} with the key {str(key_path)!r}: "
                f"{str(error) or type(error).__name__}"
            ) from error
        check_format(f"the table {path}", content["version"], _TABLE_VERSION, remake="export again", error=DataError)
        return dict(content["surrogates"])


def _parts(text: str) -> Iterator[str]:
    """Split a long text at empty lines, so that the unchanged start of a growing prompt is found in the cache."""
    start = 0
    while (end := text.find("\n\n", start + PART_CHARS)) >= 0:
        yield text[start : end + 2]
        start = end + 2
    if start < len(text):
        yield text[start:]


def surrogate_of(kind: str, value: str, digest: bytes, turn: int) -> str:
    """Surrogate of a value, in a format of its type that is reserved or invalid for real values."""
    n = int.from_bytes(digest[:16])
    match kind:
        case "date":  # as a day of birth
            return surrogate_of("dob", value, digest, turn)
        case "email":
            return f"person{digest.hex()[:8]}@example.org"
        case "phone":  # 555-0100 to 555-0199: for fiction
            return f"+1-{200 + n % 800}-555-01{n // 800 % 100:02d}" + (
                f"x{n // 80_000 % 10_000:04d}" if turn > 20 else ""
            )
        case "iban":  # check digits are 02 to 98
            country = value[:2].upper() if re.fullmatch(r"[a-z]{2}[a-z0-9]{13,31}", value) else "XX"
            return f"{country}00" + str(10**40 + n)[-min(max(len(value), 15), 33) + 4 :]
        case "card":  # wrong by Luhn
            digits = f"400000{n % 10**9:09d}"
            right = -sum(sum(divmod(int(d) * (2 - at % 2), 10)) for at, d in enumerate(digits)) % 10
            return f"{digits}{(right + 5) % 10}"
        case "ssn":  # areas that are not issued
            return f"{('000', '666')[n % 2]}-{n // 2 % 100:02d}-{n // 200 % 10_000:04d}"
        case "ip" if ":" in value:
            return "2001:db8:" + ":".join(f"{1 + (n >> 16 * at) % 65535:x}" for at in range(6))
        case "ip":  # class E: 28 bits, where the documentation ranges have 762 addresses
            return f"{240 + n % 15}.{n >> 8 & 255}.{n >> 16 & 255}.{n >> 24 & 255}"
        case "mac":
            return "02:00:5e:" + ":".join(f"{byte:02x}" for byte in digest[:3])
        case "dob":  # 1100 to 1899: 800 years of 365.2425 days
            return date.fromordinal(date(1100, 1, 1).toordinal() + n % 292_194).isoformat()
        case _:
            return f"{WORDS[kind]} {digest.hex()[:8]}"


def _quote_of(text: str, span: EntityMatch) -> str:
    """Quotation mark for a surrogate that replaces a number in JSON text; empty elsewhere."""
    before = re.search(r'(\\*")\s?:\s?$', text[max(0, span.start - 8) : span.start])
    number = (
        before
        and text[span.start : span.end].isdigit()
        and re.match(r"(?:\s|\\+[nrt])*[,}\]]", text[span.end : span.end + 12])
    )
    return before[1] if before and number else ""


def _kind_of(surrogate: str) -> str | None:
    shape = _SHAPES.fullmatch(surrogate)
    if shape is None or not shape["word"]:
        return shape and shape.lastgroup
    return next(kind for kind, word in WORDS.items() if surrogate.startswith(word))


def _without_overlap(ranked: list[tuple[int, EntityMatch]], shapes: list[tuple[int, int, bool]]) -> list[EntityMatch]:
    """Select matches without overlap: overlapping secrets are merged, other matches are taken by rank and length.

    Existing surrogates and marks are never replaced.
    """
    chosen: list[EntityMatch] = []
    for match in sorted((match for rank, match in ranked if rank == 0), key=lambda match: (match.start, -match.end)):
        if chosen and match.start < chosen[-1].end:
            chosen[-1] = EntityMatch("secret", chosen[-1].start, max(match.end, chosen[-1].end), chosen[-1].value)
        elif not any(start <= match.start and match.end <= end for start, end, mark in shapes if mark):
            chosen.append(match)
    occupied = sorted([(match.start, match.end) for match in chosen] + [(start, end) for start, end, _ in shapes])
    for _, match in sorted(
        ((rank, match) for rank, match in ranked if rank),
        key=lambda item: (item[0], item[1].start - item[1].end, item[1].start),
    ):
        index = bisect.bisect_left(occupied, (match.start, match.end))
        if (index == 0 or occupied[index - 1][1] <= match.start) and (
            index == len(occupied) or occupied[index][0] >= match.end
        ):
            occupied.insert(index, (match.start, match.end))
            chosen.append(match)
    return sorted(chosen, key=lambda match: match.start)
