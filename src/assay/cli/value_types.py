"""Types of flag values: numbers between bounds, and choices."""

from typing import Any

import click

from assay.support.settings import one_of


class Choice(click.Choice[str]):
    """One of some words; an unknown one gets the nearest in the error, as in `assay.toml` and in Python."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        return f"{str(value)!r} {one_of(str(value), self.choices)}"


class Integer(click.IntRange):
    """An integer between bounds; another text is not an integer, where click says "not a valid integer range"."""

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        return super().convert(_of_type(click.INT, value, param, context), param, context)


class Number(click.FloatRange):
    """As `Integer`, for numbers."""

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        return super().convert(_of_type(click.FLOAT, value, param, context), param, context)


def _of_type(kind: Any, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
    try:
        return kind.convert(value, param, context)
    except click.BadParameter:
        raise click.BadParameter(
            f"{value!r} is not {'an integer' if kind is click.INT else 'a number'}", context, param
        ) from None
