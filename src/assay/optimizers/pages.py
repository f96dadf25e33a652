"""An HTML page of figures, tables and notes that opens without a network."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.errors import MissingExtra

__all__ = ["Page", "table"]

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.15em .7em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child,.facts td{text-align:left}.facts td:first-child{white-space:nowrap;vertical-align:top}
.note{color:#666}h2{margin-top:2em}pre{white-space:pre-wrap;background:#f6f6f6;padding:.6em}"""


class Page:
    """Parts in order; plotly's library is written once, into the page itself.

    Raises:
        MissingExtra: plotly is not installed.
    """

    def __init__(self, title: str, facts: Mapping[str, Any]) -> None:
        try:
            import plotly.io
        except ImportError as error:
            raise MissingExtra(str(error.name), "plots") from error
        self._plotly, self.title, self.facts, self.parts, self._library = plotly.io, title, facts, list[str](), True

    def section(self, heading: str, note: str = "") -> None:
        """A heading with a note; both are text."""
        self.parts.append(f"<h2>{html.escape(heading)}</h2>" + (f"<p class=note>{html.escape(note)}</p>" if note else ""))

    def markup(self, text: str) -> None:
        """HTML as it is."""
        self.parts.append(text)

    def figure(self, figure: Any) -> None:
        """A plotly figure."""
        self.parts.append(self._plotly.to_html(figure, include_plotlyjs=self._library, full_html=False, config={"displaylogo": False}))
        self._library = False

    def write(self, path: Path) -> Path:
        head = "".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(value))}</td></tr>" for name, value in self.facts.items())
        path.write_text(
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(self.title)}</title><style>{_STYLE}</style>'
            f"<h1>{html.escape(self.title)}</h1><table class=facts>{head}</table>{''.join(self.parts)}</html>",
            encoding="utf-8",
        )
        return path


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table's HTML; every cell is text."""
    cells = ["".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) for row in rows]
    return f"<table><tr>{''.join(f'<th>{html.escape(name)}</th>' for name in head)}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
