"""`assay traces`: list, show, stats."""

from dataclasses import asdict
from typing import Any

import click

from assay.cli.shared import print_json

__all__ = ["command"]

_store = click.option("--store", help="Database of traces; by default .assay/assay.db or $ASSAY_STORE.")
_json = click.option("--json", "as_json", is_flag=True, help="JSON on standard output.")


@click.group("traces")
def command() -> None:
    """Look at what happened."""


def _open(store: str | None) -> Any:
    from pathlib import Path

    from assay.errors import StoreError
    from assay.traces.store import Store, store_url

    url = store_url(store)
    if url.startswith("sqlite:///") and not Path(url.removeprefix("sqlite:///")).is_file():
        raise StoreError(f"there is no store at {url.removeprefix('sqlite:///')}: nothing has run here yet, or name it with --store")
    return Store(store)


@command.command("list")
@click.option("--run", "run_id", help="Only of this run.")
@click.option("--task", "task_id", help="Only of this task.")
@click.option("--split", type=click.Choice(["train", "val", "gate", "test"]), help="Only of this split.")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True)
@_store
@_json
def list_rollouts(run_id: str | None, task_id: str | None, split: str | None, limit: int, store: str | None, as_json: bool) -> None:
    """The newest rollouts."""
    with _open(store) as opened:
        rollouts = list(opened.rollouts(run_id=run_id, task_id=task_id, split=split, limit=limit))
    if as_json:
        print_json({"rollouts": [asdict(rollout) for rollout in rollouts]})
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("id", "program", "split", "phase", "status", "score", "inputs", box=None)
    for r in rollouts:
        score = "–" if r.score is None else f"{r.score:.2f}"
        first = " ".join(str(next(iter(r.inputs.values()), "")).split())
        table.add_row(r.id, r.program, r.split, r.phase, r.status, score, first[:60] + ("…" if len(first) > 60 else ""))
    Console(highlight=False, markup=False).print(table)


@command.command("show")
@click.argument("rollout_id")
@_store
@_json
def show(rollout_id: str, store: str | None, as_json: bool) -> None:
    """One rollout with every LM call, exactly as sent and received. The start of an id is enough."""
    with _open(store) as opened:
        rollout = opened.rollout(rollout_id)
    if as_json:
        print_json(asdict(rollout))
        return
    score = "unscored" if rollout.score is None else f"{rollout.score:.3f}"
    click.echo(f"{rollout.id}  {rollout.program}@{rollout.program_version}  {rollout.model}  {rollout.status}  score {score}")
    click.echo(f"task {rollout.task_id} ({rollout.task_type}, {rollout.split}): {rollout.inputs}")
    _show_tools(rollout.early_tools)
    for t in rollout.transitions:
        marks = [word for word, on in (("cached", t.cached), ("constrained", t.constrained)) if on]
        tokens = f"{t.prompt_tokens}+{t.completion_tokens} tokens, {t.latency_ms:.0f} ms"
        click.echo(f"\n[{t.t}] {tokens}{', ' + ', '.join(marks) if marks else ''}")
        if t.request.get("system"):
            click.echo(f"  system: {_flat(t.request['system'])}")
        for message in t.request.get("messages", []):
            click.echo(f"  {message['role']}: {_flat(''.join(part.get('text', '') for part in message['parts']))}")
        click.echo(f"  -> {t.error if t.error else _flat(t.output)}")
        _show_tools(t.tools)
    click.echo(f"\nprediction: {rollout.prediction if rollout.prediction is not None else rollout.error}")
    for v in rollout.verdicts:
        click.echo(f"  {v.criterion} (weight {v.weight:g}): {'unscored' if v.grade is None else f'{v.grade:.2f}'} {v.reason}")


def _show_tools(tools: list[Any]) -> None:
    for tool in tools:
        click.echo(f"  tool {tool.name}({tool.arguments}) = {tool.result if tool.error is None else 'error: ' + tool.error}")


def _flat(text: Any) -> str:
    return str(text).replace("\n", "\n      ")


@command.command("stats")
@click.option("--run", "run_id", help="Only of this run.")
@_store
@_json
def stats(run_id: str | None, store: str | None, as_json: bool) -> None:
    """Counts, tokens and dollars of the store; `unseen` are LM calls that went past the recorder."""
    with _open(store) as opened:
        found = opened.stats(run_id=run_id)
    if as_json:
        print_json(found)
        return
    for key, value in found.items():
        click.echo(f"{key:18} {value}")
