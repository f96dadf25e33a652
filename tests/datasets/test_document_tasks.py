"""Generated tasks of answering from documents."""

import pytest

from assay.datasets import load_tasks
from assay.errors import DataError
from assay.shipped.programs.answer_from_documents.tasks import rows


def test_the_answer_is_in_one_passage_or_in_none() -> None:
    tasks = load_tasks("documents:facts?size=200&seed=3", inputs=["question"])
    kinds = {kind: [task for task in tasks if task.task_type == kind] for kind in ("answerable", "removed")}
    assert {kind: len(tasks) for kind, tasks in kinds.items()} == {"answerable": 140, "removed": 60}
    for task in tasks:
        texts = [document["text"] for document in task.inputs["documents"]]
        assert len(texts) == len(set(texts)) == 20
        if task.task_type == "removed":
            assert dict(task.expected) == {"passages": []}
            continue
        (passage,) = task.expected["passages"]
        assert texts.count(passage) == 1
        assert task.expected["answer"] in passage


def test_the_same_seed_gives_the_same_tasks_and_splits_are_by_hash() -> None:
    first, again = (list(rows("facts?size=40&seed=1&passages=8&removed=0.3")) for _ in range(2))
    assert first == again
    assert first != list(rows("facts?size=40&seed=2&passages=8&removed=0.3"))
    assert not any("split" in row for _, row in first)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("documents:tales", "documents has no kind 'tales'"),
        ("documents:facts?removed=2", "removed is '2': it must be a number from 0 to 1"),
        ("documents:facts?passages=1", "passages is '1': it must be an integer >= 2"),
        ("documents:facts?words=3", r"unknown option 'words'\. The options are "),
    ],
)
def test_wrong_options_are_named(spec: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_tasks(spec)
