"""Events of recorders besides DSPy's callbacks: tools, unparsed answers, calls of unobserved models."""

import asyncio
from typing import Any

import dspy
import pytest

from assay.errors import FailureKind
from assay.testing import scripted_lm
from assay.traces import Recorder, Rollout


def answer(request: object) -> str:
    return "[[ ## answer ## ]]\n4\n\n[[ ## completed ## ]]"


def double(x: int) -> int:
    return 2 * x


def test_parse_failures_of_later_adapters_are_notified() -> None:
    recorder = Recorder()
    lm = scripted_lm(answer, observers=[recorder.observe])
    with recorder.active():  # what wraps adapters is in place

        class Refusing(dspy.ChatAdapter):  # type: ignore[misc]
            def parse(self, signature: Any, completion: str) -> dict[str, Any]:
                raise ValueError("no")

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return dspy.Adapter.__call__(self, *args, **kwargs)

        with (
            dspy.context(lm=lm, adapter=Refusing()),
            recorder.rollout(Rollout()) as rollout,
            pytest.raises(ValueError, match="no"),
        ):
            dspy.Predict("question -> answer")(question="2+2?")
    assert [t.failure for t in rollout.transitions] == [FailureKind.PARSE]


def test_async_tools_and_models_are_notified() -> None:
    async def both() -> None:
        assert await dspy.Tool(double).acall(x=3) == 6
        await scripted_lm(answer).acall("by itself")

    recorder = Recorder()
    with recorder.active(), recorder.rollout(Rollout()) as rollout:
        asyncio.run(both())
    assert [tool.result for tool in rollout.early_tools] == ["6"]
    assert len(rollout.transitions) == 1
    assert recorder.unrecorded.count == 0


def test_of_two_recorders_the_one_of_the_open_rollout_records_a_call() -> None:
    first, second = Recorder(), Recorder()
    lm = scripted_lm(answer)
    with first.active(), first.rollout(Rollout()) as outer, second.active(), first.active():
        lm("nobody observes this")
        with second.rollout(Rollout()) as inner:
            lm("nor this")
    assert (len(outer.transitions), len(inner.transitions)) == (1, 1)
    assert lm.scripted.calls == 2
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
