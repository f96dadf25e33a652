"""Rollouts in a store, and the rows of their export, for tests of exports."""

import json
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.datasets.tasks import task_key
from assay.traces import Rollout, Store, Transition
from assay.traces.export.settings import Gates
from assay.traces.store.sealing import store_splits

LOOSE = Gates(min_transitions=0, min_clean=0.0, min_task_types=0)


def chat(text: str) -> dict[str, Any]:
    return {"dialect": "chat", "body": {"model": "m", "messages": [{"role": "user", "content": text}]}}


def response_of(text: str, finish: str = "stop") -> dict[str, Any]:
    return {"body": {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish}]}}


def turn(t: int, ask: str, answer: str, **options: Any) -> Transition:
    finish = options.pop("finish", "stop")
    return Transition(
        t=t, model="m", weights="w", request=chat(ask), response=response_of(answer, finish), output=answer, **options
    )


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}


def tool_call(name: str, arguments: dict[str, Any], call_id: str = "c") -> dict[str, Any]:
    """The message of an assistant that calls a tool."""
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def tool_turn(t: int, messages: list[dict[str, Any]], answer: dict[str, Any], tools: Any = (ADD,)) -> Transition:
    """A call that offers tools, with a message of the assistant as its answer."""
    request = {"dialect": "chat", "body": {"model": "m", "messages": messages, "tools": list(tools)}}
    response = {"body": {"choices": [{"message": answer}]}}
    return Transition(t=t, model="m", request=request, response=response, output=answer.get("content") or "")


def add_rollout(store: Store, *turns: Transition, **options: Any) -> Rollout:
    task = options.pop("task", "t1")
    fields = {
        "run_id": "r", "task_id": task, "group_id": task, "split": "train", "status": "done", "program": "p",
        "program_version": "v", "model": "m", "inputs": {"question": task}, "expected": {"answer": "7"},
        "rubric": "r@1", "score": 1.0, **options,
    }  # fmt: skip
    rollout = Rollout(transitions=list(turns), **fields)
    if rollout.split in ("train", "val"):  # as a file that names splits would: else the hash of the inputs decides
        store_splits(store, {rollout.split: [task_key(rollout.inputs)]})
    store.put_rollout(rollout)
    for transition in turns:
        store.put_transition(rollout.id, transition)
    return rollout


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store(tmp_path / ".assay" / "assay.db") as opened:
        yield opened


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "data.jsonl").read_text().rstrip("\n").split("\n")]


def exported(store: Store, kind: str, out: str = "out", **options: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    store.flush()
    report = assay.export(kind, out, store=store.url, **{"gates": LOOSE, **options})
    return rows(report.path), report.manifest
