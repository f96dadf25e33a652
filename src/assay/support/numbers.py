"""Numbers as text. A number that rounds to zero has no minus sign: `-0.000` reads as a loss."""

__all__ = ["counted", "figure", "signed"]


def counted(number: int, things: str) -> str:
    """A number and what it counts: `1 rollout`, `2 rollouts`, `1,200 LM calls`."""
    return f"{number:,} {things.removesuffix('s') if number == 1 else things}"


def figure(value: float | None, digits: int = 3) -> str:
    """A number with these decimals; a dash where there is none."""
    return "–" if value is None else f"{value:z.{digits}f}"


def signed(value: float | None, digits: int = 3) -> str:
    """A difference with its sign: `+0.100`; `+0.000` if it rounds to zero, a dash where there is none."""
    return "–" if value is None else f"{value:+z.{digits}f}"
