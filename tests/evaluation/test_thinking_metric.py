"""The metric `thinking`: tokens, tokens after the answer was stable, share of the budget, loops."""

from typing import Any

import pytest

from assay.datasets import Task
from assay.errors import FailureKind
from assay.rubrics.checks import thinking
from assay.rubrics.criteria import NoGrade
from assay.traces import Rollout, Transition
from assay.traces.thinking import thinking_of

TASK = Task(id="t", inputs={"q": "1"}, expected={"answer": "5"})


def call(output: str, tokens: int | None = None, limit: int = 0, **fields: Any) -> Transition:
    """A call that writes a thought of at most `limit` tokens and an action."""
    thought = {"thought": {"type": "string", "maxLength": 4 * limit}} if limit else {}
    schema = {"type": "object", "properties": {**thought, "action": {"type": "string"}}}
    request = {"config": {"max_tokens": 100, "response_format": {"schema": schema}}}
    return Transition(t=0, model="m", request=request, output=output, thinking_tokens=tokens, **fields)


def rollout(*calls: Transition, answer: Any = "5") -> Rollout:
    return Rollout(transitions=list(calls), prediction={"answer": answer})


def test_tokens_and_share_of_the_budget_are_summed_over_the_calls() -> None:
    use = thinking_of(rollout(call('{"thought": "a", "action": "x"}', 10, 16), call('{"action": "y"}')))
    assert (use.tokens, use.budget, use.budget_share, use.loops) == (10, 16, 0.625, 0)


def test_a_thought_that_only_confirmed_the_probe_was_wasted() -> None:
    calls = [call('{"action": "x"}'), call('{"thought": "hm", "action": "x"}', 8, 16)]
    assert thinking_of(rollout(*calls)).after_stable == 8
    assert thinking_of(rollout(*calls)).tokens == 8


def test_thinking_after_the_first_mention_of_the_answer_counts_as_wasted() -> None:
    # 6 of the 12 characters come after "2+3 =5"
    use = thinking_of(rollout(call('{"thought": "2+3 =5 wait,", "action": "x"}', 12, 16)))
    assert use.after_stable == 6
    assert thinking_of(rollout(call('{"thought": "15 or 5.5 hm", "action": "x"}', 12, 16))).after_stable == 0


def test_uncounted_thinking_is_unknown_and_not_0() -> None:
    hidden = {"message": {"parts": [{"type": "thinking", "text": "…"}, {"type": "text", "text": "5"}]}}
    use = thinking_of(rollout(Transition(t=0, model="m", request={}, response=hidden)))
    assert (use.tokens, use.after_stable) == (None, None)
    with pytest.raises(NoGrade, match="did not report"):
        thinking(TASK, {}, rollout(Transition(t=0, model="m", request={}, response=hidden)), budget=10)


def test_loops_and_the_tokens_that_a_stop_saved_are_counted() -> None:
    stopped = call("x x x", 30, 16, completion_tokens=30, failure=FailureKind.LOOP, error="repeated itself")
    alarm = call("x", failure=FailureKind.LOOP)
    use = thinking_of(rollout(stopped, alarm))
    assert (use.loops, use.tokens_saved) == (2, 70)
    assert thinking(TASK, {}, rollout(stopped), budget=1000).value == 0.0


def test_the_thinking_check_grades_all_tokens_or_only_wasted_ones() -> None:
    calls = [call('{"action": "x"}'), call('{"thought": "hm", "action": "x"}', 8, 16)]
    assert thinking(TASK, {}, rollout(*calls), budget=16).value == 0.5
    assert thinking(TASK, {}, rollout(*calls[:1]), budget=16).value == 1.0
    assert thinking(TASK, {}, rollout(calls[1]), budget=16, wasted=True).value == 1.0
    assert thinking(TASK, {}, rollout(*calls), budget=4).value == 0.0
    with pytest.raises(NoGrade, match="no rollout"):
        thinking(TASK, {}, None, budget=16)
