"""`assay judge audit`, `score`, `card`, `drift`, `label`, `forget` and `lint`: judges at work."""

import getpass
import sys
from collections.abc import Callable
from typing import Any

import click

from assay.cli.shared import (
    Console,
    Decorator,
    endpoint_options,
    json_option,
    keep,
    min_coverage_option,
    no_preflight_option,
    pairs,
    print_json,
    require_coverage,
    task_timeout_option,
    trust_option,
)
from assay.cli.wording import counted, in_flags
from assay.compilereport import dollars

__all__ = ["COMMANDS"]

_no_cache = click.option("--no-cache", is_flag=True, help="Do not read or write the response cache.")
_store = click.option("--store", help="Database of traces; by default .assay/assay.db or $ASSAY_STORE.")


def _model_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The flags of everything that asks a judge."""
    options: list[Decorator] = [
        click.option("--model", help="The model that judges; by default that of a compiled judge, else embedded/smollm2-135m."),
        *endpoint_options("--model"),
        click.option("--seed", type=int, default=0, show_default=True),
        click.option("--threads", type=int, help="Number of concurrent verdicts; by default what suits the model's engine."),
        task_timeout_option(),
        click.option("--max-calls", type=int, help="Stop after so many LM calls."),
        click.option("--max-tokens", type=int, help="Stop after so many tokens."),
        click.option("--max-cost-usd", type=float, help="Stop after so many dollars."),
        _store,
        min_coverage_option(),
        trust_option(),
        json_option(),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def _words(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    return tuple(word.strip() for word in value.split(",")) if value else None


_scale = click.option("--scale", callback=_words, help="Words of a judge that is given as a sentence, worst to best; no,yes by default.")


def _rich() -> Any:
    from rich.console import Console as Rich

    return Rich(highlight=False)


def _spent(data: dict[str, Any]) -> str:
    return f"{data['calls']:,} LM calls ({data['cached']:,} more from the cache), {data['tokens']:,} tokens, {dollars(data['cost_usd'])}"


@click.command("audit")
@click.argument("judge")
@click.option("--cases", metavar="D", help="Rows with good and bad outputs (and input) to make the attacks from; shipped ones by default.")
@click.option("--labels", metavar="D", help="Ratings instead, whose best and worst outputs are taken; 'store' for those of the store.")
@click.option("--attack", metavar="FILE", help="Attacks of your own to try as well: rows with text (holding {output}) and name.")
@click.option("--profile", type=click.Choice(["quality", "property"]), help="Whether the scale says how good an output is, or what it is like.")
@click.option("--pass-at", type=click.FloatRange(0, 1), default=0.8, show_default=True, help="Share of an attack's cases that must come out right.")
@_scale
@_no_cache
@_model_options
def audit_command(judge: str, **values: Any) -> None:
    """Try the ways judges are known to fail on JUDGE. Exit code 1 where it fails one: for your CI."""
    from assay.errors import ModelError
    from assay.verdicts import audit_judge

    (as_json,) = keep(values, "as_json")
    values["cache"] = not values.pop("no_cache")
    try:
        data = audit_judge(judge, progress=Console(), **values)  # type: ignore[arg-type]
    except ModelError as error:
        if as_json:
            print_json({"passed": None, "error": str(error)})
        raise
    if as_json:
        print_json(data)
    else:
        _show_audit(data)
    require_coverage(data)
    if not data["passed"]:
        click.get_current_context().exit(1)


def _show_audit(data: dict[str, Any]) -> None:
    from rich.table import Table

    rich, table = _rich(), Table(title=f"audit: right at least {data['pass_at']:.0%} of the time", title_justify="left")
    for column in ("attack", "right", "cases", "verdicts moved", ""):
        table.add_column(column, justify="left" if column in ("attack", "") else "right")
    for name, entry in data["attacks"].items():
        moved = "" if entry["flip_rate"] is None else f"{entry['flip_rate']:.0%}"
        table.add_row(name, f"{entry['share']:.0%}", str(entry["n"]), moved, "passed" if entry["passed"] else "[bold]FAILED[/bold]")
    rich.print(table)
    for note in data["notes"]:
        rich.print(f"note: {in_flags(note)}", markup=False)
    for name in data["not_tried"]:
        why = "in every case its own words say the right answer"
        if name == "truncation":
            why = "no good output has a first half that surely lost what makes it right; an 'answer' column says it"
        rich.print(f"note: {name} was not tried: {why}", markup=False)
    for alarm in data["flip_alarms"]:
        rich.print(f"alarm: {alarm}", markup=False)
    for name, entry in data["attacks"].items():
        for wrong in [] if entry["passed"] else entry["wrong"][:1]:
            value, against = ("none" if v is None else f"{v:.2f}" for v in (wrong["value"], wrong["against"]))
            than = "" if wrong["against"] is None else f" the {against} of what it is held against"
            rich.print(f"{name}: {wrong['output']!r} got {value}, and must be {wrong['rule']}{than}", markup=False)
    verdict = "passed" if data["passed"] else "FAILED"
    alarms = f" (alarms: {len(data['flip_alarms'])})" if data["flip_alarms"] else ""
    rich.print(f"{verdict}{alarms}; {counted(data['verdicts'], 'verdicts')}, {data['unscored']} of them none; {_spent(data)}", markup=False)


@click.command("score")
@click.argument("judge")
@click.option(
    "--data", required=True, metavar="D", help="Rows with input and output (or output_a and output_b); labels beside some correct the mean."
)
@click.option("--out", metavar="FILE", help="A .jsonl file for one verdict an item.")
@click.option("--rename", multiple=True, metavar="COLUMN=NAME", help="Rename a column of the data.")
@click.option("--resume", is_flag=True, help="Continue this job's unfinished run.")
@_scale
@_no_cache
@_model_options
@no_preflight_option()
def score_command(judge: str, **values: Any) -> None:
    """Judge every row of D, and say the mean with its interval."""
    from assay.verdicts import score_rows

    (as_json,) = keep(values, "as_json")
    values["rename"], values["cache"] = pairs(values["rename"], "--rename"), not values.pop("no_cache")
    values["preflight"] = not values.pop("no_preflight")
    data = score_rows(judge, progress=Console(), **values)  # type: ignore[arg-type]
    if as_json:
        print_json(data)
    else:
        _show_scores(data)
    require_coverage(data)


def _show_scores(data: dict[str, Any]) -> None:
    rich = _rich()
    shares = ", ".join(f"{label} {count}" for label, count in data["verdicts"].items())
    several = f" of {counted(data['rows'], 'rows')}; rows that show the same count once" if data["rows"] != data["n"] else ""
    rich.print(f"{counted(data['n'], 'items')}{several}: {shares}; no verdict {data['unscored']}", markup=False)
    for reason in data["why_unscored"]:
        rich.print(f"note: no verdict: {reason}", markup=False)
    if data["interval"]:
        rich.print("mean value {:.3f}, 95 % [{:.3f}, {:.3f}] as this judge sees it".format(data["mean"], *data["interval"]), markup=False)
    if data["labelled"] > 0 and not data["corrected"]:
        why = "every item has one, and there is nothing to correct" if data["labelled"] == data["n"] else "it takes 20, and two items without one"
        rich.print(f"note: the mean is not corrected by the {counted(data['labelled'], 'items')} with human labels: {why}", markup=False)
    if found := data["corrected"]:
        text = (
            f"corrected by {found['n_people']} human labels: {found['mean']:.3f}, 95 % [{found['low']:.3f}, {found['high']:.3f}] "
            f"(people alone {found['people_alone']:.3f}; the verdicts were trusted by {found['weight']:.2f})"
        )
        rich.print(text, markup=False)
    if data["out"]:
        rich.print(f"verdicts: {data['out']}", markup=False, soft_wrap=True)
    rich.print(_spent(data), markup=False)


@click.command("card")
@click.argument("judge")
@json_option()
def card_command(judge: str, as_json: bool) -> None:
    """Show the reliability card that lies beside a compiled JUDGE."""
    import json
    from pathlib import Path

    from assay.cli.judge import show_agreement, show_card
    from assay.errors import ArtifactError

    path = Path(judge) / "card.json"
    if not path.is_file():
        raise ArtifactError(f"{judge} has no card: it is no folder that assay judge compile wrote, or its run was stopped before the sealed test")
    card = json.loads(path.read_text("utf-8"))
    if as_json:
        print_json(card)
    else:
        show_agreement(_rich(), card)
        show_card(_rich(), card)


@click.command("drift")
@click.argument("judge")
@click.option("--anchors", metavar="FILE", help="The frozen set, a .json file; by default the one beside a compiled judge.")
@click.option("--freeze", metavar="D", help="Freeze what JUDGE says of these rows into FILE.")
@_scale
@_model_options
@no_preflight_option()
def drift_command(judge: str, **values: Any) -> None:
    """Replay a frozen set of verdicts on JUDGE, and raise an alarm that names what changed. Exit code 1 on an alarm."""
    from assay.verdicts import replay_anchors

    (as_json,) = keep(values, "as_json")
    values["preflight"] = not values.pop("no_preflight")
    data = replay_anchors(judge, progress=Console(), **values)  # type: ignore[arg-type]
    if as_json:
        print_json(data)
    elif "frozen" in data:
        text = f"froze {data['frozen']} verdicts in {data['anchors']}; asked twice they differ by {data['noise']:.3f} of the scale; {_spent(data)}"
        _rich().print(text, markup=False)
    else:
        _show_drift(data)
    require_coverage(data)
    if data.get("alarms"):
        click.get_current_context().exit(1)


def _show_drift(data: dict[str, Any]) -> None:
    rich = _rich()
    for name, (before, after) in data["changed"].items():
        rich.print(f"changed: {name}: {before} -> {after}", markup=False)
    moved, psi = ("–" if value is None else f"{value:.3f}" for value in (data["mean_difference"], data["psi"]))
    cusum = f"CUSUM {data['cusum']:.1f} (alarm over {data['cusum_limit']:.1f})"
    over = "" if data["psi"] is None else f" (alarm over {data['psi_limit']:.2f})"
    rich.print(f"{data['n']} anchors: mean difference {moved}, {cusum}, PSI {psi}{over}", markup=False)
    for alarm in data["alarms"]:
        rich.print(f"ALARM: {alarm}", markup=False)
    rich.print(f"{'drifted' if data['alarms'] else 'judges as it did'}; {_spent(data)}", markup=False)


@click.command("label")
@click.argument("judge")
@click.option("--rater", help="Who you are; by default your user name.")
@click.option("--run", "run_id", help="Only rollouts of this run.")
@click.option("--task", "task_id", help="Only rollouts of this task.")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="Most outputs to ask about.")
@click.option("--rationale", is_flag=True, help="Ask for a reason as well; optimizers that reflect read it.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the order in which rollouts are shown.")
@_scale
@_store
@trust_option()
@json_option("What was labelled as one JSON object on standard output; the questions go to standard error.")
def label_command(judge: str, rater: str | None, limit: int, rationale: bool, store: str | None, as_json: bool, **where: Any) -> None:
    """Judge rollouts of the store yourself, as JUDGE would be asked, and keep the labels in the store.

    Answer with a word of the scale, its number in the list (where no word is a number itself), s to skip or q to stop; every
    answer is kept at once. Then compile with assay judge compile JUDGE --labels store.
    """
    from assay.judging import question_key
    from assay.traces.store import Store
    from assay.verdicts import to_label

    who, done = rater or getpass.getuser(), 0
    with Store(store) as opened:
        built, waiting = to_label(judge, opened, rater=who, limit=limit, **where)
        words = list(built.spec.scale)
        if not waiting:
            click.echo("nothing is waiting for your label: no rollout that you have not judged fits", err=True)
        for at, entry in enumerate(waiting, 1):
            _ask(at, len(waiting), entry.shown, built.spec)
            label = _answer(words)
            if label is None:
                break
            if label:
                why = _line("why? ") if rationale else ""
                opened.put_label(question_key(built), entry.item_id, who, label, shown=entry.shown, rationale=why, rollout_id=entry.rollout_id)
                done += 1
    data = {"rater": who, "labelled": done, "asked": len(waiting)}
    if as_json:
        print_json(data)
    else:
        then = f"; compile with: assay judge compile {judge!r} --labels store" if done else ""
        click.echo(f"{counted(done, 'labels')} of {who} kept{then}", err=True)


def _ask(at: int, count: int, shown: Any, spec: Any) -> None:
    from rich.console import Console as Rich
    from rich.panel import Panel
    from rich.text import Text

    rich = Rich(stderr=True, highlight=False)
    rich.rule(f"{at} of {count}")
    for name, value in shown.items():
        rich.print(Panel(Text(str(value)), title=name, title_align="left"))
    rich.print(f"{spec.text}", markup=False)
    keys = {word: key for key, word in _numbers(list(spec.scale)).items()}
    for word in spec.scale:
        meaning = f": {spec.anchors[word]}" if word in spec.anchors else ""
        rich.print(f"  {keys.get(word, '')} {word}{meaning}", markup=False)


def _numbers(words: list[str]) -> dict[str, str]:
    """What may be typed for a word: its place, but on a scale of numbers only the numbers themselves."""
    return {} if any(word.strip("+-").replace(".", "").isdigit() for word in words) else {str(at): word for at, word in enumerate(words, 1)}


def _line(prompt: str) -> str:
    click.echo(prompt, nl=False, err=True)
    return sys.stdin.readline().strip()


def _answer(words: list[str]) -> str | None:
    """A word of the scale, "" to skip, None to stop, as at the end of the input. A word of the scale goes before s and q, which
    are then /s and /q."""
    known = {**_numbers(words), **{word.casefold(): word for word in words}}
    skip, stop = (key if key not in known else f"/{key}" for key in ("s", "q"))
    while True:
        click.echo(f"your verdict ({skip} skips, {stop} stops): ", nl=False, err=True)
        line = sys.stdin.readline()
        said = line.strip().casefold()
        if said in known:
            return known[said]
        if said == stop or not line:
            return None
        if said == skip:
            return ""
        numbers = f", or 1 to {len(words)}" if _numbers(words) else ""
        click.echo(f"{line.strip()!r} is not on the scale: {', '.join(words)}{numbers}", err=True)


@click.command("forget")
@click.argument("rater")
@_store
@json_option()
def forget_command(rater: str, store: str | None, as_json: bool) -> None:
    """Remove all labels of RATER from the store, and name every judge that was compiled from them."""
    from assay.verdicts import forget_rater

    data = forget_rater(rater, store=store)
    if as_json:
        print_json(data)
        return
    rich = _rich()
    rich.print(f"{counted(data['removed'], 'labels')} of {rater} removed", markup=False)
    for judge in data["judges"]:
        rich.print(f"compiled from labels of {rater}, compile it again without them: {judge}", markup=False, soft_wrap=True)


@click.command("lint")
@click.argument("rubric")
@trust_option()
@json_option()
def lint_command(rubric: str, as_json: bool) -> None:
    """Look for criteria in RUBRIC that ask two things, ask about what a judge cannot see, or stand twice. Exit code 1 if there are any."""
    from assay.jobs import load_judge, load_rubric
    from assay.rubrics import lint_rubric

    found = lint_rubric(load_rubric(rubric), used=lambda name: load_judge(name).spec.text)
    if as_json:
        print_json({"findings": [finding.to_dict() for finding in found]})
    else:
        for finding in found:
            _rich().print(f"{finding.criterion}: {finding.rule}: {finding.text}", markup=False)
        _rich().print(f"{len(found)} finding{'s' if len(found) > 1 else ''}" if found else "nothing found", markup=False)
    if found:
        click.get_current_context().exit(1)


COMMANDS = (audit_command, score_command, card_command, drift_command, label_command, forget_command, lint_command)
