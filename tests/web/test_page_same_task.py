"""From a rollout to the same task on the other side of a comparison, to its verdicts, and to a command."""

import re
from pathlib import Path
from typing import Any

from compiles import put_compile
from pages import NOW, Scans, links_in, read, rollout_of_sums

from assay.traces import Rollout, Store


def test_the_command_runs_the_artifact_that_was_evaluated(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "artifact"
    folder.mkdir()
    config = {"program": str(folder), "model": "openai/m", "api_base": "http://127.0.0.1:1/v1"}
    store.put_run("run-1", kind="evaluate", config=config, status="done", started_at=NOW)
    rollout = rollout_of_sums(store, 1, parameters={"temperature": 0.1})
    store.flush()
    text = read(store, f"/rollouts/{rollout.id}")
    assert "with its own parameters</dt>" in text  # no artifact is there any more
    assert "assay run sums.py:Sums &#39;question=How much is 1 + 1?&#39; --model openai/m --api-base" in text
    (folder / "manifest.json").write_text("{}")
    assert f"assay run {folder} &#39;question=How much" in read(store, f"/rollouts/{rollout.id}")


def test_the_rollout_of_the_other_side_is_one_click_away(store: Store, tmp_path: Path) -> None:
    put_compile(store, tmp_path)
    (first, second) = re.findall(
        r'href="/rollouts/(\w+)\?other=(\w+)"', read(store, "/runs/run-1", where=tmp_path / "page.db")
    )[0]
    with Scans(store) as scans:
        before = read(store, f"/rollouts/{first}", where=tmp_path / "page.db")
        after = read(store, f"/rollouts/{second}?other={first}", where=tmp_path / "page.db")
    assert scans == []
    assert (
        f'<a href="/rollouts/{second}?other={first}" data-key="o"><bdi>winner: two demonstrations</bdi></a>' in before
    )
    assert f'<a href="/rollouts/{first}?other={second}" data-key="o"><bdi>baseline</bdi></a>' in after


def test_the_other_side_of_a_comparison_is_of_the_same_task(store: Store) -> None:
    for number, run in ((1, "run-1"), (2, "run-2")):
        rollout_of_sums(store, number, run_id=run, task_id="t", phase="evaluate")
    stranger = rollout_of_sums(store, 3, task_id="another")
    store.flush()
    page = f"/rollouts/{1:032x}"
    assert "Same task" not in read(store, page)
    text = read(store, f"{page}?other={2:032x}")
    assert f'/rollouts/{2:032x}?other={1:032x}" data-key="o"><bdi>the other side of the comparison' in text
    for other in (stranger.id, "x", f"{1:032x}"):
        assert "Same task" not in read(store, f"{page}?other={other}")


def test_a_rollout_of_a_training_opens_the_one_that_was_sampled_in_the_same_way(store: Store) -> None:
    sampled = {"before, greedy": 0, "before, sampled": 1, "after, greedy": 2, "after, sampled": 3}  # as they are run
    store.put_run("training", kind="train", config={"algorithm": "grpo"}, status="done", started_at=NOW)
    for condition, at in sampled.items():
        fields = {"phase": "test", "split": "test", "task_id": "t", "group_id": f"{condition}/t"}
        rollout_of_sums(store, at, run_id="training", score=at / 4, **fields)
    store.flush()
    for here, there, name in ((0, 2, "after, greedy"), (2, 0, "before, greedy"), (1, 3, "after, sampled")):
        text = read(store, f"/rollouts/{here:032x}")
        assert f'/rollouts/{there:032x}?other={here:032x}" data-key="o"><bdi>{name}</bdi>' in text


JUDGE = {"source": "judge", "program": "Is it kind?", "group_id": "task", "verdicts": []}


def put_judged(store: Store) -> list[Rollout]:
    """Two outputs of one task and the judge's call about each, which is stored after all outputs."""
    one: dict[str, Any] = {"task_id": "task", "group_id": "task"}
    outputs = [rollout_of_sums(store, at, prediction={"answer": f"out {at}"}, **one) for at in (1, 2)]
    calls = [
        rollout_of_sums(
            store, 10 + at, **{**one, **JUDGE}, inputs={"task_input": "q", "output": f"out {at}"},
            prediction={"verdict": f"kind {at}", "confidence": 0.75},
        )
        for at in (1, 2)
    ]  # fmt: skip
    store.flush()
    return [*outputs, *calls]


def test_verdicts_link_the_judges_own_call_and_back(store: Store) -> None:
    first, _, call, other = put_judged(store)
    with Scans(store) as scans:
        text, judged = (read(store, f"/rollouts/{one.id}") for one in (first, call))
    assert scans == []
    assert f'<a href="/rollouts/{call.id}"><bdi>Is it kind?</bdi></a> <bdi>kind 1</bdi>' in text
    assert other.id not in text
    assert links_in(judged, f"/rollouts/{first.id}") == [f"/rollouts/{first.id}"]


def test_a_call_about_another_run_or_another_output_is_not_linked(store: Store) -> None:
    first = put_judged(store)[0]
    for number, run_id, output in ((20, "run-2", "out 1"), (21, "run-1", "out 3")):
        rollout_of_sums(
            store, number, task_id="task", run_id=run_id, **{**JUDGE, "program": "Is it short?"},
            inputs={"output": output}, prediction={"verdict": "yes", "confidence": 0.5},
        )  # fmt: skip
    store.flush()
    assert "Is it short?" not in read(store, f"/rollouts/{first.id}")
    assert "Judged</dt>" not in read(store, f"/rollouts/{20:032x}")
