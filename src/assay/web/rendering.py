"""Jinja templates of the page, in which every value is escaped, and its static files."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from assay.errors import ConfigError, FailureKind
from assay.reports.files import page_environment, stylesheet
from assay.support.numbers import since
from assay.traces.store import Store
from assay.traces.store.paging import Cursor, RolloutFilters

if TYPE_CHECKING:
    from jinja2 import Environment

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


# -- Filters of lists, read from the query of an address.


SPLITS = ("train", "val", "gate", "test")
STATUSES = ("done", "failed", "error", "running")
FAILURES = tuple(kind.value for kind in FailureKind)
DOWNLOADS = ("sft", "preferences", "transitions")  # kinds of `assay export` that need no rubric
MOST_DOWNLOADED = 1_000  # rollouts
ROLLOUT_FIELDS = (
    "program", "text", "status", "split", "phase", "source", "failure", "least", "most", "since", "run", "task",
    "deployment", "arm",
    "criterion", "tool",
)  # fmt: skip
RUN_FIELDS = ("kind", "program", "status", "since")
_COLUMNS = {"status": "status", "split": "split", "phase": "phase", "source": "source", "failure": "failure",
            "run": "run_id", "deployment": "deployment", "arm": "arm", "task": "task_id"}  # fmt: skip


def filled_in(query: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """The fields that are filled in. NUL, which no database takes in a text, and space around them are removed."""
    texts = {name: query.get(name, "").replace("\0", "").strip() for name in names}
    return {name: text.encode("utf-8", "replace").decode() for name, text in texts.items() if text}


def rollout_filters(store: Store, query: Mapping[str, str]) -> tuple[dict[str, str], RolloutFilters]:
    """The fields that are filled in, and the filters that they stand for.

    Raises:
        ConfigError: a score is not a number in [0, 1], or a time cannot be read.
    """
    values = filled_in(query, ROLLOUT_FIELDS)
    return values, RolloutFilters(
        equal={column: values[name] for name, column in _COLUMNS.items() if name in values},
        program=values.get("program", ""),
        text=values.get("text", ""),
        criterion=values.get("criterion", ""),
        tool=values.get("tool", ""),
        since=since(values["since"], now=store.clock.now()) if "since" in values else None,
        least=number_of(values, "least"),
        most=number_of(values, "most"),
    )


def number_of(values: Mapping[str, str], name: str) -> float | None:
    """A number in [0, 1]; None if the field is empty.

    Raises:
        ConfigError: the text is no such number.
    """
    if (text := values.get(name, "")) == "":
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise ConfigError(f"{name}={text[:80]!r} must be a number from 0 to 1")
    return value


def cursor_of(query: Mapping[str, str], name: str) -> Cursor | None:
    """The place in a list that the query names; None if it names none."""
    return Cursor.of(text) if (text := query.get(name, "")) else None
