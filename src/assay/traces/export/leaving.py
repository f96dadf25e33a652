"""Which rollouts may leave the store as traces: what exports of training data withhold too.

Does not decide by the store's salt alone: a task of production that no job has loaded is in no split yet.
"""

from collections.abc import Sequence
from functools import partial

from assay.datasets.tasks import task_key
from assay.traces.export.restrictions import Restrictions
from assay.traces.export.selection import Selection, consents, sealed_tasks
from assay.traces.messages.dialects import chat_messages
from assay.traces.records import NOT_AGENTS, Rollout, Transition, subject_digest
from assay.traces.shown import message_texts
from assay.traces.store import Store
from assay.traces.store.sealing import SEALED, SplitFinder

__all__ = ["Leaving"]


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
