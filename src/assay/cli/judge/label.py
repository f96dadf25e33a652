"""`assay judge label`: a rater labels rollouts of the store."""

import getpass
from typing import Any

import click

from assay.cli.flags import command_settings, settings_flags
from assay.cli.options import json_option, store_option, trust_option
from assay.cli.shared import print_json
from assay.runs.settings import JudgeLabelSettings
from assay.support.numbers import counted
from assay.support.terminal import ask, echo, rich_console


@click.command("label")
@click.argument("judge")
@settings_flags(JudgeLabelSettings)
@click.option(
    "--page", "for_page", is_flag=True, help="Ask nothing here: add the question to the page of assay view, for raters."
)
@store_option()
@trust_option()
@json_option("The labels as one JSON object on standard output; the questions go to standard error.")
def label_command(judge: str, for_page: bool, store: str | None, as_json: bool, **values: Any) -> None:
    """Label rollouts of the store with the question and the scale of JUDGE.

    Answer with a label of the scale, its number in the list (if no label is a number), s to skip or q to stop;
    every label is stored immediately. Then compile with assay judge compile JUDGE --labels store.
    """
    from assay.api.judge.label import to_label
    from assay.judges.questions import key_of
    from assay.traces.store import Store

    typed = command_settings(values, JudgeLabelSettings)
    if for_page and (idle := sorted(typed.keys() - {"scale", "run_id"})):
        raise click.UsageError(f"{', '.join(f'--{name}' for name in idle)} would have no effect with --page")
    settings = JudgeLabelSettings(**typed)
    rater, done = settings.rater or getpass.getuser(), 0
    with Store(store) as opened:
        built, waiting = to_label(
            judge, opened, rater=rater, run_id=settings.run_id, task_id=settings.task_id, limit=settings.limit,
            seed=settings.seed, scale=settings.scale,
        )  # fmt: skip
        if for_page:
            return _show_place(key_of(built), settings.run_id, len(waiting), as_json=as_json)
        words = list(built.spec.scale)
        if not waiting:
            echo("there is nothing to label: no selected rollout is without your label", err=True)
        for at, entry in enumerate(waiting, 1):
            _show_item(at, len(waiting), entry.fields, built.spec)
            label = _answer(words)
            if label is None:
                break
            if label:
                reason = ask("why? ") or "" if settings.rationale else ""
                opened.put_label(
                    key_of(built),
                    entry.item_id,
                    rater,
                    label,
                    fields=entry.fields,
                    rationale=reason,
                    rollout_id=entry.rollout_id,
                )
                done += 1
    data = {"rater": rater, "labelled": done, "asked": len(waiting)}
    if as_json:
        print_json(data)
    else:
        hint = f"; compile with: assay judge compile {judge!r} --labels store" if done else ""
        echo(f"{counted(done, 'labels')} of {rater} kept{hint}", err=True)


def _show_place(key: str, run_id: str | None, waiting: int, *, as_json: bool) -> None:
    """Says where raters find the question on the page."""
    from assay.web.rendering import link

    place = link("judges", key, "label", run=run_id)
    if as_json:
        print_json({"judge": key, "path": place})
    else:
        some = "outputs are" if waiting else "so far no output is"
        echo(f"{some} waiting for raters: start assay view, then Judges, or {place} of its address", err=True)


def _show_item(at: int, count: int, fields: Any, spec: Any) -> None:
    from rich.panel import Panel
    from rich.text import Text

    rich = rich_console(err=True)
    rich.rule(f"{at} of {count}")
    for name, value in fields.items():
        rich.print(Panel(Text(str(value)), title=Text(str(name)), title_align="left"))
    rich.print(spec.text)
    keys = {word: key for key, word in _numbers(list(spec.scale)).items()}
    for word in spec.scale:
        meaning = f": {spec.anchors[word]}" if word in spec.anchors else ""
        rich.print(f"  {keys.get(word, '')} {word}{meaning}")


def _numbers(words: list[str]) -> dict[str, str]:
    """Scale words by the number that may be typed for them; empty for a scale of numbers."""
    return (
        {}
        if any(word.strip("+-").replace(".", "").isdigit() for word in words)
        else {str(at): word for at, word in enumerate(words, 1)}
    )


def _answer(words: list[str]) -> str | None:
    """The typed word of the scale, "" to skip, None to stop or at the end of the input.

    If s or q is itself a label of the scale, /s skips and /q stops.
    """
    words_by_input = {**_numbers(words), **{word.casefold(): word for word in words}}
    skip, stop = (key if key not in words_by_input else f"/{key}" for key in ("s", "q"))
    while True:
        line = ask(f"your verdict ({skip} skips, {stop} stops): ")
        answer = (line or "").casefold()
        if answer in words_by_input:
            return words_by_input[answer]
        if line is None or answer == stop:
            return None
        if answer == skip:
            return ""
        numbers = f", or 1 to {len(words)}" if _numbers(words) else ""
        echo(f"{line!r} is not on the scale: {', '.join(words)}{numbers}", err=True)
