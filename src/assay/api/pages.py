"""Reports of tune as one HTML file each: `--report FILE.html`."""

from pathlib import Path

from assay.api.tune.report import TuneReport
from assay.reports.files import opened_facts, short_name, spent_facts, stopped_facts, write_report
from assay.reports.studies import tuned_page, tuned_words
from assay.support.report import Words


def write_tune_page(path: str | Path, report: TuneReport, *, words: Words = str) -> Path:
    """Writes the report of a search over agent parameters as one HTML file.

    Args:
        words: changes notes; the command line puts its flags into them, in place of Python arguments.
    Raises:
        ConfigError: the file cannot be written.
    """
    data = report.to_dict()
    best = ", ".join(f"{name} {value:.4g}" for name, value in data["best"].items())
    facts = [
        ("Program", report.config.program), ("Model", report.config.model), ("Best parameters", best),
        ("Trials", f"{data['trials']}, {data['complete']} complete, {data['pruned']} pruned, {data['failed']} failed"),
        *spent_facts(data), *stopped_facts(data, words), *opened_facts(data), ("Artifact", str(data["artifact"])),
    ]  # fmt: skip
    page = tuned_page(data)
    return write_report(
        path, "report_study.html", title=f"Agent parameters of {short_name(report.config.program)}", facts=facts,
        page=page, result=tuned_words(data), notes=list(map(words, data["notes"])),
    )  # fmt: skip
