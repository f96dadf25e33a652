"""Placeholders of prompt templates in all common languages: `{name}`, `{{ name }}`, `${name}`, `%(name)s`, `%s`.

A template is read as pieces, literal text and placeholders in turn, so that a rendered text can be recognised by its
literal pieces. A doubled brace, which Python's formatting renders as a single one, counts as a placeholder too.
"""

import re
from collections.abc import Sequence

_PLACEHOLDER = re.compile(
    r"(\{\{[^{}\n]*\}\}|\{%[^\n]*?%\}|\{#[^\n]*?#\}|<%[^\n]*?%>"  # Jinja, Mustache, EJS
    r"|\$\{[^{}\n]+\}|\$[A-Za-z_]\w*"  # JavaScript, shell, string.Template
    r"|\{[A-Za-z_][\w.\[\]]*(?:![rsa])?(?::[^{}\n]*)?\}|\{\d*\}"  # Python's str.format and f-strings
    r"|%\([A-Za-z_]\w*\)[sdifr]|%[sd]\b"  # Python's % operator
    r"|\{\{|\}\})"
)


def pieces_of(template: str) -> list[str]:
    """Literal text and placeholders in turn, the first and the last one literal, perhaps empty."""
    return _PLACEHOLDER.split(template)


def placeholders_in(template: str) -> list[str]:
    """The placeholders in their order."""
    return pieces_of(template)[1::2]


def outer_of(template: str) -> tuple[list[str], list[str]]:
    """The placeholders before and after the literal text, which have no known end in a rendered text."""
    pieces = pieces_of(template)
    literal = [at for at in range(0, len(pieces), 2) if pieces[at].strip()] or [0]
    return pieces[1 : literal[0] : 2], pieces[literal[-1] + 1 :: 2]


def with_added(template: str, addition: str) -> str:
    """A template with a text after its literal text, before the placeholders at its end."""
    pieces = pieces_of(template)
    end = len(pieces) - 2 * len(outer_of(template)[1])
    return "".join([*pieces[:end], addition, *pieces[end:]])


def inner_of(template: str, outer: tuple[Sequence[str], Sequence[str]]) -> list[str] | None:
    """The pieces of a template without these placeholders before and after it; None if it does not have them there."""
    before, after = outer
    pieces = pieces_of(template)
    first, end = 2 * len(before), len(pieces) - 2 * len(after)
    blank = [*pieces[0:first:2], *pieces[end + 1 :: 2]]
    if end <= first or pieces[1:first:2] != list(before) or pieces[end::2] != list(after) or any(map(str.strip, blank)):
        return None
    return pieces[first:end]
