"""Times as users write them: spans back from now and dates."""

import time
from datetime import datetime

from assay.errors import ConfigError

_SECONDS = {"m": 60, "h": 3600, "d": 86400}
_EARLIEST = 0.0


def since(text: str, *, now: float | None = None) -> float:
    """Seconds since the epoch of `30m`, `12h` or `7d` before `now`, or of a date such as `2026-11-23`.

    Raises:
        ConfigError: `text` is neither.
    """
    number = text[:-1]
    try:
        if text[-1:] in _SECONDS and number.isascii() and number.isdigit() and len(number) < 9:
            at = (time.time() if now is None else now) - int(number) * _SECONDS[text[-1]]
            return max(_EARLIEST, at)
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise ConfigError(
            f"`since={text[:100]!r}` must be a number of minutes, hours or days (30m, 12h, 7d) or a date (2026-11-23)"
        ) from None
