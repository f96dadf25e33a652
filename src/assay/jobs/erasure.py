"""Erasure of a person's texts from files: artifacts, runs, pools and other files of `.assay`, and the response cache.

Pages of `--report` are emptied wherever they are. Other files elsewhere are searched and named, never changed: they are
the user's. The store's own file is the matter of
`assay.traces.store.erasure`.
"""

import itertools
import json
import os
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from assay.datasets.tasks import task_key
from assay.deployment.registry import Registry
from assay.errors import AssayError
from assay.models import ResponseCache
from assay.sources import trust
from assay.sources.artifact_files import hash_of_manifest, read_json, resealed
from assay.support.values import json_text
from assay.traces import Store
from assay.traces.shown import demos_in
from assay.traces.store import tables as schema
from assay.traces.store.erasure import ERASED, ErasedTexts

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
