"""Rows of a transitions export: what is written can be read again, by one schema."""

import json
from pathlib import Path

import pytest
from export_rows import add_rollout, exported, store as store, turn

from assay.errors import DataError
from assay.traces import Store
from assay.traces.export.transitions import read_transitions, transition_of_row

CALLS = [
    turn(
        0, "ü?", "an answer\nof two lines", adapters=("a" * 64,), prompt_tokens=5, completion_tokens=2,
        token_ids=(7, 0), logprobs=(-0.5, 0.0), constrained=True, step_rewards={"parsed": 0.15},
    ),
    turn(1, "and?", "no ids", prompt_tokens=1, completion_tokens=2),
]  # fmt: skip


@pytest.fixture
def folder(store: Store) -> Path:
    for at, score in enumerate((1.0, 0.0)):
        add_rollout(store, *CALLS, id=f"r{at}", score=score)
    exported(store, "transitions", privacy="off")
    return Path("out")


def test_a_row_is_read_back_as_the_recorded_call(folder: Path) -> None:
    read = [transition_of_row(row) for row in read_transitions(folder) if row["rollout"] == "r0"]
    for made, recorded in zip(read, CALLS, strict=True):
        for name in (
            "t", "model", "weights", "adapters", "request", "output", "constrained", "cached", "prompt_tokens",
            "completion_tokens", "token_ids", "logprobs",
        ):  # fmt: skip
            assert getattr(made, name) == getattr(recorded, name), name


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
