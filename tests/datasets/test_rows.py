"""What is said of the rows of a dataset: splits of few rows, ids, near-duplicates."""

import random
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from assay.datasets import SPLITS, load_splits
from assay.datasets.keys import ALIKE, near_duplicates
from assay.datasets.splits import FEW, split_of, splits_of_few
from assay.errors import DataError

keys = st.lists(st.integers(0, 2**64 - 1).map("{:016x}".format), min_size=1, max_size=FEW - 1, unique=True)


@given(keys, st.integers(0, 5).map(str))
def test_few_tasks_fill_all_splits_in_any_order(few: list[str], salt: str) -> None:
    splits = splits_of_few(dict.fromkeys(few), salt)
    assert splits == splits_of_few(dict.fromkeys(reversed(few)), salt)
    sizes = [list(splits.values()).count(name) for name in SPLITS]
    assert sum(size > 0 for size in sizes) == min(4, len(few))
    if len(few) >= 10:
        assert all(abs(size - share * len(few)) < 1.01 for size, share in zip(sizes, (0.4, 0.2, 0.2, 0.2), strict=True))


@given(keys, keys)
def test_few_tasks_that_become_more_keep_their_splits(first: list[str], more: list[str]) -> None:
    known = splits_of_few(dict.fromkeys(first), "s")
    every = list(dict.fromkeys([*first, *more]))
    splits = splits_of_few(dict.fromkeys(every), "s", known=known)
    assert known.items() <= splits.items()
    assert splits.keys() == set(every)


def test_few_tasks_that_name_splits_keep_them() -> None:
    named = {"a": "test", "b": None, "c": "test", "d": None, "e": None}
    splits = splits_of_few(named, "s", known={"c": "val"})
    assert (splits["a"], splits["c"]) == ("test", "val")
    assert {splits["b"], splits["d"], splits["e"]} >= {"train", "gate"}


def test_the_splits_that_a_command_reads_come_first() -> None:
    assert splits_of_few({"a": None}, "s", need=("val",)) == {"a": "val"}
    assert set(splits_of_few({"a": None, "b": None, "c": None}, "s", need=("val", "gate", "test")).values()) == {
        "val", "gate", "test",
    }  # fmt: skip


def test_forty_tasks_are_assigned_by_hash(tmp_path: Path) -> None:
    rows = "".join(f'{{"question": "question number {at}"}}\n' for at in range(FEW))
    (tmp_path / "d.jsonl").write_text(rows * 2)
    splits = load_splits(str(tmp_path / "d.jsonl"), need=())
    assert all(split_of(task.key, "assay")[0] == name for name, tasks in splits.parts().items() for task in tasks)
    assert sum(splits.sizes().values()) == 2 * FEW


def test_ids_of_rows_of_one_task_are_distinct_and_other_repeated_ids_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(
        '{"id": "a", "question": "One?"}\n{"id": "a", "question": "one? "}\n{"id": "a-2", "question": "Two?"}\n'
        '{"id": "a", "question": "ONE?"}\n'
    )
    splits = load_splits(str(path), need=())
    ids = {task.where.rpartition(":")[2]: task.id for tasks in splits.parts().values() for task in tasks}
    assert ids == {"1": "a", "2": "a-3", "3": "a-2", "4": "a-4"}
    path.write_text('{"id": "a", "question": "One?"}\n{"id": "a", "question": "Two?"}\n')
    with pytest.raises(DataError, match="2 rows have the id 'a'"):
        load_splits(str(path), need=())


def shingles(text: str) -> set[str]:
    return {text[at : at + 5] for at in range(max(1, len(text) - 4))}


def test_near_duplicates_are_those_of_all_pairs() -> None:
    rng = random.Random(0)
    words = [f"{a}{b}" for a in ("par", "tow", "let", "str") for b in ("cel", "er", "ter", "eet", "s", "ing")]
    texts = [" ".join(rng.choices(words, k=9)) for _ in range(60)]
    texts += [text.replace(text.split()[4], rng.choice(words), 1) for text in texts[:40]]
    groups = [rng.choice(SPLITS) for _ in texts]
    similar = {
        one
        for one, a in enumerate(texts)
        for other, b in enumerate(texts)
        if groups[one] != groups[other] and len(shingles(a) & shingles(b)) >= ALIKE * len(shingles(a) | shingles(b))
    }
    pairs = near_duplicates(texts, groups) or []
    assert {pair.text for pair in pairs} == similar
    assert 0 < len(similar) < len(texts)
    assert all(groups[pair.text] != groups[pair.other] for pair in pairs)
    assert [pair.similarity for pair in pairs] == sorted((pair.similarity for pair in pairs), reverse=True)


def test_texts_of_a_template_are_compared_and_too_much_text_is_not() -> None:
    template = "Please tell me how far the place number {} of the old atlas is from here, in kilometres and in miles"
    texts = [template.format(at * 7919) for at in range(300)]
    assert len(near_duplicates(texts, [SPLITS[at % 4] for at in range(300)]) or []) == 300
    assert near_duplicates(["x" * 2_000_000, "y"], ["train", "test"]) is None
    assert near_duplicates(["x"] * 10_001, ["train"] * 10_001) is None
    assert near_duplicates([], []) == near_duplicates(["", "a", "abc"], ["train", "val", "test"]) == []
