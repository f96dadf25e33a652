"""The pages of rollouts: the list, one rollout as a conversation, and the JSON of one call."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson
import sqlalchemy as sa

from assay.cli.flags import is_artifact
from assay.cli.repeat import rollout_command
from assay.errors import ConfigError, UnknownRollout
from assay.reports.texts import Budget, pretty
from assay.reports.training_log import read_training_log
from assay.traces.rating import store_rating, why_not_rated
from assay.traces.records import NOT_AGENTS, Rollout
from assay.traces.store import Store
from assay.traces.store import tables as schema
from assay.traces.store.listing import finished_report, run_folder
from assay.traces.store.paging import Cursor, RolloutFilters, RolloutPage, calls_from, rollout_page
from assay.traces.store.rows import rollout_of
from assay.web.conversation import tools_of, turns_of
from assay.web.datasets import dataset_values
from assay.web.filters import (
    DOWNLOADS,
    FAILURES,
    MOST_DOWNLOADED,
    SPLITS,
    STATUSES,
    cursor_of,
    number_of,
    rollout_filters,
)  # fmt: skip
from assay.web.rendering import View, link
from assay.web.runs import RUNNING_S
from assay.web.same_task import other_sides
from assay.web.verdicts import judge_calls, judged_rollout

__all__ = ["call_json", "one_rollout", "rate", "rollout_json", "rollout_view", "rollouts_view"]

_WAITING_S = 20  # seconds between two loads of the newest rollouts while no run is in progress


def rollouts_view(store: Store, query: Mapping[str, str]) -> View:
    """Rollouts that match the filters, newest first."""
    values, filters = rollout_filters(query)
    before, after = cursor_of(query, "before"), cursor_of(query, "after")
    page = rollout_page(store, filters, before=before, after=after)
    older, newer = _neighbour_pages(page, is_newer=after is not None, is_first=before is None and after is None)
    first = before is None and after is None
    return View(
        template="rollouts.html",
        title="Rollouts",
        values={
            "rollouts": page.rows, "filters": values, "splits": SPLITS, "statuses": STATUSES, "failures": FAILURES,
            "older": link("rollouts", **values, before=older) if older else "",
            "newer": link("rollouts", **values, after=newer) if newer else "",
            "newest": "" if first else link("rollouts", **values), "searched": page.searched,
            "downloads": DOWNLOADS, "most": MOST_DOWNLOADED,
        },
        part="rollouts_part.html",
        every_s=0 if not first else RUNNING_S if _runs_are_going_on(store) else _WAITING_S,
    )  # fmt: skip


def _neighbour_pages(page: RolloutPage, *, is_newer: bool, is_first: bool) -> tuple[Cursor | None, Cursor | None]:
    """Places of the pages with older and with newer rollouts; None if there is none."""
    onwards = page.rows[0 if is_newer else -1].cursor if page.more else page.searched
    back = page.rows[-1 if is_newer else 0].cursor if page.rows and not is_first else None
    return (back, onwards) if is_newer else (onwards, back)


def _runs_are_going_on(store: Store) -> bool:
    with store.engine.connect() as connection:
        query = sa.select(schema.runs.c.id).where(schema.runs.c.status == "running").limit(1)
        return connection.execute(query).first() is not None


def one_rollout(store: Store, rollout_id: str) -> Rollout:
    """A rollout without its transitions.

    Raises:
        UnknownRollout: no rollout has this id.
    """
    table = schema.rollouts
    with store.engine.connect() as connection:
        row = connection.execute(sa.select(table).where(table.c.id == rollout_id)).mappings().first()
    if row is None:
        raise UnknownRollout(f"there is no rollout {rollout_id[:80]!r}")
    return rollout_of(row)


def rollout_view(
    store: Store, rollout_id: str, query: Mapping[str, str], *, where: str | Path | None, store_flag: str | None
) -> View:
    """One rollout: its task, calls, verdicts, rating, and the rollouts around it in the filtered list.

    Args:
        where: the store's location, next to which datasets are.
    """
    rollout = one_rollout(store, rollout_id)
    values, filters = rollout_filters(query)
    first = _first_call(query)
    calls, budget = calls_from(store, rollout.id, first), Budget()
    return View(
        template="rollout.html",
        title=f"Rollout {rollout.id[:16]}",
        values={
            "rollout": rollout,
            "filters": values,
            "inputs": [(name, budget.clip(pretty(value))) for name, value in rollout.inputs.items()],
            "expected": [(name, budget.clip(pretty(value))) for name, value in rollout.expected.items()],
            "early_tools": tools_of(rollout.early_tools, budget),
            "turns": turns_of(calls.rows, calls.before, budget),
            "calls": calls,
            "prediction": [(name, budget.clip(pretty(value))) for name, value in (rollout.prediction or {}).items()],
            "error": budget.clip(rollout.error) if rollout.error else None,
            "verdicts": [(verdict, budget.clip(verdict.reason)) for verdict in rollout.verdicts],
            "earlier_calls": link("rollouts", rollout.id, **values, call=max(0, first - 20) or None) if first else "",
            "later_calls": link("rollouts", rollout.id, **values, call=calls.rows[-1].t + 1) if calls.more else "",
            "list": link("rollouts", **values),
            "run_link": _run_link(store, rollout),
            "advantages": _advantages(rollout, where),
            "judge_calls": judge_calls(store, rollout),
            "judged": judged_rollout(store, rollout),
            "other_sides": other_sides(store, rollout, query, values, where=where),
            **_around(store, rollout, values, filters),
            **rating_values(rollout),
            **dataset_values(store, rollout, where),
            "commands": list(_commands(store, rollout, where, store_flag)),
        },
        part="rollout_part.html",
        every_s=RUNNING_S if rollout.status == "running" else 0,
    )


def _advantages(rollout: Rollout, where: str | Path | None) -> list[float]:
    """Of each call, if the rollout is a sample of a training; the log has those of samples alone."""
    log = read_training_log(run_folder(where, rollout.run_id)) if rollout.phase == "train" else None
    samples = [] if log is None else log.samples.values()
    return next((list(advantages) for rollout_id, advantages in samples if rollout_id == rollout.id), [])


def rating_values(rollout: Rollout) -> dict[str, Any]:
    """What the form for a rating shows."""
    return {"why_not_rated": why_not_rated(rollout), "keys": [(key, round(key / 9, 4)) for key in range(10)]}


def _first_call(query: Mapping[str, str]) -> int:
    text = query.get("call", "0")
    if not (text.isascii() and text.isdigit() and len(text) < 9):
        raise ConfigError(f"call={text[:80]!r} must be the number of a call, from 0")
    return int(text)


def _around(store: Store, rollout: Rollout, values: Mapping[str, str], filters: RolloutFilters) -> dict[str, str]:
    """Addresses of the rollout before (newer) and after (older) this one in the filtered list; empty at its ends."""
    here = Cursor(rollout.started_at, rollout.id)
    if rollout.source in NOT_AGENTS and "source" not in filters.equal:  # its own list leaves it out
        filters = replace(filters, equal={**filters.equal, "source": rollout.source})
    newer = rollout_page(store, filters, after=here, limit=1)
    older = rollout_page(store, filters, before=here, limit=1)
    return {
        name: link("rollouts", page.rows[-1 if name == "newer" else 0].id, **values) if page.rows else ""
        for name, page in (("newer", newer), ("older", older))
    }


def _run_link(store: Store, rollout: Rollout) -> str:
    """The page of the rollout's run; its rollouts if the store has no row of the run."""
    with store.engine.connect() as connection:
        query = sa.select(schema.runs.c.id).where(schema.runs.c.id == rollout.run_id)
        known = connection.execute(query).first() is not None
    return link("runs", rollout.run_id) if known else link("rollouts", run=rollout.run_id)


def _commands(
    store: Store, rollout: Rollout, where: str | Path | None, store_flag: str | None
) -> Iterator[tuple[str, str]]:
    if rollout.source == "program":
        words, program, endpoint = _repeated(store, rollout, where)
        again = rollout_command(program, rollout.inputs, rollout.model, store=store_flag, **endpoint)
        if again is not None:
            yield words, again
    store_option = "" if store_flag is None else f" --store {shlex.quote(store_flag)}"
    yield "Show it in a terminal", f"assay traces show {rollout.id}{store_option}"
    if why_not_rated(rollout) is None:
        yield "Rate it in a terminal", f"assay traces rate {rollout.id} 0.8{store_option}"


def _repeated(store: Store, rollout: Rollout, where: str | Path | None) -> tuple[str, str, dict[str, str]]:
    """Which program repeats a rollout: words that say so, its name, and the address and key of its model."""
    config = _config(store, rollout.run_id)
    is_own = config.get("model") in (None, rollout.model)
    endpoint = {name: config[name] for name in ("api_base", "api_key_env") if is_own and config.get(name)}
    words, given = "Run the program on this task again", config.get("program")
    report = {} if config.get("kind") != "compile" else finished_report(where, rollout.run_id) or {}
    versions = {one.get("name"): one.get("version") for one in report.get("candidates") or ()}
    if report.get("artifact") and rollout.program_version == versions.get(report.get("winner")):
        return "Run the compiled program on this task again", str(report["artifact"]), endpoint
    if versions and rollout.program_version != versions.get("baseline"):
        words = "Run the program on this task, without the prompt of this candidate"
    elif config.get("kind") in ("evaluate", "collect") and isinstance(given, str) and is_artifact(given):
        return words, given, endpoint
    elif rollout.parameters:
        words = "Run the program on this task again, with its own parameters"
    return words, rollout.program, endpoint


def _config(store: Store, run_id: str) -> Mapping[str, Any]:
    """The settings of a run, with its kind; empty if the store has no row of it."""
    table = schema.runs
    with store.engine.connect() as connection:
        row = connection.execute(sa.select(table.c.kind, table.c.config).where(table.c.id == run_id)).first()
    if row is None:
        return {}
    return {**(orjson.loads(row.config) if isinstance(row.config, str | bytes) else row.config), "kind": row.kind}


def rate(store: Store, rollout_id: str, text: str) -> Rollout:
    """Stores a rating. Returns the rollout with it.

    Raises:
        ConfigError: the text is no number in [0, 1], or the rollout takes no rating.
        UnknownRollout: no rollout has this id.
    """
    rollout = one_rollout(store, rollout_id)
    rating = number_of({"rating": text}, "rating")
    if rating is None:
        raise ConfigError("rating='' must be a number from 0 to 1")
    store_rating(store, rollout, rating)
    rollout.human_rating = rating
    return rollout


def call_json(store: Store, rollout_id: str, t: int) -> str:
    """A transition as indented JSON.

    Raises:
        UnknownRollout: there is no such transition.
    """
    rows = calls_from(store, rollout_id, t, limit=1).rows
    if not rows or rows[0].t != t:
        raise UnknownRollout(f"there is no call {t} of a rollout {rollout_id[:80]!r}")
    return pretty(asdict(rows[0]))


def rollout_json(store: Store, rollout_id: str) -> str:
    """A rollout without its transitions as indented JSON."""
    return pretty(asdict(one_rollout(store, rollout_id)))
