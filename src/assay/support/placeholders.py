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


def core_of(pieces: Sequence[str]) -> tuple[int, int]:
    """Range of pieces from the first to the last literal one with text, as `pieces[first:end]`.

    Placeholders before and after it have no known end in a rendered text.

    Returns:
        (0, 0) if no literal piece has text.
    """
    literal = [at for at in range(0, len(pieces), 2) if pieces[at].strip()]
    return (literal[0], literal[-1] + 1) if literal else (0, 0)
