"""Key files and other files that only their owner can read."""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from assay.errors import ConfigError, MissingExtra
from assay.support.places import writing

__all__ = ["key_of", "load_fernet", "write_private"]


def key_of(path: str | Path) -> bytes:
    """Read a key file, or create one that only its owner can read.

    Raises:
        ConfigError: Others can read the file, or it has no key.
        MissingExtra: `cryptography` is not installed.
    """
    path, fernet = Path(path), load_fernet()
    if not path.exists():
        write_private(path, fernet.generate_key(), new=True)
    elif os.name == "posix" and path.stat().st_mode & 0o077:
        raise ConfigError(f"the key file {str(path)!r} is readable by others; run chmod 600 on it, or use a new file")
    key = path.read_bytes()
    try:
        fernet(key)
    except ValueError:
        raise ConfigError(
            f"{str(path)!r} does not contain a key; give a file that does not exist yet to create one"
        ) from None
    return key


def load_fernet() -> Any:
    """The class `cryptography.fernet.Fernet`.

    Raises:
        MissingExtra: `cryptography` is not installed.
    """
    try:
        from cryptography.fernet import Fernet
    except ImportError as error:
        raise MissingExtra("cryptography", "privacy") from error
    return Fernet


def write_private(path: Path, content: bytes, *, new: bool = False) -> None:
    """Write a file that only its owner can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | (os.O_EXCL if new else os.O_TRUNC)
    with (
        nullcontext(path) if new else writing(path) as place,  # a full disk must not cost the table that is there
        os.fdopen(os.open(place, flags, 0o600), "wb") as file,
    ):
        file.write(content)
