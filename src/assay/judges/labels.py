"""Human labels: ratings of items by one or several raters. Disagreement is kept.

One row per rating: `item_id` (by default rows with equal judged content are one item), `input` (optional), `output` or
`output_a` and `output_b`, `rater`, `label`, `rationale` (optional). A judge can see further columns if its `shows`
names them; see `shown_columns` for names such as `expected.answer`. Instead of `rater` and `label`, a row may have a
column per rater.
"""

import hashlib
import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from assay.datasets import SPLITS
from assay.datasets.keys import task_key
from assay.datasets.rows import ComparedRow, RowFindings, compare_rows
from assay.datasets.sources import iter_rows
from assay.datasets.splits import FEW, renamed, split_of, splits_of_few
from assay.errors import DataError
from assay.support.names import nearest
from assay.support.numbers import counted, whole_number
from assay.support.values import digest_of, is_missing

# -- Labels as people's tools write them: one label against a scale, and the ratings in a row of a table.


# what survey and spreadsheet tools write for a missing answer; a label of the scale that is spelled so is a label
_NO_LABEL = frozenset(
    ("", "-", "--", "–", "—", ".", "?", "n/a", "#n/a", "na", "n.a", "n.a.", "<na>", "nan", "nat", "null", "none", "nil",
     "skip", "skipped", "abstain", "missing", "not applicable", "no answer", "no label", "not rated", "unrated",
     "unlabeled", "unlabelled", "blank", "empty", "undefined", "unknown", "unsure", "not sure", "don't know",
     "do not know", "idk", "tbd", "pending")
)  # fmt: skip
# the words for true and false are also those that spreadsheets write in other languages
_YES = frozenset(
    ("yes", "true", "y", "t", "wahr", "vrai", "verdadero", "vero", "verdadeiro", "waar", "ja", "oui", "sí", "si", "sim",
     "да", "是", "はい", *"✓✔☑✅")
)  # fmt: skip
_NO = frozenset(
    ("no", "false", "n", "f", "falsch", "faux", "falso", "onwaar", "nein", "nee", "non", "não", "нет", "否", "いいえ",
     *"✗✘☒❌")
)  # fmt: skip
_GOOD = frozenset(("pass", "passed", "correct", "right", "good", "success", "accept", "accepted"))
_BAD = frozenset(("fail", "failed", "incorrect", "wrong", "bad", "failure", "reject", "rejected"))
_YES_LABELS, _NO_LABELS = _YES | _GOOD | {"1", "positive"}, _NO | _BAD | {"0", "negative"}
_QUOTES = "\"'“”„‘’‚«»()[]"
_OUT_OF = re.compile(r"(.+?)\s*(?:/|out of|of)\s*(.+)")
_NUMBER_AND_NAME = re.compile(r"([-+]?\d+(?:[.,]\d+)?)(?:\s*[-–:=.(]\s*|\s+)[^\W\d_][^\d]*")
_VALUE = r"(?:rating|label|score|annotation|grade|vote)s?"
# rater_alice; of names that also occur in other columns only with a number or a letter: human_A, score2, human_label_1
_PER_RATER = re.compile(
    rf"(?:rater|annotator|label+er)s?(?:[ _.:#-]*\d+(?:[ _.:-]+{_VALUE})?|[ _.:#-]+\w[\w .-]*)"
    rf"|(?:(?:human|reviewer|grader|assessor|coder|evaluator|expert|worker|judge|person|user)s?(?:[ _.:-]*{_VALUE})?|"
    rf"{_VALUE})(?:[ _.:#-]*\d+|[ _.:#-]+[a-z])(?:[ _.:-]+{_VALUE})?",
    re.IGNORECASE,
)
_ABOUT_RATING = re.compile(
    r".*[ _.:-](?:ids?|name|email|type|time|date|at|seconds|count|comments?|notes?|reasons?|rationale|confidence|mean|"
    r"average|median|std|agreement|version)",
    re.IGNORECASE,
)
_RATER_COLUMNS = ("rater", "rater_id", "annotator", "annotator_id", "worker_id", "reviewer", "reviewer_id")


class GivenRating(NamedTuple):
    """A rating in a row: its column, its rater if the row names one, and the value."""

    column: str
    rater: str | None
    value: Any


def ratings_in(row: Mapping[str, Any], judged: Collection[str]) -> list[GivenRating]:
    """The ratings of a row: of its column `label`, otherwise of its columns per rater, such as `rater_1` or `human A`.

    Missing ones are included.

    Args:
        judged: names of the columns that a judge sees.
    """
    if "label" in row:
        names = (row[name] for name in _RATER_COLUMNS if not is_missing(row.get(name)) and row[name] != "")
        return [GivenRating("label", next(map(id_text, names), None), row["label"])]
    return [GivenRating(name, name, row[name]) for name in rater_columns(row, judged)]


def rater_columns(row: Mapping[str, Any], judged: Collection[str]) -> list[str]:
    """Names of a row's columns about its ratings, except for `label`, `rationale` and ids of the item."""
    if "label" in row:
        return [name for name in _RATER_COLUMNS if name in row and name not in judged]
    return [
        name
        for name in row
        if name not in judged and _PER_RATER.fullmatch(name.strip()) and not _ABOUT_RATING.fullmatch(name.strip())
    ]


def id_text(value: Any) -> str:
    """An id as text; a table with gaps turns `3` into 3.0."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def read_label(value: Any, labels: Sequence[str], anchors: Mapping[str, str] | None = None) -> str | None:
    """The label of a scale that a value means; None if it says that there is none, such as `N/A`, `-` or NaN.

    - Case, white space around and between words, `_` and `-` between words, quotes and brackets around the label and
      one of `.,:;!` after it make no difference.
    - On a scale of numbers: `4.0`, `4,0`, `4/5` and `4 out of 5` (of the highest label), `80 %` (on a scale up to 1 or
      100), and a number with its name, as in `4 - good`.
    - `true`, `yes`, `y`, `t`, a check mark and `false`, `no`, `n`, `f`, a cross, also in some other languages, are the
      one label for yes and the one for no, such as `pass` and `fail`; on a scale of two labels 1 and 0 are too.
    - On a scale of two labels for quality, such as `pass` and `fail`, other words for quality are read: `passed`,
      `wrong`. A yes to "Is it harmful?" is not a `good`, so that they are refused on other scales.
    - The meaning of a label in `anchors` is the label.

    Raises:
        DataError: no label of the scale; with the nearest one.
    """
    if is_missing(value):
        return None
    raw = str(value).strip()
    if raw in labels:
        return raw
    text = _normal(raw)
    by_text = {_normal(meaning): label for label, meaning in (anchors or {}).items()}
    by_text |= {_normal(label): label for label in labels}
    if text in by_text:
        return by_text[text]
    if text in _NO_LABEL or raw in _NO_LABEL:
        return None
    numbers = {number: label for label in labels if (number := _number(_normal(label))) is not None}
    if len(numbers) < len(labels):
        numbers = {}
    number = _on_scale(text, list(numbers))
    if number in numbers:
        return numbers[number]
    if (label := _yes_or_no(text, labels)) is not None:
        return label
    if number is not None and numbers:
        near: str | None = numbers[min(numbers, key=lambda other: abs(other - number))]
    else:
        near = nearest(text, labels)
    hint = "" if near is None else f". The nearest is {near!r}"
    raise DataError(f"the label {value!r} is not on the judge's scale {list(labels)}{hint}")


def _normal(text: str) -> str:
    text = unicodedata.normalize("NFKC", text.replace("\ufe0f", ""))  # without the mark of a coloured sign
    text = " ".join(text.casefold().split()).strip(_QUOTES).rstrip(".,:;! ")
    text = re.sub(r" ?/ ?", "/", text)
    return re.sub(r"(?<=[^\W\d])[-_ ]+(?=[^\W\d])", " ", text)


def _number(text: str) -> float | None:
    """The number that a text is, or begins with if a name follows."""
    if match := _NUMBER_AND_NAME.fullmatch(text):
        text = match[1]
    return whole_number(text)


def _on_scale(text: str, numbers: Sequence[float]) -> float | None:
    """The number of a label; None if it has none, or counts up to another number than the scale's highest."""
    if numbers and (match := _OUT_OF.fullmatch(text)) and whole_number(match[2]) is not None:
        return _number(match[1]) if whole_number(match[2]) == max(numbers) else None
    if text.endswith("%"):
        percent = whole_number(text)
        whole = max(numbers, default=None)
        return None if percent is None or whole not in (1, 100) else percent * whole / 100
    return _number(text)


def _yes_or_no(text: str, labels: Sequence[str]) -> str | None:
    yes = [label for label in labels if _normal(label) in _YES_LABELS]
    no = [label for label in labels if _normal(label) in _NO_LABELS]
    if len(yes) != 1 or len(no) != 1:
        return None
    if len(labels) > 2:
        return yes[0] if text in _YES else no[0] if text in _NO else None
    quality = _normal(yes[0]) in _GOOD and _normal(no[0]) in _BAD
    digit = whole_number(text)
    if text in _YES or digit == 1 or (quality and text in _GOOD):
        return yes[0]
    return no[0] if text in _NO or digit == 0 or (quality and text in _BAD) else None


# -- Labels.


_RATING_FIELDS = {"item_id", "rater", "label", "rationale", "split"}
_TASK_INPUT = "task_input"
_ANONYMOUS = "anonymous "
_JUDGED = {_TASK_INPUT, "output", "output_a", "output_b"}


@dataclass(frozen=True, kw_only=True)
class Rating:
    """One rater's label of one item."""

    rater: str
    label: str
    rationale: str = ""


@dataclass(frozen=True, kw_only=True)
class Item:
    """Judged content with all its ratings.

    Args:
        fields: the judged fields.
        split: the split named in the data; None to use the key of the fields.
        where: its first row.
        columns: columns that are not judged, such as `model`.
    """

    id: str
    fields: Mapping[str, Any]
    ratings: tuple[Rating, ...]
    split: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    where: str = field(default="", compare=False)

    @cached_property
    def key(self) -> str:
        """Key of the fields, by which items are compared; see `assay.datasets.keys`."""
        return task_key(self.fields)

    @property
    def shares(self) -> dict[str, float]:
        """Label -> share of the raters who chose it."""
        counts = Counter(rating.label for rating in self.ratings)
        return {label: count / len(self.ratings) for label, count in counts.items()}

    @property
    def modes(self) -> tuple[str, ...]:
        """The labels that most raters chose; several if there is a tie."""
        counts = Counter(rating.label for rating in self.ratings)
        most = max(counts.values())
        return tuple(sorted(label for label, count in counts.items() if count == most))

    @property
    def rationales(self) -> list[str]:
        """`label: rationale` of each rating with a rationale."""
        return [f"{rating.label}: {rating.rationale}" for rating in self.ratings if rating.rationale]

    @property
    def digests(self) -> list[str]:
        """Short hash of each rating. An artifact stores them to record its labels without their content."""
        return [rating_digest(self.id, rating.rater, rating.label) for rating in self.ratings]


class LabelledItems(list[Item]):
    """Items of a source of labels.

    Attributes:
        gaps: number of labels that were missing.
    """

    def __init__(self, items: Iterable[Item] = (), gaps: int = 0) -> None:
        super().__init__(items)
        self.gaps = gaps


def output_name(fields: Mapping[str, Any]) -> str:
    """The field with the judged output: `output`, otherwise the first `output.NAME`; of a pair `output_b`."""
    names = [name for name in ("output_b", "output") if name in fields]
    return next(iter((*names, *(name for name in fields if name.startswith("output.")))), "output")


def shown_columns(row: Mapping[str, Any], shows: Sequence[str]) -> dict[str, Any]:
    """The row with the fields `ORIGIN.NAME` that a judge sees under these names.

    A field without a column of its name is read, in this order: from an object (`{"expected": {"answer": …}}`), from
    the column `NAME` if the judge sees no other field of that name, and from the column of its origin (`input`,
    `output`, `expected`) if the judge sees no other field of that origin.
    """
    columns = dict(row)
    parts = {name: name.partition(".") for name in shows if "." in name and name not in row}
    for name, (origin, _, short) in parts.items():
        wholes = (origin, f"{origin}s", *((_TASK_INPUT,) if origin == "input" else ()))
        whole = next((column for column in wholes if column in row), "")
        objects = row.get(whole)
        if isinstance(objects, Mapping):
            if short in objects:
                columns[name] = objects[short]
                columns.pop(whole, None)
        elif short in row and sum(other.rpartition(".")[2] == short for other in shows) == 1:
            columns[name] = columns.pop(short)
        elif whole and sum(other.partition(".")[0] == origin for other in shows) == 1:
            columns[name] = columns.pop(whole)
    return columns


def rating_digest(item_id: str, rater: str, label: str) -> str:
    """Identifies one rating in an artifact without the rater's name: 16 hex digits."""
    return hashlib.sha256(json.dumps([item_id, rater, label]).encode()).hexdigest()[:16]


def load_labels(
    spec: str,
    *,
    labels: Sequence[str],
    rename: Mapping[str, str] | None = None,
    shows: Sequence[str] = (),
    anchors: Mapping[str, str] | None = None,
) -> LabelledItems:
    """Loads items with their ratings from any source that `assay.datasets.iter_rows` reads.

    Rows have a column `label`, or a column per rater such as `rater_1`, `annotator A` or `score_2`, whose name is then
    the rater's. Missing labels are counted (`LabelledItems.gaps`). If a rater rated an item more than once, the last
    rating counts. Each row without a rater counts as a different rater.

    Args:
        labels: the judge's scale; a label outside it is an error. `assay.judges.labels.read_label` documents which
            spellings of a label are read.
        anchors: label -> its meaning, which is read as the label.
        rename: old -> new column name.
        shows: judged columns in addition to `input`, `output`, `output_a` and `output_b`. Other columns are kept in
            `Item.columns` if all rows of an item have the same value.
    Raises:
        DataError: a row lacks the judged content, a label is not on the scale, or an id has two contents; with file and
            line.
    """
    rows = ((where, renamed(row, rename, where) if rename else row) for where, row in iter_rows(spec))
    return make_items(rows, labels=labels, spec=spec, shows=shows, anchors=anchors)


def make_items(
    rows: Iterable[tuple[str, Mapping[str, Any]]],
    *,
    labels: Sequence[str],
    spec: str = "labels",
    unrated: bool = False,
    shows: Sequence[str] = (),
    anchors: Mapping[str, str] | None = None,
) -> LabelledItems:
    """Like `load_labels`, from rows.

    Args:
        rows: pairs of location (for error messages) and row.
        unrated: whether to keep items without a label.
    """
    judged = {*_JUDGED, *shows}
    contents: dict[str, dict[str, Any]] = {}
    columns: dict[str, dict[str, Any]] = {}
    ratings: dict[str, dict[str, Rating]] = defaultdict(dict)
    splits: dict[str, str | None] = {}
    places: dict[str, str] = {}
    count = gaps = 0
    for where, columns_of_row in rows:
        row = shown_columns(columns_of_row, shows)
        count += 1
        given = ratings_in(row, judged)
        content, other = _content(row, judged, shows, where)
        item_id = digest_of(content) if _is_empty(row.get("item_id")) else id_text(row["item_id"])
        places.setdefault(item_id, where)
        if contents.setdefault(item_id, content) != content:
            differing = sorted(key for key in judged if content.get(key) != contents[item_id].get(key))
            raise DataError(
                f"{where}: item {item_id!r} has another {', '.join(differing)} in an earlier row; "
                "use one item_id per content"
            )
        common = columns.setdefault(item_id, other)
        columns[item_id] = {key: value for key, value in common.items() if other.get(key) == value}
        if not _is_empty(row.get("split")) and row["split"] not in SPLITS:
            raise DataError(f"{where}: unknown split {row['split']!r}; splits are {', '.join(SPLITS)}")
        for column, rater, value in given:
            try:
                label = read_label(value, labels, anchors)
            except DataError as error:
                raise DataError(f"{where}: {error} (column {column!r})") from None
            if label is None:
                gaps += 1
                continue
            rater = rater or f"{_ANONYMOUS}{len(ratings[item_id]) + 1}"
            rationale = "" if column != "label" or is_missing(row.get("rationale")) else str(row["rationale"])
            ratings[item_id][rater] = Rating(rater=rater, label=label, rationale=rationale)
            splits[item_id] = None if _is_empty(row.get("split")) else row["split"]
    if unrated:
        ratings = defaultdict(dict, {key: ratings.get(key, {}) for key in contents})
    if not ratings:
        way = f": none of its {count} rows has a label in 'label', or in a column per rater such as 'rater_1'"
        raise DataError(f"{spec} has no ratings{way if count else ''}")
    items = [
        Item(
            id=key, fields=contents[key], ratings=tuple(entries.values()), split=splits.get(key), columns=columns[key],
            where=places[key],
        )
        for key, entries in ratings.items()
    ]  # fmt: skip
    return LabelledItems(items, gaps)


def _content(
    row: Mapping[str, Any], judged: set[str], shows: Sequence[str], where: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The judged fields of a row, and its other fields except those of the rating."""
    ratings = _RATING_FIELDS.union(rater_columns(row, judged))
    fields = {
        (_TASK_INPUT if key == "input" else key): value
        for key, value in row.items()
        if key not in ratings and not is_missing(value)
    }
    content = {key: value for key, value in fields.items() if key in judged}
    other_names = [  # a judge may see the output under another name
        name for name in shows if name not in _JUDGED and not name.startswith(("input.", "expected"))
    ]
    outputs = {"output", "output_a", *(other_names if not _JUDGED & set(shows) - {_TASK_INPUT} else ())}
    if not any(name in content for name in outputs) or ("output_a" in content) != ("output_b" in content):
        raise DataError(
            f"{where}: expected the judged content in 'output', or in 'output_a' and 'output_b'; the row has "
            f"{sorted(row)}. Rename a column: `rename={{'answer': 'output'}}`"
        )
    return content, {key: value for key, value in fields.items() if key not in judged}


def _is_empty(value: Any) -> bool:
    return is_missing(value) or value == ""


@dataclass
class LabelSplits:
    """Items by split. All ratings of an item, and all items with one key, are in the same split."""

    train: list[Item]
    val: list[Item]
    gate: list[Item]
    test: list[Item] = field(repr=False)
    wanted: Mapping[str, str] = field(default_factory=dict)  # by item, in their order: the split by the data alone

    def sizes(self) -> dict[str, int]:
        return {name: len(getattr(self, name)) for name in SPLITS}

    def keys(self) -> dict[str, list[str]]:
        """Keys of the items by split."""
        return {name: [item.key for item in getattr(self, name)] for name in SPLITS}

    def ratings(self) -> dict[str, list[str]]:
        """Digests of the ratings by split, for the artifact."""
        return {name: [digest for item in getattr(self, name) for digest in item.digests] for name in SPLITS}

    def report(self) -> RowFindings:
        """Repeated, contradicting and moved items, and near-duplicates across splits."""
        members = {item.id: (name, item) for name in SPLITS for item in getattr(self, name)}
        return compare_rows(
            [
                ComparedRow(
                    row=item.where or item.id, key=item.key, split=name, wanted=self.wanted[item.id],
                    inputs=item.fields, outputs={"label": item.modes},
                )
                for name, item in (members[item_id] for item_id in self.wanted if item_id in members)
            ]
        )  # fmt: skip


def split_items(
    items: Sequence[Item],
    *,
    salt: str = "assay",
    limits: Mapping[str, int] | None = None,
    known: Mapping[str, str] | None = None,
) -> LabelSplits:
    """Splits items by key, identically in every command.

    Args:
        salt: the store's salt.
        limits: maximum number of items by split. The share of each class is kept; an item's class is its first mode.
        known: key -> split of the items that have one in the store; it stands.
    Raises:
        DataError: a split is empty.
    """
    named: dict[str, str | None] = {}
    for item in items:
        named[item.key] = named.get(item.key) or item.split
    few = len(named) < FEW
    alone = splits_of_few(named, salt) if few else {key: name or split_of(key, salt)[0] for key, name in named.items()}
    assigned = splits_of_few(named, salt, known=known) if few else {**alone, **(known or {})}
    chosen: dict[str, list[Item]] = {name: [] for name in SPLITS}
    for item in items:
        chosen[assigned[item.key]].append(item)
    if empty := [name for name in SPLITS if not chosen[name]]:
        raise DataError(
            f"no items in the splits {', '.join(empty)} ({counted(len(named), 'distinct items')} in total; at least "
            f"{len(SPLITS)} are needed). Add labels, or assign splits in a column 'split'"
        )
    splits = {}
    for name, members in chosen.items():
        ordered = sorted(members, key=lambda item: split_of(item.key, salt)[1])
        splits[name] = _stratified(ordered, (limits or {}).get(name, len(ordered)))
    return LabelSplits(**splits, wanted={item.id: item.split or alone[item.key] for item in items})


def _stratified(items: list[Item], limit: int) -> list[Item]:
    """The first `limit` items, with each class in proportion to its share (largest remainder method)."""
    if limit >= len(items):
        return items
    classes: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        classes[item.modes[0]].append(item)
    exact = {label: limit * len(group) / len(items) for label, group in classes.items()}
    quota = {label: int(share) for label, share in exact.items()}
    for label in sorted(exact, key=lambda name: quota[name] - exact[name])[: limit - sum(quota.values())]:
        quota[label] += 1
    chosen = {item.id for label, group in classes.items() for item in group[: quota[label]]}
    return [item for item in items if item.id in chosen]
