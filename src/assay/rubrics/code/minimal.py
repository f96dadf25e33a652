"""How much of an edit was needed: its changed statements against the smallest known fix. Does not run code."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from assay.errors import RubricError
from assay.rubrics.code.difference import Edit, Source, UnreadableCode, compare, read_source

__all__ = ["MinimalDiff", "minimal_diff"]

Edits = tuple[Edit, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class MinimalDiff(int):
    """Result of `minimal_diff`. As a number it is `excess`.

    Args:
        excess: changed statements above `needed`; 0 is best.
        changed: changed statements of the edit.
        needed: changed statements of the reference; 0 without a reference.
        nodes: changed expressions and names inside the changed statements. Of two edits with equally many statements
            the one with fewer nodes is smaller.
        edits: the changed statements.
        unnecessary: those that the reference does not change in the same way, if there is an excess.
        grade: in [0, 1], higher is better: needed / (needed + excess), where at least one statement counts as needed;
            0 for an edit that changes nothing, leaves no statement or cannot be read.
        reason: explanation; empty if nothing is wrong.
    """

    excess: int
    changed: int
    needed: int
    nodes: int = 0
    edits: tuple[Edit, ...] = ()
    unnecessary: tuple[Edit, ...] = ()
    grade: float
    reason: str = ""

    def __new__(cls, value: int | None = None, **fields: Any) -> "MinimalDiff":
        return super().__new__(cls, fields.get("excess", value or 0))

    @property
    def size(self) -> tuple[int, int]:
        """Statements, then nodes: the order in which edits are compared."""
        return self.changed, self.nodes


def minimal_diff(before: str, after: str, reference: str | None = None) -> MinimalDiff:
    """Counts the changed statements of an edit that a fix did not need.

    Sources are compared as normalised syntax trees: formatting, comments, docstrings, names of local variables and the
    order of imports do not count. A changed, inserted, deleted or moved statement counts 1; of a compound statement
    only the header. A moved definition counts 1.

    Args:
        before: source that was edited.
        after: the edited source. One that is not valid Python, has no statements, or is too long to compare, gets the
            grade 0.
        reference: source with the smallest known fix. Without it the excess is the number of changed statements.
    Raises:
        RubricError: `before` or `reference` cannot be read.
    """
    source = _readable(before, "before")
    fixed = None if reference is None else _readable(reference, "reference")
    fix = None if fixed is None else _compared(source, fixed, "reference")
    needed = len(fix) if fix is not None else 0
    try:
        edited = read_source(after)
        if source.count and not edited.count and (fixed is None or fixed.count):
            raise UnreadableCode("it has no statements")
        edits = compare(source, edited)
    except UnreadableCode as error:
        everything = max(1, source.count)
        return MinimalDiff(
            excess=everything,
            changed=everything + needed,
            needed=needed,
            grade=0.0,
            reason=f"The edit is unusable: {error}.",
        )
    return _result(edits, fix)


def _result(edits: Edits, fix: Edits | None) -> MinimalDiff:
    needed = len(fix) if fix is not None else 0
    excess = max(0, len(edits) - needed)
    unnecessary = _without(edits, fix) if fix is not None and excess else ()
    if not len(edits) and (fix is None or needed):
        grade, reason = 0.0, "The edit changes nothing."
    else:
        least = max(1, needed)  # without a reference, one changed statement is the smallest edit
        beyond = max(0, len(edits) - least) if fix is None else excess
        grade, reason = least / (least + beyond), _reason(edits, needed, excess, unnecessary)
    return MinimalDiff(
        excess=excess,
        changed=len(edits),
        needed=needed,
        nodes=sum(edit.nodes for edit in edits),
        edits=edits,
        unnecessary=unnecessary,
        grade=grade,
        reason=reason,
    )


def _compared(source: Source, other: Source, name: str) -> Edits:
    try:
        return compare(source, other)
    except UnreadableCode as error:
        raise RubricError(f"{name} cannot be compared: {error}") from None


def _readable(text: str, name: str) -> Source:
    try:
        return read_source(text)
    except UnreadableCode as error:
        raise RubricError(f"{name} cannot be read: {error}. Pass Python source") from None


def _without(edits: Sequence[Edit], needed: Sequence[Edit]) -> tuple[Edit, ...]:
    """The edits that the fix does not have. A statement of the fix is recognised whichever statement it replaces.

    Where a statement was inserted next to the fix, the alignment may pair the old statement with either of them.
    """
    rest, missing = _unmatched(edits, needed, lambda edit: edit.key)
    written = [[edit for edit in part if edit.after is not None] for part in (rest, missing)]
    beyond, _ = _unmatched(written[0], written[1], lambda edit: edit.key[2])
    removed = [edit for edit in rest if edit.after is None]
    return tuple(sorted([*beyond, *removed], key=lambda edit: edit.line))


def _unmatched(
    edits: Sequence[Edit], others: Sequence[Edit], key: Callable[[Edit], Any]
) -> tuple[list[Edit], list[Edit]]:
    """The edits of each side whose key has no partner on the other one."""
    counts = Counter(map(key, edits)), Counter(map(key, others))
    sides = []
    for side, spare in ((edits, counts[1].copy()), (others, counts[0].copy())):
        left = []
        for edit in side:
            if spare[key(edit)] > 0:
                spare[key(edit)] -= 1
            else:
                left.append(edit)
        sides.append(left)
    return sides[0], sides[1]


_LISTED = 5


def _reason(edits: Edits, needed: int, excess: int, unnecessary: Sequence[Edit]) -> str:
    if not excess or not needed:
        return ""
    listed = "; ".join(map(str, unnecessary[:_LISTED]))
    more = f"; and {len(unnecessary) - _LISTED} more" if len(unnecessary) > _LISTED else ""
    return f"{len(edits)} statements changed, {needed} needed. Not in the smallest known fix: {listed}{more}."
