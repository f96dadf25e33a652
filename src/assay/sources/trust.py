"""Artifacts and project files of others: the content hashes that the user has trusted, in one file per user.

Trust applies to exactly one content: an artifact that differs in one byte is another one. Does not read artifacts:
`assay.deployment.artifact` does, and calls this module before it imports any of their files.
"""

import functools
import hashlib
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

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Mode = Literal["ask", "remember", "once"]
_mode: ContextVar[_Mode] = ContextVar("assay_trust", default="ask")
_accepted: set[str] = set()  # trusted in this process only: if the file cannot be written, and on hosts of a Ray job


class UntrustedArtifact(ArtifactError):
    """A file of others would run code, or send a key to an address, and the user has not trusted its content."""


@dataclass(frozen=True)
class Entry:
    """A trusted content: sha256, path when it was trusted, and time (UTC)."""

    sha256: str
    path: str
    added_at: str


def trust_file() -> Path:
    """`$ASSAY_HOME/trusted.jsonl`, or `assay/trusted.jsonl` in `$XDG_CONFIG_HOME` (by default `~/.config`)."""
    if home := os.environ.get("ASSAY_HOME"):
        return Path(home) / "trusted.jsonl"
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "assay" / "trusted.jsonl"


def entries() -> list[Entry]:
    """Trusted contents, oldest first. Unreadable lines are skipped.

    Raises:
        ConfigError: the file exists and cannot be read.
    """
    try:
        lines = trust_file().read_text("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"cannot read {trust_file()}, the list of trusted artifacts: {error}") from error
    return [entry for line in lines if (entry := _entry(line)) is not None]


def _entry(line: str) -> Entry | None:
    try:
        fields = json.loads(line)
        return Entry(str(fields["sha256"]), str(fields["path"]), str(fields["added_at"]))
    except (ValueError, KeyError, TypeError):
        return None


def is_trusted(sha256: str) -> bool:
    """Whether the user has trusted this content."""
    return sha256 in _accepted or any(entry.sha256 == sha256 for entry in entries())


def add(sha256: str, path: str | Path) -> None:
    """Trust a content permanently.

    Raises:
        ConfigError: the list cannot be written.
    """
    if any(entry.sha256 == sha256 for entry in entries()):
        return
    file = trust_file()
    line = json.dumps(
        asdict(Entry(sha256, str(Path(path).absolute()), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())))
    )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="utf-8") as opened:
            opened.write(line + "\n")  # a single write of one line: several processes may append at once
    except OSError as error:
        raise ConfigError(
            f"cannot write {file}, the list of trusted artifacts: {error}. Set ASSAY_HOME to another folder"
        ) from error


def remove(start: str, content: str | None = None) -> list[Entry]:
    """Remove the trust in a content, by the start of its hash, the path where it was trusted, or its current path.

    Args:
        start: start of a hash (at least 6 digits), or a path.
        content: sha256 of the artifact that is at the path `start` now: it may have been moved or copied.
    Returns:
        The removed entries.
    Raises:
        ConfigError: no trusted content matches, or several do.
    """
    existing = entries()
    matches = [entry for entry in existing if entry.path == str(Path(start).absolute()) or entry.sha256 == content]
    by_path = bool(matches)
    matches = matches or [entry for entry in existing if len(start) >= 6 and entry.sha256.startswith(start)]
    if not matches:
        raise ConfigError(
            f"{start!r} is not trusted: `assay trust list` shows trusted artifacts; "
            "give a path, or at least 6 digits of a hash"
        )
    if len({entry.sha256 for entry in matches}) > 1 and not by_path:
        raise ConfigError(f"{start!r} is the start of {len(matches)} hashes: give more digits")
    removed = {entry.sha256 for entry in matches}
    file = trust_file()
    scratch = file.with_name(f".{file.name}-{os.getpid()}")
    scratch.write_text(
        "".join(json.dumps(asdict(entry)) + "\n" for entry in existing if entry.sha256 not in removed), encoding="utf-8"
    )
    scratch.chmod(0o600)
    scratch.replace(file)
    _accepted.difference_update(removed)
    return matches


def accept(hashes: Iterable[str]) -> None:
    """Trust contents in this process only: the hosts of a Ray job trust what its driver trusts."""
    _accepted.update(hashes)


def hash_of_file(path: Path) -> str:
    """sha256 of a file that is trusted by itself: a project file, or a judge's YAML file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def allow(sha256: str, path: str | Path) -> None:
    """Trust an artifact that the user has just compiled; in this process only if the list cannot be written."""
    if _mode.get() == "once":
        return
    try:
        add(sha256, path)
    except ConfigError:
        _accepted.add(sha256)


def demand(sha256: str, path: str | Path, why: str) -> None:
    """Require that a content is trusted; inside of `trusting` it becomes trusted.

    Args:
        why: what it would do, as a predicate after its path.
    Raises:
        UntrustedArtifact: the content is not trusted.
    """
    remember(sha256, path)
    if _mode.get() == "once" or is_trusted(sha256):
        return
    raise UntrustedArtifact(
        f"{path} {why}. Its content (sha256 {sha256[:12]}…) is not trusted. Read it first; `trust=True` then loads it, "
        f"as does assay trust add {path}, and is remembered for exactly this content"
    )


def remember(sha256: str, path: str | Path) -> None:
    """Inside of `trusting()`, trust a content permanently.

    Raises:
        ConfigError: the list cannot be written.
    """
    if _mode.get() == "remember" and not is_trusted(sha256):
        add(sha256, path)


@contextmanager
def trusting(mode: bool | _Mode = True) -> Iterator[None]:
    """Inside, loaded artifacts are trusted.

    Args:
        mode: True or `remember`: permanently; `once`: without recording it; False: no change.
    """
    if mode is False:
        yield
        return
    token = _mode.set("remember" if mode is True else mode)
    try:
        yield
    finally:
        _mode.reset(token)


def trusts(function: _Function) -> _Function:
    """Decorator that adds `trust=False` to a function that loads artifacts; `trust=True` trusts them permanently."""

    @functools.wraps(function)
    def call(*args: Any, trust: bool = False, **options: Any) -> Any:
        if not isinstance(trust, bool):
            raise ConfigError(f"`trust={trust!r}` must be True or False")
        with trusting(trust):
            return function(*args, **options)

    signature = inspect.signature(function)
    named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    catch_all = [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
    flag = inspect.Parameter("trust", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)
    call.__signature__ = signature.replace(parameters=[*named, flag, *catch_all])  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]
