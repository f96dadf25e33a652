"""The page of training data: gates, balance and privacy findings of an export before it is written."""

import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from assay.commands.repeat import names_in
from assay.errors import AssayError, ConfigError, DataError, spoken
from assay.reports.charts import share_bar
from assay.traces.export.pipeline import export_rows, preview_export
from assay.traces.export.settings import (
    KINDS,
    METHODS,
    Balance,
    ExportConfig,
    Gates,
    Selection,
    UngatedExport,
    format_value,
)
from assay.traces.store import Store
from assay.traces.store.paging import count_newest, rollout_page
from assay.web.rendering import DOWNLOADS, MOST_DOWNLOADED, View, filled_in, number_of, rollout_filters

__all__ = ["KINDS", "MOST", "Download", "data_view", "download", "export_command"]

MOST = 5_000  # rollouts of a store up to which the page reads all of them: a few seconds
_FIELDS = ("kind", "run", "program", "task_type", "balance", "min_quality")
_ROWS = 40  # cells of the balance, task types, reasons


def data_view(store: Store, query: Mapping[str, str], *, store_flag: str | None) -> View:
    """What an export would hold, as far as its fields are filled in.

    Personal data are found by patterns alone here, names are not: the models for names are large.
    """
    values = filled_in(query, _FIELDS)
    content: dict[str, Any] = {
        "filters": values, "kinds": KINDS, "methods": METHODS, "manifest": None, "problem": "", "is_large": False,
        "most": MOST, "command": "",
    }  # fmt: skip
    if "kind" in values:
        config = _config(values)
        content["command"] = export_command(values, store_flag)
        content["is_large"] = count_newest(store, most=MOST) > MOST
        if not content["is_large"]:
            try:
                content |= _manifest_view(values["kind"], preview_export(store, config))
            except AssayError as error:  # nothing fits, or a setting is refused
                content["problem"] = str(error)
    return View(template="data.html", title="Data", values=content)


def _config(values: Mapping[str, str]) -> ExportConfig:
    """Raises `ConfigError` if a field is invalid."""
    kind, method = values["kind"], values.get("balance", "none")
    if kind not in KINDS:
        raise ConfigError(f"kind={kind[:80]!r} must be one of {', '.join(KINDS)}")
    runs, programs, task_types = ((values[name],) if name in values else () for name in ("run", "program", "task_type"))
    selection = Selection(runs=runs, programs=programs, task_types=task_types)
    quality = number_of(values, "min_quality")
    return ExportConfig(
        kind=kind, selection=selection, balance=Balance(method=method), privacy="patterns",
        min_quality=ExportConfig.min_quality if quality is None else quality,
    )  # fmt: skip


def export_command(values: Mapping[str, str], store_flag: str | None) -> str:
    """The command that writes the export."""
    flags = [("--run", "run"), ("--program", "program"), ("--task-type", "task_type"), ("--balance", "balance")]
    if values["kind"] == "sft":
        flags.append(("--min-quality", "min_quality"))
    text = "".join(f" {flag} {shlex.quote(values[name])}" for flag, name in flags if name in values)
    rubric = " --rubric RUBRIC" if values["kind"] == "grpo" else ""
    store = "" if store_flag is None else f" --store {shlex.quote(store_flag)}"
    return f"assay export {values['kind']} --out FOLDER{rubric}{text}{store}"


def _manifest_view(kind: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
    balance, privacy, overlap = manifest["balance"], manifest["privacy"], manifest["overlap"]
    before, after = balance["before"], balance["after"]
    most = max([*before.values(), *after.values()], default=0) or 1
    return {
        "manifest": manifest,
        "gates": [
            {
                **gate,
                "value": format_value(gate["value"]),
                "required": format_value(gate["required"]),
                "text": spoken(gate.get("missing") or gate.get("warning") or "", names_in(f"export {kind}")),
            }
            for gate in manifest["gates"]
        ],
        "balance": [
            (cell, count, after.get(cell, 0), share_bar(count / most), share_bar(after.get(cell, 0) / most))
            for cell, count in list(before.items())[:_ROWS]
        ],
        "balanced": balance["method"] != "none",
        "left_out": _most(manifest["left_out"]),
        "problems": _most(manifest["problems"]),
        "task_types": _most(manifest["task_types"]),
        "privacy": privacy,
        "found": _most(privacy.get("found") or {}),
        "overlap": overlap,
    }


def _most(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:_ROWS]


# -- Downloads of the rollouts that the filters of the page leave, as rows of an export.


@dataclass(frozen=True, kw_only=True)
class Download:
    """The rows of an export. `file` is open for reading; who gets it closes it."""

    name: str
    file: BinaryIO
    rows: int


def download(store: Store, query: Mapping[str, str], form: Mapping[str, Any]) -> Download:
    """The newest rollouts that match the filters, as rows of an export with its gates and privacy by patterns.

    Raises:
        ConfigError: a field is invalid, no rollout matches, there is nothing to export, or a gate failed.
    """
    fields = {name: str(form.get(name, "")).strip() for name in ("kind", "min_quality", "min_clean")}
    kind, quality, clean = fields["kind"], number_of(fields, "min_quality"), number_of(fields, "min_clean")
    if kind not in DOWNLOADS:
        raise ConfigError(f"kind={kind[:80]!r} must be one of {', '.join(DOWNLOADS)}")
    _, filters = rollout_filters(store, query)
    ids = tuple(row.id for row in rollout_page(store, filters, limit=MOST_DOWNLOADED).rows)
    if not ids:
        raise ConfigError("no rollout matches the filters, so there is nothing to download")
    config = ExportConfig(
        kind=kind, selection=Selection(rollouts=ids), privacy="patterns",
        min_quality=ExportConfig.min_quality if quality is None else quality,
        gates=Gates() if clean is None else Gates(min_clean=clean),
    )  # fmt: skip
    name = f"assay-{kind}-{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    try:
        file, rows = export_rows(store, config, registered_as=f"downloaded: {name}")
    except (DataError, UngatedExport) as error:
        raise ConfigError(str(error)) from error
    return Download(name=name, file=file, rows=rows)
