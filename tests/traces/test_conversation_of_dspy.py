"""Which rollout a request of a DSPy program continues: each prompt contains anew what was before."""

import itertools
from collections.abc import Callable
from typing import Any

from conversation_place import Answers, Message, Place, place as place, scripted as scripted, user

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


def test_a_predictor_that_reads_an_earlier_output_belongs_to_the_same_run(scripted: Callable[[Answers], Place]) -> None:
    place = scripted(counting(draft="a draft"))
    for _ in range(2):
        place.chat(*prompt("question -> draft", question="six times seven?"))
        place.chat(*prompt("question, draft -> answer", question="six times seven?", draft="a draft"))
    assert place.turns == [2, 2]
