"""The recorder: every call and tool in its rollout, in threads too; ids of rollouts that a replay gives again."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.errors import FailureKind
from assay.models import ResponseCache
from assay.testing import scripted_lm
from assay.traces import Recorder, Rollout, Store, Transition, current_rollout
from assay.traces.resuming import close_running, drop_cut_off


def answer(request: object) -> str:
    return "[[ ## answer ## ]]\n4\n\n[[ ## completed ## ]]"


def double(x: int) -> int:
    return 2 * x


@contextmanager
def recording(recorder: Recorder, **options: Any) -> Iterator[Rollout]:
    """An open rollout whose model the recorder observes."""
    lm = scripted_lm(answer, observers=[recorder.observe])
    with dspy.context(lm=lm, **options), recorder.active(), recorder.rollout(Rollout()) as rollout:
        yield rollout


# -- calls and tools


def test_calls_and_tools_are_recorded_in_the_open_rollout(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        with recording(Recorder(store)) as rollout:
            dspy.Tool(double)(x=1)  # before the first call of the model
            dspy.Predict("question -> answer")(question="2+2?")
            dspy.Tool(double)(x=2)
        store.flush()
        for read in (rollout, store.rollout(rollout.id)):
            assert "2+2?" in str(read.transitions[0].request)
            tools = [(tool.name, tool.arguments, tool.result) for tool in read.tools]
            assert tools == [("double", {"x": 1}, "2"), ("double", {"x": 2}, "4")]
            assert (len(read.transitions), read.status, current_rollout()) == (1, "done", None)


def test_a_tools_exception_is_its_error() -> None:
    def broken(x: int) -> int:
        raise ValueError("no")

    with recording(Recorder()) as rollout:
        dspy.Predict("question -> answer")(question="?")
        with suppress(ValueError):
            dspy.Tool(broken)(x=2)
    assert rollout.tools[0].error == "ValueError: no"


def test_cached_answers_are_recorded_and_marked() -> None:
    recorder = Recorder()
    lm = scripted_lm(answer, observers=[recorder.observe], cache=ResponseCache())
    for expected in (False, True):
        with dspy.context(lm=lm), recorder.rollout(Rollout()) as rollout:
            dspy.Predict("question -> answer")(question="?")
        assert [t.cached for t in rollout.transitions] == [expected]


def test_calls_outside_any_rollout_are_kept(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        recorder = Recorder(store, run_id="r")
        recorder.phase = "search"
        lm = scripted_lm(answer, observers=[recorder.observe])
        for text in ("propose something", "and again"):
            lm(text)
        store.flush()
        (outside,) = store.rollouts(run_id="r")
        assert (outside.source, outside.phase) == ("outside", "search")
        assert len(store.rollout(outside.id).transitions) == 2


def test_a_rollout_that_is_interrupted_is_written_as_an_error(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        with suppress(KeyboardInterrupt), Recorder(store).rollout(Rollout()):
            raise KeyboardInterrupt
        store.flush()
        assert [(r.status, r.error) for r in store.rollouts()] == [("error", "KeyboardInterrupt: ")]


def test_parse_failures_of_later_adapters_are_recorded() -> None:
    recorder = Recorder()
    with recorder.active():  # what wraps adapters is in place

        class Refusing(dspy.ChatAdapter):  # type: ignore[misc]
            def parse(self, signature: Any, completion: str) -> dict[str, Any]:
                raise ValueError("no")

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return dspy.Adapter.__call__(self, *args, **kwargs)

        with pytest.raises(ValueError, match="no"), recording(recorder, adapter=Refusing()) as rollout:
            dspy.Predict("question -> answer")(question="2+2?")
    assert [t.failure for t in rollout.transitions] == [FailureKind.PARSE]


def test_async_tools_and_models_are_recorded() -> None:
    async def both() -> None:
        assert await dspy.Tool(double).acall(x=3) == 6
        await scripted_lm(answer).acall("by itself")

    recorder = Recorder()
    with recorder.active(), recorder.rollout(Rollout()) as rollout:
        asyncio.run(both())
    assert [tool.result for tool in rollout.early_tools] == ["6"]
    assert (len(rollout.transitions), recorder.unrecorded.count) == (1, 0)


def test_of_two_recorders_the_one_of_the_open_rollout_records_a_call() -> None:
    first, second = Recorder(), Recorder()
    lm = scripted_lm(answer)
    with first.active(), first.rollout(Rollout()) as outer, second.active(), first.active():
        lm("nobody observes this")
        with second.rollout(Rollout()) as inner:
            lm("nor this")
    assert (len(outer.transitions), len(inner.transitions), lm.scripted.calls) == (1, 1, 2)
    assert (first.unrecorded.count, second.unrecorded.count) == (0, 0)


def test_a_failing_listener_does_not_affect_the_program(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("cannot listen")

    recorder = Recorder()
    monkeypatch.setattr(recorder, "tool_began", broken)
    with recorder.active(), recorder.rollout(Rollout()):
        assert dspy.Tool(double)(x=2) == 4
    assert "cannot listen" in caplog.text


# -- ids: a replay gives the same ones, so a resumed run overwrites what it wrote


def replayable(store: Store | None = None, **options: Any) -> Recorder:
    return Recorder(store, run_id="job-1", replayable=True, **options)


def opened(by: Recorder, **fields: Any) -> str:
    with by.rollout(Rollout(**{"task_id": "t", "program": "p", "inputs": {"q": 1}, **fields})) as rollout:
        return rollout.id


def test_a_replay_has_the_same_ids_and_other_rollouts_have_other_ids() -> None:
    first, again = replayable(), replayable()
    two = [opened(first), opened(first)]  # identical rollouts are numbered
    assert (two, len(set(two)), len(two[0])) == ([opened(again), opened(again)], 2, 32)
    others: list[dict[str, Any]] = [{"sample": 1}, {"program_version": "b"}, {"task_id": "u"}, {"parameters": {"t": 1}}]
    ids = {*two, *(opened(replayable(), **fields) for fields in others)}
    with first.within("trial-1"):
        ids.add(opened(first))
    ids |= {opened(Recorder(run_id="job-1")) for _ in range(2)}  # the gateway and imports keep ids of their own
    assert len(ids) == 9


def test_further_transitions_of_an_earlier_attempt_are_removed(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        for count, resumed in ((3, False), (1, True)):
            with replayable(store, resumed=resumed).rollout(Rollout(task_id="t")) as rollout:
                for t in range(count):
                    rollout.transitions.append(Transition(t=t, model="m", request={}, output=f"{count}"))
                    store.put_transition(rollout.id, rollout.transitions[-1])
            store.flush()
        assert [t.output for t in store.rollout(rollout.id).transitions] == ["1"]
        assert len(list(store.rollouts())) == 1


def test_running_rollouts_are_closed_and_removed_if_not_replayed(tmp_path: Path) -> None:
    with Store(tmp_path / "s.db") as store:
        for name, run, status in (("a", "job-1", "running"), ("b", "job-1", "done"), ("c", "other-1", "running")):
            store.put_rollout(Rollout(id=name * 32, task_id=name, run_id=run, status=status, started_at=1.0))
        assert close_running(store, "job-") == ["a"]
        closed = store.rollout("a")
        assert (closed.status, closed.failure) == ("error", FailureKind.CAP)
        assert (bool(closed.error), bool(closed.ended_at), store.rollout("c").status) == (True, True, "running")
        assert drop_cut_off(store, "job-1", before=2.0) == 1
        assert {r.id[0] for r in store.rollouts()} == {"b", "c"}


@pytest.mark.slow
def test_the_same_job_in_two_folders_writes_the_same_ids(tmp_path: Path) -> None:
    rows = [{"question": f"q{at}", "answer": "4"} for at in range(30)]
    job: dict[str, Any] = {"rubric": "exact", "data": rows, "sizes": {"gate": 2, "test": 2}, "optimizer": "labeled"}
    ids = []
    for name in ("one", "two"):
        path = tmp_path / name / "assay.db"
        assay.compile(
            dspy.Predict("question -> answer"), lm=scripted_lm(lambda request: '{"answer": "4"}'), store=path, **job
        )
        with Store(path) as store:
            ids.append(sorted(r.id for r in store.rollouts()))
    assert ids[0] == ids[1]
    assert len(set(ids[0])) == len(ids[0]) >= 10
