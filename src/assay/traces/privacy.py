"""Anonymisation of texts before they leave as training data: what is personal becomes a surrogate, secrets become marks.

A surrogate is a keyed hash of the value's normal form in a shape that belongs to nobody (example.org, 555-01xx, 240.0.0.0/4, …), so one
value has one surrogate wherever it stands, and anonymising twice changes nothing. Finds by form (`privacy_patterns`), by what the caller
knows, and names only by lists of names, or a name model (Presidio with spaCy), that is installed: without these names are missed, and
`finds_names` is False.
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
from datetime import date
from itertools import count
from pathlib import Path
from typing import Any

from assay.errors import ConfigError, DataError, MissingExtra
from assay.traces.privacy_forms import FINDERS as FORMS
from assay.traces.privacy_found import Found, normal, small
from assay.traces.privacy_gazetteers import KEY, THINGS
from assay.traces.privacy_names import TYPES, WORDS, Known, known_in, name_engine, unescaped
from assay.traces.privacy_numbers import FINDERS as NUMBERS
from assay.traces.privacy_patterns import FINDERS, LABEL
from assay.traces.privacy_secrets import named_secret

__all__ = ["TYPES", "Anonymizer", "Found", "Known", "key_of", "restore"]

_SHAPES = re.compile(  # every surrogate and mark that is given out, and nothing that is anybody's
    r"(?P<secret>\[secret [a-z-]+\])|(?P<word>(?:Person|Place|Organisation|Address|Id) [0-9a-f]{8}(?:-[0-9a-f]{8})*(?!\w))"
    r"|(?P<email>person[0-9a-f]{8}@example\.org)|(?P<phone>\+1-[2-9]\d\d-555-01\d\d(?:x\d{4})?(?!\w))|(?P<iban>[A-Z]{2}00\d{11,29}(?!\w))"
    r"|(?<!\d)(?:(?P<card>400000\d{10})|(?P<ssn>(?:000|666)-\d\d-\d{4})|(?P<dob>1[1-8]\d\d-\d\d-\d\d))(?!\d)"
    r"|(?P<ip>(?<![\d.])2[45]\d(?:\.\d{1,3}){3}(?!\d)|2001:db8(?::[0-9a-f]{1,4}){6}(?!\w))|(?P<mac>02:00:5e(?::[0-9a-f]{2}){3}(?!\w))"
)
_SHAPE_IN = re.compile(  # the same, each alternative beginning with a letter: several times faster to search
    r"\[secret [a-z-]+\]|Person [0-9a-f]{8}(?:-[0-9a-f]{8})*|Place [0-9a-f]{8}|Organisation [0-9a-f]{8}|Address [0-9a-f]{8}|Id [0-9a-f]{8}"
    r"|person[0-9a-f]{8}@example\.org|\+1-[2-9]\d\d-555-01\d\d(?:x\d{4})?|00(?<=[A-Z]{2}00)\d{11,29}|400000\d{10}(?!\d)|000-\d\d-\d{4}|666-\d\d-\d{4}"
    r"|1[1-8]\d\d-\d\d-\d\d(?!\d)|2[45]\d(?:\.\d{1,3}){3}|2001:db8(?::[0-9a-f]{1,4}){6}|02:00:5e(?::[0-9a-f]{2}){3}"
)
_DIGIT, _LETTER = re.compile(r"\d"), re.compile(r"[^\W\d_]{2}")
_ROUNDS = 4  # a replacement may show what was hidden before; a name model reads the text anew
_PART = 1500  # characters at least
_CACHE = 20_000_000  # characters
_BARE_DATE = re.compile(r"\d{1,4}([-/.])\d{1,2}\1\d{1,4}", re.A)
_TABLE_VERSION = 1


def restore(text: str, table: Mapping[str, str]) -> str:
    """The text with every surrogate of the table replaced by the value it stood for, as that was first written."""
    return _SHAPES.sub(lambda m: table.get(m[0], m[0]), text)


class Anonymizer:
    """One export's anonymiser, for any number of threads (one at a time inside).

    `engine`: `patterns` (no names), `gazetteers` (persons and places by lists), `presidio` (by a spaCy model), `names` (lists, Presidio or both;
    at least one must be installed), or `auto`: as `names`, and patterns alone where neither is. `engine_name` is what is used.
    `counts` are the occurrences replaced so far, by type.

    Two values whose surrogates meet get different ones, the later by its turn. So exports with one `key` agree, but for such
    meetings (of 1,000 telephone numbers about 6); with the first export's `table` as well they agree on all.

    Raises:
        ConfigError: the key is shorter than 16 bytes, or the engine is unknown.
        MissingExtra: what the engine needs is not installed.
    """

    def __init__(self, key: bytes | None = None, *, engine: str = "auto", table: Mapping[str, str] | None = None) -> None:
        if key is not None and len(key) < 16:
            raise ConfigError(f"a key of {len(key)} bytes can be guessed: use 16 or more, such as secrets.token_bytes(32)")
        self._key = secrets.token_bytes(32) if key is None else bytes(key)
        self._names, self.engine_name = name_engine(engine)
        self.finds_names = self._names is not None
        self.counts: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._given: dict[tuple[str, str], str] = {}  # (type, normal form) -> surrogate
        self._owner: dict[str, tuple[str, str]] = {}
        self._table: dict[str, str] = dict(table or {})
        self._cache: dict[tuple[str, tuple[Known, ...], bool], tuple[str, Counter[str]]] = {}
        self._cached = 0
        for surrogate, original in self._table.items():
            kind = _kind_of(surrogate)
            if kind and not (kind == "person" and "-" in surrogate):  # a full name's parts stand in the table too
                owner = (kind, normal(kind, original))
                self._given[owner], self._owner[surrogate] = surrogate, owner

    def text(self, text: str, known: Sequence[Known] = ()) -> str:
        """The text with what is personal replaced; the same object where nothing is."""
        return self._text(text, tuple(known), names=True)

    def value(self, value: Any, known: Sequence[Known] = ()) -> Any:
        """The same for JSON-like data, at any depth, with the names of fields as labels (`{"phone": "2127365000"}`).

        Keys are replaced too where they are personal (not by the name model); one that then stands twice gets `#2`. Tuples come
        back as lists, numbers that are found (a card's as an integer) as text, all else as it was.
        """
        known, out = tuple(known), [None]
        stack: list[tuple[Any, str, Any, Any]] = [(value, "", out, 0)]
        seen: dict[tuple[int, str], Any] = {}  # data that holds itself, or one part twice, keeps its form
        while stack:
            item, label, into, at = stack.pop()
            if isinstance(item, str) or (type(item) is int and 10**8 < item < 10**20):
                into[at] = self._leaf(item, label, known)
            elif not isinstance(item, dict | list | tuple):
                into[at] = item
            elif (id(item), label) in seen:
                into[at] = seen[id(item), label]
            elif isinstance(item, dict):
                new: dict[Any, Any] = {}
                into[at] = seen[id(item), label] = new
                for key, part in item.items():
                    named = self._text(key, known, names=False) if isinstance(key, str) else key
                    if named in new:
                        named = next(name for n in count(2) if (name := f"{named}#{n}") not in new)
                    new[named] = None
                    of_thing = key == "name" and not THINGS.isdisjoint(item)  # not a person's name
                    stack.append((part, "" if of_thing else key if isinstance(key, str) else label, new, named))
            else:
                into[at] = seen[id(item), label] = [None] * len(item)
                stack += [(part, label, into[at], n) for n, part in enumerate(item)]
        return out[0]

    def find(self, text: str, known: Sequence[Known] = ()) -> list[Found]:
        """What would be replaced, in order, not overlapping (what a first replacement shows is not among it)."""
        with self._lock:
            return self._spans(text, tuple(known), names=True)

    # -- inside

    def _text(self, text: str, known: tuple[Known, ...], *, names: bool) -> str:
        if len(text) < 3:
            return text
        if len(text) > 2 * _PART and "PRIVATE KEY" not in text and len(parts := list(_parts(text))) > 1:
            whole = "".join([self._text(part, known, names=names) for part in parts])
            return text if whole == text else whole
        with self._lock:
            entry = self._cache.get((text, known, names))
            if entry is None:
                entry = self._anonymise(text, known, names)
                if self._cached > _CACHE:
                    self._cache.clear()
                    self._cached = 0
                self._cache[text, known, names] = entry
                self._cached += len(text) + 100
            if entry[1]:
                self.counts.update(entry[1])
            return entry[0]

    def _anonymise(self, text: str, known: tuple[Known, ...], names: bool) -> tuple[str, Counter[str]]:
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

    def _leaf(self, item: str | int, label: str, known: tuple[Known, ...]) -> Any:
        value = str(item)
        kind = named_secret(label, value) if label and isinstance(item, str) else None
        if kind:
            with self._lock:
                self.counts["secret"] += 1
            return f"[secret {kind}]"
        named = (KEY.fullmatch(label) or _BARE_DATE.fullmatch(value)) and '"' not in label + value  # as JSON, which tells what it is
        if label and (named or LABEL.search(label)):
            before, after = (f'"{label}": "', '"') if named else (f"{label}: ", "")
            labelled = self._text(f"{before}{value}{after}", known, names=True)
            if labelled.startswith(before) and labelled.endswith(after):
                new = labelled[len(before) : len(labelled) - len(after)]
                return item if new == value else new
        new = self._text(value, known, names=True)
        return item if new == value else new

    def _spans(self, text: str, known: tuple[Known, ...], names: bool) -> list[Found]:
        lower = small(text)
        ranked = [(1 if found.type != "secret" else 0, found) for finder in FINDERS for found in finder(text, lower)]
        if _DIGIT.search(text) and _LETTER.search(text):
            ranked += [(1, found) for finder in (*NUMBERS, *FORMS) for found in finder(text, lower)]
        if known:
            ranked += [(0 if found.type == "secret" else 1, found) for found in known_in(text, lower, known)]
        if names and self._names is not None:
            ranked += [(2, found) for found in self._names(text)]
        if not ranked:
            return []
        return _apart(ranked, [(m.start(), m.end(), m[0][0] == "[") for m in _SHAPE_IN.finditer(text)])

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
        if owner not in self._given:
            for turn in range(10_000):
                digest = hmac.digest(self._key, f"{kind}\0{turn}\0{value}".encode("utf-8", "surrogatepass"), "sha256")
                surrogate = _surrogate(kind, value, digest, turn)
                if self._owner.setdefault(surrogate, owner) == owner:
                    break
            else:
                raise DataError(f"the surrogates of type {kind!r} are all given out: anonymise in several exports, each with a key of its own")
            self._given[owner] = surrogate
            self._table.setdefault(surrogate, original)
        return self._given[owner]

    # -- the way back

    @property
    def table(self) -> dict[str, str]:
        """What each surrogate given out so far stands for, as it was first written; secrets are not in it."""
        with self._lock:
            return dict(self._table)

    def save_table(self, path: str | Path, key_path: str | Path) -> None:
        """Writes what each surrogate stands for, encrypted; secrets are not in it. A key that is not there yet is made.

        Raises:
            ConfigError: the key would lie in the table's folder, or the file there is no key of one's own.
            MissingExtra: `cryptography` is not installed.
        """
        path, key_path = Path(path).resolve(), Path(key_path).resolve()
        if key_path.is_relative_to(path.parent):
            raise ConfigError(
                f"the key {str(key_path)!r} would lie in the table's folder {str(path.parent)!r}, and travel with it: keep it elsewhere"
            )
        key = key_of(key_path)
        content = json.dumps({"version": _TABLE_VERSION, "surrogates": self.table}).encode()
        _write(path, _fernet()(key).encrypt(content))

    @staticmethod
    def read_table(path: str | Path, key_path: str | Path) -> dict[str, str]:
        """Surrogate -> the value as it was first written.

        Raises:
            DataError: a file cannot be read, the key is not this table's, or the table is of a newer assay.
            MissingExtra: `cryptography` is not installed.
        """
        fernet = _fernet()
        from cryptography.fernet import InvalidToken

        try:
            content = json.loads(fernet(Path(key_path).read_bytes()).decrypt(Path(path).read_bytes()))
        except (OSError, ValueError, InvalidToken) as error:
            raise DataError(f"cannot read the table {str(path)!r} with the key {str(key_path)!r}: {str(error) or type(error).__name__}") from error
        if content["version"] > _TABLE_VERSION:
            raise DataError(f"the table {str(path)!r} is of version {content['version']}, this assay reads {_TABLE_VERSION}: update assay")
        return dict(content["surrogates"])


def _parts(text: str) -> Iterator[str]:
    """A long text in parts that end in empty lines: a prompt that grows has been read but for its end."""
    at = 0
    while (end := text.find("\n\n", at + _PART)) >= 0:
        yield text[at : end + 2]
        at = end + 2
    if at < len(text):
        yield text[at:]


def _surrogate(kind: str, value: str, digest: bytes, turn: int) -> str:
    """A value's surrogate: of its type's shape, and nobody's."""
    n = int.from_bytes(digest[:16])
    match kind:
        case "date":  # as a day of birth
            return _surrogate("dob", value, digest, turn)
        case "email":
            return f"person{digest.hex()[:8]}@example.org"
        case "phone":  # 555-0100 to 555-0199: for fiction
            return f"+1-{200 + n % 800}-555-01{n // 800 % 100:02d}" + (f"x{n // 80_000 % 10_000:04d}" if turn > 20 else "")
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


def _quote_of(text: str, span: Found) -> str:
    """The quote that a surrogate needs where a number of a JSON text stood."""
    before = re.search(r'(\\*")\s?:\s?$', text[max(0, span.start - 8) : span.start])
    number = before and text[span.start : span.end].isdigit() and re.match(r"(?:\s|\\+[nrt])*[,}\]]", text[span.end : span.end + 12])
    return before[1] if before and number else ""


def _kind_of(surrogate: str) -> str | None:
    shape = _SHAPES.fullmatch(surrogate)
    if shape is None or not shape["word"]:
        return shape and shape.lastgroup
    return next(kind for kind, word in WORDS.items() if surrogate.startswith(word))


def _apart(ranked: list[tuple[int, Found]], shapes: list[tuple[int, int, bool]]) -> list[Found]:
    """Finds that do not overlap: secrets as far as they reach together, then by rank and length. Surrogates and marks stay as they are."""
    chosen: list[Found] = []
    for found in sorted((found for rank, found in ranked if rank == 0), key=lambda found: (found.start, -found.end)):
        if chosen and found.start < chosen[-1].end:
            chosen[-1] = Found("secret", chosen[-1].start, max(found.end, chosen[-1].end), chosen[-1].value)
        elif not any(start <= found.start and found.end <= end for start, end, mark in shapes if mark):
            chosen.append(found)
    taken = sorted([(found.start, found.end) for found in chosen] + [(start, end) for start, end, _ in shapes])
    for _, found in sorted(((rank, found) for rank, found in ranked if rank), key=lambda one: (one[0], one[1].start - one[1].end, one[1].start)):
        at = bisect.bisect_left(taken, (found.start, found.end))
        if (at == 0 or taken[at - 1][1] <= found.start) and (at == len(taken) or taken[at][0] >= found.end):
            taken.insert(at, (found.start, found.end))
            chosen.append(found)
    return sorted(chosen, key=lambda found: found.start)


# -- files


def key_of(path: str | Path) -> bytes:
    """The key in a file that only its owner may read; made where it is missing.

    Raises:
        ConfigError: others may read the file, or it holds no key.
        MissingExtra: `cryptography` is not installed.
    """
    path, fernet = Path(path), _fernet()
    if not path.exists():
        _write(path, fernet.generate_key(), new=True)
    elif os.name == "posix" and path.stat().st_mode & 0o077:
        raise ConfigError(f"others may read the key {str(path)!r}: chmod 600 it, or name a new one")
    key = path.read_bytes()
    try:
        fernet(key)
    except ValueError:
        raise ConfigError(f"{str(path)!r} holds no key of a table; name a file that is not there yet to have one made") from None
    return key


def _fernet() -> Any:
    try:
        from cryptography.fernet import Fernet
    except ImportError as error:
        raise MissingExtra("cryptography", "privacy") from error
    return Fernet


def _write(path: Path, content: bytes, *, new: bool = False) -> None:
    """Writes a file that only its owner can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | (os.O_EXCL if new else os.O_TRUNC), 0o600), "wb") as file:
        os.chmod(path, 0o600)  # it may have been there, readable by others
        file.write(content)
