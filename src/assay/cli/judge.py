"""`assay judge`: calibrate a judge against people's labels, and see how far it can be trusted."""

from collections.abc import Collection
from typing import Any

import click

from assay.cli.judge_use import COMMANDS
from assay.cli.shared import (
    Console,
    json_option,
    keep,
    min_coverage_option,
    pairs,
    print_json,
    program_endpoint,
    reflection_endpoint,
    require_coverage,
    say_openings,
    task_timeout_option,
    trust_option,
)
from assay.cli.wording import in_flags
from assay.compilereport import dollars

__all__ = ["command"]

_MEASURES = ("accuracy", "kappa", "weighted_kappa", "alpha", "spearman", "brier")


@click.group("judge")
def command() -> None:
    """Calibrate judges against people's labels, audit them, and put them to work."""


for used in COMMANDS:
    command.add_command(used)


@command.command("compile")
@click.argument("judge")
@click.option("--labels", required=True, metavar="D", help="Ratings: a .jsonl, .csv or .parquet file, hf:…, or store; one row a rating.")
@click.option("--scale", help="Words from worst to best, with commas, for a JUDGE that is a sentence: no,partly,yes.")
@click.option(
    "--kind", "scale_kind", type=click.Choice(["ordinal", "nominal", "numeric"]), help="Whether the words have an order; ordinal by default."
)
@click.option("--shows", help="What the judge sees, with commas: task_input,output or other columns.")
@click.option("--model", default="embedded/smollm2-135m", show_default=True, help="The model that judges.")
@click.option("--optimizer", default="auto", show_default=True, help="auto, calibrate, or a name as in assay compile: gepa, mipro, copro, …")
@click.option("--objective", type=click.Choice(_MEASURES), help="By default by the scale.")
@click.option("--demos", type=int, default=2, show_default=True, help="Demonstrations of each label.")
@click.option("--negatives", type=int, default=0, show_default=True, help="Attacks on train items to add, labelled with the worst word.")
@click.option("--reflection-model", help="Model that proposes instructions; by default the judge's.")
@reflection_endpoint
@program_endpoint
@click.option("--rename", multiple=True, metavar="COLUMN=NAME", help="Rename a column of the labels.")
@click.option("--salt", help="Salt of the splits; by default the store's own (a new store: the artifact's, else assay).")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--threads", type=int, help="Number of concurrent verdicts; by default what suits the model's engine.")
@task_timeout_option()
@click.option("--train-size", type=int, help="Largest number of train items.")
@click.option("--val-size", type=int, help="Largest number of val items.")
@click.option("--gate-size", type=int, help="Largest number of gate items.")
@click.option("--test-size", type=int, help="Largest number of test items.")
@click.option("--max-calls", type=int, help="Stop after so many LM calls.")
@click.option("--max-search-calls", type=int, help="Most LM calls of the search.")
@click.option("--max-tokens", type=int, help="Stop after so many tokens.")
@click.option("--max-cost-usd", type=float, help="Stop after so many dollars.")
@click.option("--no-cache", is_flag=True, help="Do not read or write the response cache.")
@click.option("--store", help="Database of traces; by default .assay/assay.db or $ASSAY_STORE.")
@click.option("--out", help="Folder to write the artifact to.")
@click.option("--resume", is_flag=True, help="Continue this job's unfinished run.")
@click.option("--no-preflight", is_flag=True, help="Skip the check, before anything is spent, that each model answers.")
@min_coverage_option()
@trust_option()
@json_option()
def compile_command(judge: str, **values: Any) -> None:
    """Compile JUDGE against people's labels, and report its agreement on sealed items beside the human ceiling.

    JUDGE is a YAML file, path/to/file.py:NAME, an artifact's folder, or one sentence that says what to judge.
    """
    from assay import judging

    as_json, labels, store, out, resume = keep(values, "as_json", "labels", "store", "out", "resume")
    values["sizes"] = {name: size for name in ("train", "val", "gate", "test") if (size := values.pop(f"{name}_size")) is not None}
    for name in ("scale", "shows"):
        values[name] = tuple(word.strip() for word in values[name].split(",")) if values[name] else ()
    values["rename"], values["cache"] = pairs(values["rename"], "--rename"), not values.pop("no_cache")
    values["preflight"] = not values.pop("no_preflight")
    report = judging.compile_judge(judge, labels=labels, store=store, out=out, resume=resume, progress=Console(), **values)  # type: ignore[arg-type]
    data = report.to_dict()
    if as_json:
        print_json(data)
    else:
        _show(data)
    require_coverage(data)


def _show(data: dict[str, Any]) -> None:
    from rich.console import Console as Rich
    from rich.table import Table

    rich = Rich(highlight=False)
    before, after, people, card = data["test"]["baseline"], data["test"]["compiled"], data["ceiling"], data["card"]
    if before and after:
        table = Table(title=f"agreement with people, {after['n']} sealed items", title_justify="left")
        for column in ("", "baseline", "compiled", "95 %", "people"):
            table.add_column(column, justify="left" if not column else "right")
        for name in _MEASURES:
            style = "bold" if name == data["objective"] else ""
            table.add_row(
                name, _number(before[name]), _number(after[name]), _interval(after["intervals"].get(name)), _number(people[name]), style=style
            )
        table.add_row("no verdict", str(before["unscored"]), str(after["unscored"]), "", "")
        rich.print(table)
        for whose, side in (("", after), ("people's ", people)):
            for name, reason in sorted(side["undefined"].items()):
                if not whose or name != "brier":  # people give no probabilities
                    rich.print(f"{whose}{name} is undefined: {reason}", markup=False)
        gain, accuracy = data["test"]["gain"], data["test"]["accuracy_gain"]
        rich.print(f"gain in {data['objective']}: {_gain(gain)}; in accuracy: {_gain(accuracy)}", markup=False)
        show_card(rich, card, said=after["undefined"])
    say_openings(rich, data["test_openings"])
    if data["gate"]:
        unproven = "no proof on gate that it agrees better: keep the baseline; the artifact holds the unproven judge"
        verdict = "the compiled judge replaces the baseline" if data["replaces"] else unproven
        rich.print(f"gate ({data['gate']['n']} items): {_gain(data['gate'])}: {verdict}", markup=False)
    rich.print(
        f"winner: {data['winner']}; {data['calls']:,} LM calls ({data['cached']:,} more from the cache), {dollars(data['cost_usd'])}", markup=False
    )
    for note in [*data["notes"], *([f"stopped early: {data['stopped']}; raise the cap and add --resume"] if data["stopped"] else [])]:
        rich.print(f"note: {in_flags(note)}", markup=False)
    for key in ("picture", "artifact"):
        if data[key]:
            rich.print(f"{key}: {data[key]}", markup=False, soft_wrap=True)


def show_agreement(rich: Any, card: dict[str, Any]) -> None:
    """A card's agreement with people, beside that of people with each other."""
    from rich.table import Table

    found, people = card["agreement"], card["ceiling"]
    table = Table(title=f"agreement with people, {found['n']} sealed items", title_justify="left")
    for column in ("", "judge", "95 %", "people"):
        table.add_column(column, justify="left" if not column else "right")
    for name in _MEASURES:
        style = "bold" if name == card["objective"] else ""
        table.add_row(name, _number(found[name]), _interval(found["intervals"].get(name)), _number(people[name]), style=style)
    rich.print(table)


def show_card(rich: Any, card: dict[str, Any], *, said: Collection[str] = ()) -> None:
    """A card in words. `said`: measures whose being undefined was said already."""
    shown = [
        ("of what people reach", _percent(card["of_ceiling"])),
        ("coverage", _percent(card["coverage"])),
        ("calibration error, Brier", f"{_number(card['calibration_error'])}, {_number(card['brier'])}"),
        ("probability on its scale", "–" if not card.get("mass") else "mean {mean:.0%}, lowest {lowest:.1%}".format(**card["mass"])),
        ("same verdict when asked again", _percent(card["test_retest"])),
        ("length bias (rho)", "–" if card["length_bias"] is None else "{rho:+.2f} [{low:+.2f}, {high:+.2f}]".format(**card["length_bias"])),
        ("verbosity bias", "–" if card["verbosity_bias"] is None else "{mean:+.2f} [{low:+.2f}, {high:+.2f}]".format(**card["verbosity_bias"])),
        *((("flips when places change", _percent(card["position_flip_rate"])),) if card["position_flip_rate"] is not None else ()),
        *((("self-preference", "{mean:+.2f} [{low:+.2f}, {high:+.2f}]".format(**card["self_preference"])),) if card["self_preference"] else ()),
        ("smallest difference it can show", _percent(card["smallest_difference"])),
        ("dollars a verdict", "–" if card["cost_usd_per_verdict"] is None else f"{card['cost_usd_per_verdict']:.6f}"),
    ]
    rich.print("; ".join(f"{name}: {value}" for name, value in shown), markup=False)
    for row in card.get("explained_by") or ():
        text = (
            f"{row['feature']} explains judge minus raters: {row['effect']:+.2f} of the scale, 95 % [{row['low']:+.2f}, {row['high']:+.2f}], "
            f"corrected p {row['p']:.3f}, in {row['n']} outputs"
        )
        rich.print(text, markup=False)
    rich.print(_confusion(card["confusion"]))
    for name, reason in sorted((name, why) for name, why in card["undefined"].items() if name not in said):
        rich.print(f"{name.replace('_', ' ')} is undefined: {reason}", markup=False)
    for alarm in card["alarms"]:
        rich.print(f"alarm: this judge {alarm}", markup=False)


def _confusion(found: dict[str, Any]) -> Any:
    from rich.table import Table

    title = "confusion: the judge's verdicts by human labels, items (one with several labels counts in parts)"
    table = Table(title=title, title_justify="left")
    table.add_column("judge")
    for label in found["labels"]:
        table.add_column(label, justify="right")
    for label, row in zip(found["labels"], found["verdicts_by_people"], strict=True):
        table.add_row(label, *(f"{value:.4g}" for value in row))
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def _interval(interval: list[float] | None) -> str:
    return "–" if interval is None else f"[{interval[0]:.3f}, {interval[1]:.3f}]"


def _gain(gain: dict[str, Any]) -> str:
    if gain["mean"] is None:
        return "undefined"
    reach = "no interval (under 20 items)" if gain["low"] is None else f"95 % [{gain['low']:+.3f}, {gain['high']:+.3f}]"
    return f"{gain['mean']:+.3f}, {reach}"
