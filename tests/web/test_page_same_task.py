"""From a rollout to the same task on the other side of a comparison, and to a command that repeats it."""

import re
from pathlib import Path

from compiles import put_compile
from pages import NOW, Scans, read, rollout_of_sums

from assay.traces import Store


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
        rollout_of_sums(
            store,
            at,
            run_id="training",
            phase="test",
            split="test",
            task_id="t",
            group_id=f"{condition}/t",
            score=at / 4,
        )
    store.flush()
    for here, there, name in ((0, 2, "after, greedy"), (2, 0, "before, greedy"), (1, 3, "after, sampled")):
        text = read(store, f"/rollouts/{here:032x}")
        assert f'/rollouts/{there:032x}?other={here:032x}" data-key="o"><bdi>{name}</bdi>' in text
