"""Rollouts as OTLP traces: what is exported can be imported as it was, and others can read it by the conventions."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from importing_rows import read

from assay.commands.traces import export_rollouts, import_rollouts
from assay.datasets import Task
from assay.errors import ConfigError, DataError, FailureKind
from assay.traces import Rollout, Store, ToolCall, Transition, Verdict
from assay.traces.export.restrictions import Leaving
from assay.traces.otlp import VERSION, trace_request
from assay.traces.store.erasure import erase_subject
from assay.traces.store.sealing import store_tasks

ANSWER: dict[str, Any] = {
    "id": "r-1", "model": "gpt-0613",
    "choices": [
        {
            "index": 0, "finish_reason": "tool_calls",
            "message": {
                "role": "assistant", "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
                ],
            },
        }
    ],
}  # fmt: skip
FINAL: dict[str, Any] = {
    "id": "r-2",
    "choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": "It is 3."}}],
}
ASKED: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 1 + 2?"},
]  # fmt: skip


def call(t: int, messages: list[dict[str, Any]], answer: dict[str, Any] | None, **more: Any) -> Transition:
    body = {"model": "gpt", "messages": messages, "temperature": 0.25, "stop": ["END"]}
    return Transition(
        t=t, model="gpt", request={"dialect": "chat", "body": body},
        response=None if answer is None else {"body": answer}, started_at=1_700_000_000.123456 + t, latency_ms=20.5,
        prompt_tokens=11, completion_tokens=5, cost_usd=0.25, **more,
    )  # fmt: skip


def full() -> Rollout:
    """A rollout of production in which every field has a value that is not its default."""
    messages = [*ASKED, ANSWER["choices"][0]["message"], {"role": "tool", "tool_call_id": "c1", "content": "3"}]
    return Rollout(
        task_id="task", task_type="sums", group_id="g", sample=2, program="support", program_version="v7",
        parameters={"temperature": 0.25}, model="gpt", adapters=("a" * 8,), seed=0, split="train", phase="deployed",
        source="gateway", status="failed", inputs={"messages": "as a name"}, expected={"answer": "3"},
        metadata={"difficulty": 1}, prediction={"answer": "It is 3."}, error="too late", failure=FailureKind.AGENT,
        rubric="r@1", score=0.0, coverage=0.5,
        verdicts=[Verdict(criterion="right", grade=0.0, weight=2.0, reason="it is not", label="no", confidence=0.9)],
        human_rating=0.25, data_subject="user-7", consent="yes", started_at=1_700_000_000.1,
        ended_at=1_700_000_003.7, deployment="d1", stage=0, arm="candidate", propensity=0.1, unit="u" * 16,
        version="support@2", early_tools=[ToolCall(name="look", arguments={}, error="gone")],
        transitions=[
            call(0, ASKED, ANSWER, tools=[ToolCall(name="add", arguments={"a": 1, "b": 2}, result="3")],
                 step_rewards={"parsed": 0.15}, return_=0.4, shown_tasks=("s" * 8,), agent="planner", weights="w"),
            call(1, messages, FINAL, output="It is 3.", thinking_tokens=0, cached=True, constrained=True,
                 token_ids=(1, 2), logprobs=(-0.5, -0.25)),
            call(2, messages, None, error="429", failure=FailureKind.MODEL),
        ],
    )  # fmt: skip


@pytest.mark.parametrize("name", ["t.jsonl", "t.pb"])
def test_exported_rollouts_are_imported_as_they_were(tmp_path: Path, name: str) -> None:
    plain = Rollout(id="not hex", program="p", status="done", inputs={"q": "?"}, ended_at=2.0, started_at=1.0, sample=0)
    with Store(tmp_path / "a.db") as store, Store(tmp_path / "b.db") as other:
        rollouts = [full(), plain]
        for rollout in rollouts:
            store.put_rollout(rollout)
            for transition in rollout.transitions:
                store.put_transition(rollout.id, transition)
        store.flush()
        report = export_rollouts("otlp", tmp_path / name, store=store.url).to_dict()
        assert (report["rollouts"], report["transitions"], report["withheld"]) == (2, 3, 0)
        imported = import_rollouts("otlp", tmp_path / name, store=other.url)
        assert (imported.rollouts, imported.transitions, imported.skipped) == (2, 3, 0)
        for rollout in rollouts:
            stored = other.rollout(rollout.id)
            assert replace(stored, run_id="") == store.rollout(rollout.id)
        assert import_rollouts("otlp", tmp_path / name, store=other.url).unchanged == 2
        assert import_rollouts("otlp", tmp_path / name, store=store.url).unchanged == 2  # where they came from


def test_without_content_no_text_of_the_rollout_is_in_the_export() -> None:
    text = json.dumps(trace_request([full()], content=False))
    for secret in ("1 + 2", "It is 3", "Be brief", "as a name", "it is not", "too late", "gone", "429", "user-7"):
        assert secret not in text, secret
    assert "gen_ai.usage.input_tokens" in text


def test_sealed_rollouts_and_those_of_tenants_or_without_consent_are_left_out(tmp_path: Path) -> None:
    plain: dict[str, Any] = {"status": "done", "ended_at": 2.0}
    with Store(tmp_path / "a.db") as store:
        for at, more in enumerate((
            {}, {"split": "test"}, {"split": "gate"}, {"tenant": "acme"}, {"consent": "no"}, {"source": "judge"},
            {"status": "running", "ended_at": None},
        )):  # fmt: skip
            store.put_rollout(Rollout(program="p", inputs={"q": f"? {at}"}, **{**plain, **more}))
        store.flush()
        for tenants, exported in (((), 1), (("acme",), 2)):
            report = export_rollouts("otlp", tmp_path / f"{exported}.jsonl", tenants=tenants, store=store.url)
            assert (report.rollouts, report.withheld) == (exported, 5 - exported)
        with pytest.raises(ConfigError, match="no effect with a file"):
            export_rollouts("otlp", tmp_path / "t.jsonl", endpoint="http://x", store=store.url)
        with pytest.raises(ConfigError, match="already exists and is not overwritten"):
            export_rollouts("otlp", tmp_path / "1.jsonl", store=store.url)
        with pytest.raises(ConfigError, match=r"cannot be written: Is a directory"):
            export_rollouts("otlp", tmp_path, store=store.url)
        with pytest.raises(DataError, match="there is no run 'gone'"):
            export_rollouts("otlp", tmp_path / "new.jsonl", run_id="gone", store=store.url)
        with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_ENDPOINT"):
            export_rollouts("otlp", store=store.url)


@pytest.mark.parametrize("thorough", [True, False])
def test_content_of_sealed_tasks_erased_people_and_their_demonstrations_is_left_out(
    tmp_path: Path, thorough: bool
) -> None:
    def rollout(number: int, tasks: tuple[str, ...] = (), **more: Any) -> Rollout:
        inputs = more.pop("inputs", {"q": f"What is the question number {number}?"})
        calls = [call(0, ASKED, FINAL, shown_tasks=tasks)]
        return Rollout(status="done", ended_at=2.0, inputs=inputs, transitions=calls, **more)

    sealed, of_acme = {"q": "What is in the test split?"}, {"q": "What does acme ask for?"}
    task = Task(id="a", inputs=of_acme, metadata={"tenant": "acme"})
    with Store(tmp_path / "a.db") as store:
        store_tasks(store, {"test": [Task(id="s", inputs=sealed)], "train": [task]})
        store.put_rollout(Rollout(status="done", data_subject="Ann", inputs={"q": "Who is Ann?"}))
        assert erase_subject(store, "Ann").removed == 1
        leaving = Leaving(store, thorough=thorough)
        assert leaving.permits(rollout(1))
        assert not leaving.permits(rollout(2, inputs=sealed))
        assert not leaving.permits(rollout(3, data_subject="Ann"))
        assert not leaving.permits(rollout(4, tasks=(task.key,)))
        assert Leaving(store, tenants=("acme",), thorough=thorough).permits(rollout(5, tasks=(task.key,)))
        structure = Leaving(store, content=False, thorough=thorough)
        assert structure.permits(rollout(6, inputs=sealed))  # no text leaves
        assert not structure.permits(rollout(7, data_subject="Ann"))


def test_exports_of_a_newer_version_and_broken_ones_are_skipped(tmp_path: Path) -> None:
    for key, value, reason in (
        ("assay.mapping.version", {"intValue": str(VERSION + 1)}, "update assay"),
        ("assay.verdicts", {"stringValue": "[1"}, "not those of an export"),
        ("assay.failure", {"stringValue": "nonsense"}, "not those of an export"),
    ):
        request = trace_request([full()])
        root = request["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
        root["attributes"] = [*(p for p in root["attributes"] if p["key"] != key), {"key": key, "value": value}]
        good = trace_request([full()])
        (tmp_path / "t.jsonl").write_text(f"{json.dumps(request)}\n{json.dumps(good)}\n")
        rollouts, skipped = read("otlp", tmp_path / "t.jsonl")
        assert (len(rollouts), len(skipped)) == (1, 1)
        assert reason in skipped[0].reason
