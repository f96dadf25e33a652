"""What was made of a person's data, and what was made of that: exports, pools, artifacts, adapters, trainings, runs.

Reads manifests and the store; changes nothing.
"""

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.deployment.pool import manifest_path
from assay.errors import AssayError
from assay.models.lora.adapters import adapter_home, list_adapters
from assay.sources.artifact_files import read_json
from assay.traces import Store
from assay.traces.store import tables as schema

_HASHED = 12  # hex digits by which exports name an adapter


@dataclass(frozen=True, kw_only=True)
class _Made:
    """Something that was made.

    Attributes:
        name: its path, or the id of a run.
        people: hashes of the data subjects whose data it was made of.
        origin: JSON text of what else it was made of.
        known_as: patterns by which the origin of others names it.
    """

    name: str
    kind: str
    people: frozenset[str]
    origin: str
    known_as: tuple[str, ...]
    sha256: str = ""


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """Everything that was made of a person's data.

    Attributes:
        paths: files and folders: what the store knows, oldest first, then adapters and trainings, then the rest.
        adapters: hashes of adapters.
        runs: ids of jobs that used one of these.
        unknown: folders of models that were trained on and that assay did not make: they may hold merged adapters.
    """

    paths: list[str]
    adapters: set[str]
    runs: list[str]
    unknown: list[str]


def lineage_of(store: Store, home: Path, people: Collection[str]) -> Lineage:
    """What was made of the data of a person.

    Args:
        home: folder of runs and artifacts.
        people: hashes of the person's name, see `subject_digests`.
    """
    made = [*_registered(store), *_adapters(), *_trainings(), *_artifacts(home), *_runs(store)]
    made = list({entry.name: entry for entry in reversed(made)}.values())[::-1]  # the first of a name
    derived, waiting = dict[str, _Made](), made
    while True:
        patterns = [pattern for entry in derived.values() for pattern in entry.known_as]
        named = re.compile("|".join(patterns)) if patterns else None
        new = [
            entry
            for entry in waiting
            if not entry.people.isdisjoint(people) or (named is not None and named.search(entry.origin))
        ]
        if not new:
            break
        derived |= {entry.name: entry for entry in new}
        waiting = [entry for entry in waiting if entry.name not in derived]
    chosen = [entry for entry in made if entry.name in derived]
    return Lineage(
        paths=[entry.name for entry in chosen if entry.kind != "run"],
        adapters={entry.sha256 for entry in chosen if entry.sha256},
        runs=[entry.name for entry in chosen if entry.kind == "run"],
        unknown=sorted({folder for entry in waiting if entry.kind == "training" for folder in _models(entry.origin)}),
    )


def _path(path: str | Path) -> tuple[str, ...]:
    """Patterns of a path in JSON, and of what is below it."""
    texts = {json.dumps(str(path))[1:-1], json.dumps(os.path.realpath(path))[1:-1]}
    return tuple(f'"{re.escape(text)}(?=["/])' for text in texts)


def _registered(store: Store) -> Iterator[_Made]:
    """Artifacts, exports, pools, data sets and reports that the store knows."""
    table = schema.made_from
    with store.engine.connect() as connection:
        rows = connection.execute(sa.select(table.c.artifact, table.c.people_json).order_by(table.c.created_at)).all()
    for name, people in rows:
        yield _Made(
            name=name, kind="registered", people=frozenset(json.loads(people)), origin=_origin(Path(name)),
            known_as=_path(name),
        )  # fmt: skip


def _artifacts(home: Path) -> Iterator[_Made]:
    """Artifacts without people, which the store does not know."""
    for file in sorted((home / "artifacts").glob("*/manifest.json")):
        folder = file.parent.absolute()
        yield _Made(
            name=str(folder), kind="registered", people=frozenset(), origin=_origin(folder), known_as=_path(folder)
        )


def _origin(path: Path) -> str:
    """What the manifest of a folder or file says, with the paths in it absolute."""
    file = path / "manifest.json" if path.is_dir() else manifest_path(path)
    try:
        return json.dumps(_absolute(read_json(file, file.parent)))
    except AssayError:
        return ""


def _absolute(value: Any) -> Any:
    """JSON in which names of files and folders that exist are followed by their absolute paths."""
    if isinstance(value, Mapping):
        return {key: _absolute(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_absolute(part) for part in value]
    is_path = isinstance(value, str) and 0 < len(value) < 1000 and "\0" not in value and os.path.exists(value)
    return [value, os.path.realpath(value)] if is_path else value


def _adapters() -> Iterator[_Made]:
    for adapter in list_adapters():
        yield _Made(
            name=str(adapter.path), kind="adapter", people=frozenset(adapter.made.get("people") or ()),
            origin=json.dumps([_absolute(adapter.made), list(adapter.after), _trained_as(adapter.name)]),
            known_as=(
                *_path(adapter.path), adapter.sha256, rf"\+{adapter.sha256[:_HASHED]}\b",
                rf'\+{re.escape(adapter.name)}(?=["+])',
            ),
            sha256=adapter.sha256,
        )  # fmt: skip


def _trainings() -> Iterator[_Made]:
    """Folders of trainings: their checkpoints, and the adapters of models that are not embedded."""
    for file in sorted((adapter_home().parent / "training").glob("*/job.json")):
        try:
            made_from = read_json(file, file.parent).get("made_from") or {}
        except AssayError:
            continue
        yield _Made(
            name=str(file.parent), kind="training", people=frozenset(made_from.get("people") or ()),
            origin=json.dumps({**_absolute(made_from), "as": _trained_as(file.parent.name)}),
            known_as=_path(file.parent),
        )  # fmt: skip


def _trained_as(name: str) -> str:
    """How an adapter is linked to the job that trains it."""
    return f"adapter:{name}"


def _models(origin: str) -> list[str]:
    """The folder of the model that a training started from, if it was one."""
    model = json.loads(origin).get("model")
    return [model[1]] if isinstance(model, list) else []


def _runs(store: Store) -> Iterator[_Made]:
    """Jobs, by the program, model and data that they were given."""
    table = schema.runs
    with store.engine.connect() as connection:
        rows = connection.execute(sa.select(table.c.id, table.c.config).order_by(table.c.started_at)).all()
    for run_id, config in rows:
        values = json.loads(config) if isinstance(config, str) else config
        trained = values.get("adapter_name") or ""
        yield _Made(
            name=run_id, kind="run", people=frozenset(), origin=json.dumps(_absolute(values)),
            known_as=(f'"{re.escape(run_id)}"', *([f'"{re.escape(_trained_as(trained))}"'] if trained else [])),
        )  # fmt: skip
