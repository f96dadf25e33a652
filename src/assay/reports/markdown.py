"""Reports as text: rounded figures with their intervals, `report.md` of an artifact, a result in a few words."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from assay.reports.texts import readable
from assay.support.numbers import counted, figure, price, signed
from assay.support.report import Report, Table

MORE_TASKS = "More gate tasks can show a smaller gain: four times as many halve the interval."


def cost_words(value: float | None) -> str:
    """A price in a line of text."""
    return "cost unknown" if value is None else price(value)


def models_text(report: Mapping[str, Any]) -> str:
    """LM calls, tokens and dollars by model; empty where the model of the report answered all calls.

    Args:
        report: with `model`, the one that was named, and `models`, usages by model.
    """
    models = report.get("models") or []
    if [row["model"] for row in models] in ([], [report.get("model")]):
        return ""
    return "; ".join(
        f"{row['model']}: {counted(row['calls'], 'calls')}"
        + (f" ({row['cached']:,} more from the cache)" if row["cached"] else "")
        + f", {row['tokens']:,} tokens, {cost_words(row['cost_usd'])}"
        for row in models
    )


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def type_label(kind: str) -> str:
    """A row's name for the tasks of a type; tasks without `task_type` are of the type `default`."""
    return "tasks without a type" if kind == "default" else f"tasks of type {readable(kind)}"


def _cell(text: str) -> str:
    """A text in a cell of a Markdown table, in which it is neither markup nor a further cell."""
    return " ".join(readable(text).replace("&", "&amp;").replace("<", "&lt;").replace("|", r"\|").split())


def graded(report: Mapping[str, Any], name: str) -> str:
    """Mean grade of a criterion with its 95 % interval; a dash where it was not decided."""
    mean, interval = report["criteria"].get(name), report.get("criteria_intervals", {}).get(name)
    return percent(mean) + (f" [{100 * interval[0]:.0f}, {100 * interval[1]:.0f}]" if interval else "")


def tool_rows(reports: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Rows of a table: the figures of tool use, with a cell for each evaluation that has them.

    Those that are criteria of the rubric are left out: their rows are in the table already.
    """
    sides = [report.get("tool_use") or {} for report in reports]
    criteria = {name for report in reports for name in report["criteria"]}
    for name in dict.fromkeys(name for side in sides for name in side if name not in criteria):
        shares = name != "calls_per_task"
        scale, digits = (100, 0) if shares else (1, 2)
        cells = [
            f"{scale * value['mean']:.{digits}f}{' %' if shares else ''} "
            f"[{scale * value['low']:.{digits}f}, {scale * value['high']:.{digits}f}], "
            f"{counted(value['n'], 'tasks')}"
            if (value := side.get(name))
            else "–"
            for side in sides
        ]
        yield "tool calls a task" if name == "calls_per_task" else name.replace("_", " "), *cells


def with_interval(value: Mapping[str, Any], unit: str = "tasks") -> str:
    """A difference and its 95 % interval."""
    if value.get("mean") is None:
        return "nothing was scored in both"
    interval = (
        "no interval (too few)"
        if value.get("low") is None
        else f"95 % [{signed(value['low'])}, {signed(value['high'])}]"
    )
    return f"{signed(value['mean'])}, {interval}" + (
        f", {counted(value['n'], unit)}" if value.get("n") is not None else ""
    )


def gain_claim(low: float, high: float, openings: Mapping[str, int] | None = None) -> str:
    """What the interval of a paired gain shows. A test that was opened before supports a weaker claim.

    Args:
        openings: `Openings.to_dict()` where the gain is one on the sealed test.
    """
    if low <= 0 <= high:
        return "no significant difference"
    claim = "a gain" if low > 0 else "a loss"
    if openings and openings["this_store"] > 1:
        return f"an indication of {claim}, no proof: the test was opened {counted(openings['this_store'], 'times')}"
    return claim


def why_sealed(report: Mapping[str, Any]) -> str:
    """Why the sealed test has no result in the report of a compile, of a program or a judge, or of a tune."""
    if report.get("test_openings"):
        return "The sealed test was opened, and the run ended before it had a result."
    if report["stopped"]:
        return "The sealed test was not opened: the run was stopped before."
    if report["gate"] is not None:
        return "The sealed test was not opened: gate did not prove that the result is better, so the baseline is kept."
    return "The sealed test was not opened: the baseline is the best that was found, so it is kept."


def markdown(report: Report, *, title: str, about: str) -> str:
    """The page `report.md` of an artifact: what people see of a report, as Markdown.

    Args:
        about: a paragraph under the title.
    """
    lines, notes = split_notes(report.lines())
    parts = [f"# {title}", about, *(line if isinstance(line, str) else _table(line) for line in lines)]
    items = "\n".join(f"- {note}" for note in notes)
    return "\n\n".join([*parts, *(["## Notes", items] if items else [])]) + "\n"


def split_notes(lines: Iterable[str | Table]) -> tuple[list[str | Table], list[str]]:
    """The lines of a report without its notes, and the notes, which stand at the end of a page."""
    body, notes = list[str | Table](), list[str]()
    for line in lines:
        if isinstance(line, str) and line.startswith("note: "):
            notes.append(line.removeprefix("note: "))
        else:
            body.append(line)
    return body, notes


def _table(table: Table) -> str:
    header = table.header or [""] * len(table.rows[0])
    rows = [header, ["---", *["---:"] * (len(header) - 1)], *([_cell(cell) for cell in row] for row in table.rows)]
    return f"## {table.title}\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows)


def thinking_row(thinking: Mapping[str, Any]) -> str:
    """The metric `thinking` in one cell."""
    parts = [f"{thinking['tokens']:.1f}, {100 * thinking['wasted_share']:.0f} % after the answer was stable"]
    if thinking["budget_share"] is not None:
        parts.append(f"{100 * thinking['budget_share']:.0f} % of the budget")
    if thinking["loops"]:
        parts.append(counted(thinking["loops"], "loops"))
    return "; ".join(parts)


def gap_lines(data: Mapping[str, Any]) -> Iterator[str]:
    """A warning of calls that were not recorded, with how many were seen and why, where a report has that."""
    if data["unrecorded"] is None:
        least = f" ({seen} were seen)" if (seen := data.get("unrecorded_seen")) else ""
        reason = f": {why}" if (why := data.get("unrecorded_reason")) else ""
        yield f"warning: the number of LM calls that were not recorded is unknown{least}{reason}"
    elif data["unrecorded"]:
        yield f"warning: {counted(data['unrecorded'], 'LM calls')} could not be recorded"


def failure_lines(report: Mapping[str, Any], *, is_error: bool = False) -> Iterator[str]:
    """Reasons of failed runs and of unscored criteria, which a score does not show.

    Args:
        is_error: the command ends with the reason of the failed runs as its error if no run was scored.
    """
    if report["failed"] and not (is_error and report["unscored"] == report["n"]):
        of = f"{report['failed']} of {counted(report['n'], 'runs')}"
        yield f"note: {of} failed; the commonest reason: {report['why_failed']}"
    for name, part in report["undecided"].items():
        yield (
            f"warning: {name} was not decided on {part['n']} of {part['of']} and is not in their score: "
            f"{part['reason']}"
        )


def curriculum_lines(report: Mapping[str, Any] | None) -> Iterator[str]:
    """A line for each stage of the curriculum of a report, and its file; none without a curriculum."""
    if report is None:
        return
    for stage in report["stages"]:
        line = f"stage {stage['name']}: {stage['status']}"
        if stage["status"] != "not reached":
            best = "not scored" if stage["best_val"] is None else f"{stage['best_val']:.3f}"
            line += f"; val {best}, needed {stage['promote_at']:g}"
        if stage["drawn"]:
            line += f"; {counted(stage['drawn'], 'tasks')}, {stage['replayed']} more as replays"
        yield line
    yield f"order of the tasks: {report['path']}"


@dataclass(frozen=True, kw_only=True)
class RunScores:
    """Mean scores of a run, on test if it has one; None for what it has not."""

    before: float | None = None
    after: float | None = None


def run_scores(report: Mapping[str, Any]) -> RunScores:
    """Mean scores on test of a run of `compile`, `tune` or `train`, from its report."""
    validations = report.get("validation") or {}  # of a training, by rubric and sampling
    for sides in (report.get("test"), *(next(iter(modes.values()), None) for modes in validations.values())):
        if isinstance(sides, Mapping):
            before = _score_of(sides, ("baseline", "default", "before"))
            after = _score_of(sides, ("compiled", "tuned", "after"))
            if after is not None:
                return RunScores(before=before, after=after)
    return RunScores()


def _score_of(sides: Mapping[str, Any], names: Sequence[str]) -> float | None:
    parts = (sides.get(name) for name in names)
    scores = (part.get("score") for part in parts if isinstance(part, Mapping))
    return next((float(score) for score in scores if isinstance(score, int | float)), None)


def result_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """Score, agreement and gain of an artifact, where its report has them."""
    test = report.get("test") or {}
    after = test.get("compiled") or test.get("tuned") or {}
    if isinstance(after.get("score"), float):
        yield f"score on test: {after['score']:.3f} ({counted(after['n'], 'tasks')})"
    if (card := report.get("card")) and (measure := card.get("objective")):
        name, agreement = measure.replace("_", " "), card["agreement"]
        value, reach = figure(agreement[measure]), figure(card["ceiling"][measure])
        items = f"{agreement['n']} items of {card['split']}"
        yield f"{name} with raters: {value} on {items}; raters with each other: {reach}"
    for name, gain in (("gate", report.get("gate")), ("test", test.get("gain"))):
        if gain and gain.get("mean") is not None:
            yield f"gain on {name}: {with_interval({**gain, 'n': None})}"
