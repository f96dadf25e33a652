"""Which rollout a request of a DSPy program continues: each prompt contains anew what was before."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from conversation_place import TOOLS, Answers, Message, Place, user
from conversation_place import place as place
from conversation_place import scripted as scripted

from assay.traces.gateway.requests import ClientRequest

ENDS = (
    "\n\nRespond with the corresponding output fields, starting with the field `[[ ## answer ## ]]`, and then ending "
    "with the marker for `[[ ## completed ## ]]`."
)


def form(fields: dict[str, Any]) -> str:
    return "\n\n".join(f"[[ ## {name} ## ]]\n{value}" for name, value in fields.items())


def prompt(signature: str, **fields: str) -> list[Message]:
    system = (
        f"Your input fields are:\n{signature}\nAll interactions will be structured in the following way\n"
        f"[[ ## x ## ]]\n\nIn adhering to this structure, your objective is: {signature}"
    )
    return [{"role": "system", "content": system}, user(form(fields) + ENDS)]


def counting(**fixed: Any) -> Answers:
    """A model whose answers differ from one another, in DSPy's sections."""
    numbers = itertools.count(1)
    return lambda messages: {
        "content": form({"reasoning": f"thought number {next(numbers)}", "answer": "7", **fixed})
        + "\n\n[[ ## completed ## ]]"
    }


def test_the_calls_of_a_dspy_react_agent_are_one_rollout(scripted: Callable[[Answers], Place]) -> None:
    numbers = itertools.count(1)

    def answers(messages: list[Message]) -> Message:
        last = "extract" in messages[0]["content"]
        outputs = (
            {"reasoning": "r", "answer": "42"}
            if last
            else {"next_thought": f"I think {next(numbers)}", "next_tool_name": "add", "next_tool_args": "{}"}
        )
        return {"content": form(outputs) + "\n\n[[ ## completed ## ]]"}

    place = scripted(answers)
    for thoughts in ((1, 2), (3, 4)):
        trajectory = ""
        for at, thought in enumerate(thoughts):
            place.chat(*prompt("question, trajectory -> next", question="six times seven?", trajectory=trajectory))
            trajectory += "\n\n" * bool(at) + form(
                {
                    f"thought_{at}": f"I think {thought}",
                    f"tool_name_{at}": "add",
                    f"tool_args_{at}": "{}",
                    f"observation_{at}": "42",
                }
            )
        place.chat(*prompt("extract", question="six times seven?", trajectory=trajectory))
    assert place.turns == [3, 3]
    assert [rollout.prediction for rollout in place.rollouts()] == [{"reasoning": "r", "answer": "42"}] * 2


def test_a_predictor_that_reads_an_earlier_output_belongs_to_the_same_run(scripted: Callable[[Answers], Place]) -> None:
    place = scripted(counting(draft="a draft"))
    for _ in range(2):
        place.chat(*prompt("question -> draft", question="six times seven?"))
        place.chat(*prompt("question, draft -> answer", question="six times seven?", draft="a draft"))
    assert place.turns == [2, 2]


def test_a_retry_in_another_prompt_format_belongs_to_the_same_run(scripted: Callable[[Answers], Place]) -> None:
    place = scripted(lambda messages: {"content": "no sections"})
    first_prompt = prompt("question -> answer", question="six times seven?")
    place.chat(*first_prompt)
    system = first_prompt[0]["content"].replace("[[ ## x ## ]]", "outputs will be a JSON object")
    place.chat(
        {**first_prompt[0], "content": system},
        user(form({"question": "six times seven?"}) + "\n\nRespond with a JSON object in the following order"),
    )
    assert place.turns == [2]


@pytest.mark.parametrize(
    "other",
    [
        prompt("question -> answer, compiled", question="six times seven?"),  # another program on the same task
        prompt("question -> answer", question="six times eight?"),  # another task
        prompt("question, gold, answer -> right", question="six times seven?", gold="42", answer="7"),  # a judge
        prompt("text -> label", text="thought number 1"),
    ],
)
def test_unrelated_dspy_prompts_are_separate_rollouts(
    scripted: Callable[[Answers], Place], other: list[Message]
) -> None:
    place = scripted(counting())
    place.chat(*prompt("question -> answer", question="six times seven?"))
    place.chat(*other)
    assert place.turns == [1, 1]


def test_ended_rollouts_are_removed_from_the_index(place: Place) -> None:
    answer = place.chat(user("use the tool"), tools=TOOLS)
    place.chat(
        user("use the tool"),
        answer,
        {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "42"},
        tools=TOOLS,
    )
    place.chat(*prompt("q -> a", question="x"), headers={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
    place.respond("one", conversation="conv_1")
    assert place.gateway.rollouts.conversations.index
    place.gateway.rollouts.sweep(all_of_them=True)
    assert not place.gateway.rollouts.conversations.index
    assert place.turns == [2, 1, 1]


def test_arguments_of_tool_calls_are_parsed_once_per_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[str] = []
    plain = json.loads

    def counted(text: str) -> Any:
        read.append(text)
        return plain(text)

    monkeypatch.setattr("assay.traces.gateway.requests.json.loads", counted)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "do it"}]
    for turn in range(60):
        call = {
            "id": f"c{turn}",
            "type": "function",
            "function": {"name": "calc", "arguments": f'{{"turn":  {turn}, "once": 1}}'},
        }
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{turn}", "content": "ok"},
        ]
        chain = ClientRequest("chat", {"messages": messages}).chain
    assert len(read) == 60
    spaced = plain(json.dumps(messages).replace(":  ", ": "))
    assert ClientRequest("chat", {"messages": spaced}).chain == chain  # however a client writes them
    odd = [{"role": "user", "content": "\ud800"}]
    assert ClientRequest("chat", {"messages": odd}).chain != chain[:1]
