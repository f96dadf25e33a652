"""The page of a training that runs or was killed: curves, alarms and sample rollouts, read from its log."""

import json
import math
import re
from pathlib import Path

import pytest
from pages import Browser, Scans, browse, read
from trained import SAMPLE, put_training

from assay.reports.training_log import TrainingLog, read_training_log
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


def test_a_training_with_many_rollouts_still_updates(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_training(store, tmp_path)
    monkeypatch.setattr("assay.web.runs.COUNTED", 0)
    text = read(store, "/runs/training", where=tmp_path / "page.db")
    assert "count its rollouts" in text
    assert 'hx-trigger="every 3s"' in text


def test_a_killed_training_keeps_its_curves(store: Store, tmp_path: Path) -> None:
    put_training(store, tmp_path, status="failed")
    text = read(store, "/runs/training", where=tmp_path / "page.db")
    assert text.count('<svg class="chart"') == 3
    assert "hx-trigger" not in text


def test_a_log_survives_cut_lines_and_repeated_steps(tmp_path: Path) -> None:
    log, path = TrainingLog(tmp_path), tmp_path / "training.jsonl"
    log.values(1, {"reward": 0.25, "watched": 0.5, "loss": math.nan}, {})
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
