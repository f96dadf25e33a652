"""Memory: facts that agents remember of persons, in the store's database, with full-text search.

Facts are append-only. A new value supersedes an older one, whose validity ends; nothing is overwritten. Erasure of a
person (`assay traces forget`) deletes the facts of their rollouts and those about them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.errors import ConfigError
from assay.programs.retrieval.fulltext import WORDS, match_of, prepare, words_of
from assay.support.options import takes
from assay.traces.places import current_rollout
from assay.traces.records import subject_digest, subject_digests
from assay.traces.store import Store, tables as schema
from assay.traces.store.connection import open_engine
from assay.traces.store.erasure import fact_line
from assay.traces.store.location import store_address
from assay.traces.store.rows import clean
from assay.traces.store.turns import SharedClock, lock_names

_TEXT, _NAME = 2000, 64  # characters
_SEALED = ("gate", "test")


@dataclass(frozen=True)
class Fact:
    """One fact.

    Attributes:
        id: number in the store.
        subject: the person, as written.
        about: what it is a value of, such as `phone`; "" if nothing was named. A person has one valid fact of each.
        rollout_id, t: the rollout and the LM call that it comes from; None outside of a rollout or before a call.
        valid_from, valid_to: seconds since the epoch; `valid_to` is None while the fact is valid.
        superseded_by: id of the fact that took its place; None if it is valid or was forgotten.
    """

    id: int
    subject: str
    text: str
    about: str
    rollout_id: str | None
    t: int | None
    valid_from: float
    valid_to: float | None
    superseded_by: int | None


class Memory:
    """Facts about persons, stated in any conversation.

    Memories of other names and tenants do not see each other. In a rollout of the splits train and val, facts from
    rollouts of the splits gate and test are not found, so that nothing is learned from sealed tasks.

    Args:
        store: the database, as everywhere; an open `Store` is used, not closed.
        name: of the memory, up to 64 characters.
        tenant: of facts that are written outside of a rollout with a tenant.
        clock: returns seconds since the epoch; None for the store's clock.
    Raises:
        ConfigError: an empty or long name.
        StoreError: the database cannot be opened, or its SQLite has no full-text search.
    """

    @takes
    def __init__(
        self,
        store: Store | str | Path | None = None,
        *,
        name: str = "memory",
        tenant: str | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        if not isinstance(name, str) or not 0 < len(name) <= _NAME:
            raise ConfigError(f"name={name!r} must be a text of 1 to {_NAME} characters")
        self.name, self.tenant = name, tenant
        self.engine = store.engine if isinstance(store, Store) else open_engine(store_address(store))
        self.clock = clock or SharedClock(self.engine).now
        prepare(self.engine, "facts", ("about", "text"))

    def __deepcopy__(self, memo: object) -> "Memory":
        return self

    def remember(self, subject: str, text: str, *, about: str = "") -> Fact:
        """Adds a fact. One with the same `about`, in upper or lower case, that says something else is superseded.

        A valid fact that says the same is returned as it is. Without `about` contradictory facts are kept side by side,
        and `recall` returns the newer one first.

        Raises:
            ConfigError: subject or text is empty or no text: facts about nobody would be shared.
        """
        if not isinstance(text, str | int | float):
            raise ConfigError(f"text={text!r} must be a text")
        subject, text = _person(subject), _line(text)[:_TEXT]
        if not subject or not text:
            raise ConfigError(f"subject={subject!r} and text={text!r} must not be empty")
        f, rollout = schema.facts, current_rollout()
        row: dict[str, Any] = {
            "memory": self.name,
            "subject": subject[:200],
            "person": subject_digest(subject),
            "text": text,
            "about": _line(about)[:_NAME],
            "tenant": self._tenant(),
            "split": rollout.split if rollout else "",
            "rollout_id": rollout.id if rollout else None,
            "t": len(rollout.transitions) - 1 if rollout and rollout.transitions else None,
        }
        same_name = sa.or_(f.c.about == row["about"], sa.func.lower(f.c.about) == row["about"].lower())
        valid = [*self._own(subject), same_name, f.c.valid_to.is_(None)]
        with self.engine.begin() as connection:
            lock_names(connection, [row["person"]])  # a fact and what it supersedes are written together
            now = self.clock()  # inside the lock: the order of times is that of the facts
            same = connection.execute(sa.select(f).where(*valid, f.c.text == text)).first()
            if same is not None:
                return _fact(same)
            row |= {"valid_from": now}
            insert = sa.insert(f)
            if connection.dialect.name == "postgresql":
                insert, row = insert.values(words=WORDS), {**row, "text_of_words": f"{row['about']} {text}"}
            key = connection.execute(insert, row).inserted_primary_key
            number = int(key[0] if key is not None else 0)
            if row["about"]:
                ended = sa.update(f).where(*valid, f.c.id < number).values(valid_to=now, superseded_by=number)
                connection.execute(ended)
            return _fact(connection.execute(sa.select(f).where(f.c.id == number)).one())

    def recall(self, query: str, *, subject: str, k: int = 5, at: float | None = None) -> list[Fact]:
        """The valid facts of a person whose text or `about` has a word of the query, best first; of equals the newest.

        Without words in the query, the newest facts.

        Args:
            at: facts that were valid at this time, in seconds since the epoch; None for now.
        Raises:
            ConfigError: `k` is not a number of facts, `at` no time, or the subject no name.
        """
        if not isinstance(k, int) or k < 1:
            raise ConfigError(f"k={k!r} must be >= 1")
        if at is not None and not isinstance(at, int | float):
            raise ConfigError(f"at={at!r} must be a time in seconds since the epoch")
        f, words = schema.facts, words_of(clean(str(query)))
        where = self._valid(_person(subject), self.clock() if at is None else at)
        newest = (f.c.valid_from.desc(), f.c.id.desc())
        with self.engine.connect() as connection:
            if not words:
                rows: Sequence[Any] = connection.execute(sa.select(f).where(*where).order_by(*newest).limit(k)).all()
            elif connection.dialect.name == "sqlite":
                table = sa.table("facts_fts", sa.column("rowid"), sa.column("rank"), sa.column("facts_fts"))
                matches = sa.select(table.c.rowid, table.c.rank).where(table.c.facts_fts.op("MATCH")(match_of(words)))
                best = matches.subquery()
                statement = sa.select(f).join(best, best.c.rowid == f.c.id).where(*where)
                rows = connection.execute(statement.order_by(best.c.rank, *newest).limit(k)).all()
            else:
                query_of = sa.func.to_tsquery("english", " | ".join(words))
                rank = sa.func.ts_rank(f.c.words, query_of)
                statement = sa.select(f).where(*where, f.c.words.op("@@")(query_of))
                rows = connection.execute(statement.order_by(rank.desc(), *newest).limit(k)).all()
        return [_fact(row) for row in rows]

    def forget(self, fact: int, *, subject: str) -> bool:
        """Ends the validity of a person's fact. It stays in the history; `assay traces forget` erases a person.

        Returns:
            False if the person has no such valid fact.
        """
        f, now = schema.facts, self.clock()
        with self.engine.begin() as connection:
            ended = sa.update(f).where(*self._valid(_person(subject), now), f.c.id == fact).values(valid_to=now)
            return bool(connection.execute(ended).rowcount)

    def history(self, subject: str) -> list[Fact]:
        """All facts of a person, superseded and forgotten ones too, oldest first."""
        f = schema.facts
        where = self._own(_person(subject))
        with self.engine.connect() as connection:
            return [_fact(row) for row in connection.execute(sa.select(f).where(*where).order_by(f.c.id))]

    def tools(self, subject: str) -> list[Callable[..., str]]:
        """The functions `remember`, `recall` and `forget` for an agent, bound to one person."""
        if not _person(subject):
            raise ConfigError("subject='' must be the name of a person: facts about nobody would be shared")

        def remember(fact: str, about: str = "") -> str:
            """Remembers a fact about the user, for later conversations. about: what it is a value of, such as phone."""
            return f"remembered as number {self.remember(subject, fact, about=about).id}"

        def recall(query: str) -> str:
            """Facts about the user from earlier conversations that have words of the query."""
            facts = self.recall(query, subject=subject)
            lines = [fact_line(fact.id, fact.about, fact.text) for fact in facts]
            return "\n".join(lines) or "nothing is known about this"

        def forget(number: int) -> str:
            """Forgets the fact of the user with this number."""
            return "forgotten" if self.forget(number, subject=subject) else f"there is no fact with number {number}"

        return [remember, recall, forget]

    def _tenant(self) -> str | None:
        rollout = current_rollout()
        return rollout.tenant if rollout is not None and rollout.tenant is not None else self.tenant

    def _own(self, subject: str) -> list[Any]:
        """Conditions: facts of this memory, tenant and person that the open rollout may see."""
        f, tenant, rollout = schema.facts, self._tenant(), current_rollout()
        own = [
            f.c.memory == self.name,
            f.c.person.in_(subject_digests(subject)),
            f.c.tenant.is_(None) if tenant is None else f.c.tenant == tenant,
        ]
        if rollout is not None and rollout.split and rollout.split not in _SEALED:
            own.append(f.c.split.not_in(_SEALED))
        return own

    def _valid(self, subject: str, at: float) -> list[Any]:
        f = schema.facts
        return [*self._own(subject), f.c.valid_from <= at, sa.or_(f.c.valid_to.is_(None), f.c.valid_to > at)]


def _person(subject: str) -> str:
    """The name of a person, without line breaks. Raises `ConfigError` if it is not text."""
    if not isinstance(subject, str):
        raise ConfigError(f"subject={subject!r} must be the name of a person")
    return _line(subject)


def _line(text: str) -> str:
    return " ".join(clean(str(text)).split())


def _fact(row: Any) -> Fact:
    return Fact(**{name: row._mapping[name] for name in Fact.__dataclass_fields__})
