"""Calls of Google's Gemini API for tests: contents, a function, and a gateway in front of a scripted server."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from assay.datasets.tasks import task_key
from assay.traces import Rollout, Store, Transition
from assay.traces.messages.dialects import answer_of
from assay.traces.store.sealing import store_splits

MODEL = "/v1beta/models/gemini-2.5-flash"
VERTEX = "/v1/projects/p/locations/l/publishers/google/models/gemini-2.5-flash"


CALCULATOR = {
    "functionDeclarations": [
        {
            "name": "calculator",
            "description": "Multiplies.",
            "parameters": {
                "type": "OBJECT",
                "properties": {"expression": {"type": "STRING"}},
                "required": ["expression"],
            },
        }
    ]
}


def content(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "parts": [{"text": text}]}


QUESTION = "Write to ann.smith@acme-mail.de: how much is 6*7?"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Two runs of a task: both call a function after a thought, one of them answers."""
    call = {
        "role": "model",
        "parts": [
            {"text": "Hm.", "thought": True},
            {"functionCall": {"name": "calculator", "args": {"expression": "6*7"}}},
        ],
    }
    result = {"role": "user", "parts": [{"functionResponse": {"name": "calculator", "response": {"result": "42"}}}]}
    with Store(tmp_path / ".assay" / "assay.db") as opened:
        store_splits(opened, {"train": [task_key({"question": QUESTION})]})
        for text, score in (("It is 42.", 1.0), ("I do not know.", 0.0)):
            fields: dict[str, Any] = {
                "task_id": "t",
                "group_id": "t",
                "task_type": "sum",
                "status": "done",
                "split": "train",
                "score": score,
            }
            rollout = Rollout(
                run_id="r",
                model="m",
                inputs={"question": QUESTION},
                expected={"answer": "42"},
                prediction={"answer": text},
                **fields,
            )
            opened.put_rollout(rollout)
            for t, (contents, answer) in enumerate(
                (([content(QUESTION)], call), ([content(QUESTION), call, result], content(text, "model")))
            ):
                body = {
                    "candidates": [{"content": answer, "finishReason": "STOP"}],
                    "usageMetadata": {"promptTokenCount": 5},
                }
                request = {
                    "dialect": "gemini",
                    "model": "g",
                    "stream": False,
                    "body": {"contents": contents, "tools": [CALCULATOR]},
                }
                read = answer_of("gemini", body)
                transition = Transition(
                    t=t,
                    model="m",
                    request=request,
                    response={"body": body},
                    output=read.output,
                    tools=read.tool_calls(),
                )
                opened.put_transition(rollout.id, transition)
        opened.flush()
        yield opened
