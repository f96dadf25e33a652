"""Reports of compile, evaluate, compare, tune and a judge's card as one HTML file each: `--report FILE.html`."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from assay.api.compile import CompileReport
from assay.api.tune.report import TuneReport
from assay.commands.compare import CompareReport
from assay.commands.evaluate import EvaluationReport
from assay.datasets.rows import near_notes
from assay.errors import StoreError
from assay.reports.cards import card_page
from assay.reports.compiled import compile_page
from assay.reports.files import ROWS, scores_of, write_report
from assay.reports.markdown import cost_words, models_text
from assay.reports.sides import sides_of
from assay.reports.studies import tuned_page, tuned_words
from assay.sources.artifact_files import read_json, read_manifest
from assay.support.numbers import calls_text
from assay.traces import Store
from assay.traces.store.evaluations import Evaluated, evaluations_of
from assay.traces.store.listing import run_folder
from assay.traces.store.sealing import openings_line

Words = Callable[[str], str]

_SIDES = (("First", "a"), ("Second", "b"))


def write_compile_page(
    path: str | Path, report: CompileReport, *, store: str | Path | None = None, words: Words = str
) -> Path:
    """Writes the report of a compile as one HTML file, which loads nothing and shows no whole rollout.

    Args:
        words: changes notes; the command line puts its flags into them, in place of Python arguments.
    Raises:
        ConfigError: the file cannot be written.
        StoreError: the run is not in the store, or too large for a page.
    """
    data, folder = report.to_dict(), run_folder(store, report.run_id)
    with Store(store) as opened:
        # rows of the store, not of the report in memory: the page of a finished run can be written again
        page = compile_page(opened, report.run_id, data, folder, rows=ROWS)
        opened.put_report(path, report.run_id)
    facts = [
        ("Program", report.config.program), ("Model", report.config.model), ("Optimizer", data["optimizer"]),
        ("Winner", data["winner"]), *_spent(data),
        ("Of these, the search", f"{data['search_calls']:,} LM calls"), *_stopped(data, words),
        ("Artifact", str(data["artifact"])),
    ]  # fmt: skip
    return write_report(
        path, "report_compile.html", title=f"Compile of {_short(report.config.program)}", facts=facts, page=page,
        run_id=report.run_id, notes=_notes(data, words),
    )  # fmt: skip


def write_page(path: str | Path, report: Any, *, store: str | Path | None = None, words: Words = str) -> None:
    """Writes the report of an evaluation or of a comparison as one HTML file; not that of another kind."""
    if isinstance(report, EvaluationReport):
        write_evaluation_page(path, report, store=store, words=words)
    elif isinstance(report, CompareReport):
        write_compare_page(path, report, store=store, words=words)


def write_evaluation_page(
    path: str | Path, report: EvaluationReport, *, store: str | Path | None = None, words: Words = str
) -> Path:
    """Writes the report of an evaluation as one HTML file.

    Args:
        words: as for `write_compile_page`.
    Raises:
        ConfigError, StoreError: as `write_compile_page`.
    """
    data = report.to_dict()
    result = data["result"]
    with Store(store) as opened:
        scores = scores_of(opened, report.run_id, _evaluation(opened, report))
        opened.put_report(path, report.run_id)
    score = "unscored" if result["score"] is None else "{:.3f} [{:.3f}, {:.3f}]".format(
        result["score"], *result["interval"]
    )  # fmt: skip
    facts = [
        ("Score, 95 % interval", score), ("Tasks", f"{result['n']} of {data['split']}, {result['unscored']} unscored, "
        f"{result['failed']} failed"), *_spent(data), *_stopped(data, words), *_opened(data),
    ]  # fmt: skip
    return write_report(
        path, "report_evaluate.html", title=f"Evaluation of {_short(report.program)}", facts=facts, scores=scores,
        notes=_notes(data, words),
    )  # fmt: skip


def write_compare_page(
    path: str | Path, report: CompareReport, *, store: str | Path | None = None, words: Words = str
) -> Path:
    """Writes the report of a comparison as one HTML file.

    Args:
        words: as for `write_compile_page`.
    Raises:
        ConfigError, StoreError: as `write_compile_page`.
    """
    data = report.to_dict()
    with Store(store) as opened:
        first, second = (_evaluation(opened, side) for side in (report.a, report.b))
        sides = sides_of(opened, (report.a.run_id, report.b.run_id), first, second, rows=ROWS, better_first=False)
        opened.put_report(path, report.a.run_id, report.b.run_id)
    facts = [
        *((label, _side_text(data[side])) for label, side in _SIDES),
        ("Split", data["split"]), *_spent(data),
        *(fact for label, side in _SIDES for fact in _called(data[side], f"{label}, LM calls by model")),
        *_stopped(data, words), *_opened(data),
    ]  # fmt: skip
    names = " and ".join(map(_short, report.names))
    return write_report(
        path, "report_compare.html", title=f"Comparison of {names}", facts=facts, sides=sides,
        notes=_notes(data, words),
    )  # fmt: skip


def _side_text(side: Mapping[str, Any]) -> str:
    state = f" with the state {side['state']}" if side["state"] else ""
    return f"{side['program']}{state}, {side['model']}"


def write_tune_page(path: str | Path, report: TuneReport, *, words: Words = str) -> Path:
    """Writes the report of a search over agent parameters as one HTML file.

    Args:
        words: as for `write_compile_page`.
    Raises:
        ConfigError: the file cannot be written.
    """
    data = report.to_dict()
    best = ", ".join(f"{name} {value:.4g}" for name, value in data["best"].items())
    facts = [
        ("Program", report.config.program), ("Model", report.config.model), ("Best parameters", best),
        ("Trials", f"{data['trials']}, {data['complete']} complete, {data['pruned']} pruned, {data['failed']} failed"),
        *_spent(data), *_stopped(data, words), *_opened(data), ("Artifact", str(data["artifact"])),
    ]  # fmt: skip
    page = tuned_page(data)
    return write_report(
        path, "report_study.html", title=f"Agent parameters of {_short(report.config.program)}", facts=facts,
        page=page, result=tuned_words(data), notes=list(map(words, data["notes"])),
    )  # fmt: skip


def write_card_page(path: str | Path, judge: str | Path) -> Path:
    """Writes the reliability card of a compiled judge as one HTML file.

    Args:
        judge: the folder of the artifact.
    Raises:
        NoArtifact: the folder has no card.
        ConfigError: the file cannot be written.
    """
    card, manifest = read_json(Path(judge) / "card.json", Path(judge)), read_manifest(Path(judge))
    spec, result = manifest["judge"], manifest["result"]
    facts = [
        ("Question", spec["text"]), ("Scale", ", ".join(spec["scale"])), ("Model", manifest["model"]),
        ("Compiled", f"{manifest['created_at']} with {result['optimizer']}, winner {result['winner']}"),
        ("Labels", ", ".join(f"{name} {count}" for name, count in manifest["labels"]["sizes"].items())),
        *_opened(result), *_spent(result), *_stopped(result, str),
    ]  # fmt: skip
    title = f"Reliability card of {spec['text'][:80] or _short(str(judge))}"
    return write_report(path, "report_card.html", title=title, facts=facts, page=card_page(card), notes=result["notes"])


def _evaluation(store: Store, report: EvaluationReport) -> Evaluated:
    """The rollouts of an evaluation.

    Raises:
        StoreError: the store has none of them.
    """
    parts = [one for one in evaluations_of(store, report.run_id) if one.phase == "evaluate"]
    if report.split != "all":
        parts = [one for one in parts if one.split == report.split]
    if parts:
        return replace(
            parts[0],
            split=report.split,
            tasks={key: task for part in parts for key, task in part.tasks.items()},
            runs=sorted(run for part in parts for run in part.runs),
        )
    raise StoreError(f"the store has no rollouts of the run {report.run_id}: there is nothing to report")


def _short(program: str) -> str:
    """A program's name without its folders."""
    return program.replace("\\", "/").rstrip("/").rpartition("/")[2][:120]


def _spent(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    text = f"LM calls: {calls_text(data['calls'], data['cached'])}; {data['tokens']:,} tokens"
    return [("Cost", f"{text}; {cost_words(data['cost_usd'])}"), *_called(data)]


def _called(data: Mapping[str, Any], label: str = "LM calls by model") -> list[tuple[str, str]]:
    return [(label, text)] if (text := models_text(data)) else []


def _stopped(data: Mapping[str, Any], words: Words) -> list[tuple[str, str]]:
    return [("Stopped early", words(str(data["stopped"])))] if data["stopped"] else []


def _notes(data: Mapping[str, Any], words: Words) -> list[str]:
    """What limits the result, as the command prints it."""
    return [words(note) for note in (*data.get("alarms", ()), *data["notes"], *near_notes(data["data"]))]


def _opened(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [("Test split", openings_line(data["test_openings"]))] if data["test_openings"] else []
