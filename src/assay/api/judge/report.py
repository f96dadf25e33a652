"""Report of `assay.compile_judge`: as JSON, and as the artifact of the result, and of a judge that is unproven."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import dspy

from assay.datasets import SPLITS
from assay.datasets.rows import NO_ROWS, RowFindings
from assay.deployment import load_artifact, save_artifact
from assay.deployment.artifact import check_loads
from assay.judges import Judge
from assay.judges.labels import LabelSplits
from assay.judges.quality.drift import AnchorSet
from assay.judges.questions import key_of
from assay.models import Meter
from assay.optimizers.judges.compile import JudgeOutcome
from assay.programs import program_version
from assay.reports.markdown import gain_claim, why_sealed, with_interval
from assay.runs.anchors import ANCHORS
from assay.runs.opening import Run
from assay.runs.settings import JudgeCompileSettings
from assay.sources.modules import qualified_name
from assay.support.numbers import figure
from assay.support.package import __version__
from assay.support.places import write_whole
from assay.support.reprs import ReportDict, ReportRepr, measure_text, shortened
from assay.traces.records import person_digest, subject_digest
from assay.traces.store.sealing import Openings, openings_line

_MEASURES = ("accuracy", "kappa", "weighted_kappa", "alpha", "spearman")
UNPROVEN = "no proof that it agrees better: the baseline is kept; the unproven judge is stored beside the artifact"


def shown_card(card: Mapping[str, Any]) -> ReportDict:
    """A reliability card with a short `repr`: agreement with raters, theirs with each other, alarms."""
    facts: dict[str, Any] = {}
    if measure := card.get("objective"):
        facts = {
            "objective": measure.replace("_", " "),
            "agreement": figure(card["agreement"][measure]),
            "raters": figure(card["ceiling"][measure]),
            "alarms": len(card["alarms"]),
        }
    return ReportDict("ReliabilityCard", card, facts)


@dataclass(repr=False)
class JudgeReport(ReportRepr):
    """What `compile_judge` returns. `to_dict()` is the `--json` object.

    Unless gate proved the compiled judge better, `judge` is the one that was given.
    """

    artifact: Path
    outcome: JudgeOutcome
    card: dict[str, Any]
    meter: Meter
    config: JudgeCompileSettings
    sizes: dict[str, int]
    unproven: Path | None = None  # artifact of the winner on val that gate did not prove better
    anchors: AnchorSet | None = None
    notes: list[str] = field(default_factory=list)
    openings: Openings | None = None  # of the labels' test split
    stored: Mapping[str, Any] | None = None  # stored report of a run that had already ended
    rows: RowFindings = NO_ROWS  # of the labels

    @property
    def judge(self) -> Judge:
        return self.outcome.result

    def _facts(self) -> list[tuple[str, str]]:
        data, measure = self.to_dict(), self.to_dict()["objective"]
        test, ceiling = data["test"], data["ceiling"] or {}
        sides = {"baseline": test["baseline"] or {}, "compiled": test["compiled"] or {}, "raters": ceiling}
        facts = {
            **{key: data[key] for key in ("artifact", "winner", "replaces")},
            "measure": measure.replace("_", " "),
            **{name: figure(side.get(measure)) for name, side in sides.items()},
            **({"gain": measure_text(test["gain"], change=True)} if test["gain"] else {}),
            **{key: data[key] for key in ("calls", "cost_usd", "stopped") if data[key] is not None},
            **({"alarms": len(data["card"]["alarms"])} if data["card"].get("alarms") else {}),
        }
        return [(key, shortened(value)) for key, value in facts.items()]

    def to_dict(self) -> dict[str, Any]:
        if self.stored is not None:
            return dict(self.stored)
        usage, search, outcome = self.meter.usage, self.meter.of("search"), self.outcome
        return {
            "artifact": str(self.artifact),
            "unproven": None if self.unproven is None else str(self.unproven),
            "optimizer": self.config.optimizer,
            "objective": outcome.objective,
            "winner": outcome.winner,
            "replaces": outcome.replaces,
            "gate": outcome.gate,
            "stopped": outcome.stopped,
            "sizes": self.sizes,
            "ceiling": outcome.ceiling.to_dict() if outcome.ceiling else None,
            "test": {
                "baseline": outcome.test_baseline.to_dict() if outcome.test_baseline else None,
                "compiled": outcome.test_compiled.to_dict() if outcome.test_compiled else None,
                "gain": outcome.gain,
                "accuracy_gain": outcome.accuracy_gain,
            },
            "test_openings": self.openings.to_dict() if self.openings else None,
            "card": self.card,
            **(outcome.judged.coverage(outcome.result) if outcome.judged else {}),
            "candidates": outcome.candidates,
            "notes": [*outcome.notes, *self.notes],
            "data": self.rows.to_dict(),
            "search_calls": search.calls,
            "calls": usage.calls,
            "cached": usage.cached,
            "repeated_calls": usage.repeated,
            "tokens": usage.tokens,
            "cost_usd": usage.known_cost_usd,
        }


def items_of(artifact: str | Path) -> dict[str, list[str]]:
    """Keys of the items that a judge's artifact was made with, by split."""
    splits = json.loads((Path(artifact) / "splits.json").read_text(encoding="utf-8"))
    return dict(splits.get("items") or {})


def save_judge(report: JudgeReport, splits: LabelSplits, run: Run, parents: Sequence[str], folder: Path) -> None:
    """Writes the artifact of the result with its card and anchor set, and one of a winner on val that is unproven."""
    outcome, data = report.outcome, report.to_dict()
    data = {key: value for key, value in data.items() if key not in ("artifact", "unproven")}
    if outcome.unproven:
        beside = folder.with_name(f"{folder.name}-unproven")
        unmeasured = {**data, "card": {}}  # the card is that of the result
        report.unproven = _kept(report, outcome.compiled, splits, run, parents, beside, unmeasured, unproven=True)
    report.artifact = _kept(report, outcome.result, splits, run, parents, folder, data)
    if report.card:
        write_whole(report.artifact / "card.json", json.dumps(report.card, indent=1))
        if report.anchors is not None:
            report.anchors.save(report.artifact / ANCHORS)


def _kept(
    report: JudgeReport, judge: Judge, splits: LabelSplits, run: Run, parents: Sequence[str], folder: Path,
    result: Mapping[str, Any], *, unproven: bool = False,
) -> Path:  # fmt: skip
    """Writes an artifact: the judge, its manifest and its report."""
    config = report.config
    raters = {
        person_digest(rating.rater) for name in SPLITS for item in getattr(splits, name) for rating in item.ratings
    }
    for parent in parents:  # the child contains what its parent learned from
        raters |= set(load_artifact(parent).manifest.get("raters", ()))
    manifest = {
        "assay": __version__,
        "dspy": dspy.__version__,
        "kind": "judge",
        "program": qualified_name(judge),
        "version": program_version(judge, None),
        "settings": {"adapter": None, "parameters": {}},
        "judge": asdict(judge.spec),
        "model": config.model,
        "api_base": config.api_base or run.lm.recording.address,
        "api_key_env": config.api_key_env,
        **({} if config.thinking is None else {"thinking": config.thinking}),
        "weights": run.lm.recording.backend.weights,
        "labels": {"spec": config.labels, "salt": config.salt, "sizes": splits.sizes()},
        "raters": sorted(raters),
        "parents": list(parents),
        "seed": config.seed,
        "run": run.run_id,
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "result": dict(result),
        **({"unproven": True} if unproven else {}),
    }
    path = save_artifact(
        folder.resolve(),
        judge,
        manifest,
        splits={"ratings": splits.ratings(), "items": splits.keys()},
        report=_markdown(result),
    )
    shown = run.store.labelled_subjects(key_of(judge)) if config.labels == "store" else ()
    run.store.put_artifact(str(path), sorted({*raters, *map(subject_digest, shown)}))
    if (note := check_loads(path, judge)) is not None:
        report.notes.append(note)
    return path


def _markdown(data: Mapping[str, Any]) -> str:
    measure = data["objective"].replace("_", " ")
    lines = [
        f"# A judge, compiled with {data['optimizer']} for {measure}",
        "",
        f"Winner: {data['winner']}.",
        "",
    ]
    before, after, gain = (data["test"][key] for key in ("baseline", "compiled", "gain"))
    ceiling = data["ceiling"]
    if before and after:
        lines += ["| sealed test | baseline | compiled | raters |", "|---|---|---|---|"]
        lines += [
            f"| {name.replace('_', ' ')} | {figure(before[name])} | {figure(after[name])} | {figure(ceiling[name])} |"
            for name in _MEASURES
        ]
        claim = ""
        if gain["low"] is not None:
            claim = f": {gain_claim(gain['low'], gain['high'], data['test_openings'])}"
        lines += ["", f"Gain in {measure}, paired: {with_interval(gain, 'items')}{claim}."]
        lines += ["", openings_line(data["test_openings"])]
    else:
        lines += [why_sealed(data)]
        if card := data["card"]:
            lines += ["", f"| {card['split']}, {card['agreement']['n']} items | judge | raters |", "|---|---|---|"]
            lines += [
                f"| {name.replace('_', ' ')} | {figure(card['agreement'][name])} | {figure(ceiling[name])} |"
                for name in _MEASURES
            ]
    if data["gate"]:
        verdict = "the compiled judge replaces the baseline" if data["replaces"] else UNPROVEN
        lines += ["", f"Gate: {with_interval(data['gate'], 'items')}: {verdict}."]
    return "\n".join(lines) + "\n"
