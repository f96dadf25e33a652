"""Labels of several raters: files, merged ratings, splits."""

import json
from pathlib import Path
from typing import Any

import pytest
from labelled_items import item

from assay.errors import DataError
from assay.judges.labels import Item, Rating, load_labels, make_items, split_items


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_ratings_of_one_item_are_merged_with_their_disagreement(tmp_path: Path) -> None:
    rows = [
        {"item_id": "a", "output": "x", "rater": "1", "label": "Yes ", "rationale": "clear"},
        {"item_id": "a", "output": "x", "rater": "2", "label": "no"},
        {"item_id": "a", "output": "x", "rater": "3", "label": None},
        {"item_id": "a", "output": "x", "rater": "2", "label": "yes"},
        {"output": "y", "label": "no"},
    ]
    first, second = load_labels(write(tmp_path / "l.jsonl", rows), labels=("no", "yes"))
    assert first.shares == {"yes": 1.0}  # the second rater's last label counts, the third gave none
    assert first.rationales == ["yes: clear"]
    assert second.shares == {"no": 1.0}


def test_ratings_without_a_rater_or_by_rater_0_count(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"output": "x", "label": label} for label in ("no", "yes", "yes")]
    rows += [{"output": "y", "rater": 0, "label": "no"}, {"output": "y", "rater": 0, "label": "yes"}]
    first, second = load_labels(write(tmp_path / "l.jsonl", rows), labels=("no", "yes"))
    assert first.shares == {"no": pytest.approx(1 / 3), "yes": pytest.approx(2 / 3)}
    assert [(rating.rater, rating.label) for rating in second.ratings] == [("0", "yes")]


def test_rating_columns_do_not_create_another_item(tmp_path: Path) -> None:
    rows = [{"output": "x", "rater": str(i), "label": "no", "seconds": i, "model": "m"} for i in range(3)]
    (loaded,) = load_labels(write(tmp_path / "l.jsonl", rows), labels=("no", "yes"))
    assert (len(loaded.ratings), loaded.fields, loaded.columns) == (3, {"output": "x"}, {"model": "m"})
    judged = load_labels(write(tmp_path / "l.jsonl", rows), labels=("no", "yes"), shows=("seconds", "output"))
    assert len(judged) == 3


def test_the_splits_of_a_store_stand_for_labels() -> None:
    rows = [(f"l.csv:{at}", {"output": f"text number {at}", "label": "no", "split": "train"}) for at in range(8)]
    rows += [(f"l.csv:{at}", {"output": f"text number {at}", "label": "no"}) for at in range(8, 60)]
    items = make_items(rows, labels=("no", "yes"))
    known = {item.key: "test" for item in items[:3]}
    splits = split_items(items, known=known)
    assert {item.id for item in items[:3]} <= {item.id for item in splits.test}
    moved = splits.report().to_dict()["split_kept"]
    assert moved["rows"][:3] == [{"row": f"l.csv:{at}", "wanted": "train", "split": "test"} for at in range(3)]


@pytest.mark.parametrize("count", [4, 5, 10, 39])
def test_few_items_leave_no_split_empty(count: int) -> None:
    splits = split_items([item(n, "no") for n in range(count)])
    assert min(splits.sizes().values()) >= 1
    assert sum(splits.sizes().values()) == count


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"output": "x", "label": "maybe"}, r"l\.jsonl:2: the label 'maybe' is not on the judge's scale"),
        ({"label": "yes"}, r"l\.jsonl:2: expected the judged content in 'output'.*rename=\{'answer': 'output'\}"),
        (
            {"output_a": "x", "label": "yes"},
            r"l\.jsonl:2: expected the judged content in 'output'.*rename=\{'answer': 'output'\}",
        ),
        (
            {"item_id": "a", "output": "other", "label": "yes"},
            r"l\.jsonl:2: item 'a' has another output in an earlier row",
        ),
        ({"output": "x", "label": "yes", "split": "exam"}, r"l\.jsonl:2: unknown split 'exam'"),
    ],
)
def test_wrong_rows_are_named_with_their_line(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    spec = write(tmp_path / "l.jsonl", [{"item_id": "a", "output": "x", "label": "no"}, row])
    with pytest.raises(DataError, match=message):
        load_labels(spec, labels=("no", "yes"))


def test_a_label_file_without_labels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none of its 1 rows has a label"):
        load_labels(write(tmp_path / "l.jsonl", [{"output": "x", "label": ""}]), labels=("no", "yes"))


def test_items_are_split_by_content_in_any_order_and_a_limit_keeps_class_shares() -> None:
    items = [item(n, "yes" if n % 4 == 0 else "no") for n in range(400)]
    splits, turned = split_items(items), split_items(items[::-1])
    assert {i.id for i in splits.test} == {i.id for i in turned.test}
    limited = split_items(items, limits={"train": 40}).train
    share = sum(i.modes[0] == "yes" for i in splits.train) / len(splits.train)
    assert len(limited) == 40
    assert sum(i.modes[0] == "yes" for i in limited) == round(40 * share)


def test_repeated_content_is_in_one_split() -> None:
    items = [
        Item(id=f"{n}-{repeated}", fields={"output": str(n)}, ratings=(Rating(rater="1", label="yes"),))
        for n in range(100)
        for repeated in range(2)
    ]
    splits = split_items(items)
    assert sum(splits.sizes().values()) == 200
    names = {part.id: name for name in ("train", "val", "gate", "test") for part in getattr(splits, name)}
    assert all(names[f"{n}-0"] == names[f"{n}-1"] for n in range(100))
