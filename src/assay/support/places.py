"""Whether a file can be written, found out before the work whose result it is to hold."""

import errno
import os
import tempfile
from pathlib import Path

from assay.errors import ConfigError

__all__ = ["check_writable"]


def check_writable(path: str | Path, argument: str) -> None:
    """Makes the file's folder where it is missing. Writes nothing to the file.

    Args:
        argument: name of the argument that names the file, for the message.
    Raises:
        ConfigError: the file cannot be written.
    """
    place = Path(path)
    try:
        if place.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=place.parent).close()  # `os.access` allows a superuser what the system does not
        elif not os.access(place, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{argument}={str(path)!r} cannot be written: {reason}. Name another file") from None
