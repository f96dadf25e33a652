"""The Jinja environment of all pages, and reports as files that can be sent: one HTML file that loads nothing.

Every value is escaped, and invisible characters are made visible. The local page (`assay.web`) and reports as files
share the components in `templates/components.html`; links to other pages are left out of files.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from assay.errors import ConfigError, spoken
from assay.reports import texts
from assay.reports.markdown import cost_words, models_text, split_notes
from assay.reports.sides import FEWEST_TASKS, by_criterion, by_type, grades_of, mean_of
from assay.reports.texts import preview
from assay.support.numbers import calls_text, figure, price, signed
from assay.support.places import is_other_file, write_whole
from assay.support.report import Table
from assay.traces.store.evaluations import Evaluated
from assay.traces.store.sealing import openings_line
from assay.traces.store.store import StoreReads

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


Fact = tuple[str, str]
ROWS = 300  # tasks in one file


@dataclass(frozen=True, kw_only=True)
class Page:
    """The page of a job's report, without the lines that the command prints.

    Attributes:
        template, title, facts: see `write_report`; `values` are the further values of the template.
        runs: ids of the runs that it shows, by which an erasure finds it.
    """

    template: str
    title: str
    facts: Sequence[Fact] = ()
    values: Mapping[str, Any]
    runs: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class ScoredTask:
    """A task of an evaluation; `score` is None if it was not scored. `rollout_id` is the first of its rollouts."""

    text: str
    score: float | None
    grades: Mapping[str, float]
    rollout_id: str = ""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """An evaluation: means with 95 % intervals by criterion and type of task, and its tasks, the lowest score first.

    Attributes:
        mean: of the scored tasks, with its interval; None if there are none.
        n: number of tasks, of which `unscored` have no score.
    """

    criteria: Sequence[tuple[str, tuple[float, float, float] | None, int]]
    types: Sequence[tuple[str, tuple[float, float, float] | None, int]]
    tasks: Sequence[ScoredTask]
    left_out: int
    mean: tuple[float, float, float] | None = None
    n: int = 0
    unscored: int = 0


def scores_of(store: StoreReads, run_id: str, evaluated: Evaluated, *, rows: int = ROWS) -> Scores:
    """The scores of an evaluation of a run.

    Args:
        rows: maximum number of tasks.
    """
    grades = grades_of(store, run_id, evaluated)
    tasks = [
        ScoredTask(
            text=preview(task.inputs, 160) or key, score=task.score, grades=grades.get(key, {}),
            rollout_id=next(iter(task.rollouts), ""),
        )
        for key, task in evaluated.tasks.items()
    ]  # fmt: skip
    tasks.sort(key=lambda row: (row.score is not None, row.score or 0.0))
    criteria, types = (
        [(name, mean_of(values), len(values)) for name, values in parts.items()]
        for parts in (by_criterion(grades), by_type(evaluated))
    )
    scored = evaluated.scores
    return Scores(
        criteria=criteria, types=types, tasks=tasks[:rows], left_out=max(0, len(tasks) - rows), mean=mean_of(scored),
        n=len(tasks), unscored=len(tasks) - len(scored),
    )  # fmt: skip


def write_report(
    path: str | Path,
    template: str,
    *,
    title: str,
    facts: Sequence[Fact] = (),
    lines: Sequence[str | Table] = (),
    notes: Sequence[str] = (),
    **values: Any,
) -> Path:
    """Writes a report.

    Args:
        template: a file in `templates`, which extends `report.html`.
        facts: names and texts of the list at its top.
        lines: of the report; its notes are at the end.
        notes: more sentences at its end.
    Raises:
        ConfigError: the file cannot be written, or it exists and its name does not end in `.html`.
        WriteFailed: the disk is full.
    """
    if is_other_file(path, ".html"):
        raise ConfigError(f"{path} exists and is not overwritten, because its name does not end in .html")
    body, noted = split_notes(spoken(line, str) if isinstance(line, str) else line for line in lines)
    style = stylesheet().decode()
    digest = base64.b64encode(sha256(style.encode()).digest()).decode()
    text = _environment().get_template(template).render(
        title=title, facts=facts, lines=body, notes=[spoken(note, str) for note in [*noted, *notes]],
        style=Markup(style), style_sha256=digest, **values,
    )  # fmt: skip
    write_whole(path, text.encode("utf-8", "replace"))
    return Path(path)


def short_name(program: str) -> str:
    """A program's name without its folders."""
    return program.replace("\\", "/").rstrip("/").rpartition("/")[2][:120]


def spent_facts(data: Mapping[str, Any]) -> list[Fact]:
    """LM calls, tokens and dollars of a report; by model if several answered."""
    text = f"LM calls: {calls_text(data['calls'], data['cached'])}; {data['tokens']:,} tokens"
    called = [("LM calls by model", called)] if (called := models_text(data)) else []
    return [("Cost", f"{text}; {cost_words(data['cost_usd'])}"), *called]


def ended_facts(data: Mapping[str, Any]) -> list[Fact]:
    """What ended the job early, and how often the test split was opened."""
    stopped = [("Stopped early", spoken(str(data["stopped"]), str))] if data["stopped"] else []
    opened = [("Test split", openings_line(data["test_openings"]))] if data.get("test_openings") else []
    return [*stopped, *opened]


@cache
def _environment() -> "Environment":
    return page_environment("assay.reports", link=lambda *path, **query: "")
