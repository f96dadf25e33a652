"""The page of training data: what an export would hold, without writing it."""

import re
import shlex
import tempfile
from pathlib import Path

import pytest
from pages import Scans, got, read, rollout_of_sums

from assay.cli import command_of
from assay.traces import Store, Transition
from assay.web import data


def filled(store: Store) -> None:
    """Stores 40 rollouts of two types of task, of which some are sealed by the store's split, and one of test."""
    for number in range(40):
        mail = f"ann{number}@mailhaus.de"
        rollout = rollout_of_sums(store, number, task_type=f"kind-{number % 2}", inputs={"question": mail})
        messages = [{"role": "user", "content": f"Write to {mail}"}]
        body = {"choices": [{"message": {"role": "assistant", "content": f"Dear {mail}"}, "finish_reason": "stop"}]}
        store.put_transition(
            rollout.id,
            Transition(
                t=1, model="openai/m", request={"dialect": "chat", "body": {"messages": messages}},
                response={"body": body}, output=f"Dear {mail}", latency_ms=1.0,
            ),
        )  # fmt: skip
    rollout_of_sums(store, 99, split="test")
    store.flush()


def test_gates_balance_and_personal_data_are_shown_before_anything_is_written(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    filled(store)
    text = read(store, "/data?kind=transitions&balance=down")
    rows, rollouts = map(int, re.findall(r"(\d+) rows of (\d+) rollouts", text)[0])
    assert 4 < rollouts <= 40
    assert rows == 2 * rollouts
    assert '<tr><th scope="row">clean</th><td class="better">passed</td>' in text
    clean = 2 * rollouts
    row = f'<td data-label="value">{clean}</td><td data-label="required">5,000</td>'
    assert row in text
    assert f"{5_000 - clean:,} more clean transitions" in text
    assert re.search(r"No gate stops the export, \d warns?: ", text)
    assert "Replaced: <bdi>email" in text
    assert "@mailhaus.de" not in text
    before = {cell: int(count) for cell, count in re.findall(r"<bdi>(kind-\d)</bdi></th>.*?>(\d+)</td><td><svg", text)}
    assert rollouts == 2 * min(before.values())  # the larger type is reduced to the smaller one
    assert "of the gate or test split" in text
    assert list(scratch.iterdir()) == []
    assert "assay export transitions --out FOLDER --balance down" in text


def test_a_large_store_is_not_read_for_a_page(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(store)
    monkeypatch.setattr(data, "MOST", 5)
    with Scans(store) as scans:
        text = read(store, "/data?kind=sft")
    assert "too many to read for a page" in text
    assert scans == []


def test_an_invalid_field_is_refused_and_an_empty_preview_says_why(store: Store) -> None:
    queries = ["kind=pictures", "kind=sft&balance=up", "kind=sft&min_quality=2"]
    assert [status for status, _ in got(store, *(f"/data?{query}" for query in queries))] == [400] * 3
    text = read(store, "/data?kind=sft&run=none")
    assert 'role="alert"' in text
    assert "Preview" in text


@pytest.mark.parametrize("kind", data.KINDS)
def test_the_command_has_flags_that_exist(kind: str) -> None:
    values = {"kind": kind, "run": "r", "program": "p", "task_type": "t", "balance": "down", "min_quality": "0.5"}
    words = shlex.split(data.export_command(values, "s.db"))
    assert words[:3] == ["assay", "export", kind]
    command = command_of(words[1:3])
    assert command is not None
    known = {flag for option in command.params for flag in option.opts}
    assert {word for word in words if word.startswith("--")} <= known
