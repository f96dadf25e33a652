"""Items with human ratings for a judge, and the fields of them that the judge sees."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from assay.errors import ConfigError, DataError
from assay.judges import Cascade, Judge, Jury, PointwiseJudge, load_labels
from assay.judges.base import rebuilt
from assay.judges.labels import Item, LabelledItems, make_items
from assay.judges.questions import is_needed, key_of
from assay.traces import Store


def rated_items(labels: str, judge: Judge, rename: Mapping[str, str], store: str | Path | None) -> LabelledItems:
    """Loads items with ratings from a source; `store` means the labels made with `assay judge label`."""
    if labels != "store":
        return load_labels(labels, labels=judge.labels, rename=rename, shows=judge.shows, anchors=judge.spec.anchors)
    with Store(store) as opened:
        rows = [(f"label {index + 1} of the store", row) for index, row in enumerate(opened.labels(key_of(judge)))]
    if not rows:
        raise DataError(
            "the store has no labels for this judge's question and scale; collect some with assay judge label"
        )
    return make_items(rows, labels=judge.labels, spec="the store", shows=judge.shows)


def need_fields(judge: Judge, items: Sequence[Item], *, optional: Collection[str] = ()) -> None:
    """Raises `ConfigError` if no item has a field that the judge needs."""
    for name in judge.shows:
        if name not in optional and not any(name in item.fields for item in items):
            raise ConfigError(
                f"the judge sees {list(judge.shows)}, but no item has {name!r}; they have {sorted(items[0].fields)}. "
                "Rename a column"
            )


def with_fields(judge: Judge, fields: Sequence[str]) -> Judge:
    """A copy of the judge that is shown other fields. A jury or cascade has no own fields: its members do."""
    if not isinstance(judge, PointwiseJudge):
        raise ConfigError(
            f"shows={list(fields)!r} must be set in the files of this {type(judge).__name__.lower()}'s members: it has "
            "no question of its own",
            flag="--shows",
        )
    seeing = rebuilt(type(judge), {**judge.config, "shows": list(fields)})
    for (_, old), (_, new) in zip(judge.named_predictors(), seeing.named_predictors(), strict=True):
        new.demos, new.signature = old.demos, new.signature.with_instructions(old.signature.instructions)
    return seeing


def without_absent_fields(judge: Judge, items: Sequence[Item]) -> Judge:
    """The judge without inputs that no item has: labels of outputs alone need no input."""
    if isinstance(judge, Jury):
        return Jury(
            [without_absent_fields(member, items) for member in judge.members],
            how=judge.how,
            weights=judge.weights,
            calibration=judge.calibration,
        )
    if isinstance(judge, Cascade):
        return Cascade(
            without_absent_fields(judge.first, items),
            without_absent_fields(judge.second, items),
            least=judge.least,
            calibration=judge.calibration,
        )
    present = [name for name in judge.shows if is_needed(name) or any(name in item.fields for item in items)]
    if tuple(present) == judge.shows or not present or not isinstance(judge, PointwiseJudge):
        return judge
    return with_fields(judge, present)
