"""`assay tune`: the five agent parameters."""

from typing import Any

import click

from assay.cli.flags import command_job, settings_flags
from assay.cli.options import job_options, report_option
from assay.cli.shared import (
    Console,
    dry_run,
    pop_values,
    print_json,
    print_models,
    print_openings,
    require_coverage,
    warn_of_failures,
)
from assay.cli.wording import in_flags, stop_note
from assay.datasets.rows import near_notes
from assay.reports.markdown import cost_words, curriculum_lines
from assay.runs.settings import ImpactSettings, TuneSettings
from assay.support.numbers import calls_text, counted, figure, signed
from assay.support.settings import settings_of
from assay.support.terminal import rich_console

_MEANINGS = {
    "efficiency": "1 minus the share of --budget (steps, tokens, seconds) that a run uses",
    "coherence": "how often the answer is what the reasoning or the tools ended with, "
    "and how often samples of a task agree",
    "adaptability": "mean score of the worst task type, as a share of the mean score",
    "tool_usage": "share of tool calls that were needed, ran and were used",
    "average confidence": "the agent's own estimate that its answer is right",
    "task accuracy": "share of tasks with a score of 0.8 or more",
    "response quality": "mean score",
    "overall score": "mean of the rows above it",
}


@click.command("tune")
@click.argument("program", required=False)
@settings_flags(TuneSettings, ImpactSettings)
@click.option(
    "--impact", is_flag=True, help="Search nothing: move each parameter alone over its range, and show what it does."
)
@click.option("--apply", metavar="ARTIFACT", help="Write a copy of this compiled artifact with the best parameters.")
@report_option()
@job_options(dry_run=True, out="Folder to write the artifact, or the results of --impact, to.")
def command(program: str | None, **values: Any) -> None:
    """Search PROGRAM's five parameters on val, decide on gate, and report on the sealed test split.

    Trials that score worse are stopped after a few tasks; --resume continues a study, and --study with --storage joins
    one from other machines.
    """
    from assay.api.tune import tune

    as_json, store, out, resume, apply, shows_impact, dry, page = pop_values(
        values, "as_json", "store", "out", "resume", "apply", "impact", "dry_run", "report"
    )
    program, settings = command_job(values, program, TuneSettings, ImpactSettings)
    kind, other_kind = (ImpactSettings, TuneSettings) if shows_impact and not dry else (TuneSettings, ImpactSettings)
    # flags of both commands are known to click, so what one of them has no use for is refused here
    idle = sorted(settings.keys() & (settings_of(other_kind).keys() - settings_of(kind).keys())) + (
        [name for name, value in (("apply", apply), ("report", page)) if value and shows_impact]
    )
    if idle:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in idle)
        reason = "--impact searches nothing" if shows_impact else "it needs --impact"
        raise click.UsageError(f"{flags} would have no effect: {reason}")
    if dry:
        return dry_run("tune", program, settings, as_json=as_json, store=store)
    if shows_impact:
        return _impact(program, as_json, out=out, store=store, resume=resume, progress=Console(), **settings)
    report = tune(program, out=out, apply=apply, store=store, resume=resume, progress=Console(), **settings)
    data = report.to_dict()
    if as_json:
        print_json(data)
    else:
        print_report(data)
    if page is not None:
        from assay.api.pages import write_tune_page

        write_tune_page(page, report, words=in_flags)
    require_coverage(data)


def _impact(program: str, as_json: bool, **options: Any) -> None:
    from rich.table import Table

    from assay.api.tune import parameter_impact
    from assay.optimizers.parameters import in_figures

    report = parameter_impact(program, **options)
    data, names = report.to_dict(), report.impact.measured
    if as_json:
        print_json(data)
        return
    rich = rich_console()
    table = Table(
        title=f"each parameter moved alone, {data['n']} val tasks; * off the start, 95 %", title_justify="left"
    )
    for column in ("parameter", "value", *names):
        table.add_column(column, justify="left" if column == "parameter" else "right")
    last = None
    for effect in report.impact.effects:
        table.add_row(
            "" if effect.parameter == last else effect.parameter, in_figures(effect.value), *map(effect.cell, names)
        )
        last = effect.parameter
    rich.print(table)
    for note in data["notes"]:
        rich.print(f"note: {in_flags(note)}")
    rich.print(
        f"LM calls: {calls_text(data['calls'], data['cached'])}, {cost_words(data['cost_usd'])}",
    )
    print_models(rich, data)
    rich.print(f"written: {data['page'] or data['folder']}", soft_wrap=True)


def print_report(data: dict[str, Any]) -> None:

    from assay.optimizers.parameters import in_figures

    rich = rich_console()
    _show_test(rich, data)
    print_openings(rich, data["test_openings"])
    if data["gate"]:
        verdict = (
            "the tuned program replaces the default"
            if data["replaces"]
            else "no proof on gate that it is better: the default is kept, in the artifact too"
        )
        rich.print(f"gate: {_gain(data['gate'])}; tokens {_share(data['gate']['tokens'])}: {verdict}")
    settings = ", ".join(f"{name} {in_figures(value)}" for name, value in data["best"].items())
    level = data["level_with_best"]
    alternatives = (
        f"; level with {counted(len(level), 'other trials')} ({_shortened(level)}): no significant difference on val"
        if level
        else ""
    )
    rich.print(
        f"best: {settings}{alternatives}"
        + (f" ({data['program']})" if len({t["program"] for t in data["history"]}) > 1 else ""),
    )
    if len(data["objectives"]) > 1:
        _show_front(rich, data)
    unit = "episodes" if data["method"] == "policy" else "trials"
    rich.print(
        f"{counted(data['trials'], unit)} ({data['pruned']} pruned, {data['failed']} failed), "
        f"{counted(data['task_runs'], 'task runs')}, "
        f"{100 * data['task_runs_saved']:.0f} % saved by pruning; "
        f"LM calls: {calls_text(data['calls'], data['cached'])}, {cost_words(data['cost_usd'])}",
    )  # fmt: skip
    print_models(rich, data)
    for line in curriculum_lines(data["curriculum"]):
        rich.print(line)
    for note in [
        *data["notes"],
        *near_notes(data["data"]),
        *stop_note(data["stopped"]),
    ]:
        rich.print(f"note: {in_flags(note)}")
    if data["importance"]:
        rich.print(f"importance: {_importance(data['importance'])}")
    rich.print(f"artifact: {data['artifact']}", soft_wrap=True)
    if data["unproven"]:
        rich.print(f"unproven program: {data['unproven']}", soft_wrap=True)
    if data["page"]:
        rich.print(f"page: {data['page']}", soft_wrap=True)


def _show_test(rich: Any, data: dict[str, Any]) -> None:
    """The table of the sealed test split, what its rows mean, and the gain; or why there is none."""
    from rich.table import Table

    from assay.reports.markdown import gain_claim, why_sealed

    test = data["test"]
    before, after, gain = (test[key] for key in ("default", "tuned", "gain"))
    if before and after and gain:
        table = Table(title=f"sealed test split, {counted(after['n'], 'tasks')}", title_justify="left")
        for column in ("", "default", "tuned"):
            table.add_column(column, justify="left" if not column else "right")
        table.add_row("score", figure(before["score"]), figure(after["score"]), style="bold")
        sides = [
            name
            for name in after["metrics"]
            if before["metrics"][name] is not None or after["metrics"][name] is not None
        ]
        for name in sides:
            table.add_row(f"  {name}", figure(before["metrics"][name]), figure(after["metrics"][name]))
        for label, key in (("LM calls a task", "calls_per_task"), ("tokens a task", "tokens_per_task")):
            table.add_row(label, f"{before[key]:.1f}", f"{after[key]:.1f}")
        rich.print(table)
        rows = [row for row in test["table"] if row["before"] is not None or row["after"] is not None]
        _show_table(rich, rows)
        for name in [*sides, *(row["name"] for row in rows)]:
            if name in _MEANINGS:
                rich.print(f"{name}: {_MEANINGS[name]}", soft_wrap=True)
        warn_of_failures(rich, after)
        claim = "" if gain["low"] is None else f": {gain_claim(gain['low'], gain['high'], data['test_openings'])}"
        rich.print(f"gain: {_gain(gain)}{claim}; tokens {_share(test['tokens'])}")
    else:
        rich.print(why_sealed(data))


def _shortened(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")


def _importance(importance: dict[str, dict[str, float]]) -> str:
    """Parameter importance by the first evaluator, in per cent."""
    name, weights = next(iter(importance.items()))
    return ", ".join(f"{parameter} {100 * weight:.0f} %" for parameter, weight in weights.items()) + f" ({name})"


def _show_table(rich: Any, rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(title="the agent before and after", title_justify="left")
    for column in ("", "before", "after", "points", "per cent"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        changes = ("–" if row[key] is None else f"{signed(row[key], 1)}" for key in ("points", "percent"))
        table.add_row(row["name"], figure(row["before"]), figure(row["after"]), *changes)
    rich.print(table)


def _show_front(rich: Any, data: dict[str, Any]) -> None:
    from rich.table import Table

    from assay.optimizers.parameters import in_figures

    table = Table(title="Pareto front", title_justify="left")
    for column in ("trial", *data["objectives"], "parameters"):
        table.add_column(column, justify="left" if column == "parameters" else "right")
    first, sign = data["objectives"][0], -1 if data["objectives"][0] == "score" else 1
    for trial in sorted(data["front"], key=lambda trial: sign * (trial["values"][first] or 0)):
        settings = ", ".join(f"{name} {in_figures(value)}" for name, value in trial["parameters"].items())
        table.add_row(str(trial["number"]), *(f"{trial['values'][name]:.4g}" for name in data["objectives"]), settings)
    rich.print(table)


def _gain(gain: dict[str, Any]) -> str:
    return (
        "nothing was scored in both"
        if gain["mean"] is None
        else f"{signed(gain['mean'])}, 95 % [{signed(gain['low'])}, {signed(gain['high'])}]"
    )


def _share(change: dict[str, Any]) -> str:
    if change["mean"] is None:
        return "not known"
    return f"{signed(100 * change['mean'], 0)} %" + (
        "" if change["low"] is None else f" [{signed(100 * change['low'], 0)}, {signed(100 * change['high'], 0)}]"
    )
