"""What counts as a missing value, whatever the source of the data."""

from datetime import date
from decimal import Decimal
from typing import Any


def is_missing(value: Any) -> bool:
    """Whether a value means that it is not known: None, NaN of any type, and NaT and NA of pandas.

    The empty cell of a CSV file and null in JSON are read as None. Texts are values, also empty ones and `NA`.
    """
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(value, Decimal):
        return value.is_nan()
    if isinstance(value, float | date) or (hasattr(value, "dtype") and not getattr(value, "ndim", 1)):
        return bool(value != value)
    return False
