"""Reports of train and a judge's card as one HTML file each: `--report FILE.html`."""

from pathlib import Path

from assay.optimizers.finetuning.policy_gradient import PolicyReport
from assay.optimizers.finetuning.sft import SFTReport
from assay.reports.cards import card_page
from assay.reports.files import opened_facts, short_name, spent_facts, stopped_facts, write_report
from assay.reports.trained import compared_runs, trained_tasks
from assay.reports.training import write_sft, write_training
from assay.sources.artifact_files import read_json, read_manifest
from assay.support.report import Words
from assay.traces import Store


def write_training_page(
    path: str | Path, report: PolicyReport | SFTReport, *, store: str | Path | None = None, words: Words = str
) -> Path:
    """Writes the report of a training as one HTML file, with the tasks of the store's evaluations before and after.

    Args:
        words: changes notes; the command line puts its flags into them, in place of Python arguments.
    Raises:
        ConfigError: the file cannot be written.
    """
    data = report.to_dict()
    tasks = []
    if data["validation"]:  # an offline training has none, and then the store is not needed
        with Store(store) as opened:
            tasks = trained_tasks(opened, data["validation"])
            opened.put_report(path, *compared_runs(data["validation"]))
    write = write_training if isinstance(report, PolicyReport) else write_sft
    return write(Path(path), data, tasks=tasks, words=words)


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
        *opened_facts(result), *spent_facts(result), *stopped_facts(result, str),
    ]  # fmt: skip
    title = f"Reliability card of {spec['text'][:80] or short_name(str(judge))}"
    return write_report(path, "report_card.html", title=title, facts=facts, page=card_page(card), notes=result["notes"])
