"""Rows of a transitions export: what is written can be read again, by one schema."""

import json
from pathlib import Path
from typing import Any

import pytest

from assay.errors import DataError
from assay.traces import Rollout, Store, Transition
from assay.traces.export.pipeline import export_traces
from assay.traces.export.settings import ExportConfig, Gates
from assay.traces.export.transitions import read_transitions, transition_of_row


def call(t: int, prompt: str, answer: str, **known: Any) -> Transition:
    request = {
        "dialect": "chat",
        "body": {"model": "m", "messages": [{"role": "user", "content": prompt}], "temperature": 1.0},
    }
    response = {"body": {"choices": [{"message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}]}}
    return Transition(t=t, model="m", request=request, response=response, output=answer, **known)


CALLS = [
    call(
        0, "ü?", "an answer\nof two lines", weights="w" * 64, adapters=("a" * 64,), prompt_tokens=5,
        completion_tokens=2, token_ids=(7, 0),
        logprobs=(-0.5, 0.0), constrained=True, step_rewards={"parsed": 0.15},
    ),
    call(1, "and?", "no ids", prompt_tokens=1, completion_tokens=2),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with Store(tmp_path / "s.db") as store:
        for at, score in enumerate((1.0, 0.0)):
            rollout = Rollout(
                task_id="one",
                group_id="g",
                split="train",
                source="program",
                inputs={"q": "a?"},
                score=score,
                status="done",
            )
            rollout.id, rollout.prediction, rollout.ended_at = f"r{at}", {"answer": "x"}, 1.0
            store.put_rollout(rollout)
            for call in CALLS:
                store.put_transition(rollout.id, call)
        store.flush()
        gates = Gates(min_transitions=0, min_clean=0, min_task_types=0, privacy="off")
        export_traces(store, tmp_path / "out", ExportConfig(kind="transitions", gates=gates, privacy="off"))
    return tmp_path / "out"


def test_a_row_is_read_back_as_the_recorded_call(folder: Path) -> None:
    read = [transition_of_row(row) for row in read_transitions(folder) if row["rollout"] == "r0"]
    for made, recorded in zip(read, CALLS, strict=True):
        for name in (
            "t",
            "model",
            "weights",
            "adapters",
            "request",
            "output",
            "constrained",
            "cached",
            "prompt_tokens",
            "completion_tokens",
        ):
            assert getattr(made, name) == getattr(recorded, name), name
        assert (made.token_ids, made.logprobs) == (recorded.token_ids, recorded.logprobs)


def test_a_row_without_a_column_is_refused_by_its_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (folder / "data.jsonl").read_text().splitlines()
    row = json.loads(lines[2])
    del row["logprobs"]
    (folder / "data.jsonl").write_text("\n".join([*lines[:2], json.dumps(row), lines[3]]) + "\n")
    with pytest.raises(DataError, match="changed after the export"):
        list(read_transitions(folder))
    monkeypatch.setattr("assay.traces.export.transitions.checked_manifest", lambda *_: {})
    with pytest.raises(DataError, match="line 3: missing columns logprobs"):
        list(read_transitions(folder))
