"""What people said: ratings of items, several raters an item, with disagreement kept.

One row a rating: `item_id` (by default the hash of what was shown), `input` (optional), `output` or `output_a` and
`output_b`, `rater`, `label`, `rationale` (optional). Further columns are shown to a judge that names them.
"""

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from assay.datasets import SPLITS
from assay.datasets.sources import iter_rows
from assay.datasets.splits import SHARES, renamed, split_of
from assay.datasets.tasks import content_hash
from assay.errors import DataError

__all__ = ["Item", "LabelSplits", "Rating", "load_labels", "make_items", "split_items"]

_FIELDS = {"item_id", "rater", "label", "rationale", "split"}
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
    """Something that was judged, with all that people said of it. `beside`: columns that nobody judges, such as `model`."""

    id: str
    shown: Mapping[str, Any]
    ratings: tuple[Rating, ...]
    split: str | None = None
    beside: Mapping[str, Any] = field(default_factory=dict)

    @property
    def content_hash(self) -> str:
        return content_hash(self.shown)

    @property
    def shares(self) -> dict[str, float]:
        """Share of the raters by label; the disagreement is part of it."""
        counts = Counter(rating.label for rating in self.ratings)
        return {label: count / len(self.ratings) for label, count in counts.items()}

    @property
    def modes(self) -> tuple[str, ...]:
        """The label most raters gave; several where they are level."""
        counts = Counter(rating.label for rating in self.ratings)
        most = max(counts.values())
        return tuple(sorted(label for label, count in counts.items() if count == most))

    @property
    def rationales(self) -> list[str]:
        return [f"{rating.label}: {rating.rationale}" for rating in self.ratings if rating.rationale]

    @property
    def digests(self) -> list[str]:
        """A short hash of each rating: what an artifact was compiled from, without the ratings themselves."""
        return [rating_digest(self.id, rating.rater, rating.label) for rating in self.ratings]


def rating_digest(item_id: str, rater: str, label: str) -> str:
    return hashlib.sha256(json.dumps([item_id, rater, label]).encode()).hexdigest()[:16]


def load_labels(
    spec: str, *, labels: Sequence[str], rename: Mapping[str, str] | None = None, shows: Sequence[str] = ()
) -> list[Item]:  # fmt: skip
    """Items with their ratings, from any source that `assay.datasets.iter_rows` reads.

    A row without a label is a missing value: it is left out. Each rater counts once an item; the last rating stands. Rows
    without a rater are of somebody else each.

    Args:
        labels: the judge's scale; a label outside it is an error.
        rename: columns by the names they should have.
        shows: columns that are judged, beside `input`, `output`, `output_a` and `output_b`. Others are kept where all rows of
            an item agree on them, and decide nothing.
    Raises:
        DataError: a row without what was judged, a label outside the scale, one id for two contents; with file and line.
    """
    rows = ((where, renamed(row, rename, where) if rename else row) for where, row in iter_rows(spec))
    return make_items(rows, labels=labels, spec=spec, shows=shows)


def make_items(
    rows: Iterable[tuple[str, Mapping[str, Any]]], *, labels: Sequence[str], spec: str = "labels", unrated: bool = False, shows: Sequence[str] = ()
) -> list[Item]:
    """`load_labels` for rows that are at hand, each with the place it stands.

    Args:
        unrated: whether items without any label are kept, with no ratings.
    """
    known = {label.casefold(): label for label in labels}
    judged = {*_JUDGED, *shows}
    others = [name for name in shows if name not in _JUDGED]  # a judge that sees an output by another name
    wanted = {"output", "output_a", *(others if not _JUDGED & set(shows) - {_TASK_INPUT} else ())}
    shown_of: dict[str, dict[str, Any]] = {}
    beside: dict[str, dict[str, Any]] = {}
    ratings: dict[str, dict[str, Rating]] = defaultdict(dict)
    splits: dict[str, str | None] = {}
    rated = 0
    for where, row in rows:
        rated += 1
        found = {(_TASK_INPUT if key == "input" else key): value for key, value in row.items() if key not in _FIELDS and not _absent(value)}
        shown = {key: value for key, value in found.items() if key in judged}
        if not any(name in shown for name in wanted) or ("output_a" in shown) != ("output_b" in shown):
            raise DataError(
                f"{where}: what is to be judged must stand in 'output', or in 'output_a' and 'output_b'; the row has {sorted(row)}. Rename a column: "
                "rename={'answer': 'output'}",
                flag="--rename answer=output",
            )
        item_id = content_hash(shown)[:16] if _missing(row.get("item_id")) else str(row["item_id"])
        if shown_of.setdefault(item_id, shown) != shown:
            other = sorted(key for key in judged if shown.get(key) != shown_of[item_id].get(key))
            raise DataError(f"{where}: item {item_id!r} was shown with another {', '.join(other)} before; one id is one content")
        more = {key: value for key, value in found.items() if key not in judged}
        kept = beside.setdefault(item_id, more)
        beside[item_id] = {key: value for key, value in kept.items() if more.get(key) == value}
        if row.get("split") not in (None, "", *SPLITS):
            raise DataError(f"{where}: the split {row['split']!r} does not exist; there are {', '.join(SPLITS)}")
        label = row.get("label")
        if _missing(label):
            continue
        if str(label).strip().casefold() not in known:
            raise DataError(f"{where}: the label {label!r} is not on the judge's scale {list(labels)}")
        rater = f"{_ANONYMOUS}{len(ratings[item_id]) + 1}" if _missing(row.get("rater")) else str(row["rater"])
        ratings[item_id][rater] = Rating(rater=rater, label=known[str(label).strip().casefold()], rationale=str(row.get("rationale") or ""))
        splits[item_id] = row.get("split") or None
    if unrated:
        ratings = defaultdict(dict, {key: ratings.get(key, {}) for key in shown_of})
    if not ratings:
        raise DataError(f"{spec} has no ratings" + (f": none of its {rated} rows has a label" if rated else ""))
    return [
        Item(id=key, shown=shown_of[key], ratings=tuple(found.values()), split=splits.get(key), beside=beside[key]) for key, found in ratings.items()
    ]


def _absent(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def _missing(value: Any) -> bool:
    return _absent(value) or value == ""


@dataclass
class LabelSplits:
    """Items by split. An item with all its ratings is in one; its place is the hash of what was shown."""

    train: list[Item]
    val: list[Item]
    gate: list[Item]
    test: list[Item] = field(repr=False)

    def sizes(self) -> dict[str, int]:
        return {name: len(getattr(self, name)) for name in SPLITS}

    def ratings(self) -> dict[str, list[str]]:
        """Digests of the ratings of each split, for the artifact."""
        return {name: [digest for item in getattr(self, name) for digest in item.digests] for name in SPLITS}


def split_items(items: Sequence[Item], *, salt: str = "assay", limits: Mapping[str, int] | None = None) -> LabelSplits:
    """Splits by content hash, the same in every command. A limit keeps each class's share (the first mode is the class).

    Raises:
        DataError: a split would be empty.
    """
    chosen: dict[str, list[tuple[int, Item]]] = {name: [] for name in SPLITS}
    seen: dict[str, Item] = {}
    for item in items:  # another id for what was shown before: its ratings are of the same thing
        first = seen.get(item.content_hash)
        seen[item.content_hash] = item if first is None else replace(first, ratings=_merged(first, item), split=first.split or item.split)
    for digest, item in seen.items():
        name, rank = split_of(digest, salt, SHARES)
        chosen[item.split or name].append((rank, item))
    if empty := [name for name in SPLITS if not chosen[name]]:
        raise DataError(f"no item fell into {', '.join(empty)} ({len(seen)} different items in all). Label more, or name splits in a field 'split'")
    kept = {}
    for name, entries in chosen.items():
        ordered = [item for _, item in sorted(entries, key=lambda entry: entry[0])]
        kept[name] = _stratified(ordered, (limits or {}).get(name, len(ordered)))
    return LabelSplits(**kept)


def _merged(first: Item, other: Item) -> tuple[Rating, ...]:
    known = {rating.rater: rating for rating in first.ratings}
    for rating in other.ratings:
        name = f"{_ANONYMOUS}{len(known) + 1}" if rating.rater.startswith(_ANONYMOUS) else rating.rater
        known[name] = replace(rating, rater=name)
    return tuple(known.values())


def _stratified(items: list[Item], limit: int) -> list[Item]:
    """The first `limit` items, each class with the share that it has in all (largest remainders)."""
    if limit >= len(items):
        return items
    classes: dict[str, list[Item]] = defaultdict(list)
    for item in items:
        classes[item.modes[0]].append(item)
    exact = {label: limit * len(group) / len(items) for label, group in classes.items()}
    quota = {label: int(share) for label, share in exact.items()}
    for label in sorted(exact, key=lambda name: quota[name] - exact[name])[: limit - sum(quota.values())]:
        quota[label] += 1
    taken = {item.id for label, group in classes.items() for item in group[: quota[label]]}
    return [item for item in items if item.id in taken]
