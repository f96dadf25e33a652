"""The page of a training that runs or was killed: curves, alarms and sample rollouts, read from its log."""

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from pages import NOW, Browser, Scans, browse, links_in, put_report, read, rollout_of_sums
from trained import SAMPLE, put_before_and_after, put_sft, put_training

from assay.commands.runs import stored_report
from assay.optimizers.finetuning.report import PolicyReport, SFTReport
from assay.optimizers.finetuning.settings import PolicySettings, SFTSettings
from assay.reports.training import TrainingLog, read_training_log
from assay.traces import Store


def test_a_running_training_shows_its_curves_alarms_and_samples(store: Store, tmp_path: Path) -> None:
    put_training(store, tmp_path, text="the KL is <b>high</b>")
    with Scans(store) as scans:
        text = read(store, "/runs/training", where=tmp_path / "page.db")
    assert scans == []
    assert 'hx-trigger="every 3s"' in text
    assert "<dt>Step</dt><dd><bdi>2 of 9</bdi></dd>" in text
    assert "the KL is &lt;b&gt;high&lt;/b&gt;" in text
    assert re.findall(r"<h3>(.*?)</h3>", text)[:3] == ["Reward", "Held out", "Reward by criterion"]
    assert text.count('<svg class="chart"') == 3
    assert re.findall(r'<details id="(.*?)"', text) == ["sample-1"]  # the other one was erased
    assert "advantage -0.50" in text
    assert f'href="/rollouts/{SAMPLE}">the whole rollout' in text
    assert ">Advantage -0.50<" in read(store, f"/rollouts/{SAMPLE}", where=tmp_path / "page.db")


def test_a_step_changes_the_part_that_is_loaded_again(store: Store, tmp_path: Path) -> None:
    log = put_training(store, tmp_path)

    async def visit(browser: Browser) -> list[int]:
        _, text = await browser.get("/runs/training")
        address = re.search(r'hx-get="([^"]*seen[^"]*)"', text)
        assert address is not None
        unchanged, _ = await browser.get(address[1], HX_Request="true")
        log.values(3, {"reward": 0.9}, {})
        changed, part = await browser.get(address[1], HX_Request="true")
        assert "3 of 9" in part
        return [unchanged, changed]

    assert browse(store, visit, where=tmp_path / "page.db") == [204, 200]


def test_a_running_fine_tuning_shows_both_losses_its_alarm_and_how_to_resume_it(store: Store, tmp_path: Path) -> None:
    put_sft(store, tmp_path)
    text = read(store, "/runs/warm", where=tmp_path / "page.db")
    assert 'hx-trigger="every 3s"' in text
    assert "<dt>Step</dt><dd><bdi>4 of 6</bdi></dd>" in text
    assert "<dt>Method</dt><dd><bdi>sft</bdi></dd>" in text
    assert "the held-out loss rose" in text
    assert re.findall(r"<h3>(.*?)</h3>", text) == ["Loss"]
    assert text.count("<polyline") == 2
    assert "assay train sft data/warm --name warm --model embedded/m --epochs 2 --resume" in text
    assert "Its rollouts" not in text
    assert "train sft</td>" in read(store, "/runs", where=tmp_path / "page.db")


def comparison(runs: list[str]) -> dict[str, Any]:
    """A comparison as `compared` of `assay.optimizers.finetuning.comparison` makes it."""
    side = {
        "n": 4, "score": 0.5, "criteria": {}, "task_types": {}, "valid_calls": None, "parsed": 1.0,
        "tokens_per_task": 9.0,
    }  # fmt: skip
    gain = {"mean": 0.1, "low": 0.0, "high": 0.2}
    sides = {"before": side, "after": {**side, "score": 0.75}, "gain": gain, "criteria": {}, "task_types": {}}
    return {**sides, "runs": runs}


def fine_tuning(folder: Path, runs: list[str]) -> SFTReport:
    return SFTReport(
        "embedded/m+warm", folder, SFTSettings(), rows=8, held_out_rows=2, tasks=5, left_out=Counter({"too long": 3}),
        steps=6, loss={1: 2.0, 2: 1.0}, held_out_loss={0: 2.5, 2: 1.5}, best_step=2, alarms=["step 2: it rose"],
        validation={"sums": {"greedy": comparison(runs)}},
    )  # fmt: skip


def test_a_finished_fine_tuning_links_its_evaluations(store: Store, tmp_path: Path) -> None:
    put_sft(store, tmp_path, status="done")
    report = fine_tuning(tmp_path, ["a-1", "b-1"])
    put_report(store, report.to_dict(), run_id="warm")
    text = read(store, "/runs/warm", where=tmp_path / "page.db")
    assert '<a href="/compare?a=a-1&amp;b=b-1"><bdi>sums, greedy</bdi></a>' in text
    assert 'with their cost: <a href="/runs/a-1">a-1</a>, <a href="/runs/b-1">b-1</a>.' in text
    assert re.findall(r"<h[23]>(.*?)</h[23]>", text)[:4] == ["Before and after: <bdi>sums</bdi>", "Curves", "Loss",
                                                              "Left out"]  # fmt: skip
    assert "step 2: it rose" in text
    assert "hx-trigger" not in text
    assert "0.500 → 0.750" in read(store, "/runs", where=tmp_path / "page.db")


def test_a_finished_training_says_how_its_model_is_used(store: Store, tmp_path: Path) -> None:
    put_training(store, tmp_path, status="done")
    put_report(store, {"name": "embedded/m+better"}, run_id="training")
    config = {"program": "p.py:P", "rubric": "r.yaml", "data": "d.csv", "algorithm": "grpo", "model": "embedded/m"}
    store.put_run("training", kind="train", config=config, status="done", started_at=NOW)
    store.flush()
    text = read(store, "/runs/training", where=tmp_path / "page.db")
    assert "assay evaluate p.py:P --rubric r.yaml --data d.csv --model embedded/m+better</pre>" in text


def test_a_log_survives_cut_lines_and_repeated_steps(tmp_path: Path) -> None:
    log, path = TrainingLog(tmp_path), tmp_path / "training.jsonl"
    log.values(1, {"reward": 0.25, "monitor": 0.5, "loss": math.nan}, {})
    with path.open("a") as file:
        file.write('\n{"step": 2, "values": {"rew')
    log.values(2, {"reward": 0.5}, {})
    with path.open("a") as file:
        file.write('\n[1]\n{"step": "x", "values": {}, "alarms": {}}\n{"step": 9, "sample": 3}')
    log.values(1, {"reward": 0.125}, {"kl": "step 1: high"})
    progress = read_training_log(tmp_path)
    assert progress is not None
    assert progress.curves == {"reward": {1: 0.125, 2: 0.5}, "monitor": {1: 0.5}}
    assert (progress.step, progress.alarms, progress.samples) == (1, {"kl": "step 1: high"}, {})
    assert read_training_log(tmp_path / "none") is None


def test_of_a_long_log_the_end_is_read(tmp_path: Path) -> None:
    line = json.dumps({"step": 5, "values": {"reward": 0.5, "pad" * 500: 0.5}, "alarms": {}})
    (tmp_path / "training.jsonl").write_text(
        f'\n{{"step": 1, "values": {{"early": 1}}, "alarms": {{}}}}\n{line}' * 5_500
    )
    progress = read_training_log(tmp_path)
    assert progress is not None
    assert progress.shortened
    assert progress.curves["reward"] == {5: 0.5}


def test_the_model_before_and_after_a_policy_gradient_is_compared_by_task(store: Store, tmp_path: Path) -> None:
    put_training(store, tmp_path, status="done")
    put_before_and_after(store)
    with Scans(store) as scans:
        text = read(store, "/runs/training", where=tmp_path / "page.db")
        greedy, sampled = links_in(text, "/compare?a=training&amp;b=")
        pages = [read(store, path) for path in (greedy, sampled, "/compare?a=training&b=training")]
    assert scans == []
    assert "sums.py:Sums, greedy</bdi>" in text
    for page, words in zip(pages, ("+0.250 on 6 tasks", "-0.250 on 6 tasks", "+0.250 on 6 tasks"), strict=True):
        assert words in page
    assert re.findall(r'<option value="([^"]*)" selected>', pages[1]) == [
        "test · before, sampled", "test · after, sampled"
    ]  # fmt: skip


def test_a_report_of_a_policy_gradient_compares_each_task_of_each_program(store: Store, tmp_path: Path) -> None:
    put_before_and_after(store)
    put_before_and_after(store, run_id="kept", program="kept.py:Kept", at=24)
    report = PolicyReport(
        "embedded/m+better", tmp_path, PolicySettings(), notes=["one judge was slow"], curves={"reward": {1: 0.1}},
        validation={
            "Sums": {mode: comparison(["training"] * 2) for mode in ("greedy", "sampled")},
            "Kept": {"greedy": comparison(["kept"] * 2)},
            "Gone": {"greedy": comparison(["erased"] * 2)},
        },
    )  # fmt: skip
    text = report.write_page(tmp_path / "a.html", store=tmp_path / "page.db").read_text()
    headings = re.findall(r'<h2 id="tasks-\d">Tasks before and after: <bdi>(.*?)</bdi>, (.*?)</h2>', text)
    assert headings == [("Sums", "greedy"), ("Sums", "sampled"), ("Kept", "greedy"), ("Gone", "greedy")]
    assert text.count("+0.250 on 6 tasks") == 2
    assert text.count("-0.250 on 6 tasks") == 1
    assert text.count('class="task line"') == 18
    assert text.count("does not have the rollouts") == 1
    assert [link for link in links_in(text, "") if not link.startswith("#tasks-")] == []
    assert "one judge was slow" in text


def test_the_page_of_a_training_links_the_tasks_of_its_retention_tasks(store: Store, tmp_path: Path) -> None:
    put_training(store, tmp_path, status="done")
    put_before_and_after(store)
    store.put_run("kept", kind="train", config={"program": "kept.py:Kept"}, status="done", started_at=NOW)
    put_before_and_after(store, run_id="kept", program="kept.py:Kept", at=24)
    validation = {"Kept": {"greedy": comparison(["kept"] * 2)}}
    put_report(store, {"validation": validation}, run_id="training")
    text = read(store, "/runs/training", where=tmp_path / "page.db")
    assert len(links_in(text, "/compare?a=training&amp;b=")) == 2
    assert "Kept, greedy" in text
    assert "+0.250 on 6 tasks" in read(store, links_in(text, "/compare?a=kept&amp;b=")[0])


def test_a_report_of_a_long_training_is_below_its_limit(store: Store, tmp_path: Path) -> None:
    for side, condition in enumerate(("before, greedy", "after, greedy")):
        for task in range(160):
            rollout_of_sums(
                store, 1000 * side + task + 300, run_id="training", phase="test", split="test", task_id=f"task-{task}",
                group_id=f"{condition}/task-{task}", score=0.25 + side / 4, inputs={"question": "long words " * 80},
            )  # fmt: skip
    store.flush()
    curves = {f"criteria/{name}": {step: step / 600 for step in range(600)} for name in "abcdefghij"}
    modes = {mode: comparison(["training"] * 2) for mode in ("greedy", "sampled")}
    report = PolicyReport("m+a", tmp_path, PolicySettings(), curves=curves, validation={"Sums": modes})
    file = report.write_page(tmp_path / "a.html", store=tmp_path / "page.db")
    assert file.stat().st_size < 500_000
    assert "10 more tasks are not shown" in file.read_text()


def test_a_stored_training_is_read_as_the_report_of_its_command(tmp_path: Path) -> None:
    policy = PolicyReport("m+a", tmp_path, PolicySettings(), curves={"reward": {9: 0.1, 10: 0.2}}, report=tmp_path)
    policy.row_stats.left_out["cached"] += 2
    for report, method in ((policy, "grpo"), (fine_tuning(tmp_path, []), "sft")):
        stored = json.loads(json.dumps(report.to_dict()))
        run = {"id": "r", "kind": "train", "config": {"algorithm": method}, "program": None}
        again = stored_report(run, stored)
        assert type(again) is type(report)
        assert list(again.lines()) == list(report.lines())
        assert again.to_dict() == report.to_dict()
        assert stored_report({**run, "kind": "import"}, stored) is None
        assert stored_report(run, {"stopped": "by the user"}) is None
