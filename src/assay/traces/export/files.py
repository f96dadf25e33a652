"""Files of an export: JSON lines and Parquet. Does not select rows.

The dataset card and the configurations for `trl` are in `assay.traces.export.trl_files`.
"""

import contextlib
import functools
import gc
import hashlib
import json
from collections.abc import Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from assay.support.scrubbing import fields
from assay.support.values import json_text, json_value
from assay.traces.export.transitions import JSON_COLUMNS, parquet_schema
from assay.traces.store.rows import as_json

__all__ = ["MAX_BUFFERED_BYTES", "RowWriter", "without_gc"]

_REPEATED = [  # columns with repeated values: dictionary-encoded in Parquet
    "task",
    "task_type",
    "tools",
    "model",
    "weights",
    "adapters",
    "step_rewards",
    "status",
    "program",
    "program_version",
]
_BATCH = 2000  # rows of a Parquet row group
_LINES = 500  # lines hashed and written at once
MAX_BUFFERED_BYTES = 64 << 20  # from this size on, lines and row group are written without waiting for more rows
_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Disable the cyclic garbage collector: rows have no reference cycles, and it took a third of an export's time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class RowWriter:
    """Writes rows with one schema to `data.jsonl` and optionally to `data.parquet`.

    In Parquet, JSON columns (request, tools, adapters) are text; token ids and logprobs are lists of numbers. After the
    context manager has exited, `files` has the rows, bytes and sha256 of each file.

    Args:
        folder: Existing folder to write into.
        parquet: Whether to write `data.parquet`; the rows must be `TransitionRow`s.
        encoded: Whether the rows are `TransitionRow`s, with JSON columns as text; by default as `parquet`.
    """

    def __init__(self, folder: Path, *, parquet: bool, encoded: bool | None = None) -> None:
        self.folder, self.parquet, self.rows = folder, parquet, 0
        self.files: dict[str, dict[str, Any]] = {}
        self._digest, self._waiting = hashlib.sha256(), list[dict[str, Any]]()
        self._buffered: list[bytes] = []
        self._json = JSON_COLUMNS if (parquet if encoded is None else encoded) else ()
        self._writer: Any = None
        self._size = 0  # bytes of the lines since the last row group

    def __enter__(self) -> "RowWriter":
        self._lines: BinaryIO = open(self.folder / "data.jsonl", "wb", buffering=1 << 20)
        return self

    def write(self, row: dict[str, Any]) -> None:
        row = _without_secrets(row, self._json)
        line = _line(row, self._json)
        self._buffered.append(line)
        self.rows += 1
        self._size += len(line)
        full = self._size >= MAX_BUFFERED_BYTES
        if full or len(self._buffered) >= _LINES:
            self._write_lines()
        if self.parquet:
            self._waiting.append(row)
        if full or len(self._waiting) >= _BATCH:
            self._flush()

    def leave_out(self, numbers: Sequence[int]) -> None:
        """Removes rows of these numbers, from 0, from `data.jsonl`. Only for exports without Parquet."""
        if not numbers:
            return
        self._write_lines()
        self._lines.close()
        path, removed = self.folder / "data.jsonl", set(numbers)
        path.rename(written := path.with_suffix(".all"))
        self._digest = hashlib.sha256()
        self._lines = open(path, "wb", buffering=1 << 20)  # noqa: SIM115
        with open(written, "rb") as lines:
            for number, line in enumerate(lines):
                if number not in removed:
                    self._digest.update(line)
                    self._lines.write(line)
        written.unlink()
        self.rows -= len(removed)

    def _write_lines(self) -> None:
        data = b"".join(self._buffered)
        self._buffered = []
        self._digest.update(data)
        self._lines.write(data)

    def _flush(self) -> None:
        self._size = 0
        if not self.parquet:
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = pa.schema(parquet_schema())
        columns = (
            zip(*map(itemgetter(*schema.names), self._waiting), strict=True)
            if self._waiting
            else [()] * len(schema.names)
        )
        arrays = [
            pa.array(_column(values, field.type), type=field.type)
            for values, field in zip(columns, schema, strict=True)
        ]
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                self.folder / "data.parquet", batch.schema, compression="snappy", use_dictionary=_REPEATED
            )
        self._writer.write_batch(batch)
        self._waiting = []

    def __exit__(self, kind: Any, *error: object) -> None:
        self._write_lines()
        self._lines.close()
        if self.parquet and kind is None:
            self._flush()
        if self._writer is not None:
            self._writer.close()
        path = self.folder / "data.jsonl"
        self.files["data.jsonl"] = {"rows": self.rows, "bytes": path.stat().st_size, "sha256": self._digest.hexdigest()}
        parquet = self.folder / "data.parquet"
        if parquet.exists():
            with open(parquet, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            self.files["data.parquet"] = {"rows": self.rows, "bytes": parquet.stat().st_size, "sha256": digest}


def _without_secrets(row: dict[str, Any], encoded: Sequence[str]) -> dict[str, Any]:
    """Remove known secrets and credential fields from a row: a row may be older than what is known as a secret."""
    scrubbed: dict[str, Any] = fields(row, texts=True)
    for name in encoded:
        if name in ("input", "tools") and isinstance(text := scrubbed.get(name), str):
            read = orjson.loads(text)
            clean = fields(read, mask_known=False, texts=name == "tools")
            if clean is not read:
                scrubbed = {**scrubbed, name: as_json(clean)}
    return scrubbed


_as_json = functools.partial(json_value, placeholders=True)


def _line(row: dict[str, Any], encoded: Sequence[str]) -> bytes:
    try:
        written = row | {name: orjson.Fragment(row[name]) for name in encoded} if encoded else row
        return orjson.dumps(written, default=_as_json, option=_OPTIONS)
    except TypeError:  # orjson refuses lone surrogates; the standard library writes them
        plain = row | {name: json.loads(row[name]) for name in encoded}
        return json_text(plain).encode() + b"\n"


def _column(values: Sequence[Any], kind: Any) -> Sequence[Any]:
    import pyarrow as pa

    return orjson.loads(f"[{','.join(values)}]") if pa.types.is_list(kind) else values
