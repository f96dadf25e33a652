"""Everything that assay prints. Secrets are masked and control characters are shown escaped.

Texts of tasks, models, files and stores can hold a terminal's escape sequences, or marks that reverse the direction of
a text. `echo` and `rich_console` escape them; `protected` does so for what others print: logging, warnings, programs.
Only `rich_console` adds colours.
"""

import functools
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from assay.support.scrubbing import Filtered, scrubbed, unscrubbed

# Controls except newline and tab; marks, overrides and isolates of the text direction; line separators; lone surrogates
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff]")
_RETURN = re.compile("\r\n?")


def escaped(text: str) -> str:
    r"""The text with control characters as `\u001b`. In a JSON text they keep their values."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def echo(
    text: object = "", *, err: bool = False, nl: bool = True, file: TextIO | None = None, with_key: bool = False
) -> None:
    """Prints a line on standard output, or on standard error.

    Args:
        nl: end the line.
        file: the stream to print to instead.
        with_key: the text holds a key that was generated for the user, and is not masked.
    """
    stream = file if file is not None else sys.stderr if err else sys.stdout
    stream = unscrubbed(stream) if with_key else stream
    stream.write(escaped(str(text)) + ("\n" if nl else ""))
    stream.flush()  # whoever waits for the line on a pipe gets it now


def ask(question: str) -> str | None:
    """The line that the user types; None at the end of the input."""
    echo(question, nl=False, err=True)
    line = sys.stdin.readline()
    return line.strip() if line else None


class _Escaped(Filtered):
    """A stream whose texts are escaped before they are masked."""


def protected(stream: TextIO, *, texts: bool = False) -> TextIO:
    """A stream for everything that this process prints. `texts` as in `scrubbed`.

    A carriage return ends the line: progress bars of other libraries begin with one, and it overwrites text.
    """
    return cast(TextIO, _Escaped(scrubbed(stream, texts=texts), lambda text: escaped(_RETURN.sub("\n", text))))


def rich_console(*, err: bool = False) -> Any:
    """A console of rich for tables, bars and styles, on standard output or standard error.

    Texts are printed as they are: it reads no markup, no emoji codes, and does not highlight.
    """
    stream: Any = sys.stderr if err else sys.stdout
    file = stream.inner if isinstance(stream, _Escaped) else stream  # the console's own sequences are not escaped
    return _console_type()(file=file, highlight=False, markup=False, emoji=False)


@functools.cache
def _console_type() -> Any:
    from rich.console import Console
    from rich.segment import Segment

    class EscapingConsole(Console):
        def render_str(self, text: str, **options: Any) -> Any:
            return super().render_str(escaped(text), **options)  # before the layout

        def render(self, renderable: Any, options: Any = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(escaped(segment.text), segment.style)

    return EscapingConsole
