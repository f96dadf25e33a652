"""Pages: hostile text in every place that a user's data reaches, no network, templates that are in the package."""

import importlib.resources
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jinja2
import pytest

from assay.reports.pages import write_html
from assay.reports.training import current_curves, write_report

HOSTILE = "</td></pre></script><script>alert(1)</script>&amp;'"


def training(text: str) -> dict[str, Any]:
    """A report of a training in which every text of the user's is `text`."""
    report = {
        "n": 4,
        "score": 0.5,
        "criteria": {text: 0.5},
        "task_types": {text: 0.5, "b": 0.1},
        "valid_calls": 1.0,
        "parsed": None,
        "tokens_per_task": 3.0,
    }
    gain = {"mean": 0.1, "low": 0.0, "high": 0.2}
    modes = {
        "greedy": {
            "before": report,
            "after": report,
            "gain": gain,
            "criteria": {text: gain},
            "task_types": {text: gain},
        }
    }
    return {
        "config": {"algorithm": text, "model": text, "seed": 0, "note": text},
        "name": text,
        "path": "",
        "converged": None,
        "steps": 1,
        "rollouts": 8,
        "calls": 8,
        "best_step": 1,
        "alarms": [text],
        "stopped": text,
        "validation": {text: modes},
        "test_openings": {},
        "curves": {"reward": {"1": 0.1, "2": 0.2}, f"criteria/{text}": {"1": 0.5}},
        "samples": [
            {
                "step": 1,
                "score": 0.5,
                "inputs": {"q": text},
                "advantages": [0.5],
                "calls": [{"t": 0, "output": f"a\\n  b {text}"}],
            }
        ],
        "left_out": {text: 2},
    }


class Elements(HTMLParser):
    """Counts elements, and keeps what would be run or fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.addresses: list[str] = []
        self.texts: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [str(value) for name, value in attrs if name in ("src", "href", "action")]
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.texts.append(data)


def elements(path: Path) -> Elements:
    elements = Elements()
    elements.feed(path.read_text(encoding="utf-8"))
    elements.close()
    assert elements.open == []  # every element is closed
    return elements


def test_hostile_text_stays_text_in_a_page_of_a_training(tmp_path: Path) -> None:
    harmless = elements(write_report(tmp_path / "a.html", training("harmless")))
    hostile = elements(write_report(tmp_path / "b.html", training(HOSTILE)))
    assert len(hostile.scripts) == len(harmless.scripts)
    assert not any(script.strip() == "alert(1)" for script in hostile.scripts)
    assert (
        sum(text.count(HOSTILE) for text in hostile.texts)
        == sum(text.count("harmless") for text in harmless.texts)
        > 10
    )
    assert hostile.addresses == []  # nothing comes from a network


def test_a_sample_keeps_its_line_breaks(tmp_path: Path) -> None:
    page = write_report(tmp_path / "a.html", training("x")).read_text()
    (sample,) = re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)
    assert sample.split("\n") == ["step 1, score 0.5", "{&#34;q&#34;: &#34;x&#34;}", "[0] advantage +0.50  a\\n  b x"]


def test_a_page_contains_the_values_of_its_report(tmp_path: Path) -> None:
    page = write_report(tmp_path / "a.html", training("x")).read_text()
    assert re.findall(r"<h2>(.*?)</h2>", page) == [
        "Before and after: x",
        "Reward",
        "Reward by criterion",
        "Sample rollouts",
        "Left out",
        "Settings",
    ]
    assert "<td>greedy: score</td><td>0.500</td><td>0.500</td><td>+0.100 [+0.000, +0.200]</td>" in page
    assert page.count("plotly.js v") == 1  # the library is in the page once


def test_an_undefined_template_value_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(jinja2.UndefinedError, match="'impact' is undefined"):
        write_html(tmp_path / "a.html", "study.html", title="t", facts={}, charts=[])
    assert not (tmp_path / "a.html").exists()


def test_every_page_extends_the_base() -> None:
    folder = importlib.resources.files("assay.reports") / "templates"
    names = {entry.name for entry in folder.iterdir()}
    parts = {"base.html", "parts.html", "report.html", "components.html", "compile_part.html", "card_part.html"}
    reports = {"report_compile.html", "report_compare.html", "report_evaluate.html", "report_card.html"}
    assert names == parts | reports | {"study.html", "training.html"}
    for name in names - parts:
        base = "report.html" if name in reports else "base.html"
        assert (folder / name).read_text().startswith(f'{{% extends "{base}" %}}')


def test_page_shows_the_curves_of_a_report_written_before_they_were_renamed(tmp_path: Path) -> None:
    report = training("a")
    report["curves"] |= {"watched": {"1": 0.3}, "flat_groups": {"1": 0.25}}
    page = write_report(tmp_path / "a.html", report).read_text(encoding="utf-8")
    assert '"name":"monitor"' in page
    assert '"name":"zero variance groups"' in page


def test_curves_under_old_and_new_names_are_merged() -> None:
    curves = {"watched": {"1": 0.3}, "monitor": {"2": 0.4}, "reward": {"1": 0.1}}
    assert current_curves(curves) == {"monitor": {1: 0.3, 2: 0.4}, "reward": {1: 0.1}}
