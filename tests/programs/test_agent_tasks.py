"""Tasks as agents get them, and answers as they print them."""

from typing import Any

import pytest

from assay.programs.foreign.runners import AgentFailed, answer_of_output


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        (b"5\n", "5"),
        (b'log\n{"answer": "5", "why": "sum"}\n', {"answer": "5", "why": "sum"}),
        (b'{"answer": NaN}', '{"answer": NaN}'),
        (b"[1, 2]", "[1, 2]"),
        ("neun größer\n".encode(), "neun größer"),
    ],
)
def test_answers_are_read_from_standard_output(output: bytes, answer: Any) -> None:
    assert answer_of_output(output) == answer


def test_output_without_an_answer_is_refused() -> None:
    with pytest.raises(AgentFailed, match="printed nothing"):
        answer_of_output(b" \n")
