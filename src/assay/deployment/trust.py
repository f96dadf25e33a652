"""Which artifacts may run code: the content hashes that this user has trusted, kept in one file of the user's.

Trust is for exactly one content: an artifact that differs in one byte is another one. Does not read artifacts; `assay.deployment.artifact` does,
and it asks here before it imports any file of one.
"""

import functools
import inspect
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from assay.errors import ArtifactError, ConfigError

__all__ = [
    "Entry",
    "UntrustedArtifact",
    "accept",
    "add",
    "allow",
    "demand",
    "entries",
    "is_trusted",
    "remember",
    "remove",
    "trust_file",
    "trusting",
    "trusts",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Mode = Literal["ask", "remember", "once"]
_mode: ContextVar[_Mode] = ContextVar("assay_trust", default="ask")
_accepted: set[str] = set()  # by this process: what its file could not hold, and on a Ray host what the driver trusts


class UntrustedArtifact(ArtifactError):
    """An artifact would run code, or send a key to an address, and this user has not trusted its content."""


@dataclass(frozen=True)
class Entry:
    """A trusted content: its SHA-256, where it was when it was trusted, and when that was (UTC)."""

    sha256: str
    path: str
    added_at: str


def trust_file() -> Path:
    """`$ASSAY_HOME/trusted.jsonl`, or `assay/trusted.jsonl` in `$XDG_CONFIG_HOME` (by default `~/.config`)."""
    if home := os.environ.get("ASSAY_HOME"):
        return Path(home) / "trusted.jsonl"
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "assay" / "trusted.jsonl"


def entries() -> list[Entry]:
    """What is trusted, oldest first. A line that cannot be read trusts nothing.

    Raises:
        ConfigError: the file is there and cannot be read.
    """
    try:
        lines = trust_file().read_text("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{trust_file()}, the list of trusted artifacts, cannot be read: {error}") from error
    return [entry for line in lines if (entry := _entry(line)) is not None]


def _entry(line: str) -> Entry | None:
    try:
        found = json.loads(line)
        return Entry(str(found["sha256"]), str(found["path"]), str(found["added_at"]))
    except (ValueError, KeyError, TypeError):
        return None


def is_trusted(sha256: str) -> bool:
    """Whether the user has trusted this content."""
    return sha256 in _accepted or any(entry.sha256 == sha256 for entry in entries())


def add(sha256: str, path: str | Path) -> None:
    """Trusts a content from now on.

    Raises:
        ConfigError: the list cannot be written.
    """
    if any(entry.sha256 == sha256 for entry in entries()):
        return
    file = trust_file()
    line = json.dumps(asdict(Entry(sha256, str(Path(path).absolute()), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="utf-8") as opened:
            opened.write(line + "\n")  # one write of one line: processes may add at the same time
    except OSError as error:
        raise ConfigError(f"{file}, the list of trusted artifacts, cannot be written: {error}. $ASSAY_HOME names another folder for it") from error


def remove(start: str) -> list[Entry]:
    """Takes back the trust in one content, by the start of its hash or the path it was trusted at.

    Raises:
        ConfigError: nothing of this name is trusted, or several contents are.
    """
    known = entries()
    found = [entry for entry in known if entry.path == str(Path(start).absolute())]
    found = found or [entry for entry in known if len(start) >= 6 and entry.sha256.startswith(start)]
    if not found:
        raise ConfigError(f"{start!r} is not trusted: `assay trust list` shows what is; give a path or at least 6 digits of a hash")
    if len({entry.sha256 for entry in found}) > 1 and not all(entry.path == found[0].path for entry in found):
        raise ConfigError(f"{start!r} is the start of {len(found)} hashes: give more digits")
    gone = {entry.sha256 for entry in found}
    file = trust_file()
    scratch = file.with_name(f".{file.name}-{os.getpid()}")
    scratch.write_text("".join(json.dumps(asdict(entry)) + "\n" for entry in known if entry.sha256 not in gone), encoding="utf-8")
    scratch.chmod(0o600)
    scratch.replace(file)
    _accepted.difference_update(gone)
    return found


def accept(hashes: Iterable[str]) -> None:
    """Trusts contents in this process alone: what the driver of a Ray job trusts holds on its hosts."""
    _accepted.update(hashes)


def allow(sha256: str, path: str | Path) -> None:
    """Trusts what the user has just compiled. A list that cannot be written does not end the job: the content is trusted in this process."""
    if _mode.get() == "once":
        return
    try:
        add(sha256, path)
    except ConfigError:
        _accepted.add(sha256)


def demand(sha256: str, path: str | Path, why: str) -> None:
    """Passes where a content is trusted; `trust=True` trusts it from now on.

    Args:
        why: what it would do, as a sentence after the path.
    Raises:
        UntrustedArtifact: it is not.
    """
    remember(sha256, path)
    if _mode.get() == "once" or is_trusted(sha256):
        return
    raise UntrustedArtifact(
        f"{path} {why}. You have not compiled this artifact, and its content (sha256 {sha256[:12]}…) is not trusted. Read it first; "
        "trust=True then loads it, and is remembered for exactly this content",
        flag=f"--trust, or: assay trust add {path}",
    )


def remember(sha256: str, path: str | Path) -> None:
    """Inside `trusting()` a content is trusted from now on.

    Raises:
        ConfigError: the list cannot be written.
    """
    if _mode.get() == "remember" and not is_trusted(sha256):
        add(sha256, path)


@contextmanager
def trusting(mode: bool | _Mode = True) -> Iterator[None]:
    """While it is open, artifacts that are loaded are trusted: `True` or `remember` for good, `once` without a trace, `False` as before."""
    if mode is False:
        yield
        return
    token = _mode.set("remember" if mode is True else mode)
    try:
        yield
    finally:
        _mode.reset(token)


def trusts(function: _Function) -> _Function:
    """Decorates a function that loads artifacts: with `trust=True` it trusts those that it is given, and they stay trusted."""

    @functools.wraps(function)
    def call(*args: Any, trust: bool = False, **options: Any) -> Any:
        with trusting(trust):
            return function(*args, **options)

    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    rest = [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    flag = inspect.Parameter("trust", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
    call.__signature__ = signature.replace(parameters=[*own, flag, *rest])  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]
