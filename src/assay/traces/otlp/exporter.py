"""Sends the rollouts and metrics of a process as they come, in a thread of its own.

Whatever the endpoint does, nothing that calls `ended` waits or fails: what cannot be sent is counted and logged.
"""

import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from assay.errors import UnknownRollout
from assay.support.scrubbing import error_text
from assay.traces.export.leaving import Leaving
from assay.traces.otlp.metrics import metrics_request
from assay.traces.otlp.sending import Endpoint, send
from assay.traces.otlp.spans import trace_request
from assay.traces.store import Store

__all__ = ["Exporter"]

_LOG = logging.getLogger("assay.otlp")
_WAITING = 10_000  # rollouts that wait at most; the oldest are dropped
_BATCH = 64  # rollouts of a request
_SENT = 20_000  # ids that are remembered, so that a rollout whose score comes later is not sent twice
_READ_AGAIN_S = 60.0  # how old what is known of sealed tasks and erased people may be
_QUIET_S = 60.0  # between two lines of the log


class Exporter:
    """Exports ended rollouts and metrics until it is stopped.

    Args:
        stores: where the rollouts are written; `ended` is set as their listener.
        rollouts: whether rollouts are sent.
        content: with texts.
        tenants: whose rollouts are sent, besides those without a tenant.
        metrics: returns the counts of the gateway and its agents, for `metrics_request`.
        delay_s: how long after its end a rollout is read from the store, so that its score is there.
        metrics_s: seconds between two requests with metrics.
        first_s: pause before the second try of a request.
    Attributes:
        sent, failed: rollouts that were sent, and that were not. Those that may not leave count as neither.
    """

    def __init__(
        self, endpoint: Endpoint, stores: Sequence[Store], *, rollouts: bool = True, content: bool = True,
        tenants: Sequence[str] = (), metrics: Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]]] | None = None,
        delay_s: float = 5.0, metrics_s: float = 60.0, first_s: float = 1.0,
    ) -> None:  # fmt: skip
        self.endpoint, self.stores, self.content, self.tenants = endpoint, list(stores), content, tenants
        self.metrics, self.delay_s, self.metrics_s, self.first_s = metrics, delay_s, metrics_s, first_s
        self.sent = self.failed = 0
        self._since = time.time()
        self._permits: dict[int, tuple[float, Leaving]] = {}
        self._waiting: deque[tuple[float, int, str]] = deque()
        self._known: OrderedDict[str, None] = OrderedDict()
        self._lock, self._stopping = threading.Lock(), threading.Event()
        self._logged_at = -_QUIET_S
        self._thread = threading.Thread(target=self._running, name="otlp", daemon=True)
        if rollouts:
            for number, store in enumerate(self.stores):
                store.on_ended = partial(self.ended, store=number)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Sends what waits, each request once, for at most `timeout_s`."""
        for store in self.stores:
            store.on_ended = None
        self._stopping.set()
        self._thread.join(timeout_s)

    def ended(self, rollout: str, store: int = 0) -> None:
        """Takes note of a rollout that has ended. Does not wait."""
        with self._lock:
            if rollout in self._known:
                return
            self._known[rollout] = None
            if len(self._known) > _SENT:
                self._known.popitem(last=False)
            self._waiting.append((time.monotonic() + self.delay_s, store, rollout))
            if len(self._waiting) > _WAITING:
                self._waiting.popleft()
                self.failed += 1

    def to_dict(self) -> dict[str, int]:
        return {"sent": self.sent, "failed": self.failed, "waiting": len(self._waiting)}

    def _running(self) -> None:
        measured = time.monotonic()
        while not self._stopping.wait(min(1.0, self.delay_s or 0.05, self.metrics_s)):
            self._tick()
            if time.monotonic() - measured >= self.metrics_s:
                measured = time.monotonic()
                self._guarded(self._send_metrics)
        self._tick()
        self._guarded(self._send_metrics)

    def _tick(self) -> None:
        while batch := self._due():
            if not self._guarded(partial(self._send, batch)):
                self.failed += len(batch)

    def _due(self) -> list[tuple[int, str]]:
        now = time.monotonic()
        batch: list[tuple[int, str]] = []
        with self._lock:
            while self._waiting and len(batch) < _BATCH and (self._waiting[0][0] <= now or self._stopping.is_set()):
                batch.append(self._waiting.popleft()[1:])
        return batch

    def _send(self, batch: Sequence[tuple[int, str]]) -> None:
        rollouts = []
        for at in {store for store, _ in batch}:
            self.stores[at].flush()
        for at, name in batch:
            try:
                rollout = self.stores[at].rollout(name)
            except UnknownRollout:  # erased meanwhile
                continue
            if self._leaving(at).permits(rollout):
                rollouts.append(rollout)
        if rollouts:
            self._post(trace_request(rollouts, content=self.content))
            self.sent += len(rollouts)

    def _leaving(self, store: int) -> Leaving:
        """What may leave a store. Read again at intervals, because data subjects are erased and jobs seal tasks."""
        made, leaving = self._permits.get(store, (-math.inf, None))
        if leaving is None or time.monotonic() - made > _READ_AGAIN_S:
            leaving = Leaving(self.stores[store], tenants=self.tenants, content=self.content, thorough=False)
            self._permits[store] = (time.monotonic(), leaving)
        return leaving

    def _send_metrics(self) -> None:
        if self.metrics is not None and self.endpoint.metrics:
            stats, agents = self.metrics()
            self._post(metrics_request(stats, agents, since=self._since, now=time.time()))

    def _post(self, request: Mapping[str, Any]) -> None:
        tries = 1 if self._stopping.is_set() else 5
        send(self.endpoint, request, tries=tries, first_s=self.first_s, wait=self._stopping.wait)

    def _guarded(self, work: Callable[[], None]) -> bool:
        """Runs `work`; errors are logged, at most one per `_QUIET_S`."""
        try:
            work()
            return True
        except Exception as error:  # also a record that cannot be encoded: the thread must not end
            self._tell(error_text(error))
        return False

    def _tell(self, text: str) -> None:
        if time.monotonic() - self._logged_at >= _QUIET_S:
            self._logged_at = time.monotonic()
            _LOG.warning("OTLP export: %s", text)
