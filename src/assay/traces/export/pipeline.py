"""Exports training data from the store: selects, anonymizes, gates, balances and writes rollouts, in constant memory.

Files are written to a temporary folder, which is renamed when all enforced gates have passed.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from assay.errors import ConfigError
from assay.models.defaults import DEFAULT_WEIGHTS
from assay.support.numbers import counted
from assay.support.report import Report, Table
from assay.support.reprs import shortened
from assay.support.scrubbing import fields
from assay.support.values import json_text
from assay.traces.export.export_pass import ExportPass
from assay.traces.export.files import trl_files
from assay.traces.export.selection import Turn, check_named, count_drawn, sealed_tasks
from assay.traces.export.settings import ExportConfig, gates_table, refuse_ungated
from assay.traces.records import Rollout
from assay.traces.store import Store
from assay.traces.store.sealing import SplitFinder, claim_salt

_SHOWN = (  # parts of the manifest that are in the report
    "gates", "passed", "left_out", "problems", "groups_without_spread", "balance", "overlap", "privacy", "task_types",
    "rollouts",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, repr=False)
class ExportReport(Report):
    """Result of `export_traces`. `to_dict()` is the `--json` object."""

    path: Path
    rows: int
    manifest: dict[str, Any]
    # kind="grpo" only: up to 20 rollouts with the text of their last call, to try the rubric's checks on
    answers: list[tuple[Rollout, Turn]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def _facts(self) -> list[tuple[str, str]]:
        failed = [gate["gate"] for gate in self.manifest["gates"] if not gate["passed"]]
        return super()._facts() + ([("failed_gates", shortened(", ".join(failed)))] if failed else [])

    def to_dict(self) -> dict[str, Any]:
        shown = {"path": str(self.path), "rows": self.rows, "notes": self.notes}
        return shown | {key: self.manifest[key] for key in _SHOWN} | {"template": self.manifest.get("template")}

    def lines(self) -> Iterator[str | Table]:
        data, manifest = self.to_dict(), self.manifest
        yield gates_table(data["gates"])
        if data["balance"]["method"] != "none":
            before, after = data["balance"]["before"], data["balance"]["after"]
            cells = [(cell, str(before[cell]), str(after.get(cell, 0))) for cell in before]
            yield Table(
                title=f"balance: {data['balance']['method']}", header=("rollouts of", "before", "after"), rows=cells
            )
        title = f"{counted(self.rows, 'rows')} for {manifest['kind']} from {counted(data['rollouts'], 'rollouts')}"
        yield Table(title=title, rows=list(_facts_of(data)))
        privacy = data["privacy"]
        yield from (f"note: {note}" for note in [*([privacy["note"]] if privacy.get("note") else []), *self.notes])
        yield str(self.path)


def _facts_of(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What the rows are, and what is not in them."""
    if template := data.get("template"):
        by_default = ", the default `model`" if template["model"] == DEFAULT_WEIGHTS else ""
        yield "rows are for the chat template of", f"{template['model']}{by_default}"
    yield from ((f"rows of {kind}", str(count)) for kind, count in data["task_types"].items())
    yield from ((f"left out: {reason}", str(count)) for reason, count in data["left_out"].items())
    yield from ((f"calls with a problem: {problem}", str(count)) for problem, count in data["problems"].items())
    if data["groups_without_spread"]:
        yield "zero-variance groups (advantage 0)", str(data["groups_without_spread"])
    overlap, privacy = data["overlap"], data["privacy"]
    if overlap["shared"]:
        text = f"{overlap['shared']} of {overlap['tasks']}"
        yield f"tasks that share {overlap['ngram']} words with a sealed one", text
    replaced = ", ".join(f"{count} {name}" for name, count in privacy.get("found", {}).items()) or "nothing"
    result = "not replaced" if privacy["engine"] == "off" else f"{replaced} replaced; {privacy['state']}"
    yield "personal data", f"{privacy['engine']}: {result}"
    for language, types in privacy.get("recall", {}).items():
        shares = (f"{name} {result['found']}/{result['planted']}" for name, result in types.items())
        yield f"planted values found, {language}", ", ".join(shares)


def is_export(folder: str | Path) -> bool:
    """Whether a folder is an export of any kind."""
    return (Path(folder) / "manifest.json").is_file() and (Path(folder) / "data.jsonl").is_file()


def export_traces(
    store: Store,
    out: str | Path,
    config: ExportConfig,
    *,
    rubric: Mapping[str, bytes] | None = None,
    check_reward: Callable[[Mapping[str, Any], Sequence[tuple[Rollout, Turn]]], Sequence[str]] | None = None,
    bar: Callable[[int], contextlib.AbstractContextManager[Callable[[int], None]]] | None = None,
) -> ExportReport:
    """Export training data into a new folder.

    Writes `data.jsonl`, `manifest.json`, a dataset card, `data.parquet` for transitions, and a `trl` configuration for
    the other kinds.

    Args:
        store: Store to read from.
        out: Folder to create.
        config: Settings of the export.
        rubric: Files of the rubric that scores GRPO completions, by relative path; the rubric's YAML file comes first.
        check_reward: Called with the manifest and some exported answers with their rollouts; raises `DataError` if the
            reward says nothing about them. Returns the criteria that the reward leaves out.
        bar: Opens a progress bar for a number of transitions.
    Raises:
        ConfigError: The folder exists, or a setting is invalid.
        DataError: There is nothing to export; nothing was written.
        UngatedExport: An enforced gate failed; nothing was written.
    """
    folder = Path(out).absolute()
    _check_arguments(folder, config, rubric)
    run = _pass(store, config)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error}. Choose another folder with `out=…`") from None
    try:
        with bar(run.total) if bar else contextlib.nullcontext(lambda _: None) as advance:
            written = run.write(scratch, advance)
        manifest = run.manifest(written)
        refuse_ungated(manifest, drawn=count_drawn(store, config.selection))
        left_out = check_reward(manifest, run.answers) if check_reward is not None else ()
        trl_files(scratch, config.kind, manifest, rubric=rubric, template=run.target.marked, without=sorted(left_out))
        run.save_table(scratch)
        manifest_text = json_text(fields(manifest, texts=True), indent=1)
        (scratch / "manifest.json").write_text(manifest_text + "\n", encoding="utf-8")
        os.chmod(scratch, 0o755)
        try:
            claim_salt(store, run.splits.salt)  # fixes the splits: exported tasks cannot become test tasks later
            # Registered before the folder appears, so that erasure finds it even if this process is killed in between.
            store.put_artifact(str(folder), sorted(run.people))
            os.rename(scratch, folder)
        except OSError as error:
            raise ConfigError(
                f"{folder} was created while this export was written; name a new folder (`out`)"
            ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    rows = written["data.jsonl"]["rows"]
    return ExportReport(path=folder, rows=rows, manifest=manifest, answers=run.answers)


def preview_export(store: Store, config: ExportConfig) -> dict[str, Any]:
    """What an export would be: its manifest, with gates that may have failed. Reads the whole store.

    The rows are written to a temporary folder, which is removed; neither salt nor export is registered.

    Raises:
        ConfigError: A setting is invalid.
        DataError: There is nothing to export.
    """
    run = _pass(store, config)
    with tempfile.TemporaryDirectory(prefix="assay-preview-") as scratch:
        return run.manifest(run.write(Path(scratch), lambda _: None, parquet=False))


def export_rows(store: Store, config: ExportConfig, *, registered_as: str) -> tuple[BinaryIO, int]:
    """The rows of an export alone, as a file open for reading that has no name, and their number.

    Args:
        registered_as: Name under which erasure finds the export.
    Raises:
        ConfigError, DataError, UngatedExport: As `export_traces`.
    """
    run = _pass(store, config)
    with tempfile.TemporaryDirectory(prefix="assay-rows-") as scratch:
        manifest = run.manifest(run.write(Path(scratch), lambda _: None, parquet=False))
        refuse_ungated(manifest, drawn=count_drawn(store, config.selection))
        claim_salt(store, run.splits.salt)
        store.put_artifact(registered_as, sorted(run.people))
        return (Path(scratch) / "data.jsonl").open("rb"), manifest["rows"]  # the folder is removed, the file stays


def _pass(store: Store, config: ExportConfig) -> ExportPass:
    """A pass over what the store holds now.

    Raises:
        DataError: Nothing in the store has a selected name.
    """
    store.flush()
    check_named(store, config.selection)
    splits = SplitFinder(store)
    sealed, overlap = sealed_tasks(store, splits)
    return ExportPass(store, config, sealed, overlap, splits)


def _check_arguments(folder: Path, config: ExportConfig, rubric: Mapping[str, bytes] | None) -> None:
    if config.kind == "grpo" and rubric is None:
        raise ConfigError("`kind='grpo'` requires `rubric=…`, which scores the completions")
    if folder.exists():
        raise ConfigError(f"{folder} already exists and is not overwritten; name a new folder (`out`)")
    if config.privacy_key is not None and Path(config.privacy_key).absolute().is_relative_to(folder):
        raise ConfigError(
            f"`privacy_key={str(config.privacy_key)!r}` is inside the export folder; keep the key elsewhere"
        )
