"""Items with labels of raters."""

from assay.judges.labels import Item, Rating


def item(number: int, *labels: str) -> Item:
    return Item(
        id=str(number),
        fields={"output": f"text {number}"},
        ratings=tuple(Rating(rater=str(i), label=label) for i, label in enumerate(labels)),
    )
