"""Jinja templates of the page, in which every value is escaped, and its static files."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from assay.reports.rendering import page_environment, stylesheet

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["STATIC", "View", "compile_templates", "link", "render", "static_file"]

STATIC = {"page.css": "text/css", "page.js": "text/javascript", "htmx.min.js": "text/javascript",
          "icon.svg": "image/svg+xml"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class View:
    """What a page shows.

    Args:
        template: a file in `templates`.
        values: its variables.
        part: the template of the part that is loaded again; empty if nothing changes.
        every_s: seconds between two loads of the part.
        status: of the HTTP answer.
    """

    template: str
    title: str
    values: Mapping[str, Any] = field(default_factory=dict)
    part: str = ""
    every_s: int = 0
    status: int = 200


def link(*path: str, **query: Any) -> str:
    """An address of this page. Query values that are None or empty are left out."""
    address = "/" + "/".join(quote(part.encode("utf-8", "replace"), safe="") for part in path)
    pairs = [(name, str(value).encode("utf-8", "replace")) for name, value in query.items() if value not in (None, "")]
    return f"{address}?{urlencode(pairs)}" if pairs else address


@cache
def static_file(name: str) -> tuple[bytes, str]:
    """The content of a static file, and its digest."""
    content = stylesheet() if name == "page.css" else files("assay.web").joinpath("static", name).read_bytes()
    return content, sha256(content).hexdigest()[:12]


def _static_link(name: str) -> str:
    return link("static", name, v=static_file(name)[1])


@cache
def _environment() -> "Environment":
    environment = page_environment("assay.web", "assay.reports", link=link)
    environment.globals["static"] = _static_link
    return environment


def compile_templates() -> list[str]:
    """Compiles all templates, so that no page has to. Returns their names."""
    names = _environment().list_templates(extensions=["html"])
    compiled = [name for name in names if not name.startswith("report")]  # those are of files that are sent
    for name in compiled:
        _environment().get_template(name)
    return compiled


def render(template: str, **values: Any) -> str:
    """A template with its values. Lone surrogates, which no encoding has, are replaced."""
    return _environment().get_template(template).render(**values).encode("utf-8", "replace").decode()
