"""Sources, errors with line numbers, stable splits, duplicates, and a large file in constant memory."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from assay.datasets import SPLITS, Splits, load_splits, load_tasks, make_task
from assay.datasets.splits import split_of
from assay.errors import DataError


def write(path: Path, rows: list[dict[str, object]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def questions(count: int) -> list[dict[str, object]]:
    return [{"question": f"q{i}", "answer": str(i)} for i in range(count)]


def test_a_hub_dataset_streams_by_name_config_and_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the `datasets` library on a local folder with a repository's layout; no network."""
    folder = tmp_path / "org" / "sums"
    folder.mkdir(parents=True)
    write(folder / "train.jsonl", questions(3))
    write(folder / "test.jsonl", questions(2))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert [task.inputs["question"] for task in load_tasks("hf:org/sums")] == ["q0", "q1", "q2"]
    assert len(load_tasks("hf:org/sums:default:test")) == 2
    with pytest.raises(DataError, match="train"):
        load_tasks("hf:org/sums:default:nosuch")


def test_a_missing_input_error_lists_the_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "q", "answer": "1"}])
    with pytest.raises(DataError, match=r"no column for the program's input question; .*rename="):
        load_tasks(path, inputs=["question"])
    # a structured row, as of a dspy.Example
    with pytest.raises(DataError, match=r"the columns are label, text\. Rename"):
        make_task({"inputs": {"text": "q"}, "expected": {"label": "1"}}, inputs=["question"])
    assert load_tasks(path, inputs=["question"], rename={"prompt": "question"})[0].inputs == {"question": "q"}


def test_one_error_lists_all_rows_without_an_input(tmp_path: Path) -> None:
    rows = ["a,q1", ",q2", "b,q3", ",q4", '"",q5']
    (tmp_path / "a.csv").write_text("question,queue\n" + "\n".join(rows) + "\n")
    message = r"a\.csv:3, \S*a\.csv:5, \S*a\.csv:6: every input is empty\. Fill in an input, or remove these rows"
    for load in (load_tasks, load_splits):
        with pytest.raises(DataError, match=message):
            load(str(tmp_path / "a.csv"), inputs=["question"])
    many = write(tmp_path / "b.jsonl", [{"question": "q"}, *({"question": ""} for _ in range(30))])
    with pytest.raises(DataError, match=r":21 and more: every input is empty") as caught:
        load_tasks(many, inputs=["question"])
    assert str(caught.value).count("b.jsonl:") == 20
    broken = write(tmp_path / "c.jsonl", [{"question": ""}, {"question": ""}, {"text": "no question"}])
    with pytest.raises(DataError, match=r"c\.jsonl:1, \S*c\.jsonl:2: every input is empty"):
        load_tasks(broken, inputs=["question"])


def test_splits_do_not_depend_on_row_order_or_on_other_rows(tmp_path: Path) -> None:
    rows = questions(200)
    splits = load_splits(write(tmp_path / "a.jsonl", rows))
    half = load_splits(write(tmp_path / "b.jsonl", rows[100:][::-1]))
    where = {task.id: name for name, tasks in splits.parts().items() for task in tasks}
    for name, tasks in half.parts().items():
        assert all(where[task.id] == name for task in tasks)


def test_shares_are_about_40_20_20_20() -> None:
    counts = dict.fromkeys(SPLITS, 0)
    for i in range(10_000):
        counts[split_of(f"{i:064x}", "salt")[0]] += 1
    assert abs(counts["train"] - 4000) < 200
    assert all(abs(counts[name] - 2000) < 200 for name in ("val", "gate", "test"))


def test_rows_of_one_task_stay_rows_are_in_one_split_and_are_counted(tmp_path: Path) -> None:
    rows = [*questions(50), *questions(50), {"id": "other", "question": "Q1 ", "answer": "not 1"}]
    spec = write(tmp_path / "a.jsonl", rows)
    splits = load_splits(spec)
    report = splits.report().to_dict()["repeated"]
    assert (report["count"], report["contradictions"]) == (51, 1)
    assert report["rows"][-1] == {"row": f"{spec}:101", "first": f"{spec}:2", "differs": ["answer"]}
    by_key: dict[str, list[str]] = {}
    for name, tasks in splits.parts().items():
        for task in tasks:
            by_key.setdefault(task.key, []).append(name)
    assert sorted(map(len, by_key.values())) == [2] * 49 + [3]
    assert all(len(set(names)) == 1 for names in by_key.values())
    ids = [task.id for tasks in splits.parts().values() for task in tasks]
    assert len(set(ids)) == 101


def test_a_limit_keeps_the_first_rows_of_a_task_and_their_ids(tmp_path: Path) -> None:
    spec = write(tmp_path / "a.jsonl", [*questions(60), *questions(60)])
    every, few = load_splits(spec).train, load_splits(spec, limits={"train": 7}).train
    assert [task.id for task in few] == [task.id for task in every][:7]


def test_a_column_that_is_not_an_output_makes_no_contradiction(tmp_path: Path) -> None:
    rows = [*questions(50), *questions(2), {"question": "q5", "answer": "other"}]
    tickets = [{"ticket": f"T{at}", **row} for at, row in enumerate(rows)]
    splits = load_splits(write(tmp_path / "a.jsonl", tickets), inputs=["question"])
    assert counts(splits) == (3, 3)  # no output is known
    splits.outputs = frozenset({"answer", "reasoning"})
    assert counts(splits) == (3, 1)
    splits.outputs = frozenset({"reply"})  # the data has no column for this output: a rubric may read any column
    assert counts(splits) == (3, 3)
    assert counts(load_splits("arithmetic:size=60")) == (0, 0)


def counts(splits: Splits) -> tuple[int, int]:
    """Repeated rows, and those among them that contradict an earlier row."""
    repeated = splits.report().to_dict()["repeated"]
    return repeated["count"], repeated["contradictions"]


def test_a_file_may_name_its_splits(tmp_path: Path) -> None:
    names = ["Train", "validation ", "gate", "TEST"]
    rows = [{**row, "split": names[i % 4]} for i, row in enumerate(questions(8))]
    splits = load_splits(write(tmp_path / "a.jsonl", rows))
    assert splits.sizes() == {"train": 2, "val": 2, "gate": 2, "test": 2}
    with pytest.raises(DataError, match=":1: the split 'holdout' does not exist"):
        load_splits(write(tmp_path / "b.jsonl", [{**questions(1)[0], "split": "holdout"}]))


def test_the_error_lists_the_empty_splits(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"1 distinct task, and none is left for val, gate, test: at least 4 "):
        load_splits(write(tmp_path / "a.jsonl", questions(1)))


def test_a_limit_keeps_the_share_of_every_type(tmp_path: Path) -> None:
    rows = [{**row, "task_type": "rare" if i % 10 == 0 else "usual"} for i, row in enumerate(questions(400))]
    splits = load_splits(write(tmp_path / "a.jsonl", rows), limits={"val": 10})
    assert [task.task_type for task in splits.val].count("rare") == 5


@given(st.dictionaries(st.text(min_size=1), st.one_of(st.text(), st.integers(), st.booleans(), st.none()), min_size=1))
def test_any_json_inputs_make_a_task_or_a_clear_error(inputs: dict[str, object]) -> None:
    try:
        task = make_task({"inputs": inputs})
    except DataError:
        return
    assert dict(task.inputs) == inputs
    assert len(task.key) == 16


@pytest.mark.slow
def test_many_lines_take_constant_memory(tmp_path: Path) -> None:
    path = tmp_path / "big.jsonl"
    with open(path, "w") as file:
        for i in range(60_000):
            file.write(f'{{"question": "q{i}", "answer": "{i}"}}\n')
    code = (
        "import resource; from assay.datasets import load_splits\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"splits = load_splits({str(path)!r})\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, splits.rows, splits.sizes()['train'])"
    )
    grown, rows, train = map(
        int, subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert (rows, train) == (60_000, 1000)
    assert grown < 18_000, f"{grown} kB"


def test_a_task_named_in_two_splits_stays_in_the_first_for_any_limit(tmp_path: Path) -> None:
    rows = [{**row, "split": split} for split in ("train", "test") for row in questions(300)]
    spec = write(tmp_path / "d.jsonl", [*rows, {"question": "only test?", "answer": "1", "split": "test"}])
    for limit in (100, 1000):
        splits = load_splits(spec, limits={"train": limit}, need=())
        assert len(splits.unseal()) == 1
        assert {row.wanted for row in splits.report().moved} == {"test"}


@pytest.mark.parametrize(
    ("rename", "message"),
    [({"qestion": "x"}, "no column 'qestion' to rename"), ({"answer": "question"}, "two columns the name 'question'")],
)
def test_renaming_a_missing_column_or_onto_an_existing_one_is_refused(
    tmp_path: Path, rename: dict[str, str], message: str
) -> None:
    spec = write(tmp_path / "d.jsonl", questions(30))
    with pytest.raises(DataError, match=message):
        load_splits(spec, rename=rename)


OWNER = {"tenant": "t1", "data_subject": "s1", "consent": "no"}


@pytest.mark.parametrize(
    "row",
    [
        {"question": "q", "answer": "a", **OWNER},
        {"inputs": {"question": "q"}, "expected": {"answer": "a"}, **OWNER},
        {"question": "q", "answer": "a", "metadata": OWNER},
    ],
)
@pytest.mark.parametrize("inputs", [None, {"question"}])
def test_owner_columns_are_metadata_and_not_inputs(row: dict[str, Any], inputs: set[str] | None) -> None:
    task = make_task(row, inputs=inputs)
    assert (task.inputs, task.expected, task.metadata) == ({"question": "q"}, {"answer": "a"}, OWNER)
