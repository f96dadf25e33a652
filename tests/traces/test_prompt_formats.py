"""Sealed tasks, runs and final answers are recognised in every prompt format."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from conversation_place import Answers, Place, scripted as scripted
from prompt_forms import ADAPTERS, VALUES, answer_of, prompt_of

from assay.datasets.tasks import Task
from assay.models.alternatives import value_tokens
from assay.rubrics import steps
from assay.rubrics.trl_reward import completion_fields
from assay.traces import Rollout, ToolCall, Transition
from assay.traces.store.sealing import SplitFinder, store_tasks


@pytest.mark.parametrize("form", ADAPTERS)
@pytest.mark.parametrize("demonstrated", [False, True])
def test_sealed_tasks_of_several_inputs_and_lines_are_recognised_behind_a_gateway(
    scripted: Callable[[Answers], Place], form: str, demonstrated: bool
) -> None:
    adapter, signature = ADAPTERS[form], "question, context: list[str], n: int -> answer"
    sealed = [
        {"question": f"{value}\nof place {at}?", "context": [value, "b"], "n": at} for at, value in enumerate(VALUES)
    ]
    kept = [{**inputs, "n": inputs["n"] + 100} for inputs in sealed]
    demos = [{"question": "q", "context": ["c"], "n": 1, "answer": "a"}] if demonstrated else []
    place = scripted(lambda messages: {"content": answer_of(adapter, signature, {"answer": "far away"})})
    store = place.gateway.store
    for split, tasks in (("test", sealed), ("train", kept)):
        store_tasks(store, {split: [Task(id=f"{split} {at}", inputs=inputs) for at, inputs in enumerate(tasks)]})
    for inputs in [*sealed, *kept]:
        place.chat(*prompt_of(adapter, signature, inputs, demos))
    place.gateway.rollouts.sweep(all_of_them=True)
    finder = SplitFinder(store)
    recorded = [rollout.inputs for rollout in place.rollouts()]
    assert [finder.knows_as_sealed(inputs) for inputs in recorded] == [True] * len(sealed) + [False] * len(kept)
    assert {finder.of_inputs(inputs) for inputs in recorded[: len(sealed)]} == {"test"}


def test_the_arguments_of_dspys_submit_are_the_answer_of_a_run(scripted: Callable[[Answers], Place]) -> None:
    fields = {"answer": "two\nlines", "score": 3}
    call = {"id": "c1", "type": "function", "function": {"name": "submit", "arguments": json.dumps(fields)}}
    submit = {"type": "function", "function": {"name": "submit", "parameters": {"type": "object", "properties": {}}}}
    place = scripted(lambda messages: {"content": "I am done", "tool_calls": [call]})
    for adapter in ADAPTERS.values():
        place.chat(*prompt_of(adapter, "question -> thought", {"question": "how far?"}), tools=[submit])
    assert [rollout.prediction for rollout in place.rollouts()] == [fields] * len(ADAPTERS)


def test_a_tool_call_is_the_completion_of_a_reward() -> None:
    for arguments in ({"answer": "4"}, '{"answer": "4"}'):
        call = {"type": "function", "function": {"name": "submit", "arguments": arguments}}
        completion = [{"role": "assistant", "content": "", "tool_calls": [call]}]
        assert completion_fields(completion, ["answer"]) == {"answer": "4"}
    for written in (
        '<tool_call>\n{"name": "submit", "arguments": {"answer": "a < 4"}}\n</tool_call>',
        'Done.<tool_call>{"name": "note", "arguments": {}}</tool_call><tool_call>{"name": "submit", '
        '"parameters": {"answer": "a < 4"}}</tool_call>',
    ):
        assert completion_fields(written, ["answer"]) == {"answer": "a < 4"}
    run = _step("I am done", tools=[ToolCall(name="submit", arguments={"answer": "4"})])
    assert _graded(run, ["answer"]) == 1


def _step(output: str, **more: Any) -> Transition:
    return Transition(t=0, model="m", request={}, output=output, **more)


def _graded(call: Transition, fields: list[str]) -> float | None:
    run = Rollout(transitions=[call])
    return steps.parsed(Task(id="t", inputs={}), {"transition": call}, run, fields=fields).value


@pytest.mark.parametrize("form", ADAPTERS)
def test_the_tokens_of_a_verdict_are_found(form: str) -> None:
    text = answer_of(ADAPTERS[form], "question -> why, verdict", {"why": "the verdict: no", "verdict": "yes"})
    at = text.rindex("yes")
    tokens = [text[:at], "ye", "s", text[at + 3 :]]
    assert list(value_tokens(tokens, "verdict"))[:2] == [1, 2]
    assert value_tokens(tokens, "other") == range(0)
