"""Rollouts that show remembered facts of a person. Reads the store, changes nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import sqlalchemy as sa

from assay.traces.store import tables as schema

_AT_ONCE = 400  # rows that are read at once
_FEWEST_CHARS = 12  # of a fact; a shorter text, such as `likes tea`, is in prompts that are not about the person


@dataclass
class RecalledFacts:
    """Ids of rollouts.

    Args:
        own: without a data subject, and a tool returned facts of the person: those of an agent that talked with them.
        others: all others with a call or a tool result that quotes one of the facts.
    """

    own: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)


def fact_line(number: int, about: str, text: str) -> str:
    """A fact as the tool `recall` returns it, one per line. The number makes the line the fact's own."""
    return f"{number}{f' ({about})' if about else ''}: {text}"


def recalled_facts(connection: sa.Connection, facts: Sequence[Any], *, without: sa.Select[Any]) -> RecalledFacts:
    """The rollouts that show facts of a person.

    Args:
        facts: rows of the table `facts`.
        without: selects the ids of rollouts that are left out.
    """
    result = RecalledFacts()
    if not facts:
        return result
    lines = {fact_line(fact.id, fact.about, fact.text) for fact in facts}
    texts = [orjson.dumps(fact.text).decode()[1:-1] for fact in facts if len(fact.text) >= _FEWEST_CHARS]
    for row in _calls(connection, without):
        quotes = any(text in row.tools_json or text in row.request_json for text in texts)
        if not row.data_subject and any(lines & set(result.splitlines()) for result in _results(row.tools_json)):
            result.own.add(row.rollout_id)
        elif quotes:
            result.others.add(row.rollout_id)
    result.others -= result.own
    return result


def _results(tools_json: str) -> list[str]:
    return [text for tool in orjson.loads(tools_json) if isinstance(text := tool.get("result"), str)]


def _calls(connection: sa.Connection, without: sa.Select[Any]) -> Iterator[Any]:
    """The texts of each LM call, and of each rollout with tools before its first call."""
    r, t = schema.rollouts, schema.transitions
    not_left_out = r.c.id.not_in(without)
    call = sa.select(t.c.rollout_id, r.c.data_subject, t.c.request_json, t.c.tools_json)
    early = sa.select(
        r.c.id.label("rollout_id"), r.c.data_subject, sa.literal("").label("request_json"),
        r.c.early_tools_json.label("tools_json"),
    )  # fmt: skip
    for query in (
        call.select_from(r.join(t, r.c.id == t.c.rollout_id)).where(not_left_out),
        early.where(not_left_out, r.c.early_tools_json != "[]"),
    ):
        yield from connection.execute(query.execution_options(yield_per=_AT_ONCE))
