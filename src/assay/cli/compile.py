"""`assay compile`: the main job."""

from collections.abc import Iterator
from typing import Any

import click

from assay.cli.shared import (
    Console,
    decision_options,
    dry_run,
    json_or_text,
    keep,
    pairs,
    print_json,
    reflection_endpoint,
    require_coverage,
    run_config,
    run_options,
    say_openings,
    token_margin_option,
    warn_of_failures,
    warn_of_gaps,
)
from assay.cli.wording import in_flags
from assay.compilereport import dollars

__all__ = ["command"]


@click.command("compile")
@click.argument("program")
@run_options
@decision_options
@token_margin_option()
@click.option(
    "--optimizer",
    default="auto",
    show_default=True,
    help="auto, labeled, bootstrap, bootstrap-search, knn, copro, mipro, simba, gepa, infer-rules, ensemble, optuna, a class of DSPy (SIMBA), or "
    "package.module:Class.",
)
@click.option("--reflection-model", help="Model that proposes instructions; by default the program's.")
@reflection_endpoint
@click.option("--optimizer-set", multiple=True, metavar="NAME=VALUE", help="A setting of the optimizer, e.g. max_metric_calls=400 of gepa.")
@click.option("--max-search-calls", type=int, help="Cap on the LM calls of the search; 300 by default for auto.")
@click.option("--threshold", type=float, default=0.8, show_default=True, help="Lowest score at which a run counts as a success to learn from.")
@click.option("--demos", type=int, default=16, show_default=True, help="Largest number of demonstrations per predictor; auto also tries fewer.")
@click.option("--train-size", type=int, help="Largest number of train tasks.")
@click.option("--val-size", type=int, help="Largest number of val tasks.")
@click.option("--gate-size", type=int, help="Largest number of gate tasks.")
@click.option("--test-size", type=int, help="Largest number of test tasks.")
@click.option("--out", help="Folder to write the artifact to.")
def command(program: str, **values: Any) -> None:
    """Compile PROGRAM's prompts against a rubric, and report it on a sealed test split.

    PROGRAM is path/to/file.py[:Class], package.module:Class, an artifact's folder, or a shipped program (math_qa, classify,
    extract).
    """
    from assay import api

    as_json, store, out, resume = keep(values, "as_json", "store", "out", "resume")
    given = pairs(values.pop("optimizer_set"), "--optimizer-set")
    values["optimizer_settings"] = {name: json_or_text(text) for name, text in given.items()} or None
    sizes = {name: size for name in ("train", "val", "gate", "test") if (size := values.pop(f"{name}_size")) is not None}
    if values["dry_run"]:
        dry_run("compile", program, values, as_json=as_json, store=store, sizes=sizes)
        return
    console = Console()
    report = api.compile(program, out=out, store=store, resume=resume, progress=console, sizes=sizes, **run_config(values))  # type: ignore[arg-type]
    data = report.to_dict()
    if as_json:
        print_json(data)
    else:
        _show(data)
    require_coverage(data)


def _show(data: dict[str, Any]) -> None:
    from rich.console import Console as Rich
    from rich.table import Table

    from assay.compilereport import NOTHING_TO_COMPARE

    rich = Rich(highlight=False)
    before, after, gain = (data["test"][key] for key in ("baseline", "compiled", "gain"))
    if before and after and gain:
        alone = data["winner"] == "baseline"
        sides = [after] if alone else [before, after]
        table = Table(title=f"sealed test split, {after['n']} tasks", title_justify="left")
        for column, justify in (("", "left"), ("baseline", "right"), ("compiled", "right"))[: 1 + len(sides)]:
            table.add_column(column, justify=justify)  # type: ignore[arg-type]
        for label, *cells, style in _rows(sides):
            table.add_row(label, *cells, style=style)
        rich.print(table)
        warn_of_failures(rich, after)
        rich.print(NOTHING_TO_COMPARE if alone else _gain_line(gain), markup=False)
    say_openings(rich, data["test_openings"])
    gate = data["gate"]
    if gate:
        verdict = (
            "the compiled program replaces the baseline"
            if data["replaces"]
            else "no proof on gate that it is better: keep the baseline; the artifact holds the unproven program"
        )
        rich.print(f"gate ({gate['n']} tasks): {gate['mean']:+.3f}, 95 % [{gate['low']:+.3f}, {gate['high']:+.3f}]: {verdict}", markup=False)
    elif data["winner"] != "baseline":
        rich.print("gate: not decided, so nothing proves that the artifact's program is better: keep the baseline", markup=False)
    cost = dollars(data["cost_usd"]) + (f" ({data['unpriced_calls']} calls without a known price)" if data["unpriced_calls"] else "")
    rich.print(
        f"winner: {data['winner']}; {data['calls']} LM calls ({data['search_calls']} searching, {data['cached']} more from the cache), "
        f"{data['tokens']:,} tokens, {cost}", markup=False,
    )  # fmt: skip
    warn_of_gaps(rich, data)
    for note in [*data["notes"], *([f"stopped early: {data['stopped']}; raise the cap and add --resume"] if data["stopped"] else [])]:
        rich.print(f"note: {in_flags(note)}", markup=False)
    rich.print(f"artifact: {data['artifact']}", markup=False, soft_wrap=True)


def _rows(sides: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Rows of the table: label, a cell for each side, style."""
    from assay.compilereport import type_label

    kinds = sides[-1]["task_types"]
    yield "score", *(_number(side["score"]) for side in sides), "bold"
    for name in sides[-1]["criteria"]:
        yield f"  {name}", *(_percent(side["criteria"].get(name)) for side in sides), ""
    for kind in kinds if len(kinds) > 1 else ():
        yield f"  {type_label(kind)}", *(_number(side["task_types"].get(kind)) for side in sides), ""
    for label, key in (("failed runs", "failed"), ("unscored", "unscored")):
        yield label, *(str(side[key]) for side in sides), ""
    for label, key in (("LM calls a task", "calls_per_task"), ("tokens a task", "tokens_per_task")):
        yield label, *(f"{side[key]:.1f}" for side in sides), ""
    unpriced = any(side["cost_usd"] is None for side in sides)  # then a side that came from the cache has no cost to compare with either
    yield "cost", *(dollars(None if unpriced else side["cost_usd"]) for side in sides), ""


def _gain_line(gain: dict[str, Any]) -> str:
    if gain["mean"] is None:
        return "gain: nothing was scored in both"
    what = "a gain" if gain["low"] > 0 else "a loss" if gain["high"] < 0 else "no proven difference (the interval holds zero)"
    return f"gain: {gain['mean']:+.3f}, paired 95 % interval [{gain['low']:+.3f}, {gain['high']:+.3f}]: {what}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"
