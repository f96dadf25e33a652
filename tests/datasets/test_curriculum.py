"""Curriculum files and the tasks of their stages."""

import json
from pathlib import Path

import pytest

from assay.datasets import load_splits, load_tasks
from assay.datasets.curriculum import load_curriculum, stage_of
from assay.errors import DataError


def written(folder: Path, text: str, name: str = "cur.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def sums(folder: Path, *, of: int = 40) -> Path:
    rows = [
        {"inputs": {"question": f"{a} + {a}"}, "expected": {"answer": str(2 * a)}, "metadata": {"terms": 2 + a % 2}}
        for a in range(of)
    ]
    return written(folder, "\n".join(map(json.dumps, rows)), "sums.jsonl")


def test_defaults_of_the_file_hold_for_stages_that_have_none(tmp_path: Path) -> None:
    text = (
        "promote_at: 0.9\nmax_share: 0.5\nstages:\n  - {name: a, data: x.csv}\n"
        "  - {name: b, data: x.csv, max_share: null, replay: 0}\n"
    )
    first, second = load_curriculum(written(tmp_path, text)).stages
    assert (first.promote_at, first.max_share, first.replay) == (0.9, 0.5, 0.2)
    assert (second.promote_at, second.max_share, second.replay) == (0.9, None, 0.0)
    assert (first.limit(30), first.limit(1), second.limit(30)) == (15, 1, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", ":1: a curriculum is a mapping with a list of stages, found an empty file"),
        ("stages: []", ":1: stages"),
        ("stage: []", ":1: unknown key 'stage'.* Did you mean 'stages'?"),
        ("replay: 0.1", ":1: the key 'stages' is missing"),
        ("stages: {a: 1}", ":1: stages must be a list"),
        ("stages:\n  - a", ":2: stage 1 must be a mapping"),
        ("- a", ":1: a curriculum is a mapping"),
        (
            "stages:\n  - name: a\n    promote_to: 1",
            ":3: stage 'a': unknown key 'promote_to'.* Did you mean 'promote_at'?",
        ),
        ("stages:\n  - name: a\n    promote_at: 80", ":3: stage 'a': promote_at .*80"),
        ("stages:\n  - name: a\n    promote_at: .nan", ":3: stage 'a': promote_at .*nan"),
        ("promote_at: 2\nstages:\n  - name: a", ":1: promote_at .*2"),
        ("stages:\n  - name: a\n    promote_at: '0.8'", ":3: stage 'a': promote_at must be a number"),
        ("stages:\n  - name: a\n    max_share: 0", ":3: stage 'a': max_share .*0"),
        ("stages:\n  - name: a\n    replay: 1.5", ":3: stage 'a': replay .*1.5"),
        ("stages:\n  - name: ' '", ":2: stage ' ': name must be text of 1 to 60 characters in one line"),
        ("stages:\n  - name: 5", ":2: stage 1: name must be a string"),
        (f"stages:\n  - name: {'a' * 61}", ":2: stage 'aaa.* name must be text of 1 to 60 characters"),
        ("stages:\n  - {name: a, data: 7}", ":2: stage 'a': data must be a string"),
        ("stages:\n  - {? [1] : b}", "invalid YAML"),
        ("stages: !!python/object/apply:os.system ['true']", "invalid YAML"),
        ("a: &a [x]\nb: &b [*a, *a]\nstages: [*b, *b]", ":1: unknown key 'a'"),
        ("stages: &s [*s]", ":1: an alias refers to a node that contains it"),
        ("stages: " + "[" * 5000, "invalid YAML"),
        ("stages:\n  - name: a\n    name: b", ":3: duplicate key 'name'"),
        ("stages:\n  - {name: a}\n  - {name: a}", ":3: there are two stages 'a'"),
        ("stages:\n  - {data: x}", ":2: stage 1: the key 'name' is missing"),
        ("stages:\n  - {name: a, where: terms}", ":2: stage 'a': where must be a mapping"),
        ("stages:\n  - {name: a, where: {terms: []}}", ":2: stage 'a': where: terms"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        load_curriculum(written(tmp_path, text))
    assert "cur.yaml" in str(error.value)


def test_an_unknown_name_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no curriculum 'tool_us'.*did you mean 'tool_use'"):
        load_curriculum("tool_us")
    with pytest.raises(DataError, match=r"no such file: .*gone.yaml"):
        load_curriculum(tmp_path / "gone.yaml")


def test_data_is_relative_to_the_file_and_a_task_belongs_to_its_first_stage(tmp_path: Path) -> None:
    sums(tmp_path)
    path = written(
        tmp_path, "stages:\n  - {name: a, data: sums.jsonl, where: {terms: 2}}\n  - {name: b, data: sums.jsonl}"
    )
    splits = load_splits(f"curriculum:{path}", curriculum=load_curriculum(path))
    assert {task.metadata["terms"] for task in splits.of_stage("b", "train")} == {3}
    assert {stage_of(task.metadata) for task in load_tasks(f"curriculum:{path}")} == {"a", "b"}


def test_a_task_that_the_sample_of_its_stage_dropped_is_in_no_later_stage(tmp_path: Path) -> None:
    rows = [{"inputs": {"question": f"q{at}"}, "expected": {"answer": "x"}} for at in range(120)]
    for name, chosen in (("easy", rows[:100]), ("all", rows)):
        written(tmp_path, "\n".join(map(json.dumps, chosen)), f"{name}.jsonl")
    path = written(tmp_path, "stages:\n  - {name: easy, data: easy.jsonl}\n  - {name: hard, data: all.jsonl}")
    splits = load_splits(f"curriculum:{path}", curriculum=load_curriculum(path), limits={"train": 20, "val": 8})
    for split in ("train", "val"):
        names = {task.inputs["question"] for task in splits.of_stage("hard", split)}
        assert names
        assert not names & {row["inputs"]["question"] for row in rows[:100]}


def test_stages_whose_files_name_different_splits_share_no_task(tmp_path: Path) -> None:
    for name, order in (("easy", ("train", "val", "gate", "test")), ("hard", ("test", "gate", "val", "train"))):
        questions = [f"{at} {'' if at % 2 else name}" for at in range(80)]
        rows = [{"question": q, "answer": "x", "split": order[at // 2 % 4]} for at, q in enumerate(questions)]
        written(tmp_path, "\n".join(map(json.dumps, rows)), f"{name}.jsonl")
    path = written(tmp_path, "stages:\n  - {name: easy, data: easy.jsonl}\n  - {name: hard, data: hard.jsonl}")
    parts = load_splits(f"curriculum:{path}", curriculum=load_curriculum(path)).parts()
    questions = [task.inputs["question"] for tasks in parts.values() for task in tasks]
    assert len(questions) == len(set(questions)) == 120  # 40 of the 160 rows are in both files
    assert {task.inputs["question"] for task in parts["test"]} >= {f"{at} " for at in (7, 15, 23)}


def test_a_curriculum_is_no_data_of_a_stage(tmp_path: Path) -> None:
    path = written(tmp_path, "stages:\n  - {name: a, data: 'curriculum:tool_use'}")
    with pytest.raises(DataError, match=r"cur.yaml:2: the data of stage 'a' is a curriculum \(curriculum:tool_use\)"):
        load_splits(f"curriculum:{path}", curriculum=load_curriculum(path))


def test_stages_without_tasks_say_what_the_data_has(tmp_path: Path) -> None:
    data = str(sums(tmp_path))
    cases = {
        "stages:\n  - {name: a, where: {terms: 4}}": "cur.yaml:2: .*has terms=4. In the data terms is 2 or 3",
        "stages:\n  - {name: a, where: {term: 2}}": "no row of .* has a field 'term'; did you mean 'terms'?",
        "stages:\n  - {name: a}\n  - {name: b}": "cur.yaml:3: every task of the stage 'b' is in an earlier stage",
        "stages:\n  - {name: a, data: gone.jsonl}": "cur.yaml:2: stage 'a': no such file: gone.jsonl",
    }
    for text, message in cases.items():
        with pytest.raises(DataError, match=message):
            load_splits(data, curriculum=load_curriculum(written(tmp_path, text)))
    few = load_curriculum(written(tmp_path, "stages:\n  - {name: two, where: {terms: 2}}\n  - {name: rest}"))
    with pytest.raises(DataError, match=r"has no val task: add tasks to it, or take more of them \(val_size\)"):
        load_splits(data, curriculum=few, limits={"val": 1})
    path = written(tmp_path, "stages:\n  - {name: a, where: {terms: 2}}")
    with pytest.raises(DataError, match="names no data, and the command was given none"):
        load_splits(f"curriculum:{path}", curriculum=load_curriculum(path))


def test_the_shipped_curriculum_has_tasks_of_each_stage_in_each_split() -> None:
    curriculum = load_curriculum("tool_use")
    splits = load_splits("curriculum:tool_use", curriculum=curriculum)
    names = {stage.name for stage in curriculum.stages}
    for tasks in splits.parts().values():
        assert {stage_of(task.metadata) for task in tasks} == names
