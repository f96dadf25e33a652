"""Short `repr` and notebook table for reports. Imports no other part of assay, so that any package can use it."""

import html
from typing import TYPE_CHECKING, Any

from assay.support.numbers import figure, signed

__all__ = ["ReportRepr", "measure_text", "shortened"]

_FIRST = (
    "artifact", "path", "name", "agent", "deployment", "status", "stage", "share", "decision", "action", "split",
    "winner", "best", "replaces",
)  # fmt: skip
_LAST = (
    "rollouts", "rows", "passed", "steps", "best_step", "agreement", "converged", "calls", "cost_usd", "reason",
    "stopped",
)  # fmt: skip
_COMPARED = ("a", "b", "gain")  # scores of two sides, and their difference
_FEW, _MANY = 3, 8  # facts; a report that has fewer than `_FEW` of the names above shows others


class ReportRepr:
    """Base of reports: `repr` is one line, notebooks show a small table. The data is in `to_dict()`.

    A report without `to_dict`, or whose values are of another form, overrides `_facts`.
    """

    if TYPE_CHECKING:

        def to_dict(self) -> dict[str, Any]: ...

    def _facts(self) -> list[tuple[str, str]]:
        data = self.to_dict()
        facts = [(key, data[key]) for key in _FIRST if data.get(key) is not None]
        compared = ((key, data.get(key)) for key in _COMPARED)
        for key, part in (("score", data.get("result")), *compared, *(data.get("test") or {}).items()):
            if isinstance(part, dict) and part:
                facts.append((key, measure_text(part, change=key == "gain")))
        facts += [(key, data[key]) for key in _LAST if isinstance(data.get(key), str | int | float)]
        if len(facts) < _FEW:
            known = {key for key, _ in facts}
            more = ((key, value) for key, value in data.items() if key not in known)
            facts += [(key, value) for key, value in more if isinstance(value, str | int | float)][:_MANY]
        return [(key, shortened(value)) for key, value in facts]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value}' for key, value in self._facts())})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{html.escape(key)}</th><td>{html.escape(value)}</td></tr>" for key, value in self._facts()
        )
        return f"<table><caption>{html.escape(type(self).__name__)}</caption>{rows}</table>"


def measure_text(part: dict[str, Any], *, change: bool = False) -> str:
    """A score with its interval, or a difference with its sign."""
    text = signed if change else figure
    value = part.get("score", part.get("mean", part.get("kappa")))
    low, high = part.get("interval") or (part.get("low"), part.get("high"))
    if value is None:
        return "unscored"
    return text(value) + (f" [{text(low)}, {text(high)}]" if low is not None and high is not None else "")


def shortened(value: Any) -> str:
    """A value as text of at most 80 characters."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
