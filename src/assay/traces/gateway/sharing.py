"""Several gateways on one store: each says that it is there, and finds rollouts and calls of the others.

A gateway alone does none of this. With others, a call is in the store before its answer is complete, with the keys of
its conversation. A request that continues a conversation or a tool call which a gateway does not know is looked up in
the store, while the upstream works on it.
"""

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

import sqlalchemy as sa

from assay.errors import StoreError
from assay.support.scrubbing import error_text
from assay.traces.gateway.calls import Call
from assay.traces.gateway.conversation import Conversations
from assay.traces.gateway.requests import ClientRequest
from assay.traces.gateway.routes import StoreAccess
from assay.traces.gateway.sessions import NEVER_CLOSED, Live, LiveRollouts, rollout_id_of
from assay.traces.messages.gemini import CALL_IDS
from assay.traces.records import Transition, new_id
from assay.traces.store import Store, tables as schema
from assay.traces.store.leases import announce, withdraw
from assay.traces.store.rows import transition_of

EVERY_S = 0.5  # between two looks for other gateways
_PREFIX = "gateway:"  # of the names of the leases by which gateways say that they are there
_PRESENT_S = 10.0  # after which a gateway that says nothing counts as ended
_MOST_S = 3.0  # that a call waits for a store that does not answer
_MOST, _ROWS = 8, 1000  # rollouts and keys of rollouts that are read for a request, those with most of its keys
_LOG = logging.getLogger("assay.gateway")


class Sharing:
    """The other gateways of a gateway's store.

    Attributes:
        met: whether there has been another one.
    """

    def __init__(self, rollouts: LiveRollouts, store_access: StoreAccess) -> None:
        self.rollouts, self.store, self._access = rollouts, rollouts.store, store_access
        self.met = False
        self._name, self._announced = f"{_PREFIX}{new_id()}", -_PRESENT_S
        self._ended = self._written = 0  # calls that have ended, and those of them that are in the store
        self._writing = asyncio.Lock()

    async def arrive(self) -> None:
        """Says that this gateway is there. Others know it when this returns, before its first call."""
        await self.look()
        if self.rollouts.shared:
            await asyncio.sleep(2 * EVERY_S)

    async def look(self) -> None:
        """Says that this gateway is there, and sees whether there are others."""
        due = time.monotonic() - self._announced > _PRESENT_S / 3
        with suppress(StoreError):  # the store is away: what is known of the others stays
            others = await self._access.call(self._look, due, waits=False)
            self._announced = time.monotonic() if due else self._announced
            if others and not self.rollouts.shared:
                self.met = self.rollouts.shared = True
                self.rollouts.put_keys()
            self.rollouts.shared = bool(others)

    def _look(self, due: bool) -> int:
        others = announce(self.store.engine, _PREFIX, self._name, _PRESENT_S if due else None)
        if due:
            self.store.clock.read()
        return others

    async def leave(self) -> None:
        """Says that this gateway is no longer there."""
        with suppress(StoreError):
            await self._access.call(withdraw, self.store.engine, self._name, waits=False)

    async def drop_ended(self) -> None:
        """Drops open rollouts that another gateway has ended."""
        if not self.met:
            return
        with suppress(StoreError):
            ids = [live.rollout.id for live in self.rollouts.open.values() if not live.adopted]
            for rollout_id in await self._access.call(_ended_among, self.store, ids, waits=False):
                self.rollouts.drop(rollout_id)

    async def was_ended(self, rollout_id: str) -> bool:
        """Whether a client has ended the rollout at another gateway, as in `LiveRollouts.was_ended`."""
        ended: list[str] = []
        live = self.rollouts.open.get(rollout_id_of(rollout_id))
        is_own = live is not None and live.adopted  # of a job here, which runs it again: what the store has is older
        if self.rollouts.shared and not self._is_away and not is_own:
            with suppress(StoreError, TimeoutError):  # away: the call is answered, as those of other rollouts
                async with asyncio.timeout(_MOST_S):
                    asked = [rollout_id_of(rollout_id)]
                    ended = await self._access.call(_ended_among, self.store, asked, waits=False)
        self.rollouts.late_calls += bool(ended)
        return bool(ended)

    @property
    def _is_away(self) -> bool:
        """Whether rows of this gateway wait for the store: nothing is to be asked there."""
        return self.store.spill.rows > 0

    async def catch_up(self, call: Call, upstream: Any) -> None:
        """Reads what another gateway has recorded and a call continues, if anything: its rollout, or the calls whose
        tool results it has."""
        if not self.met or self._is_away or (call.live is not None and call.live.adopted):
            return
        try:
            async with asyncio.timeout(_MOST_S):
                await self._catch_up(call, call.client_request(), upstream)
        except TimeoutError:
            _LOG.warning("the store did not answer within %g s: a call may begin a rollout of its own", _MOST_S)
        except Exception as error:  # the call is recorded as one of a gateway alone
            _LOG.error("the calls of other gateways could not be read: %s", error_text(error, call.passed.secrets))

    async def _catch_up(self, call: Call, request: ClientRequest, upstream: Any) -> None:
        live = call.live or self.rollouts.conversations.find(request)
        if live is None:
            await self._find(request, upstream)
            live = self.rollouts.conversations.find(request)
        if live is not None and not _knows_calls(live, request):
            await self._read_calls(live)

    async def claim(self, live: Live, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Stores the fields of the version that a rollout is assigned, unless it has one.

        Returns:
            The fields that the store has: those of another gateway if that was first.
        """
        self.rollouts.put(live, only="unassigned", **fields)
        if self.rollouts.shared and not self._is_away:
            with suppress(StoreError, TimeoutError):
                async with asyncio.timeout(_MOST_S):
                    kept = await self._access.call(_version_of, self.store, live.rollout.id, list(fields))
                    return kept or fields
        return fields

    async def written(self) -> None:
        """Waits until the rows of a call are in the store, before its answer is complete: the client's next call may
        go to another gateway. Calls that end together are written together."""
        if self.rollouts.shared and not self._is_away:
            self._ended += 1
            try:
                async with asyncio.timeout(_MOST_S):
                    await self._write(self._ended)
            except TimeoutError:
                _LOG.warning("the store took no call within %g s: another gateway may not know it yet", _MOST_S)

    async def _write(self, ended: int) -> None:
        async with self._writing:
            if self._written < ended:
                written = self._ended
                with suppress(StoreError):
                    await self._access.call(self.store.written, _MOST_S)
                self._written = written

    async def _find(self, request: ClientRequest, upstream: Any) -> None:
        """Opens the rollouts here that the store has under the keys of a request."""
        keys, found = Conversations.keys_of(request), dict[str, list[str]]()
        for key, rollout_id in await self._access.call(_rollouts_by_key, self.store, list(keys), waits=False):
            found.setdefault(rollout_id, []).append(key)
        for rollout_id in sorted(found, key=lambda name: -len(found[name]))[:_MOST]:
            live = self.rollouts.open.get(rollout_id)
            if live is None:
                rollout = await self._access.call(self.store.rollout, rollout_id, waits=False)
                live = self.rollouts.open.get(rollout_id)  # meanwhile another call may have opened it
                if live is None and rollout.status == "running":
                    live = self.rollouts.take_up(rollout, upstream, explicit="client_id" in rollout.metadata)
            else:
                await self._read_calls(live)
            if live is not None:
                for key in found[rollout_id]:
                    self.rollouts.conversations.add(live, *keys[key], request)

    async def _read_calls(self, live: Live) -> None:
        calls = await self._access.call(_calls_of, self.store, live.rollout.id, list(live.calls), waits=False)
        self.rollouts.catch_up(live, calls)


def _knows_calls(live: Live, request: ClientRequest) -> bool:
    """Whether the calls are known whose tool results a request has."""
    return all(call_id in live.trail.calls for call_id in request.results if not call_id.startswith(CALL_IDS))


def _rollouts_by_key(store: Store, keys: Collection[str]) -> list[tuple[str, str]]:
    table = schema.conversation_keys
    query = sa.select(table.c.key, table.c.rollout_id).where(table.c.key.in_(keys))
    with store.engine.connect() as connection:
        return [(key, rollout_id) for key, rollout_id in connection.execute(query.limit(_ROWS))] if keys else []


def _calls_of(store: Store, rollout_id: str, but: Iterable[str | int]) -> list[Transition]:
    """The calls of a rollout, in order, without known ones."""
    calls, known = schema.transitions, {key for key in but if isinstance(key, str)}
    own = calls.c.rollout_id == rollout_id
    with store.engine.connect() as connection:
        ids = [call for (call,) in connection.execute(sa.select(calls.c.id).where(own, calls.c.id.is_not(None)))]
        unknown = sa.select(calls).where(own, calls.c.id.in_(set(ids) - known)).order_by(calls.c.t)
        return [transition_of(row) for row in connection.execute(unknown).mappings()]


def _version_of(store: Store, rollout_id: str, names: Collection[str]) -> dict[str, Any]:
    """These fields of a rollout once all that was put is written; none if it has no version."""
    store.written(_MOST_S)
    r = schema.rollouts.c
    query = sa.select(*(r[name] for name in names)).where(r.id == rollout_id, r.version.is_not(None))
    with store.engine.connect() as connection:
        row = connection.execute(query).mappings().one_or_none()
    return {} if row is None else dict(row)


def _ended_among(store: Store, ids: Collection[str]) -> list[str]:
    """The rollouts that a client has ended. An idle timeout does not count."""
    r = schema.rollouts.c
    decided = sa.or_(r.score.is_not(None), sa.func.coalesce(r.error, "") != NEVER_CLOSED)
    query = sa.select(r.id).where(r.id.in_(ids), r.status != "running", decided)
    with store.engine.connect() as connection:
        return list(connection.execute(query).scalars()) if ids else []
