"""Ids of rollouts: a replay gives the same ones, so a resumed run overwrites what it wrote."""

import json
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.errors import FailureKind
from assay.testing import scripted_lm
from assay.traces import Recorder, Rollout, Store, Transition
from assay.traces.resuming import close_running, drop_cut_off


def answers() -> Any:
    return scripted_lm(lambda request: json.dumps({"answer": "7"}))


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "p.py").write_text(
        "import dspy\n\nclass P(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.ask = dspy.Predict('question -> answer')\n\n"
        "    def forward(self, question):\n        return self.ask(question=question)\n"
    )
    rows = [{"inputs": {"question": f"q{at}"}, "expected": {"answer": "7"}} for at in range(30)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: 'assay.rubrics.checks:exact'}\n")
    return {
        "program": f"{tmp_path}/p.py:P",
        "rubric": "r.yaml",
        "data": "d.jsonl",
        "prompt_format": "json",
        "threads": 2,
    }


def recorder(store: Store | None = None, **options: Any) -> Recorder:
    return Recorder(store, run_id="job-1", replayable=True, **options)


def opened(by: Recorder, **fields: Any) -> str:
    with by.rollout(Rollout(**{"task_id": "t", "program": "p", "inputs": {"q": 1}, **fields})) as rollout:
        return rollout.id


def test_a_replay_has_the_same_ids_and_other_rollouts_have_other_ids() -> None:
    first, again = recorder(), recorder()
    assert opened(first) == opened(again)
    assert len(opened(first)) == 32
    ids = {
        opened(recorder(), **fields)
        for fields in (
            {},
            {"sample": 1},
            {"program_version": "b"},
            {"task_id": "u"},
            {"parameters": {"temperature": 1}},
        )
    }
    assert len(ids) == 5
    with first.within("trial-1"):
        assert opened(first) not in ids
    assert opened(Recorder(run_id="job-1")) != opened(
        Recorder(run_id="job-1")
    )  # the gateway and imports keep ids of their own


def test_identical_rollouts_are_numbered() -> None:
    first, again = recorder(), recorder()
    two = [opened(first), opened(first)]
    assert two[0] != two[1]
    assert two == [opened(again), opened(again)]


def test_further_transitions_of_an_earlier_attempt_are_removed(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        for count, resumed in ((3, False), (1, True)):
            by = recorder(store, resumed=resumed)
            with by.rollout(Rollout(task_id="t")) as rollout:
                for t in range(count):
                    rollout.transitions.append(Transition(t=t, model="m", request={}, output=f"{count}"))
                    store.put_transition(rollout.id, rollout.transitions[-1])
            store.flush()
        assert [t.output for t in store.rollout(rollout.id).transitions] == ["1"]
        assert len(list(store.rollouts())) == 1


def test_running_rollouts_are_closed_and_removed_if_not_replayed(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        for name, run, status in (
            ("a" * 32, "job-1", "running"),
            ("b" * 32, "job-1", "done"),
            ("c" * 32, "other-1", "running"),
        ):
            store.put_rollout(Rollout(id=name, run_id=run, status=status, started_at=1.0))
        assert close_running(store, "job-") == 1
        closed = store.rollout("a")
        assert (closed.status, closed.failure, bool(closed.error), bool(closed.ended_at)) == (
            "error",
            FailureKind.CAP,
            True,
            True,
        )
        assert store.rollout("c").status == "running"
        assert drop_cut_off(store, "job-1", before=2.0) == 1
        assert {r.id[0] for r in store.rollouts()} == {"b", "c"}


@pytest.mark.slow
def test_the_same_job_in_two_folders_writes_the_same_ids(job: dict[str, Any], tmp_path: Path) -> None:
    ids = []
    for name in ("one", "two"):
        assay.compile(
            lm=answers(), optimizer="labeled", sizes={"gate": 2, "test": 2}, store=tmp_path / name / "assay.db", **job
        )
        with Store(tmp_path / name / "assay.db") as store:
            ids.append(sorted(r.id for r in store.rollouts()))
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == len(ids[0]) >= 10
