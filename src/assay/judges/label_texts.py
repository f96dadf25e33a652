"""Labels as people's tools write them: one label against a scale, and the ratings in a row of a table."""

import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from assay.errors import DataError
from assay.support.missing import is_missing
from assay.support.number_texts import whole_number
from assay.support.settings import nearest

# what survey and spreadsheet tools write for a missing answer; a label of the scale that is spelled so is a label
_NO_LABEL = frozenset(
    ("", "-", "--", "–", "—", ".", "?", "n/a", "#n/a", "na", "n.a", "n.a.", "<na>", "nan", "nat", "null", "none", "nil",
     "skip", "skipped", "abstain", "missing", "not applicable", "no answer", "no label", "not rated", "unrated",
     "unlabeled", "unlabelled", "blank", "empty", "undefined", "unknown", "unsure", "not sure", "don't know",
     "do not know", "idk", "tbd", "pending")
)  # fmt: skip
# the words for true and false are also those that spreadsheets write in other languages
_YES = frozenset(
    ("yes", "true", "y", "t", "wahr", "vrai", "verdadero", "vero", "verdadeiro", "waar", "ja", "oui", "sí", "si", "sim",
     "да", "是", "はい", *"✓✔☑✅")
)  # fmt: skip
_NO = frozenset(
    ("no", "false", "n", "f", "falsch", "faux", "falso", "onwaar", "nein", "nee", "non", "não", "нет", "否", "いいえ",
     *"✗✘☒❌")
)  # fmt: skip
_GOOD = frozenset(("pass", "passed", "correct", "right", "good", "success", "accept", "accepted"))
_BAD = frozenset(("fail", "failed", "incorrect", "wrong", "bad", "failure", "reject", "rejected"))
_YES_LABELS, _NO_LABELS = _YES | _GOOD | {"1", "positive"}, _NO | _BAD | {"0", "negative"}
_QUOTES = "\"'“”„‘’‚«»()[]"
_OUT_OF = re.compile(r"(.+?)\s*(?:/|out of|of)\s*(.+)")
_NUMBER_AND_NAME = re.compile(r"([-+]?\d+(?:[.,]\d+)?)(?:\s*[-–:=.(]\s*|\s+)[^\W\d_][^\d]*")
_VALUE = r"(?:rating|label|score|annotation|grade|vote)s?"
# rater_alice; of names that also occur in other columns only with a number or a letter: human_A, score2, human_label_1
_PER_RATER = re.compile(
    rf"(?:rater|annotator|label+er)s?(?:[ _.:#-]*\d+(?:[ _.:-]+{_VALUE})?|[ _.:#-]+\w[\w .-]*)"
    rf"|(?:(?:human|reviewer|grader|assessor|coder|evaluator|expert|worker|judge|person|user)s?(?:[ _.:-]*{_VALUE})?|"
    rf"{_VALUE})(?:[ _.:#-]*\d+|[ _.:#-]+[a-z])(?:[ _.:-]+{_VALUE})?",
    re.IGNORECASE,
)
_ABOUT_RATING = re.compile(
    r".*[ _.:-](?:ids?|name|email|type|time|date|at|seconds|count|comments?|notes?|reasons?|rationale|confidence|mean|"
    r"average|median|std|agreement|version)",
    re.IGNORECASE,
)
_RATER_COLUMNS = ("rater", "rater_id", "annotator", "annotator_id", "worker_id", "reviewer", "reviewer_id")


class GivenRating(NamedTuple):
    """A rating in a row: its column, its rater if the row names one, and the value."""

    column: str
    rater: str | None
    value: Any


def ratings_in(row: Mapping[str, Any], judged: Collection[str]) -> list[GivenRating]:
    """The ratings of a row: of its column `label`, otherwise of its columns per rater, such as `rater_1` or `human A`.

    Missing ones are included.

    Args:
        judged: names of the columns that a judge sees.
    """
    if "label" in row:
        names = (row[name] for name in _RATER_COLUMNS if not is_missing(row.get(name)) and row[name] != "")
        return [GivenRating("label", next(map(id_text, names), None), row["label"])]
    return [GivenRating(name, name, row[name]) for name in rater_columns(row, judged)]


def rater_columns(row: Mapping[str, Any], judged: Collection[str]) -> list[str]:
    """Names of a row's columns about its ratings, except for `label`, `rationale` and ids of the item."""
    if "label" in row:
        return [name for name in _RATER_COLUMNS if name in row and name not in judged]
    return [
        name
        for name in row
        if name not in judged and _PER_RATER.fullmatch(name.strip()) and not _ABOUT_RATING.fullmatch(name.strip())
    ]


def id_text(value: Any) -> str:
    """An id as text; a table with gaps turns `3` into 3.0."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def read_label(value: Any, labels: Sequence[str], anchors: Mapping[str, str] | None = None) -> str | None:
    """The label of a scale that a value means; None if it says that there is none, such as `N/A`, `-` or NaN.

    - Case, white space around and between words, `_` and `-` between words, quotes and brackets around the label and
      one of `.,:;!` after it make no difference.
    - On a scale of numbers: `4.0`, `4,0`, `4/5` and `4 out of 5` (of the highest label), `80 %` (on a scale up to 1 or
      100), and a number with its name, as in `4 - good`.
    - `true`, `yes`, `y`, `t`, a check mark and `false`, `no`, `n`, `f`, a cross, also in some other languages, are the
      one label for yes and the one for no, such as `pass` and `fail`; on a scale of two labels 1 and 0 are too.
    - On a scale of two labels for quality, such as `pass` and `fail`, other words for quality are read: `passed`,
      `wrong`. A yes to "Is it harmful?" is no `good`, so that they are refused on other scales.
    - The meaning of a label in `anchors` is the label.

    Raises:
        DataError: no label of the scale; with the nearest one.
    """
    if is_missing(value):
        return None
    raw = str(value).strip()
    if raw in labels:
        return raw
    text = _normal(raw)
    by_text = {_normal(meaning): label for label, meaning in (anchors or {}).items()}
    by_text |= {_normal(label): label for label in labels}
    if text in by_text:
        return by_text[text]
    if text in _NO_LABEL or raw in _NO_LABEL:
        return None
    numbers = {number: label for label in labels if (number := _number(_normal(label))) is not None}
    if len(numbers) < len(labels):
        numbers = {}
    number = _on_scale(text, list(numbers))
    if number in numbers:
        return numbers[number]
    if (label := _yes_or_no(text, labels)) is not None:
        return label
    if number is not None and numbers:
        near: str | None = numbers[min(numbers, key=lambda other: abs(other - number))]
    else:
        near = nearest(text, labels)
    hint = "" if near is None else f". The nearest is {near!r}"
    raise DataError(f"the label {value!r} is not on the judge's scale {list(labels)}{hint}")


def _normal(text: str) -> str:
    text = unicodedata.normalize("NFKC", text.replace("\ufe0f", ""))  # without the mark of a coloured sign
    text = " ".join(text.casefold().split()).strip(_QUOTES).rstrip(".,:;! ")
    text = re.sub(r" ?/ ?", "/", text)
    return re.sub(r"(?<=[^\W\d])[-_ ]+(?=[^\W\d])", " ", text)


def _number(text: str) -> float | None:
    """The number that a text is, or begins with if a name follows."""
    if match := _NUMBER_AND_NAME.fullmatch(text):
        text = match[1]
    return whole_number(text)


def _on_scale(text: str, numbers: Sequence[float]) -> float | None:
    """The number of a label; None if it has none, or counts up to another number than the scale's highest."""
    if numbers and (match := _OUT_OF.fullmatch(text)) and whole_number(match[2]) is not None:
        return _number(match[1]) if whole_number(match[2]) == max(numbers) else None
    if text.endswith("%"):
        percent = whole_number(text)
        whole = max(numbers, default=None)
        return None if percent is None or whole not in (1, 100) else percent * whole / 100
    return _number(text)


def _yes_or_no(text: str, labels: Sequence[str]) -> str | None:
    yes = [label for label in labels if _normal(label) in _YES_LABELS]
    no = [label for label in labels if _normal(label) in _NO_LABELS]
    if len(yes) != 1 or len(no) != 1:
        return None
    if len(labels) > 2:
        return yes[0] if text in _YES else no[0] if text in _NO else None
    quality = _normal(yes[0]) in _GOOD and _normal(no[0]) in _BAD
    digit = whole_number(text)
    if text in _YES or digit == 1 or (quality and text in _GOOD):
        return yes[0]
    return no[0] if text in _NO or digit == 0 or (quality and text in _BAD) else None
