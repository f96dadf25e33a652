"""A schema as text for a prompt: all tables if they fit, otherwise those that the question is about."""

import math
import re
from collections import Counter
from collections.abc import Sequence

from assay.programs.sql.database import Table

__all__ = ["schema_text"]

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_IGNORED = frozenset(
    (
        *("a", "an", "and", "are", "by", "do", "does", "for", "from", "has", "have", "how", "id", "in", "is", "it"),
        *("many", "much", "of", "on", "s", "the", "there", "to", "what", "which", "who"),
    )
)


def words_of(text: str) -> list[str]:
    """Words in lower case without plural endings; `customerId`, `customer_id` and `CustomerID` have the same."""
    return [_stem(word.lower()) for word in _WORD.findall(text)]


def _stem(word: str) -> str:
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 4 and word.endswith(("ses", "xes", "ches", "shes")):
        return word[:-2]
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def schema_text(tables: Sequence[Table], question: str, characters: int) -> str:
    """The tables with their columns, one a line, in at most about so many characters.

    If they do not fit, tables that share words with the question come first, rare words counting most, then the tables
    that these refer to. The names of others follow as far as there is room, and the number of those that are left out.
    """
    lines = [_line(table) for table in tables]
    if sum(map(len, lines)) + len(lines) <= characters:
        return "\n".join(lines)
    chosen: list[int] = []
    used = 0
    rest = max(100, characters // 5)  # for the names of other tables
    for at in _by_relevance(tables, question):
        if used + len(lines[at]) + 1 > characters - rest and chosen:
            break
        chosen.append(at)
        used += len(lines[at]) + 1
    others, names = [table.name for at, table in enumerate(tables) if at not in set(chosen)], ""
    for count, name in enumerate(others):
        if used + len(names) + len(name) + 40 > characters:
            names += f" and {len(others) - count} more"
            break
        names += f", {name}" if names else name
    text = "\n".join(lines[at] for at in sorted(chosen))
    return f"{text}\nother tables: {names}" if names else text


def _line(table: Table) -> str:
    refers = dict(table.references)
    columns = [f"{name} -> {refers[name]}" if name in refers else name for name in table.columns]
    return f"{table.name}({', '.join(columns)})"


def _by_relevance(tables: Sequence[Table], question: str) -> list[int]:
    """Positions of the tables that share words with the question or are referred to by one that does, the most relevant
    first; all if there are none."""
    asked = set(words_of(question)) - _IGNORED
    names = [set(words_of(table.name)) for table in tables]
    columns = [set(words_of(" ".join(table.columns))) for table in tables]
    spread = Counter(word for own, of in zip(names, columns, strict=True) for word in own | of)

    def weight(word: str) -> float:
        return math.log(1 + len(tables) / spread[word])

    scores = [
        sum(2 * weight(word) for word in asked & own) + sum(weight(word) for word in (asked & of) - own)
        for own, of in zip(names, columns, strict=True)
    ]
    place = {table.name: at for at, table in enumerate(tables)}
    reached = list(scores)
    for at, table in enumerate(tables):
        for _, other in table.references:
            if other in place:  # a table next to a relevant one is needed to join it
                reached[place[other]] = max(reached[place[other]], scores[at] / 2)
    relevant = [at for at in range(len(tables)) if reached[at] > 0] or list(range(len(tables)))
    return sorted(relevant, key=lambda at: (-reached[at], tables[at].name))
