"""Reads the text files of a folder. Binary files, and files that change while they are read, are detected.

Links, hidden files and special files (pipes, devices) are not opened.
"""

import codecs
import hashlib
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["FileChanged", "FileIsBinary", "FolderFiles", "TextFile", "open_text"]

_BLOCK = 1 << 16
_CONTROLS = bytes(set(range(32)) - {9, 10, 12, 13, 27})  # not in text; 27 begins colours of a terminal
_MOST_CONTROLS = 0.02  # share of a block
_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_TAGS = re.compile(r"<(?:script|style)\b.*?</(?:script|style)\s*>|<!--.*?-->|<[a-zA-Z/!][^<>]*>", re.DOTALL | re.I)


class FileChanged(Exception):
    """A file changed while it was read."""


class FileIsBinary(Exception):
    """A file begins as text and continues as something else, such as an archive after the script that unpacks it."""


@dataclass(frozen=True)
class TextFile:
    """A regular file below the folder.

    Attributes:
        name: path relative to the folder, with `/`; bytes that are not UTF-8 are escaped.
    """

    path: Path
    name: str
    size: int
    mtime_ns: int


@dataclass
class FolderFiles:
    """The files below a folder, in the order of their names.

    Attributes:
        skipped: reason -> number of entries that are not read.
        unreadable: names of folders whose entries are unknown.
    """

    folder: Path
    files: list[TextFile] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    unreadable: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, folder: Path) -> "FolderFiles":
        """Lists a folder. Files that vanish meanwhile are left out."""
        listed = cls(folder)
        for top, folders, names in os.walk(folder, onerror=listed._note_unreadable):
            listed.skipped["hidden"] += sum(name.startswith(".") for name in (*folders, *names))
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            listed.skipped["link"] += sum(os.path.islink(os.path.join(top, name)) for name in folders)
            for name in sorted(names):
                if not name.startswith("."):
                    listed._add(Path(top, name))
        return listed

    def _add(self, path: Path) -> None:
        try:
            status = path.lstat()
        except OSError:
            return
        if stat.S_ISREG(status.st_mode):
            self.files.append(TextFile(path, self._name(path), status.st_size, status.st_mtime_ns))
        else:
            self.skipped["link" if stat.S_ISLNK(status.st_mode) else "special file"] += 1

    def _name(self, path: Path) -> str:
        return os.fsencode(path.relative_to(self.folder).as_posix()).decode("utf-8", "backslashreplace")

    def _note_unreadable(self, error: OSError) -> None:
        self.skipped["unreadable"] += 1
        self.unreadable.append(self._name(Path(os.fsdecode(error.filename))))


class open_text:
    """A file as blocks of text. A context manager; read the blocks once.

    `encoding` is None if the first block is binary. Without a byte order mark the text is UTF-8, or Latin-1 if the
    first block is not valid UTF-8. NUL is left out, and so are the tags of HTML.

    Raises:
        OSError: the file cannot be opened.
        FileChanged: its size or time changed since the listing or during the reading, or it is no regular file.
    """

    def __init__(self, file: TextFile) -> None:
        self.file, self._hash = file, hashlib.sha256()
        flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        self._opened = os.fdopen(os.open(file.path, flags), "rb")
        self._check()
        self._first = self._opened.read(_BLOCK)
        self.encoding = _encoding(self._first)

    def __enter__(self) -> "open_text":
        return self

    def __exit__(self, *exc: object) -> None:
        self._opened.close()

    def _check(self) -> None:
        status = os.fstat(self._opened.fileno())
        if not stat.S_ISREG(status.st_mode) or (status.st_size, status.st_mtime_ns) != (
            self.file.size,
            self.file.mtime_ns,
        ):
            raise FileChanged(self.file.name)

    def blocks(self) -> Iterator[str]:
        """The text. `FileChanged` is raised at the end of it, `FileIsBinary` where a part is no text."""
        if self.encoding is None:
            raise FileIsBinary(self.file.name)
        decoder = codecs.getincrementaldecoder(self.encoding)("replace")
        is_html, rest = self.file.path.suffix.lower() in (".html", ".htm", ".xhtml"), ""
        for block in self._bytes():
            if self.encoding != "utf-16" and _has_controls(block.replace(b"\0", b"")):  # logs may have runs of NUL
                raise FileIsBinary(self.file.name)
            text = decoder.decode(block).replace("\0", "").replace("\r\n", "\n").replace("\r", "\n")
            if is_html:
                text, rest = _without_tags(rest + text)
            yield text
        yield rest + decoder.decode(b"", final=True)

    def sha256(self) -> str:
        """Hash of the content; reads what is left of it. `FileChanged` as in `blocks`."""
        for _ in self._bytes():
            pass
        return self._hash.hexdigest()

    def _bytes(self) -> Iterator[bytes]:
        size = 0
        while block := self._first or self._opened.read(_BLOCK):
            self._first = b""
            self._hash.update(block)
            size += len(block)
            if size > self.file.size:  # it grows while it is read, and may never end
                raise FileChanged(self.file.name)
            yield block
        self._check()


def _encoding(first: bytes) -> str | None:
    """Encoding of a file by its first block; None if it is binary."""
    for mark, name in _MARKS.items():
        if first.startswith(mark):
            return name
    if b"\0" in first or _has_controls(first):
        return None
    try:
        codecs.getincrementaldecoder("utf-8")().decode(first)
    except UnicodeDecodeError:
        return "latin-1"
    return "utf-8"


def _has_controls(block: bytes) -> bool:
    return len(block) - len(block.translate(None, _CONTROLS)) > _MOST_CONTROLS * len(block)


def _without_tags(text: str) -> tuple[str, str]:
    """HTML without tags, scripts and comments, as far as it is complete, and the rest from an open tag on."""
    from html import unescape

    lowered = text.lower()
    opened = [lowered.rfind(mark) for mark in ("<script", "<style", "<!--", "<")]
    ends = [lowered.rfind(mark) for mark in ("</script", "</style", "-->", ">")]
    open_at = [start for start, end in zip(opened, ends, strict=True) if start > end]
    at = min(open_at, default=len(text))
    if len(text) - at > 1 << 20:  # never closed: it is text
        at = len(text)
    return unescape(_TAGS.sub(" ", text[:at])), text[at:]
