"""Downloads of the rollouts that the filters of the page leave, as rows of an export."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from assay.errors import ConfigError, DataError
from assay.traces.export.gates import Gates, UngatedExport
from assay.traces.export.pipeline import ExportConfig, export_rows
from assay.traces.export.selection import Selection
from assay.traces.store import Store
from assay.traces.store.paging import rollout_page
from assay.web.filters import DOWNLOADS, MOST_DOWNLOADED, number_of, rollout_filters

__all__ = ["Download", "download"]


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
    _, filters = rollout_filters(query)
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
