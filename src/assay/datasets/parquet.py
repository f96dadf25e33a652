"""Rows of Parquet files, with bounded memory: a file of one kilobyte can decode to a terabyte.

The batch size follows from the largest possible value of each column. The size of the rows as Python objects is counted
before the objects are created. String columns inside lists are read as dictionaries: each distinct string is decoded
once.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from assay.errors import DataError
from assay.support.missing import is_missing

_ROWS = 1024  # rows per batch, at most
_DENSE = 64 * 2**20  # bytes of a decoded batch, at most
_ROW = 16 * 2**20  # bytes of one row (the same limit as for a line of JSON), and of the rows held as Python objects
_FILE = 256 * 2**20  # bytes of all rows, at most; or _TIMES the size of the file if that is more
_TIMES = 1000  # largest plausible ratio of decoded size to file size
# a list column with more than _VALUES values in a row group needs at least _LEAST bytes per value
_VALUES = 32 * 2**20
_LEAST = 1 / 128
_OBJECT = 8  # bytes per value, at least
_DICT = 64  # bytes per row as a Python dict, at least
_EXACT = 2**53  # up to here every integer has a float of its own
_TEXTS = ("STRING", "NONE", "JSON", "ENUM", "BSON")


def parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a Parquet file, each with its place for error messages.

    Raises:
        DataError: not a Parquet file, or its rows exceed the size limits of this module.
    """
    import pyarrow
    import pyarrow.parquet

    number, total, most = 0, 0, max(_FILE, _TIMES * path.stat().st_size)
    try:
        with pyarrow.parquet.ParquetFile(path) as opened:
            flat, lists = _texts(opened)
        with (
            pyarrow.parquet.ParquetFile(path, read_dictionary=lists) as file,
            pyarrow.parquet.ParquetFile(path, read_dictionary=[*flat, *lists]) as peeked,
        ):
            _check_rows(file, path, most)
            check_columns(file.schema_arrow.names, str(path))
            integers = _integer_columns(file)
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
                            for name in integers:
                                row[name] = None if is_missing(row[name]) else int(row[name])
                            yield f"{path}:row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a Parquet file that can be read ({error})") from None


def _integer_columns(file: Any) -> list[str]:
    """Columns of integers that pandas wrote as floats, because a value is missing."""
    import pyarrow

    schema = file.schema_arrow
    missing: set[str] = set()
    whole = {name for name in schema.names if schema.field(name).type in (pyarrow.float32(), pyarrow.float64())}
    if schema.pandas_metadata is None or not whole:
        return []
    for batch in file.iter_batches(batch_size=_ROWS, columns=sorted(whole)):
        for name in sorted(whole):
            values = batch.column(name).to_numpy(zero_copy_only=False)
            present = values[values == values]
            if len(present) < len(values):
                missing.add(name)
            if not (present == present.round()).all() or not (abs(present) < _EXACT).all():
                whole.remove(name)
    return sorted(whole & missing)


def check_columns(names: Sequence[str], where: str) -> None:
    """Raise `DataError` if two columns of a table have one name: a row could hold only one of their values."""
    if repeated := sorted(name for name, count in Counter(names).items() if count > 1):
        raise DataError(f"{where}: there are two columns {repeated[0]!r}; column names must differ")


def _too_much(path: Path, most: int) -> DataError:
    return DataError(
        f"{path}: its rows take more than {most >> 20} MiB, over {_TIMES} times the file's size: refused as implausible"
    )


def _check_rows(file: Any, path: Path, most: int) -> None:
    """Raise `DataError` if the declared number of rows exceeds the limit, before any row is decoded."""
    rows = sum(file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups))
    if rows * (_DICT + _OBJECT * len(file.schema_arrow)) > most:
        raise DataError(
            f"{path}: declares {rows:,} rows in {path.stat().st_size:,} bytes: refused as implausible for real data"
        )


def _chunks(file: Any, at: int) -> list[Any]:
    return [file.metadata.row_group(group).column(at) for group in range(file.metadata.num_row_groups)]


def _texts(file: Any) -> tuple[list[str], list[str]]:
    """Paths of the string columns that can be read as dictionaries: outside of lists, and inside of lists."""
    flat: list[str] = []
    lists: list[str] = []
    for at in range(len(file.schema)):
        column = file.schema.column(at)
        if column.physical_type != "BYTE_ARRAY" or str(column.logical_type.type) not in _TEXTS:
            continue
        if any("DELTA_BYTE_ARRAY" in chunk.encodings for chunk in _chunks(file, at)):  # cannot be read as a dictionary
            continue
        (lists if column.max_repetition_level else flat).append(column.path)
    return flat, lists


def _check_claims(file: Any, group: int, path: Path, most: int) -> None:
    """Raise `DataError` if the declared sizes of a row group are implausible."""
    for at in range(len(file.schema)):
        column, chunk = file.schema.column(at), file.metadata.row_group(group).column(at)
        if (
            column.max_repetition_level
            and chunk.num_values > _VALUES
            and chunk.total_uncompressed_size < _LEAST * chunk.num_values
        ):
            raise DataError(
                f"{path}: column {column.path} declares {chunk.num_values:,} values "
                f"in {chunk.total_uncompressed_size} bytes: refused as implausible"
            )
        if chunk.total_uncompressed_size > most:
            raise _too_much(path, most)


def _rows_at_once(file: Any, group: int, texts: Collection[str]) -> int:
    """Number of rows of a row group that decode to at most `_DENSE` bytes; at least 1.

    Args:
        file: opened with all string columns as dictionaries, so that the first row carries each whole dictionary.
        texts: paths of the columns that are read as dictionaries, in `file` or by the caller.
    """
    largest, meta = 0, file.metadata.row_group(group)
    for at in range(len(file.schema)):
        column, chunk = file.schema.column(at), meta.column(at)
        if column.physical_type == "FIXED_LEN_BYTE_ARRAY":
            largest += column.length
        elif column.physical_type == "BYTE_ARRAY" and column.path not in texts:
            largest += chunk.total_uncompressed_size  # one value may take the whole chunk
    first = next(file.iter_batches(batch_size=1, row_groups=[group]), None)
    largest += sum(map(_largest, first.columns)) if first is not None else 0
    average = meta.total_byte_size // max(1, meta.num_rows)
    return max(1, min(_ROWS, _DENSE // max(1, largest, average)))


def _largest(array: Any) -> int:
    """Length of the longest string in the dictionaries of an array, in bytes."""
    import pyarrow
    import pyarrow.compute

    if pyarrow.types.is_struct(array.type):
        return sum(map(_largest, array.flatten()))
    lengths = _lengths(array.dictionary) if pyarrow.types.is_dictionary(array.type) else None
    return int(pyarrow.compute.max(lengths).as_py() or 0) if lengths is not None else 0


def _parts(batch: Any, where: str) -> Iterator[tuple[Any, int]]:
    """Split a batch into parts of at most `_ROW` bytes, each with its size in bytes.

    Raises:
        DataError: a single row is larger.
    """
    size = _DICT * batch.num_rows + sum(_size(column) for column in batch.columns)
    if size <= _ROW:
        yield batch, size
    elif batch.num_rows <= 1:
        raise DataError(f"{where}: a row has {size / 2**20:.0f} MiB; the limit is {_ROW >> 20} MiB")
    else:
        half = batch.num_rows // 2
        yield from _parts(batch.slice(0, half), where)
        yield from _parts(batch.slice(half), where)


def _size(array: Any) -> int:
    """Lower bound on the bytes that an array's values take as Python objects, without creating them."""
    import pyarrow
    import pyarrow.compute

    kind, base = array.type, _OBJECT * len(array)
    if pyarrow.types.is_dictionary(kind):
        counts = pyarrow.compute.value_counts(array.indices.drop_null())
        lengths = _lengths(array.dictionary.take(counts.field(0)))  # only the values that this part refers to
        if lengths is None:
            return base
        return base + int(pyarrow.compute.sum(pyarrow.compute.multiply(lengths, counts.field(1))).as_py() or 0)
    if pyarrow.types.is_struct(kind):
        return base + sum(_size(part) for part in array.flatten())
    if pyarrow.types.is_map(kind):
        entries = array.cast(pyarrow.list_(pyarrow.struct([("key", kind.key_type), ("value", kind.item_type)])))
        return base + _size(entries.flatten())
    if pyarrow.types.is_nested(kind) and hasattr(array, "flatten"):
        return base + _size(array.flatten())
    return base + int(array.nbytes)


def _lengths(values: Any) -> Any:
    """Length of each string of a dictionary in bytes; None for a dictionary of numbers."""
    import pyarrow
    import pyarrow.compute

    try:
        return pyarrow.compute.binary_length(values)
    except pyarrow.ArrowNotImplementedError:
        return None
