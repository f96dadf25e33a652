"""Labels as people's tools write them, and tables with a column per rater."""

import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy
import pandas
import pytest

from assay.datasets.memory import data_spec
from assay.errors import DataError
from assay.judges import load_labels
from assay.judges.labels import read_label

FIVE = ("1", "2", "3", "4", "5")


@pytest.mark.parametrize(
    "value",
    [
        *(4, 4.0, Decimal("4.0"), numpy.int64(4), numpy.float64(4), "4", " 4 ", "4.0", "4,0", "4.", "+4", "4/5"),
        *("4 / 5", "4.0/5", "4 out of 5", "4 of 5", "４", "4 - good", "4: good", "4 (good)", "4. good", "4 stars"),
        *("4,", "Good", "Good.", "(4)", "[4]", "4)"),
    ],
)
def test_a_label_on_a_scale_of_numbers_is_read_in_every_spelling(value: Any) -> None:
    assert read_label(value, FIVE, {"4": "good", "5": "very good"}) == "4"


@pytest.mark.parametrize(
    ("value", "labels", "label"),
    [
        (True, ("no", "yes"), "yes"),
        (False, ("no", "yes"), "no"),
        ("TRUE", ("fail", "pass"), "pass"),
        ("False", ("incorrect", "correct"), "incorrect"),
        ("Y", ("no", "yes"), "yes"),
        ("Yes!", ("no", "yes"), "yes"),
        ("WAHR", ("no", "yes"), "yes"),
        ("FAUX", ("fail", "pass"), "fail"),
        ("Нет", ("no", "yes"), "no"),
        ("TRUE", ("nein", "ja"), "ja"),
        ("Failure", ("fail", "pass"), "fail"),
        ("(B)", ("A", "B", "C"), "B"),
        ("✓", ("fail", "pass"), "pass"),
        ("✔\ufe0f", ("fail", "pass"), "pass"),
        ("“Pass”", ("fail", "pass"), "pass"),
        ("«Fail»", ("fail", "pass"), "fail"),
        ("❌", ("fail", "unclear", "pass"), "fail"),
        ("PASSED", ("fail", "pass"), "pass"),
        ("wrong", ("fail", "pass"), "fail"),
        ("failed", ("bad", "good"), "bad"),
        (True, ("negative", "positive"), "positive"),
        ("wrong", ("incorrect", "correct"), "incorrect"),
        (1, ("no", "yes"), "yes"),
        (0.0, ("no", "yes"), "no"),
        ("true", ("0", "1"), "1"),
        ("1.0", ("0", "1"), "1"),
        ("F", ("no", "partly", "yes"), "no"),
        (1.0, ("false", "true"), "true"),
        ("80%", ("0", "80", "100"), "80"),
        ("50 %", ("0", "0.5", "1"), "0.5"),
        ("Good ", ("bad", "good"), "good"),
        ("very_good", ("good", "very good"), "very good"),
        ("Very  Good", ("good", "very-good"), "very-good"),
        ("none", ("none", "some"), "none"),
        ("N/A", ("ok", "n/a"), "n/a"),
        ("A", ("A", "a"), "A"),
        ("a", ("A", "a"), "a"),
        (-1, ("-1", "0", "1"), "-1"),
        ("4", ("4 - good", "5 - best"), "4 - good"),
    ],
)
def test_a_label_is_read_on_scales_of_words(value: Any, labels: tuple[str, ...], label: str) -> None:
    assert read_label(value, labels) == label


@pytest.mark.parametrize(
    "value",
    [
        *(None, math.nan, pandas.NA, pandas.NaT, "", " ", "N/A", "n/a", "NA", "#N/A", "nan", "NULL", "None", "-"),
        *("–", "?", "skip", "(blank)", "Don't know", "unsure"),
    ],
)
def test_marks_of_a_missing_label_are_no_label(value: Any) -> None:
    assert read_label(value, FIVE) is None
    assert read_label(value, ("no", "yes")) is None


@pytest.mark.parametrize(
    ("value", "labels", "near"),
    [
        (6, FIVE, "'5'"),
        ("0", FIVE, "'1'"),
        (4.5, FIVE, "'4'"),
        ("4/10", FIVE, ""),
        ("80%", FIVE, ""),
        ("goood", ("bad", "good"), "'good'"),
        ("3 or 4", FIVE, ""),
        ("TRUE", ("bad", "ok", "great"), ""),
        (1, ("no", "partly", "yes"), ""),
        ("-1", FIVE, "'1'"),
        (2, ("bad", "ok", "good"), ""),
        ("1", ("low", "high"), ""),
        *((value, ("no", "yes"), "") for value in ("bad", "good", "wrong", "correct", "passed", "Reject", "positive")),
        *((value, ("0", "1"), "") for value in ("bad", "good", "pass", "negative")),
        ("good", ("negative", "positive"), ""),
    ],
)
def test_a_label_off_the_scale_is_refused_with_the_nearest_one(value: Any, labels: tuple[str, ...], near: str) -> None:
    with pytest.raises(DataError) as caught:
        read_label(value, labels)
    assert all(repr(part) in str(caught.value) for part in (value, *labels))
    assert str(caught.value).endswith(near)


@pytest.mark.parametrize(
    "names",
    [
        ("rater_1", "rater_2", "rater_3"),
        ("annotator1", "annotator2", "annotator3"),
        ("human_A", "human_B", "human_C"),
        ("Rater 1", "Rater 2", "Rater 3"),
        ("score_1", "score_2", "score_3"),
        ("labeler-ann", "labeler-bob", "labeler-cy"),
        ("label_1", "label_2", "label_3"),
        ("rater1_label", "rater2_label", "rater3_label"),
        ("human_label_1", "human_label_2", "human_label_3"),
        ("Expert Rating A", "Expert Rating B", "Expert Rating C"),
        ("vote1", "vote2", "vote3"),
    ],
)
@pytest.mark.parametrize("form", ["csv", "frame", "jsonl"])
def test_a_table_with_a_column_per_rater_gives_each_rating(tmp_path: Path, names: tuple[str, ...], form: str) -> None:
    rows = [("x", 4, 5, None), ("y", None, None, None), ("z", 1, 1, 2)]
    frame = pandas.DataFrame(rows, columns=["output", *names])
    frame["user_query"] = "a question"
    source: Any = frame
    if form == "csv":
        source = str(tmp_path / "l.csv")
        frame.to_csv(source, index=False)
    elif form == "jsonl":
        source = str(tmp_path / "l.jsonl")
        frame.to_json(source, orient="records", lines=True)
    items = load_labels(data_spec(source), labels=FIVE)
    found = {item.fields["output"]: [(rating.rater, rating.label) for rating in item.ratings] for item in items}
    assert found == {"x": list(zip(names, "45", strict=False)), "z": list(zip(names, "112", strict=True))}
    assert items.gaps == 4
    assert all(item.columns == {"user_query": "a question"} for item in items)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("output,rater_1,rater_2\nx,4,5\ny,4,seven\n", r"l\.csv:3.*'seven'.*rater_2"),
        ("output,label\nx,4\ny,9\n", r"l\.csv:3.*'9'.*'5'"),
        ("output,verdict\nx,4\n", r"l\.csv.*rater_1"),
    ],
)
def test_an_error_names_row_column_and_scale(tmp_path: Path, text: str, place: str) -> None:
    (tmp_path / "l.csv").write_text(text)
    with pytest.raises(DataError, match=place):
        load_labels(str(tmp_path / "l.csv"), labels=FIVE)
