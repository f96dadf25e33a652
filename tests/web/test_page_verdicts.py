"""A rollout leads to the calls of its judges, and a judge's call to the rollout that it judged."""

from typing import Any

from pages import Scans, links_in, read, rollout_of_sums

from assay.traces import Rollout, Store

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
