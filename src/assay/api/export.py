"""Public API for `assay export`: training data from the store, behind gates."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from assay.errors import ConfigError
from assay.evaluation import Progress, default_progress
from assay.evaluation.stored import task_of
from assay.rubrics import Rubric
from assay.rubrics.trl_reward import undecided_checks
from assay.runs.loading import load_rubric
from assay.runs.rubric_files import portable_rubric
from assay.runs.settings.export import BalanceSettings, ExportSettings, GateSettings, RowSettings, SelectionSettings
from assay.runs.settings.store_options import ExportOptions
from assay.sources.trust import trusts
from assay.support.keywords import takes
from assay.support.settings import settings_of
from assay.traces import Store
from assay.traces.export.balance import Balance
from assay.traces.export.gates import Gates
from assay.traces.export.pipeline import ExportConfig, ExportReport, export_traces
from assay.traces.export.selection import Selection

__all__ = ["export"]


@takes(ExportSettings)
@trusts
def export(
    kind: str,
    out: str | Path,
    *,
    store: str | Path | None = None,
    rubric: str | Path | None = None,
    progress: Progress | None = None,
    selection: Selection | None = None,
    gates: Gates | None = None,
    balance: Balance | str = "none",
    **options: Unpack[ExportOptions],
) -> ExportReport:
    """Exports training data of one `kind` from the store into the new folder `out`.

    Args:
        kind: `sft`, `grpo`, `preferences` or `transitions`.
        rubric: for `grpo`: name or file of the rubric that scores completions.
        selection, gates, balance: objects that replace the settings of the same parts.
        options: the fields of `assay.runs.settings.ExportSettings`.
    Raises:
        ConfigError: a setting that this kind of export has no use for.
        DataError: nothing fits, or a gate failed; nothing was written.
    """
    for name, config_object, parts in (
        ("selection", selection, SelectionSettings),
        ("gates", gates, GateSettings),
        ("balance", balance, BalanceSettings),
    ):
        if not isinstance(config_object, str | None) and (
            repeated := sorted(settings_of(parts).keys() & options.keys())
        ):
            raise ConfigError(
                f"{name}={config_object!r} and {', '.join(repeated)} set the same fields: give one of them"
            )
    values: dict[str, Any] = dict(options)
    if isinstance(balance, str):
        values["balance"] = balance
    settings = ExportSettings(**values)
    settings.check_kind(kind)
    if rubric is not None and kind != "grpo":
        raise ConfigError(f"rubric={str(rubric)!r} would have no effect on kind={kind!r}: it requires kind='grpo'")
    gates = gates or settings.gates
    if settings.privacy == "off":  # an explicit choice, so the gate must not refuse it
        gates = replace(gates, privacy="off")
    balanced = settings.balanced if isinstance(balance, str) else balance
    rows = {name: getattr(settings, name) for name in settings_of(RowSettings)}
    rows["privacy_key"] = None if settings.privacy_key is None else Path(settings.privacy_key)
    rows["agents"] = tuple(settings.agents)
    config = ExportConfig(kind=kind, selection=selection or settings.selection, gates=gates, balance=balanced, **rows)
    progress = default_progress(progress)
    carried = portable_rubric(rubric) if rubric is not None else None
    with Store(store) as opened:
        report = export_traces(
            opened, out, config, rubric=carried, bar=lambda total: progress.bar(f"export {kind}", total)
        )
    if rubric is not None:
        measure = load_rubric(rubric)
        report.notes = [*_undecided(measure, report), *_not_in_reward(measure)]
    return report


def _not_in_reward(rubric: Rubric) -> list[str]:
    """Notes on criteria that `reward.py` computes only with a judge model, or not at all."""
    judged = [c.name for c in rubric.finals if c.judge is not None and rubric.decider(c.name) is None]
    steps = [c.name for c in rubric.criteria if c.scope == "step"]
    notes = []
    if judged:
        notes.append(
            "reward.py asks the model named by the environment variable ASSAY_JUDGE_MODEL about "
            f"{', '.join(map(repr, judged))}, and raises without it"
        )
    if steps:
        notes.append(
            "step criteria are graded on recorded rollouts and are not part of reward.py: "
            f"{', '.join(map(repr, steps))}"
        )
    return notes


def _undecided(rubric: Rubric, report: ExportReport) -> list[str]:
    """A note for each check that the exported reward leaves out because it cannot decide it."""
    outputs = report.manifest["columns"]["outputs"]
    undecided = undecided_checks(rubric, [(task_of(rollout), text) for rollout, text in report.answers], outputs)
    return [
        f"criterion {name!r} is not computed by reward.py: its check gave no grade on any of {len(report.answers)} "
        f"exported answers ({reason}). A "
        "reward sees the completion and the task's columns, not the rollout; of the prediction it has "
        f"{', '.join(outputs) or 'answer'}. The "
        f"policy is trained on the score of the other criteria{_essential(rubric, name)}"
        for name, reason in undecided.items()
    ]


def _essential(rubric: Rubric, name: str) -> str:
    """The consequence of leaving out an essential criterion; empty for others."""
    essential = next(criterion.essential for criterion in rubric.criteria if criterion.name == name)
    return (
        "; as it is essential, these rewards are unscored (NaN) and nothing is learned from them" if essential else ""
    )
