"""Exports stored rollouts as OTLP traces to a file or an endpoint, in batches."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from assay.errors import ConfigError
from assay.support.places import check_writable, writing
from assay.support.reprs import ReportRepr
from assay.traces.export.leaving import Leaving
from assay.traces.otlp.sending import PROTOBUF, Endpoint, encoded, send
from assay.traces.otlp.spans import trace_request
from assay.traces.records import Rollout, subject_digest
from assay.traces.store import Store

__all__ = ["TracesExportReport", "export_traces"]

_BATCH = 64  # rollouts of a request


@dataclass(frozen=True, kw_only=True, repr=False)
class TracesExportReport(ReportRepr):
    """What was exported.

    Attributes:
        path: the file, or the address of the endpoint.
        withheld: rollouts that were left out: sealed, of other tenants or erased people, without consent, or with
            prompts that show such a task.
    """

    path: str
    rollouts: int
    transitions: int
    withheld: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def export_traces(
    store: Store, ids: Iterable[str], *, file: Path | None, endpoint: str | None = None, content: bool = True,
    tenants: Sequence[str] = (),
) -> TracesExportReport:  # fmt: skip
    """Exports rollouts by their ids.

    Args:
        file: JSON lines, or protobuf (each request after its length, as the collector's file exporter writes it) if
            its name ends with `.pb`; None sends to `endpoint`.
        content: with texts.
        tenants: whose rollouts are exported, besides those without a tenant.
    Raises:
        ConfigError: the file exists or cannot be written, or see `Endpoint.of`.
        NotSent: see `send`.
    """
    if file is not None:
        _check_new(file)
    target = Endpoint.of(endpoint) if file is None else None
    selected = _Selected(store, ids, Leaving(store, tenants=tenants, content=content))
    counts = [0, 0]
    if file is not None:
        store.put_searched(file)  # first, so that erasure finds it after a kill too
    with ExitStack() as files:
        stream = None if file is None else files.enter_context(files.enter_context(writing(file)).open("wb"))
        while batch := list(islice(selected, _BATCH)):
            request = trace_request(batch, content=content)
            if target is not None:
                send(target, request)
            elif stream is not None and file is not None:
                _write(stream, request, is_protobuf=file.suffix == ".pb")
            counts = [counts[0] + len(batch), counts[1] + sum(len(rollout.transitions) for rollout in batch)]
    if file is not None:
        store.put_artifact(str(file.resolve()), sorted(selected.people))
    path = str(file) if target is None else target.traces
    return TracesExportReport(path=path, rollouts=counts[0], transitions=counts[1], withheld=selected.withheld)


def _check_new(file: Path) -> None:
    check_writable(file, "file")
    if file.exists():
        raise ConfigError(f"{file} already exists and is not overwritten: name another file, or remove it")


class _Selected(Iterator[Rollout]):
    """The rollouts that may leave, each read when it is its turn."""

    def __init__(self, store: Store, ids: Iterable[str], leaving: Leaving) -> None:
        self.withheld, self.people = 0, set[str]()
        self._store, self._ids, self._leaving = store, iter(ids), leaving

    def __next__(self) -> Rollout:
        for name in self._ids:
            rollout = self._store.rollout(name)
            if self._leaving.permits(rollout):
                if rollout.data_subject:
                    self.people.add(subject_digest(rollout.data_subject))
                return rollout
            self.withheld += 1
        raise StopIteration


def _write(stream: BinaryIO, request: dict[str, Any], *, is_protobuf: bool) -> None:
    if is_protobuf:
        body = encoded(request, PROTOBUF)
        stream.write(len(body).to_bytes(4, "big") + body)
    else:
        stream.write(json.dumps(request, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
