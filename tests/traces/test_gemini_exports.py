"""Exports of calls in the dialect of Google's Gemini API."""

import json
from typing import Any

from click.testing import CliRunner
from gemini_calls import store as store

import assay
from assay.cli.main import group
from assay.traces import Store
from assay.traces.export.settings import Gates

NATIVE = {"model": "nobody/unknown", "tools": "native"}  # messages as they are
LOOSE = Gates(min_transitions=0, min_clean=0.0, min_task_types=0)


def exported(store: Store, kind: str, out: str = "out", **options: Any) -> list[dict[str, Any]]:
    folder = assay.export(kind, out, store=store.url, gates=LOOSE, **{"privacy": "off", **options}).path
    return [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]


def test_a_run_is_one_row_with_whole_conversations(store: Store) -> None:
    (row,) = exported(store, "sft", **NATIVE, whole=True)
    assert [m["role"] for m in row["messages"]] == ["user", "assistant", "tool", "assistant"]


def test_preferences_and_prompts_contain_the_same_conversation(store: Store) -> None:
    (pair,) = exported(store, "preferences", **NATIVE)
    assert (pair["chosen"][0]["content"], pair["rejected"][0]["content"]) == ("It is 42.", "I do not know.")
    (prompt,) = exported(store, "grpo", out="prompts", **NATIVE, rubric="math_qa")
    assert ([m["role"] for m in prompt["prompt"]], "calculator" in prompt["tools"]) == (
        ["user", "assistant", "tool"],
        True,
    )


def test_transitions_hide_personal_data_and_have_the_reasoning(store: Store) -> None:
    rows = exported(store, "transitions", privacy="patterns")
    assert [row["reasoning"] for row in sorted(rows, key=lambda row: row["t"])] == ["Hm.", "Hm.", "", ""]
    assert "ann.smith" not in json.dumps(rows)
    assert all(row["input"]["dialect"] == "gemini" for row in rows)


def test_traces_show_prints_the_calls_of_a_run(store: Store) -> None:
    (rollout,) = [row for row in store.rollouts() if row.score == 1.0]
    result = CliRunner().invoke(group, ["traces", "show", rollout.id, "--store", store.url])
    assert result.exit_code == 0, result.output
    assert 'assistant:  [calls calculator({"expression": "6*7"})]' in result.output
    assert "reasoning: Hm." in result.output
    assert "-> It is 42." in result.output
