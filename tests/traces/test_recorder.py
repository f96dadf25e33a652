"""The recorder: every call and tool in its rollout, in threads too; what cannot be seen is counted."""

from pathlib import Path

import dspy

from assay.models import ResponseCache
from assay.testing import ScriptedEngine, scripted_lm
from assay.traces import Recorder, Rollout, Store, current_rollout


def answer(request: object) -> str:
    return "[[ ## answer ## ]]\n4\n\n[[ ## completed ## ]]"


def test_calls_and_tools_are_recorded_in_the_open_rollout() -> None:
    recorder = Recorder()
    lm = scripted_lm(answer, observers=[recorder.observe])
    with dspy.context(lm=lm), recorder.active(), recorder.rollout(Rollout()) as rollout:
        dspy.Predict("question -> answer")(question="2+2?")

        def double(x: int) -> int:
            return 2 * x

        dspy.Tool(double)(x=2)
    assert len(rollout.transitions) == 1
    assert "2+2?" in str(rollout.transitions[0].request)
    assert [(tool.name, tool.arguments, tool.result) for tool in rollout.tools] == [("double", {"x": 2}, "4")]
    assert rollout.status == "done"
    assert current_rollout() is None


def test_a_tool_called_before_the_first_lm_call_is_kept(tmp_path: Path) -> None:
    def look_up(key: str) -> str:
        return key.upper()

    with Store(tmp_path / "traces.db") as store:
        recorder = Recorder(store)
        lm = scripted_lm(answer, observers=[recorder.observe])
        with dspy.context(lm=lm), recorder.active(), recorder.rollout(Rollout()) as rollout:
            dspy.Tool(look_up)(key="a")
            dspy.Predict("question -> answer")(question="?")
            dspy.Tool(look_up)(key="b")
        assert [tool.result for tool in rollout.tools] == ["A", "B"]
        store.flush()
        assert [tool.result for tool in store.rollout(rollout.id).tools] == ["A", "B"]


def test_a_tools_exception_is_its_error() -> None:
    recorder = Recorder()
    lm = scripted_lm(answer, observers=[recorder.observe])

    def broken(x: int) -> int:
        raise ValueError("no")

    with dspy.context(lm=lm), recorder.active(), recorder.rollout(Rollout()) as rollout:
        dspy.Predict("question -> answer")(question="?")
        try:
            dspy.Tool(broken)(x=2)
        except ValueError:
            pass
    assert rollout.tools[0].error == "ValueError: no"


def test_worker_threads_of_a_program_stay_in_their_rollout() -> None:
    recorder = Recorder()
    lm = scripted_lm(answer, observers=[recorder.observe])
    with dspy.context(lm=lm), recorder.active(), recorder.rollout(Rollout()) as rollout:
        predict = dspy.Predict("question -> answer")
        dspy.Parallel(num_threads=3, disable_progress_bar=True)(
            [(predict, dspy.Example(question=str(i)).with_inputs("question")) for i in range(6)]
        )
    assert len(rollout.transitions) == 6
    assert [t.t for t in rollout.transitions] == list(range(6))


def test_cached_answers_are_recorded_and_marked() -> None:
    recorder = Recorder()
    lm = scripted_lm(answer, observers=[recorder.observe], cache=ResponseCache())
    for expected in (False, True):
        with dspy.context(lm=lm), recorder.rollout(Rollout()) as rollout:
            dspy.Predict("question -> answer")(question="?")
        assert [t.cached for t in rollout.transitions] == [expected]


def test_calls_of_a_model_that_is_not_the_jobs_are_recorded() -> None:
    recorder = Recorder()
    stranger = dspy.LM("scripted/other", engine=ScriptedEngine(answer), cache=False)
    with recorder.active(), recorder.rollout(Rollout()) as rollout:
        stranger("hello")
    assert (recorder.unrecorded.count, [t.model for t in rollout.transitions]) == (0, ["scripted/other"])


def test_calls_outside_any_rollout_are_kept(tmp_path) -> None:
    with Store(tmp_path / "s.db") as store:
        recorder = Recorder(store, run_id="r")
        recorder.phase = "search"
        lm = scripted_lm(answer, observers=[recorder.observe])
        lm("propose something")
        lm("and again")
        store.flush()
        outside = list(store.rollouts(run_id="r"))
        assert [(r.source, r.phase) for r in outside] == [("outside", "search")]
        assert len(store.rollout(outside[0].id).transitions) == 2


def test_a_rollout_that_is_interrupted_is_written_as_an_error(tmp_path) -> None:
    with Store(tmp_path / "s.db") as store:
        recorder = Recorder(store)
        try:
            with recorder.rollout(Rollout()):
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
        store.flush()
        assert [(r.status, r.error) for r in store.rollouts()] == [("error", "KeyboardInterrupt: ")]
