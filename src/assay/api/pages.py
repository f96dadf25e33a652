"""Reports of train as one HTML file each: `--report FILE.html`."""

from pathlib import Path

from assay.optimizers.finetuning.policy_gradient import PolicyReport
from assay.optimizers.finetuning.sft import SFTReport
from assay.reports.trained import compared_runs, trained_tasks
from assay.reports.training import write_sft, write_training
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
