"""Draws a judge's reliability card with matplotlib."""

from pathlib import Path
from typing import Any

import numpy as np

from assay.errors import MissingExtra

__all__ = ["draw_card"]


def draw_card(card: dict[str, Any], path: Path) -> Path:
    """Draws the card as a PNG: agreement with the human ceiling, reliability diagram, confusion matrix.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("matplotlib", "plots") from error
    figure = Figure(figsize=(13, 4), layout="constrained")
    left_axes, middle, right = figure.subplots(1, 3)
    _draw_agreement(left_axes, card)
    middle.plot([0, 1], [0, 1], color="0.7", linestyle="--")
    for point in card["reliability"]:
        middle.scatter(point["confidence"], point["share"], s=20 + 3 * point["n"], color="tab:blue")
    middle.set(
        xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), xlabel="confidence of the verdict", ylabel="share of raters who agree"
    )
    summary = (
        "no probabilities"
        if card["calibration_error"] is None
        else f"calibration error {card['calibration_error']:.3f}, Brier {card['brier']:.3f}"
    )
    middle.set_title(f"reliability: {summary}", fontsize=10)
    table, labels = np.array(card["confusion"]["verdicts_by_people"]), card["confusion"]["labels"]
    right.imshow(table, cmap="Blues")
    for (row, column), value in np.ndenumerate(table):
        right.text(
            column, row, f"{value:.4g}", ha="center", va="center", color="white" if value > table.max() / 2 else "black"
        )
    right.set_xticks(range(len(labels)), labels, rotation=30)
    right.set_yticks(range(len(labels)), labels)
    right.set(xlabel="raters", ylabel="judge")
    right.set_title("confusion (items)", fontsize=10)
    figure.suptitle(f"reliability on {card['agreement']['n']} items of {card['split']}", fontsize=11)
    figure.savefig(path, dpi=120)
    return path


def _draw_agreement(axes: Any, card: dict[str, Any]) -> None:
    agreement, ceiling = card["agreement"], card["ceiling"]
    names = [
        name for name in ("accuracy", "kappa", "weighted_kappa", "alpha", "spearman") if agreement[name] is not None
    ]
    for at, name in enumerate(names):
        interval = agreement["intervals"].get(name)
        axes.plot(
            agreement[name],
            at,
            "o",
            color="tab:blue",
            label=("judge, 95 %" if any(agreement["intervals"].values()) else "judge") if not at else None,
        )
        if interval:
            axes.plot(interval, [at, at], color="tab:blue")
        if ceiling[name] is not None:
            axes.plot(
                ceiling[name],
                at,
                "|",
                color="tab:red",
                markersize=16,
                label="raters (one against the others)" if not at else None,
            )
    axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
    axes.set(xlim=(min(-0.1, *(agreement[name] for name in names)) if names else -0.1, 1.02))
    axes.invert_yaxis()
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)
    axes.set_title("agreement with raters", fontsize=10)
