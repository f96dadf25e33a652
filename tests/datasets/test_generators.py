"""Generated tasks: arithmetic, documents, conversations, tool use; options that are refused."""

from typing import Any

import pytest

from assay.datasets import iter_rows, load_splits, load_tasks
from assay.errors import DataError
from assay.programs.toolbox import simulated_result
from assay.shipped.programs.tool_user.tasks import STAGES


def rows(spec: str) -> list[dict[str, Any]]:
    return [row for _, row in iter_rows(spec)]


@pytest.mark.parametrize(
    "spec",
    [
        "arithmetic:size=20&seed=",
        "documents:facts?size=40&passages=8&removed=0.3&seed=",
        "conversations:?size=20&seed=",
        "tools:text?size=40&seed=",
    ],
)
def test_the_seed_decides_the_tasks(spec: str) -> None:
    assert rows(f"{spec}1") == rows(f"{spec}1") != rows(f"{spec}2")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("documents:tales", "documents has no kind 'tales'"),
        ("documents:facts?removed=2", "removed is '2': it must be a number from 0 to 1"),
        ("documents:facts?passages=1", "passages is '1': it must be an integer >= 2"),
        ("documents:facts?words=3", r"unknown option 'words'\. The options are "),
        ("conversations:?facts=0-4", "facts='0-4'"),
        ("conversations:?facts=9-40", "facts='9-40'"),
        ("conversations:?changes=2", "changes is .2.: it must be a number from 0 to 1"),
        ("conversations:?changes=much", "changes is .much."),
        ("conversations:?meeting=third", "meeting='third' must be one of only, first, second"),
        ("conversations:?meeting=first&facts=3-4", "must be above 6"),
        ("conversations:?turns=4", "unknown option"),
        ("tools:easy", "tools has no stage 'easy'; the stages are given, text"),
        ("tools:given?sizes=3", "unknown option"),
        ("tools:given?size=0", "size is '0': it must be an integer >= 1"),
        ("arithmetic:terms=0", "terms"),
        ("arithmetic:ops=/", "ops"),
        ("arithmetic:size=x", "size"),
        ("arithmetic:colour=red", "colour"),
        ("arithmetic:signs=true", "signs"),
        ("hf:", "hf:"),
        ("hf:a/b:c:d:e", "hf:a/b:c:d:e"),
        ("missing.jsonl", "missing.jsonl"),
    ],
)
def test_wrong_options_are_named(spec: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_tasks(spec)


def test_arithmetic_is_right_and_never_repeats() -> None:
    tasks = load_tasks("arithmetic:ops=+-*&signs=1&size=300&seed=4")
    assert len({task.key for task in tasks}) == 300
    for task in tasks:
        assert eval(task.metadata["expression"]) == int(task.expected["answer"])


def test_reasoning_gym_families_load() -> None:
    pytest.importorskip("reasoning_gym")
    task = load_tasks("reasoning_gym:chain_sum?size=3&seed=1&min_terms=2&max_terms=3")[0]
    assert eval(task.metadata["expression"]) == int(task.expected["answer"])
    with pytest.raises(DataError, match="no task family 'chain_sums'"):
        load_tasks("reasoning_gym:chain_sums")


def test_the_answer_of_a_document_task_is_in_one_passage_or_in_none() -> None:
    tasks = load_tasks("documents:facts?size=200&seed=3", inputs=["question"])
    assert sum(task.task_type == "removed" for task in tasks) == 60
    for task in tasks:
        texts = [document["text"] for document in task.inputs["documents"]]
        assert len(texts) == len(set(texts)) == 20
        if task.task_type == "removed":
            assert dict(task.expected) == {"passages": []}
            continue
        (passage,) = task.expected["passages"]
        assert texts.count(passage) == 1
        assert task.expected["answer"] in passage


def test_splits_of_conversations_are_those_of_the_content() -> None:
    one, two = (load_splits(f"conversations:?size={size}&seed=2", salt="s") for size in (60, 120))
    assert {task.id for task in one.train} <= {task.id for task in two.train}
    assert min(len(one.train), len(one.val), len(one.gate)) > 3


def test_tools_and_questions_of_a_split_occur_in_no_other() -> None:
    tools: dict[str, set[str]] = {"train": set(), "val": set(), "gate": set(), "test": set()}
    questions: dict[str, set[str]] = {split: set() for split in tools}
    for stage in STAGES:
        for seed in (0, 1):
            for row in rows(f"tools:{stage}?size=200&seed={seed}"):
                tools[row["split"]] |= {tool["name"] for tool in row["inputs"]["tools"]}
    for row in rows("tools:irrelevant?size=2000"):
        questions[row["split"]].add(row["inputs"]["question"])
    for by_split in (tools, questions):
        assert all(by_split.values())
        assert sum(map(len, by_split.values())) == len(set().union(*by_split.values()))


def test_thirty_per_cent_of_each_split_need_no_tool() -> None:
    chosen = rows("tools:irrelevant?size=500")
    for split in ("train", "val", "gate", "test"):
        of_split = [row for row in chosen if row["split"] == split]
        assert sum(not row["expected"]["calls"] for row in of_split) == 0.3 * len(of_split)
    assert all(row["metadata"]["needs_tool"] == bool(row["expected"]["calls"]) for row in chosen)
    assert all(row["expected"]["calls"] for row in rows("tools:two_tools?size=200"))


def test_simulated_results_compare_text_without_case_and_no_bool_with_a_number() -> None:
    cases = [{"arguments": {"city": "Oslo", "count": 1}, "result": "ok"}]
    assert simulated_result(cases, {"city": " oslo ", "count": 1.0, "more": 2}) == "ok"
    for wrong in ({"city": "Lima", "count": 1}, {"city": "Oslo", "count": True}, {}):
        with pytest.raises(LookupError, match="nothing was found"):
            simulated_result(cases, wrong)
