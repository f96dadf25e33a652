"""Pages: hostile text in every place that a user's data reaches, no network, templates that are in the package."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jinja2
import pytest

from assay.reports.files import write_report
from assay.reports.studies import StudyTrial, study_page, trials_of
from assay.reports.training import training_page, write_training

HOSTILE = "</td></pre></script><script>alert(1)</script>&amp;'"


def training(text: str) -> dict[str, Any]:
    """A report of a training in which every text of the user's is `text`."""
    side = {
        "n": 4, "score": 0.5, "criteria": {text: 0.5}, "task_types": {text: 0.5, "b": 0.1}, "valid_calls": 1.0,
        "parsed": None, "tokens_per_task": 3.0,
    }  # fmt: skip
    gain = {"mean": 0.1, "low": 0.0, "high": 0.2}
    pair = {"before": side, "after": side, "gain": gain, "criteria": {text: gain}, "task_types": {text: gain}}
    calls = [{"t": 0, "output": f"a\\n  b {text}"}]
    sample = {"step": 1, "score": 0.5, "inputs": {"q": text}, "advantages": [0.5], "calls": calls}
    return {
        "config": {"algorithm": text, "model": text, "seed": 0, "note": text}, "name": text, "path": "",
        "converged": None, "steps": 1, "rollouts": 8, "calls": 8, "best_step": 1, "alarms": [text], "stopped": text,
        "validation": {text: {"greedy": pair}}, "test_openings": {}, "samples": [sample], "left_out": {text: 2},
        "curves": {"reward": {"1": 0.1, "2": 0.2}, f"criteria/{text}": {"1": 0.5}},
    }  # fmt: skip


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
    harmless = elements(write_training(tmp_path / "a.html", training("harmless")))
    hostile = elements(write_training(tmp_path / "b.html", training(HOSTILE)))
    assert len(hostile.scripts) == len(harmless.scripts)
    assert not any(script.strip() == "alert(1)" for script in hostile.scripts)
    shown = sum(text.count(HOSTILE) for text in hostile.texts)
    assert shown == sum(text.count("harmless") for text in harmless.texts) > 10
    assert hostile.addresses == []  # nothing comes from a network


def test_a_page_contains_the_values_of_its_report(tmp_path: Path) -> None:
    page = write_training(tmp_path / "a.html", training("x")).read_text()
    first, *headings = re.findall(r"<h[23]>(.*?)</h[23]>", page)
    assert first == "Before and after: <bdi>x</bdi>"
    assert headings == ["Curves", "Reward", "Reward by criterion", "Sample rollouts", "Left out", "Settings"]
    (sample,) = re.findall(r'<pre dir="auto" tabindex="0">(.*?)</pre>', page, re.DOTALL)
    assert sample.split("\n") == ["step 1, score 0.5", "{&#34;q&#34;: &#34;x&#34;}", "[0] advantage +0.50  a\\n  b x"]
    row = re.findall(r"<tr>.*?</tr>", page)[1]
    assert re.findall(r">([^<>]+)<", row) == ["greedy: score", "0.500", "0.500", "+0.100 [+0.000, +0.200]"]
    assert page.count("<polyline") == 1  # one curve has two steps
    assert len(page) < 40_000


def test_long_curves_show_the_mean_of_the_last_steps(tmp_path: Path) -> None:
    report = {**training("x"), "curves": {"reward": {str(step): float(step % 2) for step in range(40)}}}
    (chart,) = training_page(report).charts
    assert chart.chart.count("<polyline") == 2
    assert 'class="line faint first"' in chart.chart
    assert [step for step, _ in chart.rows] == list(range(40))


def fine_tuning(text: str, *, steps: int = 40) -> dict[str, Any]:
    """A report of `assay train sft --program` in which every text of the user's is `text`."""
    policy = training(text)
    return {
        "config": {"model": text, "epochs": 3}, "name": text, "path": "", "rows": 90, "held_out_rows": 10, "tasks": 20,
        "steps": steps, "best_step": 20, "agreement": 0.75, "stopped": text, "alarms": [text], "notes": [text],
        "left_out": {text: 2},
        "loss": {step: 2.0 / step for step in range(1, steps + 1)}, "held_out_loss": {0: 2.5, 20: 0.5, 40: 0.75},
        "validation": policy["validation"], "test_openings": {},
    }  # fmt: skip


def test_a_page_of_a_long_fine_tuning_is_below_its_limit(tmp_path: Path) -> None:
    hostile = elements(write_training(tmp_path / "a.html", fine_tuning(HOSTILE, steps=20_000)))
    assert hostile.scripts == hostile.addresses == []
    assert (tmp_path / "a.html").stat().st_size < 100_000


def test_a_study_shows_its_best_trial_its_front_and_what_matters() -> None:
    trials = [
        StudyTrial(
            number=at, state="pruned" if at == 3 else "complete", values={"score": score, "tokens": tokens},
            parameters={"temperature": at / 5, "max_steps": 2.0**at},
        )
        for at, (score, tokens) in enumerate([(0.2, 10), (0.6, 30), (0.5, 20), (0.1, 5), (0.4, 40)])
    ]  # fmt: skip
    page = study_page(trials, ["score", "tokens"], importance={"fanova": {"max_steps": 0.2, "temperature": 0.8}})
    assert page.best is trials[1]
    assert page.front == {0, 1, 2}  # the last one has fewer points and more tokens than the second
    assert [name for name, _ in page.importance] == ["temperature", "max_steps"]
    assert [name for name, _ in page.slices] == ["temperature", "max_steps"]
    assert page.history.count("<circle") == 5
    assert len(page.pareto) == 1
    empty = study_page([], ["score"], importance={})
    assert (empty.best, empty.history, empty.pareto, empty.slices) == (None, "", [], [])


def test_trials_of_a_report_keep_the_values_that_are_known() -> None:
    history = [
        {"number": 7, "parameters": {"temperature": 0.5}, "state": "pruned", "values": {"score": None}, "tokens": 3.0},
        {"parameters": {}, "overall": 0.4},
    ]
    first, second = trials_of({"history": history})
    assert (first.number, first.values, first.state) == (7, {"tokens": 3.0}, "pruned")
    assert (second.number, second.values) == (1, {"overall": 0.4})


def test_an_undefined_template_value_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(jinja2.UndefinedError, match="'page' is undefined"):
        write_report(tmp_path / "a.html", "report_study.html", title="t", facts=[], notes=[], result=[])
    assert not (tmp_path / "a.html").exists()
