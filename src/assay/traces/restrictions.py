"""Whose data a prompt may show in an export: that of nobody who is sealed, forgotten, of another tenant, or without consent.

A rollout's own tenant and consent are conditions of the selection; this is about the demonstrations inside its prompts.
"""

from typing import Any

import orjson
import sqlalchemy as sa

from assay.datasets.tasks import content_hash
from assay.traces import schema
from assay.traces.records import subject_digest
from assay.traces.sealing import HASH, SEALED, SplitFinder
from assay.traces.selection import Selection, Turn, consents
from assay.traces.shown import TaskTexts, message_texts
from assay.traces.store import Store

__all__ = ["SHOWN", "Restrictions"]

SHOWN = "calls whose prompt shows a task of another tenant, without consent, of a person who was forgotten, or sealed"


class Restrictions:
    """Tasks that prompts of an export may not show. A task that a permitted rollout has too, word for word, is permitted."""

    def __init__(self, store: Store, selection: Selection, splits: SplitFinder) -> None:
        self.selection, self.splits = selection, splits
        self._forgotten = store.forgotten()
        self.texts = TaskTexts()  # of restricted tasks, for calls of which nobody recorded what they show
        self.tasks: set[str] = set()
        self._subjects: dict[str, str] = {}
        with store.engine.connect() as connection:
            known = schema.known_tasks
            for task, tenant, consent, subject in connection.execute(sa.select(known.c.task, known.c.tenant, known.c.consent, known.c.subject)):
                if subject is not None:
                    self._subjects[task] = subject
                if self._restricted(tenant, consent, subject, told=bool(tenant or consent or subject)):
                    self.tasks.add(task)
            self._read_rollouts(connection)

    def _restricted(self, tenant: str | None, consent: str | None, subject: str | None, *, told: bool = True) -> bool:
        if (tenant is not None and tenant not in self.selection.tenants) or (subject is not None and subject in self._forgotten):
            return True
        return (consent is not None and not consents(consent)) or (told and consent is None and self.selection.require_consent)

    def _read_rollouts(self, connection: sa.Connection) -> None:
        r = schema.rollouts
        query = sa.select(r.c.inputs_json, r.c.tenant, r.c.consent, r.c.data_subject).order_by(r.c.task_id, r.c.group_id, r.c.id)
        restricted, permitted, last = dict[str, str](), set[str](), None
        for row in connection.execution_options(yield_per=500).execute(query):
            if row == last:
                continue
            last = row
            text, tenant, consent, subject = row
            if self._restricted(tenant, consent, subject_digest(subject) if subject else None):
                restricted[text] = ""
            elif not self.tasks and not restricted:
                continue
            else:
                permitted.add(text)
        for text in restricted.keys() - permitted:
            inputs = orjson.loads(text)
            if inputs:
                task = content_hash(inputs)
                self.texts.add(task, inputs)
                self.tasks.add(task[:HASH])

    def people(self, turn: Turn) -> set[str]:
        """Hashes of the people whose tasks a call shows."""
        shown = orjson.loads(turn.shown_tasks_json) if turn.shown_tasks_json not in ("", "[]", None) else []
        return {person for task in shown if (person := self._subjects.get(task[:HASH])) is not None}

    def refuses(self, turn: Turn, own: dict[str, Any]) -> bool:
        """Whether a call shows, beside its own task, one that it may not."""
        shown = orjson.loads(turn.shown_tasks_json) if turn.shown_tasks_json not in ("", "[]", None) else []
        if any(task[:HASH] in self.tasks or self.splits.of_hash(task) in SEALED for task in shown):
            return True
        if not len(self.texts):
            return False
        return bool(self.texts.shown(message_texts(turn.messages), own=content_hash(own), inputs=own))
