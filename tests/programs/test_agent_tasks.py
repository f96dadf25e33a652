"""Tasks as agents get them, and answers as they print them."""

import datetime
import json
from typing import Any

import pytest

from assay.programs.foreign.runners import AgentFailed, AgentTask, answer_of_output


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


def test_inputs_of_every_kind_are_written_as_json() -> None:
    day = datetime.date(2024, 1, 31)
    for value, written in (
        (day, "2024-01-31"),
        (10**30, 10**30),
        ("\udcff", "\ufffd"),
        ({1: 2}, {"1": 2}),
        ({3}, [3]),
    ):
        task = AgentTask(id="t", rollout="r", inputs={"x": value}, model="m", base_url="u", api_key="k")
        assert json.loads(task.to_json())["inputs"] == {"x": written}
