"""Reports as files: complete, small, without scripts or addresses, whatever the texts are."""

import json
import math
import pickle
import re
from pathlib import Path

import pytest

import assay
from assay.deployment.simulation import SimulationReport
from assay.errors import ConfigError
from assay.evaluation.evaluation import Evaluation
from assay.reports.charts import Line, lines_chart
from assay.reports.compiled import CompilePage, Demonstration
from assay.reports.files import write_report
from assay.reports.sides import Decision
from assay.reports.texts import Clipped, changes_of
from assay.rubrics import ScoreResult
from assay.support.report import ReportDict, shortened
from assay.traces import Verdict
from assay.traces.export.settings import GateReport, Gates

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\u202e\x07\ud800"
LOADS = re.compile(r"(?:src|href|action|srcset|data)\s*=|url\(|@import|<(?:script|link|img|iframe|object|form)\b", re.I)


def page(text: str) -> CompilePage:
    candidate = {
        "name": text, "version": text, "n": 1, "val_score": 0.5, "expected": None, "dropped": text, "is_winner": True,
        "share": 1.0, "bar": "",
    }  # fmt: skip
    return CompilePage(
        decisions=[Decision(split="gate", text=text)], openings=text, history=chart(text),
        settings=[(text, text, text)],
        candidates=[candidate],
        instructions=[(text, changes_of("a", text))], prompts=[(text, changes_of(text, "b"))],
        demonstrations=[Demonstration(text=Clipped(text, 4_000), tasks=[text])], splits=["gate", "test"], split="test",
    )  # fmt: skip


def chart(text: str) -> object:
    return lines_chart([Line(name=text, points=[(0, 0), (1, 1)])], label=text, x_name=text, y_name=text)


def test_a_report_is_one_file_that_runs_and_loads_nothing(tmp_path: Path) -> None:
    file = write_report(
        tmp_path / "r.html", "report_compile.html", title=HOSTILE, facts=[(HOSTILE, HOSTILE)], page=page(HOSTILE),
        run_id="r", notes=[HOSTILE],
    )  # fmt: skip
    text = file.read_text(encoding="utf-8")
    assert LOADS.findall(text.replace(escaped(), "")) == []
    assert escaped() in text
    assert "default-src 'none'; style-src 'sha256-" in text
    (tmp_path / "data.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match=r"exists and is not overwritten"):
        write_report(tmp_path / "data.jsonl", "report_compile.html", title="", facts=[], page=page(""), run_id="r")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(tmp_path, "report_compile.html", title="", facts=[], page=page(""), run_id="r", notes=[])


def escaped() -> str:
    tags = "<script>alert(1)</script><img src=x onerror=alert(1)>".replace("<", "&lt;").replace(">", "&gt;")
    return f"{tags}[U+202E][U+0007][U+D800]"


def test_every_report_of_the_public_functions_is_shown_in_one_line_and_as_a_table() -> None:
    source = Path(assay.__file__).parent
    texts = [file.read_text() for file in source.rglob("*.py")]
    bases = dict(match.groups() for text in texts for match in re.finditer(r"^class (\w+)\((\w+)\b.*\):$", text, re.M))

    def root(name: str) -> str:
        return root(bases[name]) if name in bases and name != "ReportRepr" else name

    assert {name: root(name) for name in bases if name.endswith("Report") and root(name) != "ReportRepr"} == {}
    report = SimulationReport(
        runs=4, promoted=0.5, rolled_back=0.25, undecided=0.25, requests_median=10.0, candidate_requests_median=5.0,
        rules={"<b>": 1},
    )  # fmt: skip
    assert repr(report).startswith("SimulationReport(runs=4, promoted=0.5, rolled_back=0.25")
    assert "<tr><th>promoted</th><td>0.5</td></tr>" in report._repr_html_()


def test_scores_and_evaluations_are_one_line_each() -> None:
    verdicts = (
        Verdict(criterion="right", grade=0.5, reason="<b>half</b>"),
        Verdict(criterion="short", grade=None),
        Verdict(criterion="brief", grade=None, applies=False),
    )
    result = ScoreResult(value=0.5, verdicts=verdicts, capped_by=("right",))
    assert repr(result) == (
        "ScoreResult(value=0.500, right=0.5: <b>half</b>, short=unscored, brief=does not apply, capped_by=right)"
    )
    assert "<td>0.5: &lt;b&gt;half&lt;/b&gt;</td>" in result._repr_html_()
    assert repr(ScoreResult(value=math.nan)) == "ScoreResult(value=unscored)"
    evaluation = Evaluation(results={"a": result})
    assert repr(evaluation).endswith("right=0.500, short=–, brief=–, tasks=1, unscored=0)")
    assert repr(Evaluation()) == "Evaluation(score=unscored, tasks=0, unscored=0)"


def test_values_of_reports_are_one_line_without_invisible_characters() -> None:
    assert shortened({"temperature": 0.20934812, "max_steps": 3}) == "temperature 0.2093; max_steps 3"
    assert shortened("one\n two\u202e\x07") == "one two[U+202E][U+0007]"
    assert len(shortened("word " * 100)) == 80
    data = {"passed": False, "attacks": {"empty": {"wrong": ["<b>" * 900]}}, "notes": ["one", "two"], "calls": 3}
    report = ReportDict("Audit", data, {"failed": "<empty>"})
    assert report == data == json.loads(json.dumps(report)) == pickle.loads(pickle.dumps(report))
    assert repr(report) == "Audit(failed=<empty>, passed=False, notes=2, calls=3)"
    assert "<caption>Audit</caption><tr><th>failed</th><td>&lt;empty&gt;</td></tr>" in report._repr_html_()
    gates = GateReport(Gates(min_transitions=10))
    for problem in (None, None, None, "<empty>"):
        gates.see("default", problem)
    assert repr(gates).startswith("GateReport(all_passed=False, transitions=failed: 3, required 10")
    assert "<tr><th>clean</th><td>failed: 0.75, required 0.95" in gates._repr_html_()
    assert "<empty>" not in gates._repr_html_()
