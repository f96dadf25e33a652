"""Streams and log records with secrets removed."""

import logging
from collections.abc import Callable, Iterable
from typing import Any, TextIO, cast

from assay.support.scrubbing.texts import mask_secrets, message


def scrubbed(stream: TextIO, *, texts: bool = False) -> TextIO:
    """A text stream that removes secrets from each piece written. A secret split over two pieces is not detected.

    Args:
        texts: texts of models and agents are written, from which only known secrets are removed; else messages.
    """
    return cast(TextIO, Filtered(stream, mask_secrets if texts else message))


def unscrubbed(stream: TextIO) -> TextIO:
    """The underlying stream, for a secret that must be shown: a key generated for its owner."""
    while isinstance(stream, Filtered):
        stream = stream.inner
    return stream


class Filtered:
    """A text stream that changes each text before it is written to the stream `inner`."""

    def __init__(self, inner: TextIO, change: Callable[[str], str]) -> None:
        self.inner, self._change = inner, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __enter__(self) -> "Filtered":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(self, text: str) -> int:
        self.inner.write(self._change(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


def scrub_logs() -> None:
    """Remove secrets from the records of all loggers of this process, from now on."""
    default_factory = logging.getLogRecordFactory()
    if getattr(default_factory, "scrubs", False):
        return

    def scrubbed_record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = default_factory(*args, **kwargs)
        try:
            record.msg, record.args = message(record.getMessage()), ()
        except Exception:  # arguments do not fit the format: logging reports that itself
            return record
        if record.exc_info and record.exc_info[0] is not None:
            record.exc_text = message(logging.Formatter().formatException(record.exc_info))
        return record

    scrubbed_record.scrubs = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(scrubbed_record)
