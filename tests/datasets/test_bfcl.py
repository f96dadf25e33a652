"""`bfcl:CATEGORY`: tasks in the format of BFCL v4, from an installed package or an unpacked wheel."""

import json
from pathlib import Path
from typing import Any

import pytest

from assay.datasets.sources import iter_rows
from assay.datasets.tasks import make_task
from assay.errors import DataError
from assay.rubrics import load_rubric

TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "dict", "properties": {"a": {"type": "integer"}}}}


def written(folder: Path, category: str = "simple_python", n: int = 5, answers: bool = True) -> Path:
    data = folder / "bfcl_eval" / "data"
    (data / "possible_answer").mkdir(parents=True, exist_ok=True)
    (folder / "bfcl_eval" / "__init__.py").write_text("raise RuntimeError('never imported')")
    rows = [
        {"id": f"{category}_{i}", "question": [[{"role": "user", "content": f"add {i} é"}]], "function": [TOOL]}
        for i in range(n)
    ]
    (data / f"BFCL_v4_{category}.json").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    truth = [{"id": f"{category}_{i}", "ground_truth": [{"add": {"a": [i]}}]} for i in range(n)]
    if answers:
        (data / "possible_answer" / f"BFCL_v4_{category}.json").write_text("\n".join(map(json.dumps, truth)))
    return data


def rows(spec: str) -> list[dict[str, Any]]:
    return [row for _, row in iter_rows(spec)]


def test_a_missing_package_names_the_command_and_the_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="pip install --no-deps bfcl-eval; or unpack its wheel"):
        rows("bfcl:simple_python")
    written(tmp_path)
    for folder in (tmp_path, tmp_path / "bfcl_eval", tmp_path / "bfcl_eval" / "data"):
        assert len(rows(f"bfcl:simple_python?path={folder}")) == 5
    with pytest.raises(DataError, match="has no file BFCL_v4"):
        rows(f"bfcl:simple_python?path={tmp_path / 'nothing'}")


def test_a_sample_depends_on_the_seed_alone(tmp_path: Path) -> None:
    written(tmp_path, n=50)
    spec = f"bfcl:simple_python?path={tmp_path}&size=5&seed="
    assert rows(f"{spec}1") == rows(f"{spec}1") != rows(f"{spec}2")
    with pytest.raises(DataError, match="has 50 tasks, fewer than size=51"):
        rows(f"bfcl:simple_python?path={tmp_path}&size=51")
    with pytest.raises(DataError, match="must be an integer >= 1"):
        rows(f"bfcl:simple_python?path={tmp_path}&size=0")


def test_irrelevance_expects_no_calls_and_both_kinds_are_scored(tmp_path: Path) -> None:
    written(tmp_path)
    written(tmp_path, "irrelevance", answers=False)
    rubric = load_rubric("tool_user")
    needs = make_task(rows(f"bfcl:simple_python?path={tmp_path}")[3], inputs=["question", "tools"])
    none = make_task(rows(f"bfcl:irrelevance?path={tmp_path}")[3], inputs=["question", "tools"])
    right = {"calls": [{"name": "add", "arguments": {"a": 3}, "result": None, "error": None}]}
    assert rubric.score(needs, right).value == rubric.score(none, {"calls": []}).value == 1
    assert rubric.score(needs, {"calls": []}).value == rubric.score(none, right).value == 0


def test_several_messages_keep_their_roles(tmp_path: Path) -> None:
    data = written(tmp_path, "live_simple", n=1)
    messages = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "add 0"}]]
    row = {"id": "live_simple_0", "question": messages, "function": [TOOL]}
    (data / "BFCL_v4_live_simple.json").write_text(json.dumps(row))
    assert rows(f"bfcl:live_simple?path={tmp_path}")[0]["inputs"]["question"] == "system: Be brief.\nuser: add 0"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        ("[1]", "expected a JSON object, found list"),
        ('{"question": [[]]}', "no 'id'"),
        ('{"id": "x", "question": [[], []], "function": []}', "there is no answer for 'x'"),
        ('{"id": "simple_python_0", "question": [[], []], "function": []}', "not one turn"),
    ],
)
def test_rows_of_another_format_are_refused_with_their_line(tmp_path: Path, text: str, why: str) -> None:
    data = written(tmp_path)
    (data / "BFCL_v4_simple_python.json").write_text(text)
    with pytest.raises(DataError, match=why) as raised:
        rows(f"bfcl:simple_python?path={tmp_path}")
    assert "BFCL_v4_simple_python.json:1" in str(raised.value)


def test_an_unknown_category_or_option_is_refused() -> None:
    with pytest.raises(DataError, match="no category 'simple_c'; categories of one turn"):
        rows("bfcl:simple_c")
    with pytest.raises(DataError, match="unknown option"):
        rows("bfcl:multiple?n=3")
