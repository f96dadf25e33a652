"""Generated tasks of tool use."""

from typing import Any

import pytest

from assay.datasets.sources import iter_rows
from assay.errors import DataError
from assay.programs.toolbox import simulated_result
from assay.shipped.programs.tool_user.tasks import STAGES


def rows(stage: str, size: int = 200, seed: int = 0) -> list[dict[str, Any]]:
    return [row for _, row in iter_rows(f"tools:{stage}?size={size}&seed={seed}")]


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


@pytest.mark.parametrize("split", ["train", "val", "gate", "test"])
def test_thirty_per_cent_of_each_split_need_no_tool(split: str) -> None:
    chosen = [row for row in rows("irrelevant", 500) if row["split"] == split]
    assert sum(not row["expected"]["calls"] for row in chosen) == 0.3 * len(chosen)
    assert all(row["metadata"]["needs_tool"] == bool(row["expected"]["calls"]) for row in chosen)
    assert all(row["expected"]["calls"] for row in rows("two_tools"))


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
