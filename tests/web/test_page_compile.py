"""The page of a compile: decision, scores side by side, prompt before and after, candidates, tasks by change."""

import json
import re
from pathlib import Path

from compiles import put_compile
from pages import Scans, put_report, read

from assay.traces import Store


def rows_of(text: str, label: str) -> list[str]:
    """The rows of a table's body without tags."""
    part = text.partition(f'aria-label="{label}"')[2]
    rows = re.findall(r"<tr>(.*?)</tr>", part.partition("<tbody>")[2].partition("</tbody>")[0], re.DOTALL)
    return [" ".join(re.sub(r"<[^>]*>", " ", row).split()) for row in rows]


def test_a_compile_shows_why_its_result_won(store: Store, tmp_path: Path) -> None:
    put_compile(store, tmp_path)
    with Scans(store) as scans:
        text = read(store, "/runs/run-1", where=tmp_path / "page.db")
    assert scans == []
    assert len(text) < 100_000
    assert "+0.333 on 6 tasks, 95 % interval +0.100 to +0.600: a gain. The compiled program replaces" in text
    assert "0.500 [0.100, 0.900] before, 0.833 [0.100, 0.900] after" in text
    assert "has been opened 3 times in this store" in text
    # right: 3 of 6 before, 5 of 6 after; task 5 is worse, tasks 0 to 2 are better: (3 - 1) / 6 = 0.333
    right, short = rows_of(text, "Scores by criterion")
    assert re.search(r"^right 0\.500 .* 0\.833 .* \+0\.333 .* 6$", right)
    assert re.search(r"^short 1\.000 .* 1\.000 .* \+0\.000 .* 6$", short)
    # kind-0 has the tasks 0, 2, 4: 1 of 3, then 3 of 3; kind-1 1, 3, 5: 2 of 3, then 2 of 3
    assert [row[:12] for row in rows_of(text, "Scores by type of task")] == ["kind-0 0.333", "kind-1 0.667"]
    tasks = rows_of(text, "Tasks")
    assert "3 better, 1 worse, 2 the same." in text
    assert "1.000 0.000 -1.000 right 1 → 0" in tasks[0]
    assert "0.000 1.000 +1.000 right 0 → 1" in tasks[-1]
    assert [row.split(" @")[0] for row in rows_of(text, "Candidates")] == ["two demonstrations", "baseline"]
    assert "two demonstrations: 0.833 on 6</title>" in text
    assert re.search(r"<th scope=\"row\">prompt format</th><td>json</td><td>lean</td>", text)
    assert re.search(r"<ins>.*Answer with digits\.", text, re.DOTALL)
    assert '<a href="/rollouts?task=aaaaaaaaaaaaaaaa">' in text
    assert f"Artifact: <bdi>{tmp_path / 'artifact'}</bdi>" in text
    assert f"assay run {tmp_path / 'artifact'} &#39;question=How much is" in text
    better_first = read(store, "/runs/run-1?split=gate&order=better", where=tmp_path / "page.db")
    assert "<strong>gate</strong>" in better_first
    assert "+1.000" in rows_of(better_first, "Tasks")[0]


def test_a_compile_that_proves_nothing_says_so(store: Store, tmp_path: Path) -> None:
    report = put_compile(store, tmp_path, replaces=False)
    assert "That is not proof that it is better: the baseline is kept." in read(
        store, "/runs/run-1", where=tmp_path / "p"
    )
    put_report(store, {**report, "winner": "baseline", "gate": None})
    assert "The program is unchanged" in read(store, "/runs/run-1", where=tmp_path / "p")


def test_a_comparison_names_the_candidates_of_a_compile(store: Store, tmp_path: Path) -> None:
    put_compile(store, tmp_path)
    text = read(store, "/compare?a=run-1&b=run-1", where=tmp_path / "page.db")
    names = re.findall(r'<option value="[^"]*" selected>([^<]*)', text)
    assert names == ["test · baseline", "test · winner: two demonstrations"]


def test_a_running_compile_shows_its_candidates(store: Store, tmp_path: Path) -> None:
    report = put_compile(store, tmp_path)
    put_report(store, {})
    folder = tmp_path / "runs" / "run-1"
    folder.mkdir(parents=True)
    (folder / "search.json").write_text(json.dumps({"candidates": report["candidates"]}))
    store.put_run("run-1", kind="compile", config={}, status="running", started_at=1.0)
    store.flush()
    text = read(store, "/runs/run-1", where=tmp_path / "page.db")
    assert len(rows_of(text, "Candidates")) == 2
    assert "Decision</h2>" not in text
    (folder / "search.json").write_text("{")  # as if it were being written
    assert "Candidates</h2>" not in read(store, "/runs/run-1", where=tmp_path / "page.db")
