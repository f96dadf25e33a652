"""How often a nested query writes its columns out before the database counts instructions."""

import re
from collections import Counter
from collections.abc import Mapping

__all__ = ["columns_written_out"]

_QUOTED = re.compile(r'"[^"]*"|\[[^\]]*\]|`[^`]*`')
_COLUMNS_OF_TABLE = re.compile(r"(\w)\s*\([^()]*\)\s*(as\s*(?:not\s+)?(?:materialized\s*)?\()")  # WITH name (a, b) AS (
_INNERMOST = re.compile(r"(\w*)\s*\(([^()]*)\)")
_DEFINED_BY_QUERY = re.compile(r"(\w+)\s+as\s+(?:not\s+)?(?:materialized\s+)?§(\d+)")
_TOKEN = re.compile(r"§\d+|\b[^\W\d]\w*\b(?!\s*\.)")
_MOST_LEVELS = 200
_KEYWORDS = re.compile(
    "all|and|as|asc|between|by|case|cast|collate|cross|current|desc|distinct|else|end|escape|except|exists|false|"
    "filter|following|from|full|glob|group|having|in|inner|intersect|is|isnull|join|left|like|limit|natural|not|"
    "notnull|null|nulls|offset|on|or|order|outer|over|partition|preceding|range|recursive|right|row|rows|select|then|"
    "true|unbounded|union|using|values|when|where|window|with"
)


def columns_written_out(plain: str) -> float:
    """An upper bound of how often a column is written out, from a query without comments and strings.

    `SELECT x+x x FROM (SELECT x+x x FROM …)` has its innermost column 4 times: a level multiplies by how often it has
    one name. SQLite writes them out while it prepares a query, which cannot be interrupted: 350 characters took minutes
    and gigabytes.
    """
    text = _QUOTED.sub(lambda match: re.sub(r"\W", "_", f"_{match[0][1:-1]}"), plain.casefold())
    text = _COLUMNS_OF_TABLE.sub(r"\1 \2", text)
    queries: list[str] = []

    def taken_out(match: re.Match[str]) -> str:
        if not re.match(r"\s*(?:select|with|values)\b", match[2]):
            return f" {match[2]} "  # without the name of the function
        queries.append(match[2])
        return f"{match[1]} §{len(queries) - 1} "

    while (shorter := _INNERMOST.sub(taken_out, text)) != text:
        text = shorter
    return _size(text, queries, {}, 0)


def _size(text: str, queries: list[str], tables: Mapping[str, float], level: int) -> float:
    if level > _MOST_LEVELS:
        return float("inf")
    tables = dict(tables)
    for name, at in _DEFINED_BY_QUERY.findall(text):
        tables[name] = _size(queries[int(at)], queries, tables, level + 1)
    inside, names = 0.0, Counter[str]()
    for token in _TOKEN.findall(_DEFINED_BY_QUERY.sub(" ", text)):
        if token.startswith("§"):
            inside += _size(queries[int(token[1:])], queries, tables, level + 1)
        elif not _KEYWORDS.fullmatch(token):
            inside += tables.get(token, 0.0)
            names[token] += 1
    return max(names.values(), default=1) * max(1.0, inside)
