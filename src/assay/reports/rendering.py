"""The Jinja environment of all pages: every value is escaped, and invisible characters are made visible.

The local page (`assay.web`) and reports as files share the components in `templates/components.html`.
"""

from collections.abc import Callable
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from assay.reports import texts
from assay.reports.sides import FEWEST_TASKS
from assay.support.numbers import calls_text, figure, price, signed

if TYPE_CHECKING:
    from jinja2 import Environment

_FILTERS = ("iso", "moment", "preview", "seconds", "size")


def page_environment(*packages: str, link: Callable[..., str]) -> "Environment":
    """An environment with the templates of these packages, the first that has a name.

    Args:
        link: makes an address of a path and a query; a file without a server has one that returns nothing.
    """
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalized,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"link": link, "fewest_tasks": FEWEST_TASKS}
    environment.filters |= {name: getattr(texts, name) for name in _FILTERS}
    environment.filters |= {"calls": calls_text, "figure": figure, "price": price, "signed": signed}
    return environment


def _finalized(value: Any) -> Any:
    """What a template writes for a value, before it is escaped. Markup is the output of other templates."""
    return texts.readable(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def stylesheet() -> bytes:
    """The style sheet of all pages."""
    return files("assay.reports").joinpath("static", "page.css").read_bytes()
