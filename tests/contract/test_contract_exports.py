"""Full rows of the four exports of a store with known rollouts, and what no export has."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from contract_files import Contract
from contract_project import Project
from prompt_server import PromptServer

import assay
from assay.traces import Rollout, ToolCall, Transition, Verdict

KINDS = {
    "sft": [], "grpo": ["--rubric", "r.yaml"], "preferences": [], "transitions": [], "preferences unpaired": [],
}  # fmt: skip
OPEN, SEALED = "What is 30 + 1?", "What is 99 + 1?"
TASKS = {OPEN: "train", "What is 40 + 1?": "train", "What is 50 + 1?": "val", SEALED: "gate"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


def call(t: int, messages: list[dict[str, Any]], message: dict[str, Any], **more: Any) -> Transition:
    """A call of a chat model as the recorder stores it."""
    body: dict[str, Any] = {"model": "m", "messages": messages, "temperature": 0.5}
    if message.get("tool_calls"):
        body["tools"] = [ADD]
    finish = "tool_calls" if message.get("tool_calls") else "stop"
    return Transition(
        t=t, model="openai/m", request={"dialect": "chat", "body": body},
        response={"body": {"choices": [{"index": 0, "message": message, "finish_reason": finish}]}},
        output=message["content"] or "", prompt_tokens=11, completion_tokens=3, cost_usd=0.001, started_at=100.0 + t,
        latency_ms=5.0, **more,
    )  # fmt: skip


def rollout(number: int, question: str, answer: str, score: float | None, **more: Any) -> Rollout:
    """A rollout with one call, and fields that are the same in every run of the test."""
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": question}]
    calls = more.pop("calls", None) or [
        call(
            0,
            messages,
            {"role": "assistant", "content": answer},
            token_ids=(7, number),
            logprobs=(-0.5, -0.25),
            step_rewards={"parsed": 0.15},
        )
    ]
    group = f"{sum(map(ord, question)):032x}"
    verdicts = [Verdict(criterion="right", grade=score, reason="" if score is not None else "no grade")]
    return Rollout(**{
        "id": f"{number:032x}", "run_id": "seeded", "task_id": group, "group_id": group, "sample": number,
        "program": "sums.py:Sums", "program_version": "v1", "model": "openai/m", "split": TASKS.get(question, ""),
        "phase": "collect", "status": "done", "inputs": {"question": question},
        "expected": {"answer": str(int(question.split()[2]) + 1)}, "prediction": {"answer": answer}, "rubric": "sums@1",
        "score": score, "coverage": 1.0, "verdicts": verdicts, "started_at": 100.0, "ended_at": 101.0,
        "transitions": calls, **more,
    })  # fmt: skip


def tool_turns() -> list[Transition]:
    """Two calls: a tool, then an answer that names its result."""
    asked = [{"role": "user", "content": "What is 40 + 1?"}]
    function = {"name": "add", "arguments": '{"a": 40}'}
    called = {
        "role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }  # fmt: skip
    result = {"role": "tool", "tool_call_id": "c1", "content": "41"}
    return [
        call(0, asked, called, tools=[ToolCall(name="add", arguments={"a": 40}, result="41")]),
        call(1, [*asked, called, result], {"role": "assistant", "content": "It is 41."}),
    ]


ROLLOUTS = [
    rollout(1, OPEN, "31", 1.0),
    rollout(2, OPEN, "32", 0.0),
    rollout(3, OPEN, "Write to jane.doe@corp.com", 0.5),
    rollout(4, "What is 40 + 1?", "41", 1.0, calls=tool_turns()),
    rollout(5, "What is 40 + 1?", "42", 0.0, human_rating=0.25),
    rollout(6, "What is 50 + 1?", "51", 1.0),
    rollout(7, SEALED, "100", 1.0),
    rollout(8, OPEN, "unscored", None),
    rollout(9, OPEN, "without consent", 1.0, consent="refused"),
    rollout(10, OPEN, "of a tenant", 1.0, tenant="acme"),
]


@pytest.fixture(scope="module")
def seeded(server: PromptServer, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with the rollouts; an evaluation of a file that names the splits has assigned them."""
    project = Project(tmp_path_factory.mktemp("seeded"), server.url)
    rows = [{"question": question, "answer": "0", "split": split} for question, split in TASKS.items()]
    project.write_rows("splits.jsonl", rows)
    assert project.run("evaluate", "sums.py:successor", "--data", "splits.jsonl", "--split", "train").code == 0
    with assay.Store(project.folder / ".assay" / "assay.db") as store:
        for item in ROLLOUTS:
            store.put_rollout(item)
            for transition in item.transitions:
                store.put_transition(item.id, transition)
    return project


@pytest.fixture(scope="module")
def rows(seeded: Project) -> dict[str, list[dict[str, Any]]]:
    """Rows of each export."""
    loose = ["--run", "seeded", "--min-clean", "0"]
    loose += ["--privacy", "patterns"]
    read = {}
    for name, more in KINDS.items():
        kind, *unpaired = name.split()
        out = name.replace(" ", "-")
        seeded.report(f"export {kind}", "--out", out, *loose, *more, *(f"--{word}" for word in unpaired))
        lines = (seeded.folder / out / "data.jsonl").read_text(encoding="utf-8")
        read[name] = [json.loads(line) for line in lines.rstrip("\n").split("\n")]
    return read


def steady(value: Any) -> Any:
    """The value with numbers to nine digits, and surrogates of personal data, which are random, by their kind."""
    if isinstance(value, dict):
        return {key: steady(item) for key, item in value.items()}
    if isinstance(value, list):
        return [steady(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"person\w+@example\.org", "SURROGATE@example.org", value)
    return round(value, 9) + 0.0 if isinstance(value, float) else value


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_an_export_are_unchanged(kind: str, rows: dict[str, list[dict[str, Any]]], contract: Contract) -> None:
    contract.check("export_rows", kind, steady(rows[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_no_export_has_a_sealed_refused_or_foreign_rollout_or_personal_data(
    kind: str, rows: dict[str, list[dict[str, Any]]]
) -> None:
    text = json.dumps(rows[kind])
    assert OPEN in text
    for left_out in (SEALED, "without consent", "of a tenant", "jane.doe@corp.com"):
        assert left_out not in text


@pytest.mark.parametrize("kind", KINDS)
def test_no_export_has_a_number_in_place_of_a_missing_score(kind: str, rows: dict[str, list[dict[str, Any]]]) -> None:
    assert [row for row in rows[kind] if "unscored" in json.dumps(row) and row.get("score") is not None] == []


def test_a_human_rating_replaces_the_score(rows: dict[str, list[dict[str, Any]]]) -> None:
    (row,) = (row for row in rows["transitions"] if row["rollout"] == f"{5:032x}")
    assert (row["score"], row["human_rating"]) == (0.0, 0.25)
    assert row["return"] == pytest.approx(0.25 + 0.15)  # with the step reward of its call


def test_the_parquet_file_has_the_rows_of_the_json_lines(
    seeded: Project, rows: dict[str, list[dict[str, Any]]]
) -> None:
    import pyarrow.parquet as pq

    table = pq.read_table(seeded.folder / "transitions" / "data.parquet").to_pylist()
    assert [row["advantage"] for row in table] == [row["advantage"] for row in rows["transitions"]]
    assert [row["token_ids"] for row in table] == [row["token_ids"] for row in rows["transitions"]]


def test_python_exports_the_rows_of_the_command(seeded: Project, rows: dict[str, list[dict[str, Any]]]) -> None:
    with contextlib.chdir(seeded.folder):
        report = assay.export("sft", "python", runs=["seeded"], min_clean=0.0, privacy="patterns")
    lines = (Path(report.path) / "data.jsonl").read_text().rstrip("\n").split("\n")
    assert [json.loads(line) for line in lines] == rows["sft"]


def test_a_gate_that_fails_writes_nothing(seeded: Project) -> None:
    done = seeded.run(
        "export", "sft", "--out", "none", "--run", "seeded", "--min-clean", "1", "--privacy", "patterns", "--json"
    )
    assert (done.code, done.report["path"], done.report["rows"]) == (1, None, 0)
    assert not (seeded.folder / "none").exists()
