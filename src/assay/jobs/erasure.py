"""Erasure of a person's texts from files: artifacts, runs, pools and other files of `.assay`, and the response cache.

Pages of `--report` are emptied wherever they are. Other files elsewhere are searched and named, never changed: they are
the user's. The store's own file is the matter of `assay.traces.store.erasure`. What was made of a person's data, and
what was made of that, is named: exports, pools, artifacts, adapters, trainings, runs.
"""

import itertools
import json
import os
import re
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.datasets.tasks import task_key
from assay.deployment.pool import manifest_path
from assay.deployment.registry import Registry
from assay.errors import AssayError
from assay.models import ResponseCache
from assay.models.lora import adapter_home, list_adapters
from assay.sources import trust
from assay.sources.artifact_files import hash_of_manifest, read_json, resealed
from assay.support.values import json_text
from assay.traces import Store
from assay.traces.shown import demos_in
from assay.traces.store import tables as schema
from assay.traces.store.erasure import ERASED, ErasedTexts

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
    made = [*_registered(store), *_adapters(), *_trainings(), *_made_artifacts(home), *_runs(store)]
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


def _made_artifacts(home: Path) -> Iterator[_Made]:
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


_HOME = ".assay"  # the name of a folder that assay made, with everything in it
_OURS = ("artifacts", "improve", "impact", "loop", "runs", "training")  # folders that assay makes next to a store
_PAGE = ".html"  # of a registered report, which is assay's wherever it is
_MOST_FIELDS = 10  # of a demonstration, in whose combinations the inputs are looked for
_MOST_BYTES = 2**28  # of a file that is searched
_SQLITE, _PARQUET = b"SQLite format 3\0", b"PAR1"


@dataclass
class ErasedFiles:
    """Paths of files.

    Attributes:
        emptied: a text of the person was removed from them.
        holding: they hold such a text and were not changed.
        unread: they could not be searched: too large, in use, or of a binary format.
    """

    emptied: list[str] = field(default_factory=list)
    holding: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


def demonstrated_inputs(store: Store, home: Path, tasks: Collection[str]) -> Iterator[tuple[str, Any]]:
    """The inputs of tasks in the demonstrations of artifacts, with the key of their task, where a manifest names it.

    Args:
        tasks: their keys.
    """
    folders = {*(Path(place) for place in store.artifacts()), *(home / "artifacts").glob("*")}
    for folder in sorted(folders) if tasks else ():
        try:
            shown = read_json(folder / "manifest.json", folder).get("shown") or {}
            demos = demos_in(read_json(folder / "program.json", folder))
        except AssayError:
            continue
        by_demo = shown.get("by_demo") or ()
        for demo, names in zip(demos, by_demo, strict=True) if len(demos) == len(by_demo) else ():
            yield from ((name, _inputs_in(demo, name)) for name in names if name in tasks)


def _inputs_in(demo: Any, task: str) -> Any:
    """The fields of a demonstration that are the task's inputs; all of it where they are not found."""
    if not isinstance(demo, dict):
        return demo
    if "key" in demo and "demos" in demo:  # of `NearestDemos`: the text of the inputs
        return demo["key"]
    names = sorted(demo)[:_MOST_FIELDS]
    for size in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, size):
            if task_key(inputs := {name: demo[name] for name in chosen}) == task:
                return inputs
    return demo


def erase_answers(home: Path, requests: Sequence[dict[str, Any]], texts: ErasedTexts) -> tuple[int, int]:
    """Erases cached answers: to these requests, and those that repeat a text of the person.

    Returns:
        Their number, and the number of answers without a recorded request, which are all erased.
    Raises:
        CacheError: the cache could not be written.
    """
    path = home / "cache" / "responses.db"
    if not path.is_file():
        return 0, 0
    cache = ResponseCache(path)
    try:
        return cache.forget(requests) + cache.forget_texts(texts.are_in), cache.forget_unowned()
    finally:
        cache.close()


def erase_files(store: Store, home: Path, texts: ErasedTexts, elsewhere: Collection[str]) -> ErasedFiles:
    """Searches files for the texts of a person, and removes the texts from those of a folder `.assay` and from pages.

    Artifacts get new hashes, so that they still load, and the registry follows.

    Args:
        home: folder of runs, cache and artifacts.
        elsewhere: other files and folders to search.
    """
    files, owned = ErasedFiles(), home.resolve().name == _HOME
    if not texts:
        return files
    artifacts = {folder: (sha, _shown_without(folder, texts)) for folder, sha in _artifacts(home)} if owned else {}
    roots = [home.absolute()] if owned else [home.absolute() / name for name in _OURS]
    seen = set[Path]()
    for root, ours in [
        *((root, owned) for root in roots),
        *((Path(place), place.endswith(_PAGE)) for place in elsewhere),
    ]:
        for path in _files_below(root):
            if (place := path.resolve()) not in seen and not _is_of_store(path, store.address.file):
                seen.add(place)
                _erase_file(path, texts, files, ours=ours)
    changed = {Path(path).resolve() for path in files.emptied}
    for folder, (before, shown) in artifacts.items():
        if any(path.is_relative_to(folder) for path in changed):
            after = resealed(folder, shown)
            Registry(store.engine).reseal(before, after)
            if trust.is_trusted(before):
                trust.allow(after, folder)
    return files


def files_of_jobs(store: Store) -> Iterator[str]:
    """Local files that the jobs of a store were given, such as their data."""
    configs = sa.select(schema.runs.c.config).distinct()
    with store.engine.connect() as connection:
        values = {
            value
            for config in connection.execute(configs).scalars()
            for value in json.loads(config).values()
            if isinstance(value, str)
        }
    yield from (
        str(Path(value).absolute()) for value in sorted(values) if not value.endswith(_PAGE) and os.path.isfile(value)
    )


def _artifacts(home: Path) -> Iterator[tuple[Path, str]]:
    """Unchanged artifacts, with the hashes of their manifests."""
    for file in home.rglob("manifest.json"):
        try:
            manifest = read_json(file, file.parent)
        except AssayError:
            continue
        if isinstance(manifest.get("program"), str) and manifest.get("sha256") == hash_of_manifest(manifest):
            yield file.parent.resolve(), str(manifest["sha256"])


def _shown_without(folder: Path, texts: ErasedTexts) -> dict[str, Any]:
    """The entry of an artifact's manifest about its demonstrations, without those that will be removed."""
    shown: dict[str, Any] = dict(read_json(folder / "manifest.json", folder).get("shown") or {})
    try:
        demos, by_demo = demos_in(read_json(folder / "program.json", folder)), shown.get("by_demo") or []
    except AssayError:
        return shown
    if len(demos) == len(by_demo):
        shown["by_demo"] = [names for demo, names in zip(demos, by_demo, strict=True) if texts.without(demo) == demo]
    return shown


def _files_below(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
    for folder, _, names in os.walk(root):
        yield from (Path(folder) / name for name in sorted(names) if not (Path(folder) / name).is_symlink())


def _is_of_store(path: Path, file: Path | None) -> bool:
    """Whether a file is the store's, a log of a database, the response cache, or a lock."""
    return (
        (file is not None and path.resolve() == file.resolve())
        or path.name.endswith(("-wal", "-shm", "-journal", ".lock"))
        or (path.parent.name == "cache" and path.name == "responses.db")
    )


def _erase_file(path: Path, texts: ErasedTexts, files: ErasedFiles, *, ours: bool) -> None:
    try:
        if path.stat().st_size > _MOST_BYTES:
            files.unread.append(str(path))
            return
        content = path.read_bytes()
        new = _without(path, content, texts, change=ours and path.suffix != ".spill")
    except (OSError, sqlite3.Error, UnicodeDecodeError):
        files.unread.append(str(path))
        return
    if new is None:
        return
    if new is False:
        files.holding.append(str(path))
        return
    if isinstance(new, bytes):
        scratch = path.with_name(f".{path.name}.{os.getpid()}")
        scratch.write_bytes(new)
        scratch.chmod(path.stat().st_mode & 0o777)
        scratch.replace(path)
    files.emptied.append(str(path))


def _without(path: Path, content: bytes, texts: ErasedTexts, *, change: bool) -> bytes | bool | None:
    """The content of a file without the texts.

    Returns:
        None if it holds none; False if it holds one and `change` is off; True if the file was changed in place.
    Raises:
        UnicodeDecodeError: of another binary format.
    """
    if content.startswith(_SQLITE):
        return _without_rows(path, texts, change=change)
    if content.startswith(_PARQUET):
        return _without_records(path, texts, change=change)
    text = content.decode("utf-8")
    new = _new_text(path, text, texts)
    if new == text:
        return None
    return new.encode() if change else False


def _new_text(path: Path, text: str, texts: ErasedTexts) -> str:
    if path.suffix == ".jsonl":
        return "".join(line for line in text.splitlines(keepends=True) if not texts.are_in(line))
    if path.suffix == ".json" and texts.are_in(text):
        try:
            return json.dumps(texts.without(json.loads(text)), indent=1, ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
    return texts.without_lines(text)


def _without_rows(path: Path, texts: ErasedTexts, *, change: bool) -> bool | None:
    """Replaces texts in all tables of an SQLite file, and rewrites it without its free pages."""
    found = False
    db = sqlite3.connect(path if change else f"file:{path}?mode=ro", uri=not change, timeout=1, isolation_level=None)
    try:
        db.execute("PRAGMA secure_delete=ON" if change else "PRAGMA query_only=ON")
        names = db.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
        for (name,) in names.fetchall():
            columns = [row[1] for row in db.execute(f'PRAGMA table_info("{name}")')]
            for row in db.execute(f'SELECT * FROM "{name}"').fetchall():
                for column, value in zip(columns, row, strict=True):
                    if isinstance(value, str) and texts.are_in(value):
                        found = True
                        if change:
                            db.execute(
                                f'UPDATE "{name}" SET "{column}" = ? WHERE "{column}" = ?',
                                (_new_value(texts, value), value),
                            )
        if found and change:
            db.execute("VACUUM")
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        db.close()
    return change if found else None


def _new_value(texts: ErasedTexts, text: str) -> str:
    try:
        value = json.loads(text)
    except ValueError:
        return ERASED
    return json.dumps(texts.without(value), ensure_ascii=False)


def _without_records(path: Path, texts: ErasedTexts, *, change: bool) -> bool | None:
    """Removes the rows of a Parquet file that hold one of the texts."""
    import pyarrow as pa
    from pyarrow import parquet

    table = parquet.read_table(path)
    kept = [not texts.are_in(json_text(row)) for row in table.to_pylist()]
    if all(kept):
        return None
    if change:
        parquet.write_table(table.filter(pa.array(kept)), path)
    return change
