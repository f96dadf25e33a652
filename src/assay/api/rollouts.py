"""Public API for `assay traces list`, `rate`, `close`, `import` and `export`: stored rollouts. Does not load DSPy.

`assay traces score` and `forget` are in `assay.api.traces`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Unpack

from assay.errors import ConfigError
from assay.runs.settings import (
    TracesCloseSettings,
    TracesExportSettings,
    TracesImportSettings,
    TracesListSettings,
    TracesRateSettings,
)
from assay.runs.settings.store_options import TracesExportOptions, TracesListOptions
from assay.support.keywords import takes
from assay.support.times import since
from assay.traces.gateway.sessions import close_abandoned
from assay.traces.importers import ImportReport, import_traces
from assay.traces.otlp.exporter import TracesExportReport, export_traces
from assay.traces.records import Rollout, store_rating, why_not_rated
from assay.traces.store import Store
from assay.traces.store.listing import check_run, find_rollouts, known_programs

_EQUAL = ("run_id", "task_id", "split", "status", "phase", "source", "failure")


@takes(TracesListSettings)
def list_rollouts(store: Store, **options: Unpack[TracesListOptions]) -> list[Rollout]:
    """The newest rollouts, without their LM calls.

    Args:
        options: the fields of `assay.runs.settings.TracesListSettings`.
    Raises:
        ConfigError: a value breaks its rule, or no recorded program's name contains `program`.
        DataError: there is no run `run_id`.
    """
    settings = TracesListSettings(**options)
    equal: Mapping[str, str | None] = {name: getattr(settings, name) for name in _EQUAL}
    rollouts = list(
        find_rollouts(
            store,
            equal={name: value for name, value in equal.items() if value is not None},
            program=settings.program,
            since=None if settings.since is None else since(settings.since),
            least=settings.min_score,
            most=settings.max_score,
            limit=settings.limit,
        )
    )
    if not rollouts:
        check_run(store, settings.run_id)
    if settings.program is not None and not rollouts:
        _check_program(settings.program, known_programs(store))
    return rollouts


def _check_program(program: str, known: list[str]) -> None:
    """Refuses a text that is in the name of no recorded program: it is misspelt."""
    if known and not any(program.lower() in name.lower() for name in known):
        raise ConfigError(f"no recorded program's name contains program={program!r}; there are {', '.join(known)}")


@takes(TracesRateSettings)
def rollouts_to_rate(store: Store, *, run_id: str | None = None, limit: int = 20) -> list[Rollout]:
    """The newest ended rollouts without a human rating.

    Raises:
        DataError: there is no run `run_id`.
    """
    check_run(store, run_id)
    rollouts = store.rollouts(run_id=run_id, limit=None)
    ended = (r for r in rollouts if r.human_rating is None and r.status in ("done", "failed"))
    return [rollout for rollout in ended if why_not_rated(rollout) is None][:limit]


@takes()
def rate_rollout(store: Store, rollout_id: str, rating: float) -> str:
    """Stores a human rating in [0, 1]. Returns the full id of the rollout, which may be given by its beginning.

    Raises:
        ConfigError: the rating is out of range, or the rollout takes none.
    """
    rollout = store.rollout(rollout_id)
    store_rating(store, rollout, rating)
    return rollout.id


@takes(TracesCloseSettings)
def close_rollouts(store: Store, *, idle_minutes: float = 60.0) -> dict[str, int]:
    """Ends rollouts that killed gateways left open, see `assay.traces.gateway.sessions.close_abandoned`."""
    return close_abandoned(store, idle_s=60 * idle_minutes)


@takes(TracesImportSettings)
def import_rollouts(store: Store, kind: str, file: str | Path, *, score: str | None = None) -> ImportReport:
    """Imports a file of another tool, see `assay.traces.importers.import_traces`.

    Args:
        kind: otlp, langfuse or mlflow.
    """
    return import_traces(store, kind, file, score=score)


@takes(TracesExportSettings)
def export_rollouts(
    store: Store, kind: str, file: str | Path | None = None, **options: Unpack[TracesExportOptions]
) -> TracesExportReport:
    """Exports ended rollouts as OTLP traces, to a file or an endpoint; `import_rollouts` reads the file.

    Rollouts of sealed splits, of tenants that are not named and without consent are left out.

    Args:
        kind: otlp.
        file: JSON lines, or protobuf if its name ends with `.pb`; None sends to the endpoint.
        options: the fields of `assay.runs.settings.TracesExportSettings`.
    Raises:
        ConfigError: a value breaks its rule, the file exists, or there is no endpoint.
        DataError: there is no run `run_id`.
        NotSent: the endpoint did not take a request; those before it were sent.
    """
    settings = TracesExportSettings(**options)
    if kind != "otlp":
        raise ConfigError(f"kind={kind!r} must be otlp")
    if file is not None and settings.endpoint is not None:
        raise ConfigError(f"endpoint={settings.endpoint!r} would have no effect with a file")
    check_run(store, settings.run_id)
    equal = {"run_id": settings.run_id, "phase": settings.phase}
    rollouts = find_rollouts(
        store, equal={name: value for name, value in equal.items() if value is not None}, program=settings.program,
        since=None if settings.since is None else since(settings.since),
    )  # fmt: skip
    ids = (rollout.id for rollout in rollouts if rollout.ended_at is not None)
    return export_traces(
        store, ids, file=None if file is None else Path(file), endpoint=settings.endpoint, content=settings.content,
        tenants=tuple(settings.tenants),
    )  # fmt: skip
