"""Rows of data files: JSON lines, JSON, CSV and Parquet, also compressed. Large files are streamed.

Every command that reads a file of tasks, labels or inputs reads it here. A file that cannot be read is refused with an
error that names it.

A Parquet file of one kilobyte can decode to a terabyte. Its batch size follows from the largest possible value of each
column. The size of the rows as Python objects is counted before the objects are created. String columns inside lists
are read as dictionaries: each distinct string is decoded once.
"""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import math
import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from assay.datasets.specs import Row
from assay.errors import DataError
from assay.support.places import no_such_file
from assay.support.values import is_missing

_JSON_LINES, _JSON, _TABLES, _PARQUET = (".jsonl", ".ndjson"), ".json", (".csv", ".tsv"), ".parquet"
_ENDINGS = (*_JSON_LINES, _JSON, *_TABLES, _PARQUET)
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
FILE_TYPES = f"{', '.join(_ENDINGS)} (all but {_PARQUET} also compressed: {', '.join(_COMPRESSED)})"
_MAX_LINE = 16 * 2**20  # characters
_MAX_DOCUMENT = 256 * 2**20  # characters of a file that is one JSON value
_TIMES = 1000  # largest plausible ratio of the decompressed size to the file's
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_ESCAPED = re.compile("[\udc80-\udcff]")  # a byte that is not UTF-8, as `surrogateescape` decodes it
_BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError)  # raised by decompression
_Lines = Iterator[tuple[int, str]]


def _ending(path: Path) -> str:
    """Ending that tells the format, in lower case: that of `data.csv.gz` is `.csv`."""
    name = path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path
    return name.suffix.lower()


def is_data_file(name: str) -> bool:
    """Whether a name has the ending of a data file."""
    return _ending(Path(name)) in _ENDINGS


def file_rows(path: Path) -> Iterator[Row]:
    """Rows of a data file, each with its place (`file:line`) for error messages.

    - JSON lines, or one JSON document: a list of objects, or an object with one list of objects.
    - CSV with a header, separated by comma, semicolon, tab or bar, with any line ends. White space around column names
      is removed. An empty cell is None, an empty row is left out; so are unnamed columns without values and the index
      that pandas writes.
    - Parquet, or a folder of Parquet files.
    - Text is UTF-8, or UTF-16 with a byte order mark.

    Raises:
        DataError: no such file, an unknown ending, or a row that cannot be read.
    """
    for where, row in attempted_rows(path):
        if isinstance(row, DataError):
            raise row
        yield where, row


def attempted_rows(path: Path, *, default: str = "") -> Iterator[tuple[str, dict[str, Any] | DataError]]:
    """Like `file_rows`, but a line that is not a JSON object is returned as its error, and the lines after it are read.

    Args:
        default: ending to assume for a name without one.
    """
    if path.is_dir():
        if not (parts := sorted(path.rglob(f"*{_PARQUET}"))):
            raise DataError(f"{path} is a folder without Parquet files: name a file")
        return itertools.chain.from_iterable(map(parquet_rows, parts))
    if not path.exists():
        raise DataError(no_such_file(path))
    ending = _ending(path) or default
    if ending == _PARQUET:
        return parquet_rows(path)
    if ending in _TABLES:
        return _csv_rows(path, ending)
    if ending == _JSON or ending in _JSON_LINES:
        return _json_rows(path, ending)
    raise DataError(f"cannot tell what {str(path)!r} is: the name must end in {FILE_TYPES}")


def _opened(path: Path) -> BinaryIO:
    """The file, decompressed according to its content."""
    head = b""
    if path.is_file():  # a pipe can be opened only once
        with open(path, "rb") as file:
            head = file.read(6)
    if head.startswith((b"PK\x03\x04", b"PAR1", b"\xd0\xcf\x11\xe0")):
        kind = "a Parquet file; its name must end in .parquet" if head.startswith(b"PAR1") else (
            "an Excel workbook or another archive; save it as CSV"
        )  # fmt: skip
        raise DataError(f"{path} is {kind}")
    if head.startswith(b"\x1f\x8b"):
        return cast(BinaryIO, gzip.open(path))
    if head.startswith(b"BZh"):
        return cast(BinaryIO, bz2.open(path))
    if head.startswith(b"\xfd7zXZ\x00"):
        return cast(BinaryIO, lzma.open(path))
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        import pyarrow

        return cast(BinaryIO, pyarrow.input_stream(str(path), compression="zstd"))
    return open(path, "rb")


def _lines(path: Path) -> _Lines:
    """Numbered lines of a text file, with their ends: a line feed, a carriage return, or both."""
    number = 0
    try:
        with _opened(path) as opened:
            stream = io.BufferedReader(cast(Any, opened))
            head = stream.peek(4)[:4]
            encoding = "utf-8-sig"
            if head.startswith((b"\xff\xfe", b"\xfe\xff")):
                encoding = "utf-32" if head == b"\xff\xfe\0\0" else "utf-16"
            errors = "surrogateescape" if encoding == "utf-8-sig" else "strict"
            text, total = io.TextIOWrapper(stream, encoding, errors, newline=""), 0
            most = max(_MAX_DOCUMENT, _TIMES * path.stat().st_size)
            while line := text.readline(_MAX_LINE):
                number, total = number + 1, total + len(line)
                if total > most and path.is_file():
                    raise DataError(f"{path}: decompresses to over {_TIMES} times its size: refused as implausible")
                if len(line) == _MAX_LINE and line[-1] not in "\r\n":
                    raise DataError(f"{path}:{number}: the line is longer than {_MAX_LINE // 2**20} MiB")
                if not line.isascii() and (bad := _ESCAPED.search(line)):
                    byte = ord(bad[0]) & 0xFF
                    raise DataError(f"{path}:{number}: not UTF-8 (byte 0x{byte:02x} at column {bad.start() + 1})")
                if "\0" in line:
                    raise DataError(f"{path}:{number}: a NUL byte: binary, or UTF-16 without a byte order mark")
                yield number, line
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: after line {number}: not {error.encoding.upper()} ({error.reason})") from None
    except _BROKEN as error:
        raise DataError(f"{path}: after line {number}: cannot be read ({error})") from None


def parsed_lines(name: str, lines: Iterable[tuple[int, str]]) -> Iterator[tuple[str, dict[str, Any] | DataError]]:
    """Rows of numbered JSON lines; the error of a line that is not a JSON object. Blank lines are left out."""
    for number, line in lines:
        if line.strip():
            where = f"{name}:{number}"
            try:
                yield where, _object(_parsed(line, where), where)
            except DataError as error:
                yield where, error


def _json_rows(path: Path, ending: str) -> Iterator[tuple[str, dict[str, Any] | DataError]]:
    lines: _Lines = ((number, line) for number, line in _lines(path) if line.strip())
    start = list(itertools.islice(lines, 2))
    if not start:
        return
    first = start[0][1].strip()
    is_document = first.startswith("[") or first == "{"
    if ending == _JSON and not is_document:
        is_document = len(start) == 1 or not first.endswith("}")
    lines = itertools.chain(start, lines)
    if not is_document:
        yield from parsed_lines(str(path), lines)
        return
    text, at = io.StringIO(), 1
    for number, line in lines:
        text.write("\n" * (number - at))  # blank lines, so that an error names the right one
        text.write(line.rstrip("\r\n"))
        at = number
        if text.tell() > _MAX_DOCUMENT:
            raise DataError(f"{path} is one JSON value of more than {_MAX_DOCUMENT >> 20} MiB: write JSON lines")
    for item, row in enumerate(_records(_parsed(text.getvalue(), str(path), document=True), path), 1):
        where = f"{path}:item {item}"
        yield where, _object(row, where)


def _records(value: Any, path: Path) -> list[Any]:
    """The rows in a JSON document."""
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a list of JSON objects, found {type(value).__name__}")
    if isinstance(value.get("inputs"), dict):
        return [value]
    lists = [name for name, part in value.items() if isinstance(part, list) and any(isinstance(i, dict) for i in part)]
    if len(lists) == 1:
        return list(value[lists[0]])
    if lists:
        raise DataError(
            f"{path} has several lists of objects, {', '.join(map(repr, lists))}: write one to a file of its own"
        )
    if value and (kind := {type(part) for part in value.values()}) in ({dict}, {list}):
        raise DataError(
            f"{path} has a {kind.pop().__name__} per column: write a list of rows (pandas: orient='records')"
        )
    return [value]


class _RepeatedKey(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise _RepeatedKey(next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1))
    return fields


def _parsed(text: str, where: str, *, document: bool = False) -> Any:
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_unique)
        if _SURROGATE.search(text):  # encoding the row finds an unpaired surrogate; a pair passes
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except _RepeatedKey as error:
        raise DataError(f"{where}: an object has the key {error.args[0]!r} twice; keys must differ") from None
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: unpaired surrogate ({error.object[error.start]!r}), which is not valid text"
        ) from None
    except json.JSONDecodeError as error:
        raise DataError(f"{where}{f':{error.lineno}' if document else ''}: not JSON ({error})") from None
    except (RecursionError, ValueError) as error:
        raise DataError(f"{where}: not JSON ({error})") from None


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is out of range for a number")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _csv_rows(path: Path, ending: str) -> Iterator[Row]:
    csv.field_size_limit(_MAX_LINE)
    lines = itertools.dropwhile(lambda line: not line[1].strip(), _lines(path))
    number, header = next(lines, (1, ""))
    delimiter = ""
    if match := re.fullmatch(r"sep=(.)\s*", header, re.IGNORECASE):  # a line that Excel reads
        delimiter = match[1]
        number, header = next(lines, (number + 1, ""))
    if re.match(r"\s*(?:\{\s*\"|\[?\s*\{?\s*$|\[\s*\{)", header) and header.strip():
        raise DataError(f"{path}:{number}: JSON in a CSV file: its name must end in .jsonl or .json")
    delimiter = delimiter or _delimiter(header, ending)
    spaced = any(cell.startswith(" ") for cell in next(csv.reader([header], delimiter=delimiter), [])[1:])
    text = itertools.chain([header], (line for _, line in lines))
    reader = csv.reader(text, delimiter=delimiter, strict=True, skipinitialspace=spaced)
    before = number - 1
    try:
        names = [name.strip() for name in next(reader, [])]
        for name, count in Counter(filter(None, names)).items():
            if count > 1:
                raise DataError(f"{path}:{number}: the header has the column {name!r} twice; column names must differ")
        rows = 0
        for cells in reader:
            where = f"{path}:{before + reader.line_num}"
            if any(map(str.strip, cells)):
                yield where, _fields(names, cells, rows, where)
                rows += 1
    except csv.Error as error:
        raise DataError(f"{path}:{before + reader.line_num}: {error}") from None


def _fields(names: list[str], cells: list[str], index: int, where: str) -> dict[str, Any]:
    """The named cells of a row, None for an empty one.

    Args:
        index: number of rows before this one, which pandas writes into a first column without a name.
    """
    if len(cells) < len(names) and any(names[len(cells) :]):
        raise DataError(f"{where}: fewer fields than the header's {len(names)}")
    if any(map(str.strip, cells[len(names) :])):
        raise DataError(f"{where}: more fields than the header's {len(names)}")
    fields: dict[str, Any] = {}
    for at, (name, cell) in enumerate(zip(names, cells, strict=False)):
        if name:
            fields[name] = cell if cell.strip() else None
        elif cell.strip() and (at or cell.strip() != str(index)):
            raise DataError(f"{where}: column {at + 1} has a value, {cell[:80]!r}, and no name in the header")
    return fields


def _delimiter(header: str, ending: str) -> str:
    """Column separator of a header: the one that the ending implies, or another one if only that splits the header."""
    usual = "\t" if ending == ".tsv" else ","
    for delimiter in (usual, *(other for other in ",;\t|" if other != usual)):
        if len(next(csv.reader([header], delimiter=delimiter), [])) > 1:
            return delimiter
    return usual


_ROWS = 1024  # rows per batch, at most
_DENSE = 64 * 2**20  # bytes of a decoded batch, at most
_ROW = 16 * 2**20  # bytes of one row (the same limit as for a line of JSON), and of the rows held as Python objects
_FILE = 256 * 2**20  # bytes of all rows, at most; or _TIMES the size of the file if that is more
_RATIO = 1000  # largest plausible ratio of decoded size to file size
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

    number, total, most = 0, 0, max(_FILE, _RATIO * path.stat().st_size)
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
        f"{path}: its rows take more than {most >> 20} MiB, over {_RATIO} times the file's size: refused as implausible"
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
