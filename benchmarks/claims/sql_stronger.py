"""Text to SQL on a schema that was not compiled on, as in `claims.sql`, with the stronger model."""

from dataclasses import replace

from claims import sql
from claims.storing import Measured, Setting


def measure(setting: Setting) -> Measured:
    return sql.measure(replace(setting, model=f"embedded:{setting.stronger}"))
