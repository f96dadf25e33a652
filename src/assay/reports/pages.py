"""Self-contained HTML pages: Jinja templates, in which every value is escaped, and plotly charts."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.errors import MissingExtra
from assay.reports.rendering import page_environment

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

__all__ = ["Charts", "write_html"]


class Charts:
    """Makes the charts of one page. plotly's library is written once, into the first of them.

    Raises:
        MissingExtra: plotly is not installed.
    """

    def __init__(self) -> None:
        try:
            import plotly.io
        except ImportError as error:
            raise MissingExtra(str(error.name), "plots") from error
        self._plotly, self._library = plotly.io, True

    def html(self, figure: Any) -> "Markup":
        """A plotly figure as HTML. plotly escapes the texts in it itself."""
        from markupsafe import Markup

        text = self._plotly.to_html(
            figure, include_plotlyjs=self._library, full_html=False, config={"displaylogo": False}
        )
        self._library = False
        return Markup(text)


def write_html(path: Path, template: str, *, title: str, facts: Mapping[str, Any], **values: Any) -> Path:
    """Writes a page.

    Args:
        template: file in `templates`, which extends `base.html`.
        facts: name -> value, the table at the top.
        values: what the template needs besides; a name that it uses and that is not among them is an error.
    """
    path.write_text(_environment().get_template(template).render(title=title, facts=facts, **values), encoding="utf-8")
    return path


@cache
def _environment() -> "Environment":
    return page_environment("assay.reports", link=lambda *path, **query: "")
