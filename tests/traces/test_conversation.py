"""Which rollout a request continues, where it names none: requests as real clients send them, over HTTP."""

from collections.abc import Callable

import openai
import pytest
from conversation_place import TOOLS, Answers, Message, Place, place as place, scripted as scripted, user

from rigs.serving import post


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def parts(role: str, text: str) -> Message:
    return {"role": role, "content": [{"type": "text", "text": text}]}


# -- clients that rewrite the model's answer


@pytest.mark.parametrize("at_once", [False, True])
def test_smolagents_writes_tool_calls_as_text_and_stays_one_rollout(place: Place, at_once: bool) -> None:
    begun = [parts("system", "You solve tasks by tool calls."), parts("user", "New task:\nuse the tool")]
    agents = [[*begun], [*begun]]  # the same task twice
    for _, messages in sorted(enumerate(agents * 3), key=lambda step: step[0] if at_once else step[0] % 2):
        call = place.chat(*messages, tools=TOOLS, tool_choice="required")["tool_calls"][0]
        rewritten = {
            "id": call["id"],
            "type": "function",
            "function": {"name": "calculator", "arguments": {"expression": "6*7"}},
        }
        messages += [
            parts("assistant", f"Calling tools:\n[{rewritten}]"),
            parts("user", "Observation:\n42; use the tool"),
        ]
    assert place.turns == [3, 3]
    assert len({rollout.group_id for rollout in place.rollouts()}) == 1


def test_an_answer_whose_json_the_client_reformatted_is_recognised(scripted: Callable[[Answers], Place]) -> None:
    place = scripted(lambda messages: {"content": '{"b": 1,\n "a": [2]}'})
    place.chat(user("json"))
    place.chat(user("json"), {"role": "assistant", "content": '{"a": [2], "b": 1}'}, user("more"))
    assert place.turns == [2]


def test_a_client_that_sends_no_answers_back_has_one_rollout(place: Place) -> None:
    place.chat(user("one"))
    place.chat(user("one"), user("two"))
    place.chat(user("one"), user("two"), user("three"))
    assert place.turns == [3]


def test_a_conversation_with_the_same_beginning_is_another_rollout(place: Place) -> None:
    place.chat(user("hello"))
    place.chat(user("hello"), {"role": "assistant", "content": "Somebody else answered this, long ago."}, user("two"))
    assert place.turns == [1, 1]


def test_a_request_that_insists_on_a_tool_after_an_answer_stays_in_the_rollout(place: Place) -> None:
    place.chat(user("hello"), tools=TOOLS)
    place.chat(user("hello"), tools=TOOLS, tool_choice={"type": "function", "function": {"name": "final_answer"}})
    place.chat(user("hello"), tools=TOOLS)  # the same task anew
    assert place.turns == [2, 1]


def test_a_shorter_request_after_a_failed_call_stays_in_the_rollout(place: Place) -> None:
    answer = place.chat(user("one"))
    body = {"model": "m", "messages": [user("one"), answer, user("#500, and long")]}
    assert post(f"{place.url}/v1/chat/completions", body)[0] == 500
    place.chat(user("one"), answer, user("shorter"))
    assert place.turns == [3]


def test_another_conversation_with_the_beginning_of_a_partial_answer_is_another_rollout(place: Place) -> None:
    leave_in_the_middle(place, "Hello, and #hang")
    place.chat(user("Hello, and #hang"), assistant("Somebody else answered this, long ago."), user("two"))
    assert place.turns == [1, 1]


def leave_in_the_middle(place: Place, question: str) -> str:
    """Text of a streamed answer that a client received before it closed the connection."""
    client = openai.OpenAI(base_url=f"{place.url}/v1", api_key="x", max_retries=0)
    text = ""
    with client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": question}], stream=True
    ) as parts:
        for part in parts:
            text += part.choices[0].delta.content or ""
            if len(text) > 3:
                return text
    raise AssertionError("the answer came to its end")


# -- forks


def test_tool_results_that_are_sent_twice_are_a_fork(place: Place) -> None:
    answer = place.chat(user("use the tool"), tools=TOOLS)
    for result in ("42", "43"):
        tool_message = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": result}
        place.chat(user("use the tool"), answer, tool_message, tools=TOOLS)
    assert place.turns == [2, 1]


# -- ids


def test_calls_of_one_conversation_object_are_one_rollout(place: Place) -> None:
    for conversation in ("conv_1", {"id": "conv_1"}, "conv_2"):
        place.respond("hello", conversation=conversation)
    assert place.turns == [2, 1]
