"""What a job says about the rows of its data: rows of one task, rows whose split the store decided, near-duplicates.

Nothing is left out because of it: every row is used.
"""

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from assay.datasets.keys import ALIKE, near_duplicates, task_text
from assay.support.numbers import counted

_LISTED = 1_000  # rows that a report names, of each kind
_SHOWN = 10  # rows that a sentence names
_EXAMPLES = 2


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """A row of the data that is used. `wanted`: the split that it would have without the store and its twins."""

    row: str
    key: str
    split: str
    wanted: str
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RepeatedRow:
    """A row with the task of an earlier row. `differs`: names of expected outputs in which they differ."""

    row: str
    first: str
    differs: list[str]

    @property
    def text(self) -> str:
        another = f", another {' and '.join(self.differs)}" if self.differs else ""
        return f"{self.row} (as {self.first}{another})"


@dataclass(frozen=True, kw_only=True)
class MovedRow:
    """A row in another split than the data alone would give it: the one that its task was first given."""

    row: str
    wanted: str
    split: str


@dataclass(frozen=True, kw_only=True)
class NearRow:
    """Two rows of different splits whose texts are nearly the same."""

    row: str
    split: str
    other: str
    other_split: str
    similarity: float


@dataclass(frozen=True, kw_only=True)
class RowFindings:
    """Rows that a reader of the scores should know of. Lists name at most 1,000 rows; counts are of all.

    Attributes:
        used: number of rows that are used.
        near: number of rows that resemble a row of another split; None if there was too much text to compare.
    """

    used: int
    repeated_rows: int = 0
    contradicting_rows: int = 0
    repeated: Sequence[RepeatedRow] = ()
    moved_rows: int = 0
    moved: Sequence[MovedRow] = ()
    near: int | None = 0
    near_examples: Sequence[NearRow] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "used": self.used,
            "repeated": {
                "count": self.repeated_rows,
                "contradictions": self.contradicting_rows,
                "rows": [asdict(row) for row in self.repeated],
            },
            "split_kept": {"count": self.moved_rows, "rows": [asdict(row) for row in self.moved]},
            "near_duplicates": {
                "count": self.near,
                "similarity": ALIKE,
                "examples": [asdict(row) for row in self.near_examples],
            },
        }

    def notes(self) -> list[str]:
        """A sentence on repeated rows and one on moved rows, if there are any. See `near_notes` too."""
        notes = []
        if self.repeated_rows:
            ordered = sorted(self.repeated, key=lambda row: not row.differs)  # contradictions are named first
            contradicting = self.contradicting_rows and f", {self.contradicting_rows:,} with another expected output"
            notes.append(
                f"{counted(self.repeated_rows, 'rows')} with the inputs of an earlier row, in any spelling"
                f"{contradicting or ''}: {_listed([row.text for row in ordered], self.repeated_rows)}. "
                "Rows of one task are in one split, and each is scored"
            )
        if self.moved_rows:
            named = _listed([f"{row.row} ({row.split}, not {row.wanted})" for row in self.moved], self.moved_rows)
            notes.append(f"{counted(self.moved_rows, 'rows')} in the split that the task was first given: {named}")
        return notes


NO_ROWS = RowFindings(used=0)


def near_notes(data: Mapping[str, Any]) -> list[str]:
    """A sentence on near-duplicates across splits, for the end of a job's output; none if there are none.

    Args:
        data: `RowFindings.to_dict()`.
    """
    count, examples = data["near_duplicates"]["count"], data["near_duplicates"]["examples"]
    if count is None:
        return ["near-duplicates across splits were not looked for: there is too much text"]
    if not count:
        return []
    pairs = [f"{row['row']} ({row['split']}) and {row['other']} ({row['other_split']})" for row in examples]
    return [f"{counted(count, 'rows')} nearly the same as a row of another split, such as {' or '.join(pairs)}"]


def _listed(names: Sequence[str], count: int) -> str:
    more = f" and {count - _SHOWN} more" if count > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def compare_rows(
    rows: Sequence[ComparedRow], *, outputs: Collection[str] = (), same: Callable[[Any, Any], bool] = operator.eq
) -> RowFindings:
    """Compares the rows of a job with each other, in the order of the data.

    Args:
        outputs: the program's output fields. If the data has any of them, only these can contradict each other: a
            column such as a row number then makes no contradiction.
        same: whether two expected outputs are the same to the checks.
    """
    relevant = {name for row in rows for name in row.outputs} & set(outputs)
    first: dict[str, ComparedRow] = {}
    repeated = []
    for row in rows:
        twin = first.setdefault(row.key, row)
        if twin is not row:
            names = twin.outputs.keys() | row.outputs.keys()
            differs = {name for name in names if not same(twin.outputs.get(name), row.outputs.get(name))}
            repeated.append(
                RepeatedRow(row=row.row, first=twin.row, differs=sorted(differs & relevant if relevant else differs))
            )
    moved = [MovedRow(row=row.row, wanted=row.wanted, split=row.split) for row in rows if row.wanted != row.split]
    distinct = list(first.values())
    near = near_duplicates([task_text(row.inputs) for row in distinct], [row.split for row in distinct])
    examples: list[NearRow] = []
    for pair in near or ():
        one, other = distinct[pair.text], distinct[pair.other]
        if len(examples) < _EXAMPLES and one.row not in {row.other for row in examples}:
            examples.append(
                NearRow(
                    row=one.row, split=one.split, other=other.row, other_split=other.split,
                    similarity=round(pair.similarity, 3),
                )
            )  # fmt: skip
    return RowFindings(
        used=len(rows),
        repeated_rows=len(repeated),
        contradicting_rows=sum(bool(row.differs) for row in repeated),
        repeated=repeated[:_LISTED],
        moved_rows=len(moved),
        moved=moved[:_LISTED],
        near=None if near is None else len(near),
        near_examples=examples,
    )
