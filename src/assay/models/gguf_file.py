"""Metadata of a GGUF file: architecture, name, context length, chat template. Reads only the header, no weights."""

import mmap
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

from assay.errors import ModelError, NoModelFile

_FORMATS = {  # struct format by GGUF value type, see gguf.md of the ggml project
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_MOST = 100_000_000  # bytes of a header, at most


class _Header:
    def __init__(self, data: Any) -> None:
        self.data, self.at = data, 0

    def number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(kind, self.data, self.at)
        self.at += struct.calcsize(kind)
        return value

    def text(self) -> str:
        return self.bytes_(self.number("<Q")).decode("utf-8", "replace")

    def bytes_(self, length: int) -> bytes:
        if length > _MOST or self.at + length > len(self.data):
            raise ValueError("a length exceeds the file")
        self.at += length
        return bytes(self.data[self.at - length : self.at])

    def value(self, kind: int) -> Any:
        """The next value; None for an array, which is skipped."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_FORMATS[kind])
        inner, count = self.number("<I"), self.number("<Q")
        if inner in _FORMATS:
            self.at += count * struct.calcsize(_FORMATS[inner])
        else:
            for _ in range(count):
                if inner == _STRING:
                    self.at += 8 + struct.unpack_from("<Q", self.data, self.at)[0]
                else:
                    self.value(inner)
        return None


def read_metadata(path: Path) -> dict[str, Any]:
    """Values of the header by key, without arrays.

    Raises:
        NoModelFile: not a GGUF file.
        ModelError: its header is damaged.
    """
    stat = path.stat()
    return dict(_read(str(path), stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=16)
def _read(path: str, size: int, mtime_ns: int) -> tuple[tuple[str, Any], ...]:
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise NoModelFile(f"{path} is not a GGUF file: it does not begin with 'GGUF'")
        try:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                header = _Header(data)
                header.at = 4
                version, _, count = header.number("<I"), header.number("<Q"), header.number("<Q")
                if version < 2 or count > 100_000:
                    raise ValueError(f"version {version} with {count} keys")
                pairs = []
                for _ in range(count):
                    key = header.text()
                    pairs.append((key, header.value(header.number("<I"))))
                return tuple(pairs)
        except (struct.error, ValueError, KeyError, IndexError) as error:
            raise ModelError(f"{path} is a damaged GGUF file: {error}") from None
