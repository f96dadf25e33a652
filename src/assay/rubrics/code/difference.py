"""The changed statements between two sources: the smallest number of inserted, deleted, changed and moved statements.

Definitions are matched by name, so that a moved function is one change. Inside a pair the statements are aligned as
trees. The alignment does not see local names: they are matched by the statements that they occur in.
"""

import ast
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from assay.rubrics.code.statements import Source, Statement, definition_name
from assay.rubrics.code.trees import Tree, distance_work, tree_edits

__all__ = ["Difference", "Edit", "compare"]

_STATEMENT_WORK = 600_000  # table cells, about half a second
_HEADER_WORK = 100_000
_PARAMETER_VOTES = 1000


@dataclass(frozen=True)
class Edit:
    """One changed statement.

    Args:
        kind: `added`, `removed`, `changed` or `moved`.
        line: in the source after the edit; of a removed statement in the source before.
        text: first line of the statement.
        key: equal for equal edits of one source.
    """

    kind: str
    line: int
    text: str
    key: tuple[Any, ...] = field(default=(), repr=False)
    before: Statement | None = field(default=None, repr=False)
    after: Statement | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"line {self.line} {self.kind}: {self.text}"


@dataclass(frozen=True)
class Difference:
    """Changed statements.

    Args:
        nodes: changed expressions and names inside the changed statements (tree distance of their headers).
        exact: False if the edit is too large to align; the numbers are then lower bounds.
    """

    edits: tuple[Edit, ...]
    changed: int
    nodes: int
    exact: bool = True


def compare(before: Source, after: Source) -> Difference:
    """Compares two sources.

    Raises:
        UnreadableCode: nested too deeply.
    """
    parts = list(_bodies(before, after, before.tree.body, after.tree.body, (), ()))
    edits = [edit for part in parts for edit in part.edits]
    return Difference(
        edits=tuple(sorted(edits, key=lambda edit: edit.line)),
        changed=sum(part.changed for part in parts),
        nodes=sum(part.nodes for part in parts),
        exact=all(part.exact for part in parts),
    )


def _bodies(
    before: Source,
    after: Source,
    old: Sequence[ast.stmt],
    new: Sequence[ast.stmt],
    old_owners: tuple[ast.ClassDef, ...],
    new_owners: tuple[ast.ClassDef, ...],
) -> Iterator[Difference]:
    """Differences of two modules or class bodies."""
    old_named, new_named = _definitions(old), _definitions(new)
    common = [key for key in new_named if key in old_named]
    yield _moved([key for key in old_named if key in new_named], new_named, common)
    for key in common:
        a, b = old_named[key], new_named[key]
        if before.text(a) == after.text(b):
            continue
        if isinstance(a, ast.ClassDef) and isinstance(b, ast.ClassDef):
            yield _align(before.statements([_bare(a)], of=old_owners), after.statements([_bare(b)], of=new_owners))
            yield from _bodies(before, after, _members(a), _members(b), (*old_owners, a), (*new_owners, b))
        else:
            yield _align(before.statements([a], of=old_owners), after.statements([b], of=new_owners))
    matched = {id(named[key]) for named in (old_named, new_named) for key in common}
    rest_old = [node for node in old if id(node) not in matched]
    rest_new = [node for node in new if id(node) not in matched]
    while rest_old and rest_new and before.text(rest_old[-1]) == after.text(rest_new[-1]):
        rest_old.pop(), rest_new.pop()
    yield _align(before.statements(rest_old, of=old_owners), after.statements(rest_new, of=new_owners))


def _definitions(nodes: Sequence[ast.stmt]) -> dict[tuple[Any, ...], ast.stmt]:
    """Functions and classes by kind, name and occurrence (a property is defined several times)."""
    counts, result = Counter[tuple[bool, str]](), {}
    for node in nodes:
        if (name := definition_name(node)) is not None:
            key = (isinstance(node, ast.ClassDef), name)
            result[*key, counts[key]] = node
            counts[key] += 1
    return result


def _bare(node: ast.ClassDef) -> ast.ClassDef:
    """A class without its members, for its header."""
    header = {name: value for name, value in ast.iter_fields(node) if name != "body"}
    return ast.copy_location(ast.ClassDef(**header, body=[]), node)


def _members(node: ast.ClassDef) -> list[ast.stmt]:
    first = node.body[0]
    documented = (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    )
    return node.body[1:] if documented else node.body


def _moved(old: Sequence[Any], new: Mapping[Any, ast.stmt], order: Sequence[Any]) -> Difference:
    """Definitions outside a longest common order of both files."""
    place = {key: index for index, key in enumerate(old)}
    ends: list[int] = []
    last: list[Any] = []
    previous: dict[Any, Any] = {}
    for key in order:
        at = bisect_left(ends, place[key])
        previous[key] = last[at - 1] if at else None
        ends[at : at + 1], last[at : at + 1] = [place[key]], [key]
    unmoved, key = set(), last[-1] if last else None
    while key is not None:
        unmoved.add(key)
        key = previous[key]
    edits = [
        Edit("moved", new[key].lineno, f"definition of {key[1]}", ("moved", key)) for key in order if key not in unmoved
    ]
    return Difference(tuple(edits), len(edits), 0)


def _align(old: Sequence[Statement], new: Sequence[Statement]) -> Difference:
    """Aligns two blocks twice: without local names, to match the names; then with the matched names."""
    if not old and not new:
        return Difference((), 0, 0)
    names = _matched_names(old, new)
    pairs, exact = _pairs(old, new, lambda s: _named(s, None), lambda s: _named(s, names))
    edits, nodes = [], 0
    for a, b in pairs:
        before = _named(a, None) if a is not None else ()
        after = _named(b, names) if b is not None else ()
        if before != after:
            nodes += _header_distance(before, after)
            edits.append(_edit(a, b, before, after))
    if exact:
        edits = _joined(edits)
        return Difference(tuple(edits), len(edits), nodes)
    added = sum(edit.kind == "added" for edit in edits)
    return Difference(tuple(edits), max(added, len(edits) - added), nodes, exact=False)


def _named(statement: Statement, names: Mapping[int, str] | None) -> tuple[str, ...]:
    """Header with local names as text: those of the old block by number, those of the new one by what they match."""
    if names is None:
        return tuple(f"${token}" if isinstance(token, int) else token for token in statement.tokens)
    return tuple(names.get(token, f"new ${token}") if isinstance(token, int) else token for token in statement.tokens)


def _edit(a: Statement | None, b: Statement | None, before: tuple[str, ...], after: tuple[str, ...]) -> Edit:
    if b is not None:
        kind, statement = "added" if a is None else "changed", b
    else:
        assert a is not None
        kind, statement = "removed", a
    key = (kind, a.line if a is not None else None, after or before)
    return Edit(kind, statement.line, statement.text, key, a, b)


def _joined(edits: Sequence[Edit]) -> list[Edit]:
    """Joins a removed and an added statement that are equal: the statement was moved, such as out of a loop.

    The first token, the block that it is in, does not count.
    """
    removed: dict[Any, list[Edit]] = {}
    for edit in edits:
        if edit.kind == "removed":
            removed.setdefault(edit.key[2][1:], []).append(edit)
    gone, result = set[int](), []
    for edit in edits:
        if edit.kind == "added" and (same := removed.get(edit.key[2][1:])):
            old = same.pop()
            gone.add(id(old))
            edit = replace(edit, kind="moved", key=("moved", old.line, edit.key[2]), before=old.before)
        result.append(edit)
    return [edit for edit in result if id(edit) not in gone]


def _matched_names(old: Sequence[Statement], new: Sequence[Statement]) -> dict[int, str]:
    """Local name of the new block -> label of the old block's name that it stands for.

    Names are matched by the number of places that they share in aligned statements of the same shape.
    """
    pairs, _ = _pairs(old, new, _shape, _shape)
    votes = Counter[tuple[int, int]]()
    for a, b in pairs:
        if a is None or b is None:
            continue
        if _shape(a) == _shape(b):
            votes.update(
                (s, t) for s, t in zip(a.tokens, b.tokens, strict=True) if isinstance(s, int) and isinstance(t, int)
            )
        for name in a.parameters.keys() & b.parameters.keys():
            votes[a.parameters[name], b.parameters[name]] += _PARAMETER_VOTES
    matched: dict[int, str] = {}
    taken = set[int]()
    for (s, t), _ in sorted(votes.items(), key=lambda item: (-item[1], abs(item[0][0] - item[0][1]), item[0])):
        if s not in taken and t not in matched:
            taken.add(s)
            matched[t] = f"${s}"
    return matched


def _shape(statement: Statement) -> tuple[str, ...]:
    return tuple("$" if isinstance(token, int) else token for token in statement.tokens)


# Alignment of statement trees


Pair = tuple[Statement | None, Statement | None]
Label = Callable[[Statement], tuple[str, ...]]


def _pairs(
    old: Sequence[Statement], new: Sequence[Statement], label_old: Label, label_new: Label
) -> tuple[list[Pair], bool]:
    """Pairs of a cheapest alignment; False if it was too large, and statements are only counted."""
    numbers: dict[Any, int] = {}
    a = [_tree(statement, label_old, numbers) for statement in old]
    b = [_tree(statement, label_new, numbers) for statement in new]
    pairs: list[Pair] = []
    a, b = _trimmed(a, b, pairs)
    while len(a) == len(b) == 1 and (a[0].label[0] == b[0].label[0] or _are_definitions(a[0], b[0])):
        pairs.append((a[0].item, b[0].item))
        a, b = _trimmed(a[0].children, b[0].children, pairs)
    if not a or not b:
        pairs += [(node.item, None) for node in _nodes(a)] + [(None, node.item) for node in _nodes(b)]
        return pairs, True
    first, second = (Tree(0, [_plain(node) for node in trees]) for trees in (a, b))
    if distance_work(first, second) <= _STATEMENT_WORK:
        edits = tree_edits(first, second)
        pairs += [
            (x.item if x is not None else None, y.item if y is not None else None)
            for x, y in edits
            if (x is None or x.item is not None) and (y is None or y.item is not None)
        ]
        return pairs, True
    return pairs + _counted(_nodes(a), _nodes(b)), False


def _are_definitions(a: Tree, b: Tree) -> bool:
    return definition_name(a.item.node) is not None and type(a.item.node) is type(b.item.node)


def _tree(statement: Statement, label: Label, numbers: dict[Any, int]) -> Tree:
    """A tree labelled with (number of the header, number of the whole subtree): equal numbers for equal text."""
    children = [_tree(child, label, numbers) for child in statement.children]
    header = numbers.setdefault(label(statement), len(numbers))
    whole = numbers.setdefault((header, tuple(child.label[1] for child in children)), len(numbers))
    return Tree((header, whole), children, statement)


def _plain(node: Tree) -> Tree:
    return Tree(node.label[0], [_plain(child) for child in node.children], node.item)


def _nodes(trees: Sequence[Tree]) -> list[Tree]:
    result, waiting = [], list(reversed(trees))
    while waiting:
        node = waiting.pop()
        result.append(node)
        waiting += reversed(node.children)
    return result


def _trimmed(a: Sequence[Tree], b: Sequence[Tree], pairs: list[Pair]) -> tuple[list[Tree], list[Tree]]:
    """Without the equal trees at both ends, which are added to the pairs."""
    start, end = 0, 0
    least = min(len(a), len(b))
    while start < least and a[start].label[1] == b[start].label[1]:
        start += 1
    while end < least - start and a[-1 - end].label[1] == b[-1 - end].label[1]:
        end += 1
    for x, y in [*zip(a[:start], b[:start], strict=True), *zip(a[len(a) - end :], b[len(b) - end :], strict=True)]:
        pairs += [(s.item, t.item) for s, t in zip(_nodes([x]), _nodes([y]), strict=True)]
    return list(a[start : len(a) - end]), list(b[start : len(b) - end])


def _counted(a: Sequence[Tree], b: Sequence[Tree]) -> list[Pair]:
    """Pairs equal statements wherever they are. For edits that are too large to align."""
    waiting: dict[int, list[Tree]] = {}
    for node in reversed(a):
        waiting.setdefault(node.label[0], []).append(node)
    pairs: list[Pair] = []
    for node in b:
        same = waiting.get(node.label[0])
        pairs.append((same.pop().item if same else None, node.item))
    return pairs + [(node.item, None) for nodes in waiting.values() for node in nodes]


# Distance of headers


def _header_distance(before: Sequence[str], after: Sequence[str]) -> int:
    """Changed nodes between two headers; a header that is missing counts as all nodes of the other one."""
    if not before or not after:
        return sum(token != ")" for token in (*before, *after))
    a, b = _header_tree(before), _header_tree(after)
    if distance_work(a, b) <= _HEADER_WORK:
        return sum(x is None or y is None or x.label != y.label for x, y in tree_edits(a, b))
    counts = Counter(before), Counter(after)
    return max((counts[0] - counts[1]).total(), (counts[1] - counts[0]).total())


def _header_tree(tokens: Sequence[str]) -> Tree:
    root = Tree("")
    path = [root]
    for token in tokens:
        if token in (")", "]"):
            path.pop()
            continue
        node = Tree(token)
        path[-1].children.append(node)
        if token.startswith("(") or token == "[":
            path.append(node)
    return root
