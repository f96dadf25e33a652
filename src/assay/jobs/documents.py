"""Warnings about tasks that expect documents which do not exist: no search can retrieve them.

Reads the names of documents, not their texts. Does not stop a job: the sources of other retrievers are unknown.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath

import dspy
import sqlalchemy as sa

from assay.datasets import Task
from assay.errors import ConfigError, StoreError
from assay.programs.retrieval import DocumentIndex
from assay.programs.retrieval.retriever import listed_sources
from assay.rubrics import Rubric
from assay.rubrics.documents import expected_sources, retrieved
from assay.support.names import nearest

__all__ = ["absent_sources"]

_SHOWN = 3  # names in a message
_MOST_COMPARED = 20_000  # documents among which a name that is only spelled alike is looked for


def absent_sources(program: dspy.Module, rubric: Rubric, tasks: Iterable[Task]) -> list[str]:
    """Messages about expected sources that neither the program's index nor the documents of the task have.

    Only for rubrics with the check `retrieved`. Tasks without documents of their own are compared with each
    `DocumentIndex` that is an attribute of a module of the program; without one, their documents are unknown.
    """
    if not any(criterion.check is retrieved for criterion in rubric.criteria):
        return []
    of_index, of_tasks = list[Task](), list[Task]()
    for task in tasks:
        if expected_sources(task):
            (of_tasks if isinstance(task.inputs.get("documents"), list) else of_index).append(task)
    return [*_absent_in_indexes(program, of_index), *_absent_in_tasks(of_tasks)]


def _absent_in_indexes(program: dspy.Module, tasks: Sequence[Task]) -> list[str]:
    modules = [module for _, module in program.named_sub_modules(dspy.Module)]
    indexes = {id(v): v for module in modules for v in vars(module).values() if isinstance(v, DocumentIndex)}
    if not tasks or not indexes:
        return []
    try:
        known = {source for index in indexes.values() for source in index.sources()}
    except (StoreError, sa.exc.SQLAlchemyError):
        return []  # the first run fails with the reason
    expected = {source for task in tasks for source in expected_sources(task)}
    absent = sorted(expected - known)
    if not absent:
        return []
    affected = sum(not known.issuperset(expected_sources(task)) for task in tasks)
    names = ", ".join(sorted({repr(index.name) for index in indexes.values()}))
    return [
        f"the index {names} does not have {len(absent)} of the {len(expected)} expected sources, so 'retrieved' "
        f"is below 1 on {affected} of {len(tasks)} tasks: {_listed(absent, known)}. A source is the path of a "
        "file relative to the indexed folder"
    ]


def _absent_in_tasks(tasks: Sequence[Task]) -> list[str]:
    affected = list[str]()
    for task in tasks:
        try:
            known = set(listed_sources(task.inputs["documents"]))
        except ConfigError:
            continue  # the run fails with the reason
        if absent := [source for source in expected_sources(task) if source not in known]:
            affected.append(f"task {task.id!r} expects {_listed(absent, known)}")
    if not affected:
        return []
    return [
        f"'retrieved' is below 1 on {len(affected)} of {len(tasks)} tasks, because their own documents do not have an "
        f"expected source: {affected[0]}"
    ]


def _listed(absent: Sequence[str], known: Iterable[str]) -> str:
    """The first names, each with the document that was probably meant."""
    known, by_name = list(known), _by_name(known)
    parts = []
    for source in absent[:_SHOWN]:
        near = _meant(source, known, by_name)
        parts.append(f"{source[:100]!r}" + (f" (there is {near!r})" if near else ""))
    more = f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else ""
    return ", ".join(parts) + more


def _by_name(known: Iterable[str]) -> dict[str, str]:
    """File name, with and without its suffix and in lower case -> shortest path."""
    names: dict[str, str] = {}
    for source in sorted(known, key=lambda path: (len(path), path)):
        path = PurePosixPath(source.casefold())
        names.setdefault(path.name, source)
        names.setdefault(path.stem, source)
    return names


def _meant(source: str, known: Sequence[str], by_name: Mapping[str, str]) -> str | None:
    """The document with the same file name, else the one that is spelled most alike."""
    path = PurePosixPath(source.replace("\\", "/").casefold())
    same = by_name.get(path.name) or by_name.get(path.stem)
    return same or (nearest(source, known) if len(known) <= _MOST_COMPARED else None)
