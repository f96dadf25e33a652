"""Edit distance of ordered trees, with the edits: insert, delete and relabel a node, each at cost 1.

Source: Zhang and Shasha, "Simple fast algorithms for the editing distance between trees" (SIAM J. Comput. 18, 1989).
"""

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Tree", "distance_work", "tree_edits"]


@dataclass(slots=True)
class Tree:
    """An ordered tree. `item` is what the caller finds again in the edits."""

    label: Any
    children: "list[Tree]" = field(default_factory=list)
    item: Any = None


class _Order:
    """Nodes in postorder with their leftmost leaves and keyroots; index 0 is unused."""

    def __init__(self, root: Tree) -> None:
        self.nodes: list[Tree] = [root]
        self.left: list[int] = [0]
        waiting: list[tuple[Tree, bool, int]] = [(root, False, 0)]
        while waiting:
            node, done, first = waiting.pop()
            if done:
                self.nodes.append(node)
                self.left.append(first)
                continue
            waiting.append((node, True, len(self.nodes)))
            waiting += [(child, False, 0) for child in reversed(node.children)]
        last = {left: index for index, left in enumerate(self.left) if index}
        self.keyroots = sorted(last.values())
        self.work = sum(index - self.left[index] + 1 for index in self.keyroots)


def distance_work(a: Tree, b: Tree) -> int:
    """Number of table cells that `tree_edits` computes, about a microsecond each."""
    return _Order(a).work * _Order(b).work


def tree_edits(a: Tree, b: Tree) -> list[tuple[Tree | None, Tree | None]]:
    """The pairs of a cheapest mapping: (node, node), (deleted, None) or (None, inserted).

    Pairs with equal labels cost 0 and are listed too.
    """
    first, second = _Order(a), _Order(b)
    distances = [[0] * len(second.nodes) for _ in first.nodes]
    for i in first.keyroots:
        for j in second.keyroots:
            _forest(first, second, i, j, distances)
    return _backtrace(first, second, distances)


def _forest(first: _Order, second: _Order, i: int, j: int, distances: list[list[int]]) -> list[list[int]]:
    """Distances of the forests below (i, j); fills in those of the subtrees whose left leaf is theirs."""
    left_i, left_j = first.left[i], second.left[j]
    width = j - left_j + 2
    table = [list(range(width))]
    labels = [node.label for node in second.nodes]
    for x in range(left_i, i + 1):
        above, row = table[-1], [len(table)]
        whole, label, known = first.left[x] == left_i, first.nodes[x].label, distances[x]
        start = table[first.left[x] - left_i]
        for y in range(left_j, j + 1):
            at = y - left_j + 1
            best = min(above[at], row[at - 1]) + 1
            if whole and second.left[y] == left_j:
                known[y] = min(best, above[at - 1] + (label != labels[y]))
                row.append(known[y])
            else:
                row.append(min(best, start[second.left[y] - left_j] + known[y]))
        table.append(row)
    return table


def _backtrace(first: _Order, second: _Order, distances: list[list[int]]) -> list[tuple[Tree | None, Tree | None]]:
    pairs: list[tuple[Tree | None, Tree | None]] = []
    waiting = [(len(first.nodes) - 1, len(second.nodes) - 1)]
    while waiting:
        i, j = waiting.pop()
        left_i, left_j = first.left[i], second.left[j]
        table = _forest(first, second, i, j, distances)
        x, y = i, j
        while x >= left_i or y >= left_j:
            row, at = x - left_i + 1, y - left_j + 1
            if x >= left_i and y >= left_j and _is_pair(first, second, (i, j), (x, y), table):
                pairs.append((first.nodes[x], second.nodes[y]))
                x, y = x - 1, y - 1
            elif x >= left_i and table[row][at] == table[row - 1][at] + 1:
                pairs.append((first.nodes[x], None))
                x -= 1
            elif y >= left_j and table[row][at] == table[row][at - 1] + 1:
                pairs.append((None, second.nodes[y]))
                y -= 1
            else:
                waiting.append((x, y))
                x, y = first.left[x] - 1, second.left[y] - 1
    return pairs


def _is_pair(
    first: _Order, second: _Order, roots: tuple[int, int], at: tuple[int, int], table: list[list[int]]
) -> bool:
    """Whether a cheapest mapping pairs the nodes `at`; only decided where both are on the left edges of `roots`."""
    (left_i, left_j), (x, y) = (first.left[roots[0]], second.left[roots[1]]), at
    if first.left[x] != left_i or second.left[y] != left_j:
        return False
    cost = first.nodes[x].label != second.nodes[y].label
    return table[x - left_i + 1][y - left_j + 1] == table[x - left_i][y - left_j] + cost
