"""Tables and lines that the commands of `assay judge` print."""

from collections.abc import Collection
from typing import Any

from assay.reports.markdown import cost_words
from assay.support.numbers import calls_text, figure, signed

MEASURES = ("accuracy", "kappa", "weighted_kappa", "alpha", "spearman", "brier")


def show_agreement(rich: Any, card: dict[str, Any]) -> None:
    """Prints the judge's agreement with raters and the raters' agreement with each other."""
    from rich.table import Table

    agreement, ceiling = card["agreement"], card["ceiling"]
    table = Table(title=f"agreement with raters, {agreement['n']} items of {card['split']}", title_justify="left")
    for column in ("", "judge", "95 %", "raters"):
        table.add_column(column, justify="left" if not column else "right")
    for name in MEASURES:
        style = "bold" if name == card["objective"] else ""
        table.add_row(
            name.replace("_", " "),
            number(agreement[name]),
            interval_text(agreement["intervals"].get(name)),
            number(ceiling[name]),
            style=style,
        )
    rich.print(table)


def show_card(rich: Any, card: dict[str, Any], *, reported: Collection[str] = ()) -> None:
    """Prints a card. `reported`: undefined measures that were reported before."""
    from assay.reports.cards import card_facts

    rich.print("; ".join(f"{name}: {value}" for name, value in card_facts(card)))
    for row in card.get("explained_by") or ():
        text = (
            f"{row['feature']} explains judge minus raters: {signed(row['effect'], 2)} of the scale, 95 % "
            f"[{signed(row['low'], 2)}, {signed(row['high'], 2)}], "
            f"corrected p {row['p']:.3f}, in {row['n']} outputs"
        )
        rich.print(text)
    rich.print(confusion_table(card["confusion"]))
    for name, reason in sorted((name, reason) for name, reason in card["undefined"].items() if name not in reported):
        rich.print(f"{name.replace('_', ' ')} is undefined: {reason}")
    for alarm in card["alarms"]:
        rich.print(f"alarm: this judge {alarm}")


def confusion_table(agreement: dict[str, Any]) -> Any:
    from rich.table import Table

    title = "confusion: the judge's verdicts by human labels, items (one with several labels counts in parts)"
    table = Table(title=title, title_justify="left")
    table.add_column("judge")
    for label in agreement["labels"]:
        table.add_column(label, justify="right")
    for label, row in zip(agreement["labels"], agreement["verdicts_by_people"], strict=True):
        table.add_row(label, *(f"{value:.4g}" for value in row))
    return table


def number(value: float | None) -> str:
    """Three decimals, or a dash if undefined."""
    return figure(value)


def interval_text(interval: list[float] | None) -> str:
    """`[low, high]`, or a dash if there is no interval."""
    return "–" if interval is None else f"[{figure(interval[0])}, {figure(interval[1])}]"


def gain_text(gain: dict[str, Any]) -> str:
    """A gain with its 95 % interval."""
    if gain["mean"] is None:
        return "undefined"
    reach = (
        "no interval (under 20 items)"
        if gain["low"] is None
        else f"95 % [{signed(gain['low'])}, {signed(gain['high'])}]"
    )
    return f"{signed(gain['mean'])}, {reach}"


def spent_text(data: dict[str, Any]) -> str:
    """Calls, tokens and dollars of a report."""
    return (
        f"LM calls: {calls_text(data['calls'], data['cached'])}, {data['tokens']:,} tokens, "
        f"{cost_words(data['cost_usd'])}"
    )
