"""Rows of Parquet files, within limits: a file of a kilobyte can say that it holds a terabyte.

How many rows are decoded at once follows from what the largest value of each column may be; their size as Python objects is counted before these
are made. A list of texts is read as a dictionary, each different text once.
"""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from assay.errors import DataError

__all__ = ["parquet_rows"]

_ROWS = 1024  # of a batch
_DENSE = 64 * 2**20  # bytes that a batch may take decoded
_ROW = 16 * 2**20  # bytes of a row, as of a line of JSON, and of the rows that are Python objects at once
_FILE = 256 * 2**20  # bytes of all rows, and of a file that is larger than this
_TIMES = 1000  # its own size
_VALUES = 32 * 2**20  # values of a list column in a row group, each of which takes at least
_LEAST = 1 / 128  # of a byte
_OBJECT = 8  # bytes at least of any value
_DICT = 64  # bytes at least of a row as a Python object
_TEXTS = ("STRING", "NONE", "JSON", "ENUM", "BSON")


def parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows with the place of each.

    Raises:
        DataError: not a Parquet file, or rows that are larger than it can hold in earnest.
    """
    import pyarrow
    import pyarrow.parquet

    number, total, most = 0, 0, max(_FILE, _TIMES * path.stat().st_size)
    try:
        with pyarrow.parquet.ParquetFile(path) as plain:
            flat, lists = _texts(plain)
        with (
            pyarrow.parquet.ParquetFile(path, read_dictionary=lists) as file,
            pyarrow.parquet.ParquetFile(path, read_dictionary=[*flat, *lists]) as peeked,
        ):
            _check_rows(file, path, most)
            for group in range(file.metadata.num_row_groups):
                _check_claims(file, group, path, most)
                rows = _rows_at_once(peeked, group, {*flat, *lists})
                for batch in file.iter_batches(batch_size=rows, row_groups=[group]):
                    for part, size in _parts(batch, f"{path}: rows from {number + 1} on"):
                        total += size
                        if total > most:
                            raise _too_much(path, most)
                        for row in part.to_pylist():
                            number += 1
                            yield f"{path}:row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a Parquet file that can be read ({error})") from None


def _too_much(path: Path, most: int) -> DataError:
    return DataError(f"{path}: its rows have more than {most >> 20} MiB, over {_TIMES} times the file's size: no data is like this")


def _check_rows(file: Any, path: Path, most: int) -> None:
    """Raises `DataError` where the rows, by their number, are more than is read: before any of them is."""
    rows = sum(file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups))
    if rows * (_DICT + _OBJECT * len(file.schema_arrow)) > most:
        raise DataError(f"{path}: it says it has {rows:,} rows, in {path.stat().st_size:,} bytes: no data is like this")


def _chunks(file: Any, at: int) -> list[Any]:
    return [file.metadata.row_group(group).column(at) for group in range(file.metadata.num_row_groups)]


def _texts(file: Any) -> tuple[list[str], list[str]]:
    """Columns of texts that can be read as dictionaries, by their paths: those with one text a row, and those within lists."""
    flat: list[str] = []
    lists: list[str] = []
    for at in range(len(file.schema)):
        column = file.schema.column(at)
        if column.physical_type != "BYTE_ARRAY" or str(column.logical_type.type) not in _TEXTS:
            continue
        if any("DELTA_BYTE_ARRAY" in chunk.encodings for chunk in _chunks(file, at)):  # no dictionary can be read of it
            continue
        (lists if column.max_repetition_level else flat).append(column.path)
    return flat, lists


def _check_claims(file: Any, group: int, path: Path, most: int) -> None:
    """Raises `DataError` where a row group says that it is larger than it can be in earnest."""
    for at in range(len(file.schema)):
        column, chunk = file.schema.column(at), file.metadata.row_group(group).column(at)
        if column.max_repetition_level and chunk.num_values > _VALUES and chunk.total_uncompressed_size < _LEAST * chunk.num_values:
            raise DataError(f"{path}: the column {column.path} says it holds {chunk.num_values:,} values in {chunk.total_uncompressed_size} bytes")
        if chunk.total_uncompressed_size > most:
            raise _too_much(path, most)


def _rows_at_once(file: Any, group: int, texts: Collection[str]) -> int:
    """Rows of a row group that take at most `_DENSE` bytes decoded, or as many more as a column has written out in full.

    Args:
        file: opened so that columns of texts are dictionaries: its first row has the whole dictionary of each.
        texts: the columns that are read as dictionaries, here or where the rows are read.
    """
    largest, meta = 0, file.metadata.row_group(group)
    for at in range(len(file.schema)):
        column, chunk = file.schema.column(at), meta.column(at)
        if column.physical_type == "FIXED_LEN_BYTE_ARRAY":
            largest += column.length
        elif column.physical_type == "BYTE_ARRAY" and column.path not in texts:
            largest += chunk.total_uncompressed_size  # each value may be as large as all that is written
    first = next(file.iter_batches(batch_size=1, row_groups=[group]), None)
    largest += sum(map(_largest, first.columns)) if first is not None else 0
    average = meta.total_byte_size // max(1, meta.num_rows)
    return max(1, min(_ROWS, _DENSE // max(1, largest, average)))


def _largest(array: Any) -> int:
    """The longest text in the dictionaries of an array."""
    import pyarrow
    import pyarrow.compute

    if pyarrow.types.is_struct(array.type):
        return sum(map(_largest, array.flatten()))
    lengths = _lengths(array.dictionary) if pyarrow.types.is_dictionary(array.type) else None
    return int(pyarrow.compute.max(lengths).as_py() or 0) if lengths is not None else 0


def _parts(batch: Any, where: str) -> Iterator[tuple[Any, int]]:
    """A batch in parts that fit, with the size of each.

    Raises:
        DataError: one row is too large.
    """
    size = _DICT * batch.num_rows + sum(_size(column) for column in batch.columns)
    if size <= _ROW:
        yield batch, size
    elif batch.num_rows <= 1:
        raise DataError(f"{where}: a row has {size / 2**20:.0f} MiB, at most {_ROW >> 20} are read")
    else:
        half = batch.num_rows // 2
        yield from _parts(batch.slice(0, half), where)
        yield from _parts(batch.slice(half), where)


def _size(array: Any) -> int:
    """Bytes that an array's values would take as Python objects, at least; none of them is made."""
    import pyarrow
    import pyarrow.compute

    kind, own = array.type, _OBJECT * len(array)
    if pyarrow.types.is_dictionary(kind):
        counts = pyarrow.compute.value_counts(array.indices.drop_null())
        lengths = _lengths(array.dictionary.take(counts.field(0)))  # of those that stand in this part
        return own + int(pyarrow.compute.sum(pyarrow.compute.multiply(lengths, counts.field(1))).as_py() or 0) if lengths is not None else own
    if pyarrow.types.is_struct(kind):
        return own + sum(_size(part) for part in array.flatten())
    if pyarrow.types.is_map(kind):
        whole = array.cast(pyarrow.list_(pyarrow.struct([("key", kind.key_type), ("value", kind.item_type)])))
        return own + _size(whole.flatten())
    if pyarrow.types.is_nested(kind) and hasattr(array, "flatten"):
        return own + _size(array.flatten())
    return own + int(array.nbytes)


def _lengths(values: Any) -> Any:
    """The length of each text of a dictionary; None of one of numbers."""
    import pyarrow
    import pyarrow.compute

    try:
        return pyarrow.compute.binary_length(values)
    except pyarrow.ArrowNotImplementedError:
        return None
