"""Restrictions on the tasks that an exported prompt may contain, for instance as demonstrations.

Sealed tasks, tasks of erased people, of other tenants or without consent are refused. The rollout's own tenant and
consent are checked by the selection.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import orjson
import sqlalchemy as sa

from assay.datasets.tasks import task_key
from assay.traces.export.selection import Turn, consents, sealed_tasks
from assay.traces.export.settings import Selection
from assay.traces.messages.dialects import chat_messages
from assay.traces.records import NOT_AGENTS, Rollout, Transition, subject_digest
from assay.traces.shown import TaskTexts, message_texts
from assay.traces.store import Store, tables as schema
from assay.traces.store.sealing import SEALED, SplitFinder, input_forms

RESTRICTED_DEMO = "calls whose prompt shows a task of another tenant, without consent, of an erased person, or sealed"
RESTRICTED_TASK = "without an owner, of a task of another tenant, without consent or of an erased person"


class Restrictions:
    """Tasks that prompts of an export may not contain. A task is permitted if a permitted rollout has the same
    inputs.

    Args:
        texts: Whether to read the texts of all rollouts, for calls without a record of the tasks in their prompt.
    """

    def __init__(self, store: Store, selection: Selection, splits: SplitFinder, *, texts: bool = True) -> None:
        self.selection, self.splits = selection, splits
        self._forgotten = store.forgotten()
        self.texts = TaskTexts()  # texts of restricted tasks, for calls without a record of the tasks in their prompt
        self.tasks: set[str] = set()
        self._subjects: dict[str, str] = {}
        with store.engine.connect() as connection:
            known = schema.known_tasks
            for task, tenant, consent, subject in connection.execute(
                sa.select(known.c.task, known.c.tenant, known.c.consent, known.c.subject)
            ):
                if subject is not None:
                    self._subjects[task] = subject
                if self._restricted(tenant, consent, subject, has_terms=bool(tenant or consent or subject)):
                    self.tasks.add(task)
            self._known = frozenset(self.tasks)
            if texts:
                self._read_rollouts(connection)

    def _restricted(
        self, tenant: str | None, consent: str | None, subject: str | None, *, has_terms: bool = True
    ) -> bool:
        if (tenant is not None and tenant not in self.selection.tenants) or (self._forgotten.covers(subject, tenant)):
            return True
        return (consent is not None and not consents(consent)) or (
            has_terms and consent is None and self.selection.require_consent
        )

    def _read_rollouts(self, connection: sa.Connection) -> None:
        r = schema.rollouts
        query = sa.select(r.c.inputs_json, r.c.tenant, r.c.consent, r.c.data_subject).order_by(
            r.c.task_id, r.c.group_id, r.c.id
        )
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
                task = task_key(inputs)
                self.texts.add(task, inputs)
                self.tasks.add(task)

    def refuses_task(self, rollout: Rollout) -> bool:
        """Whether a rollout that names no owner is of a task whose owner, known from a data file, restricts it."""
        if rollout.tenant or rollout.consent or rollout.data_subject or not self._known:
            return False
        return any(task_key(inputs) in self._known for inputs in input_forms(rollout.inputs))

    def people(self, turn: Turn) -> set[str]:
        """Digests of the data subjects whose tasks are in a call's prompt."""
        tasks = orjson.loads(turn.shown_tasks_json) if turn.shown_tasks_json not in ("", "[]", None) else []
        return {person for task in tasks if (person := self._subjects.get(task)) is not None}

    def refuses(self, turn: Turn, own_inputs: dict[str, Any]) -> bool:
        """Whether a call's prompt contains a restricted task other than its own.

        Args:
            own_inputs: Inputs of the call's own task.
        """
        tasks = orjson.loads(turn.shown_tasks_json) if turn.shown_tasks_json not in ("", "[]", None) else []
        return self.refuses_prompt(tasks, lambda: message_texts(turn.messages), own_inputs)

    def refuses_prompt(
        self, tasks: Iterable[str], texts: Callable[[], Sequence[str]], own_inputs: Mapping[str, Any]
    ) -> bool:
        """As `refuses`, of a prompt.

        Args:
            tasks: Keys of the tasks that are recorded for it.
            texts: Gives its messages; called only if they are compared.
        """
        if any(task in self.tasks or self.splits.of_key(task) in SEALED for task in tasks):
            return True
        if not len(self.texts):
            return False
        return bool(self.texts.tasks_in(texts(), own_task=task_key(own_inputs), inputs=own_inputs))


# -- Which rollouts may leave the store as traces: what exports of training data withhold too.
#
# Does not decide by the store's salt alone: a task of production that no job has loaded is in no split yet.


class Leaving:
    """Decides on rollouts of a store, as it is when this is made.

    Args:
        tenants: whose rollouts may leave, besides those without a tenant.
        content: whether texts leave; if not, the texts of tasks and prompts restrict nothing.
        thorough: also compares with the texts of all stored rollouts. Reads them, so not for every batch of a gateway,
            whose calls name the tasks that they show.
    """

    def __init__(
        self, store: Store, *, tenants: Sequence[str] = (), content: bool = True, thorough: bool = True
    ) -> None:
        self.tenants, self.content = tuple(tenants), content
        self._forgotten, self._splits = store.forgotten(), SplitFinder(store)
        self._sealed: set[str] = set()
        self._restrictions: Restrictions | None = None
        if content:
            selection = Selection(tenants=self.tenants)
            self._restrictions = Restrictions(store, selection, self._splits, texts=thorough)
            if thorough:
                self._sealed = sealed_tasks(store, self._splits, by_salt=False)[0]

    def permits(self, rollout: Rollout) -> bool:
        """Whether a rollout may leave: it is not sealed, of no other tenant, of no erased person, not without consent,
        and its prompts show no task of which one of these is true."""
        if (
            rollout.split.strip().lower() in SEALED
            or rollout.source in (*NOT_AGENTS, "outside")
            or not (rollout.tenant is None or rollout.tenant in self.tenants)
            or not (rollout.consent is None or consents(rollout.consent))
            or self._is_erased(rollout)
        ):
            return False
        restrictions = self._restrictions
        if restrictions is None:
            return True
        if task_key(rollout.inputs) in self._sealed or self._splits.knows_as_sealed(rollout.inputs):
            return False
        if restrictions.refuses_task(rollout):
            return False
        return not any(
            restrictions.refuses_prompt(call.shown_tasks, partial(_texts, call), rollout.inputs)
            for call in rollout.transitions
        )

    def _is_erased(self, rollout: Rollout) -> bool:
        subject = rollout.data_subject
        return bool(subject) and self._forgotten.covers(subject_digest(str(subject)), rollout.tenant)


def _texts(call: Transition) -> list[str]:
    return message_texts(chat_messages(call.request))
