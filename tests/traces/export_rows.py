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


def add_rollout(store: Store, *turns: Transition, **options: Any) -> Rollout:
    task = options.pop("task", "t1")
    fields = {
        "run_id": "r",
        "task_id": task,
        "group_id": task,
        "status": "done",
        "program": "p",
        "program_version": "v",
        "model": "m",
        "score": 1.0,
        "split": "train",
        "inputs": {"question": task},
        "expected": {"answer": "7"},
        "rubric": "r@1",
        **options,
    }
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
