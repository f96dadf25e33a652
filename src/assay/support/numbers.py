"""Numbers as text. A number that rounds to zero has no minus sign: `-0.000` reads as a loss."""

from decimal import Decimal
from math import isfinite


def counted(number: float, things: str) -> str:
    """A number and what it counts: `1 rollout`, `2 rollouts`, `1,200 LM calls`, `0.0000021 dollars`."""
    figures = f"{number:,}" if isinstance(number, int) else format(Decimal(f"{number:.6g}"), ",f")
    return f"{figures} {things.removesuffix('s') if number == 1 else things}"


def calls_text(calls: int, cached: int) -> str:
    """The LM calls that were made, and how many more the response cache answered, from this run or earlier ones."""
    return f"{calls:,} ({cached:,} more from the cache)"


def price(value: float | None) -> str:
    """Dollars; `unknown` where they are not known. A cost is never rounded to nothing."""
    if value is not None and 0 < value < 0.00005:
        return "< $0.0001"
    return "unknown" if value is None else f"${value:.4f}" if value else "$0"


def figure(value: float | None, digits: int = 3) -> str:
    """A number with these decimals; a dash where there is none."""
    return f"{value:z.{digits}f}" if value is not None and isfinite(value) else "–"


def signed(value: float | None, digits: int = 3) -> str:
    """A difference with its sign: `+0.100`; `+0.000` if it rounds to zero, a dash where there is none."""
    return f"{value:+z.{digits}f}" if value is not None and isfinite(value) else "–"
