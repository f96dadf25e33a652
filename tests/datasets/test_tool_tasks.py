"""Generated tasks of tool use."""

import json
from typing import Any

import pytest

from assay.datasets.sources import iter_rows
from assay.errors import DataError
from assay.programs.toolbox import simulated_result
from assay.shipped.programs.tool_user.tasks import STAGES


def rows(stage: str, size: int = 200, seed: int = 0) -> list[dict[str, Any]]:
    return [row for _, row in iter_rows(f"tools:{stage}?size={size}&seed={seed}")]


@pytest.mark.parametrize("stage", STAGES)
def test_tasks_are_distinct_and_the_same_for_the_same_seed(stage: str) -> None:
    first = rows(stage)
    assert first == rows(stage)
    assert first != rows(stage, seed=1)
    assert len({json.dumps(row["inputs"]) for row in first}) == 200
    counts = {split: sum(row["split"] == split for row in first) for split in ("train", "val", "gate", "test")}
    assert counts == {"train": 80, "val": 40, "gate": 40, "test": 40}


def test_tools_of_a_split_occur_in_no_other_for_any_stage_and_seed() -> None:
    names: dict[str, set[str]] = {"train": set(), "val": set(), "gate": set(), "test": set()}
    for stage in STAGES:
        for seed in (0, 1):
            for row in rows(stage, seed=seed):
                names[row["split"]] |= {tool["name"] for tool in row["inputs"]["tools"]}
    for split, own in names.items():
        assert own
        assert not own & set().union(*(other for name, other in names.items() if name != split))


def test_questions_of_a_split_occur_in_no_other() -> None:
    questions: dict[str, set[str]] = {"train": set(), "val": set(), "gate": set(), "test": set()}
    for row in rows("irrelevant", 2000):
        questions[row["split"]].add(row["inputs"]["question"])
    assert sum(map(len, questions.values())) == len(set().union(*questions.values()))


def test_expected_calls_fit_the_schemas_and_given_values_are_in_the_question() -> None:
    for stage in STAGES:
        for row in rows(stage, 50):
            tools = {tool["name"]: tool["parameters"] for tool in row["inputs"]["tools"]}
            for call in row["expected"]["calls"]:
                schema = tools[call["name"]]
                assert call["arguments"].keys() == schema["properties"].keys() == set(schema["required"])
                for name, value in call["arguments"].items():
                    kind = schema["properties"][name]["type"]
                    types = {"string": str, "integer": int, "number": (int, float), "boolean": bool}
                    assert isinstance(value, types[kind])
                    if stage == "given":
                        assert f"{name}={json.dumps(value)}" in row["inputs"]["question"]


@pytest.mark.parametrize("split", ["train", "val", "gate", "test"])
def test_thirty_per_cent_of_each_split_need_no_tool(split: str) -> None:
    chosen = [row for row in rows("irrelevant", 500) if row["split"] == split]
    assert sum(not row["expected"]["calls"] for row in chosen) == 0.3 * len(chosen)
    assert all(row["metadata"]["needs_tool"] == bool(row["expected"]["calls"]) for row in chosen)
    assert all(row["expected"]["calls"] for row in rows("two_tools"))


def test_two_steps_are_solved_by_the_result_of_the_first_only() -> None:
    for row in rows("two_steps", 50):
        tools = {tool["name"]: tool["simulation"] for tool in row["inputs"]["tools"]}
        first, second = row["expected"]["calls"]
        result = simulated_result(tools[first["name"]], first["arguments"])
        assert list(second["arguments"].values()) == [result]
        assert result not in row["inputs"]["question"]
        assert simulated_result(tools[second["name"]], second["arguments"]) == "done"


def test_a_failing_call_returns_what_to_do_instead() -> None:
    results = set()
    for row in rows("errors", 50):
        tools = {tool["name"]: tool["simulation"] for tool in row["inputs"]["tools"]}
        (right,) = row["expected"]["calls"]
        assert simulated_result(tools[right["name"]], right["arguments"]) == "done"
        failing = [(name, case) for name, cases in tools.items() for case in cases if "error" in case]
        assert len(failing) == 1
        name, case = failing[0]
        with pytest.raises(LookupError, match=r"service|not accepted"):
            simulated_result(tools[name], case.get("arguments", right["arguments"]))
        if len(tools) == 2:
            results.add((list(tools).index(name), name.endswith("_v2")))
    assert len(results) == 4  # neither place nor name tells which tool is out of service


def test_simulated_results_compare_text_without_case_and_no_bool_with_a_number() -> None:
    cases = [{"arguments": {"city": "Oslo", "count": 1}, "result": "ok"}]
    assert simulated_result(cases, {"city": " oslo ", "count": 1.0, "more": 2}) == "ok"
    for wrong in ({"city": "Lima", "count": 1}, {"city": "Oslo", "count": True}, {}):
        with pytest.raises(LookupError, match="nothing was found"):
            simulated_result(cases, wrong)


def test_unknown_stages_and_options_are_refused() -> None:
    with pytest.raises(DataError, match="tools has no stage 'easy'; the stages are given, text"):
        rows("easy")
    with pytest.raises(DataError, match="unknown option"):
        list(iter_rows("tools:given?sizes=3"))
    with pytest.raises(DataError, match="size is '0': it must be an integer >= 1"):
        list(iter_rows("tools:given?size=0"))
