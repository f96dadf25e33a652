"""Human labels: ratings of items by one or several raters. Disagreement is kept.

One row per rating: `item_id` (by default the hash of the judged content), `input` (optional), `output` or `output_a`
and `output_b`, `rater`, `label`, `rationale` (optional). A judge can see further columns if its `shows` names them.
Instead of `rater` and `label`, a row may have a column per rater.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from assay.datasets import SPLITS
from assay.datasets.sources import iter_rows
from assay.datasets.splits import SHARES, renamed, split_of
from assay.datasets.tasks import content_hash
from assay.errors import DataError
from assay.judges.label_texts import id_text, rater_columns, ratings_in, read_label
from assay.support.missing import is_missing

__all__ = ["Item", "LabelSplits", "LabelledItems", "Rating", "load_labels", "make_items", "split_items"]

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
        split: the split named in the data; None to use the content hash.
        columns: columns that are not judged, such as `model`.
    """

    id: str
    fields: Mapping[str, Any]
    ratings: tuple[Rating, ...]
    split: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def content_hash(self) -> str:
        return content_hash(self.fields)

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
        labels: the judge's scale; a label outside it is an error. `assay.judges.label_texts.read_label` documents which
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
    count = gaps = 0
    for where, row in rows:
        count += 1
        given = ratings_in(row, judged)
        content, other = _content(row, judged, shows, where)
        item_id = content_hash(content)[:16] if _is_empty(row.get("item_id")) else id_text(row["item_id"])
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
        Item(id=key, fields=contents[key], ratings=tuple(entries.values()), split=splits.get(key), columns=columns[key])
        for key, entries in ratings.items()
    ]
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
    other_names = [name for name in shows if name not in _JUDGED]  # a judge may see the output under another name
    outputs = {"output", "output_a", *(other_names if not _JUDGED & set(shows) - {_TASK_INPUT} else ())}
    if not any(name in content for name in outputs) or ("output_a" in content) != ("output_b" in content):
        raise DataError(
            f"{where}: expected the judged content in 'output', or in 'output_a' and 'output_b'; the row has "
            f"{sorted(row)}. Rename a column: rename={{'answer': 'output'}}",
            flag="--rename answer=output",
        )
    return content, {key: value for key, value in fields.items() if key not in judged}


def _is_empty(value: Any) -> bool:
    return is_missing(value) or value == ""


@dataclass
class LabelSplits:
    """Items by split. All ratings of an item are in the same split, which is chosen by the hash of its content."""

    train: list[Item]
    val: list[Item]
    gate: list[Item]
    test: list[Item] = field(repr=False)

    def sizes(self) -> dict[str, int]:
        return {name: len(getattr(self, name)) for name in SPLITS}

    def ratings(self) -> dict[str, list[str]]:
        """Digests of the ratings by split, for the artifact."""
        return {name: [digest for item in getattr(self, name) for digest in item.digests] for name in SPLITS}


def split_items(items: Sequence[Item], *, salt: str = "assay", limits: Mapping[str, int] | None = None) -> LabelSplits:
    """Splits items by content hash, identically in every command.

    Args:
        salt: the store's salt.
        limits: maximum number of items by split. The share of each class is kept; an item's class is its first mode.
    Raises:
        DataError: a split is empty.
    """
    chosen: dict[str, list[tuple[int, Item]]] = {name: [] for name in SPLITS}
    unique: dict[str, Item] = {}
    for item in items:  # items with different ids and the same content are merged
        first = unique.get(item.content_hash)
        unique[item.content_hash] = (
            item if first is None else replace(first, ratings=_merged(first, item), split=first.split or item.split)
        )
    for digest, item in unique.items():
        name, rank = split_of(digest, salt, SHARES)
        chosen[item.split or name].append((rank, item))
    if empty := [name for name in SPLITS if not chosen[name]]:
        raise DataError(
            f"no items in the splits {', '.join(empty)} ({len(unique)} distinct items in total). "
            "Add labels, or assign splits in a column 'split'"
        )
    splits = {}
    for name, entries in chosen.items():
        ordered = [item for _, item in sorted(entries, key=lambda entry: entry[0])]
        splits[name] = _stratified(ordered, (limits or {}).get(name, len(ordered)))
    return LabelSplits(**splits)


def _merged(first: Item, other: Item) -> tuple[Rating, ...]:
    by_rater = {rating.rater: rating for rating in first.ratings}
    for rating in other.ratings:
        name = f"{_ANONYMOUS}{len(by_rater) + 1}" if rating.rater.startswith(_ANONYMOUS) else rating.rater
        by_rater[name] = replace(rating, rater=name)
    return tuple(by_rater.values())


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
