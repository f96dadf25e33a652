"""A shipped program as it comes and compiled, on sealed test tasks: what several measurements share."""

import copy
from dataclasses import dataclass
from typing import Any

import assay
from assay.evaluation import Evaluation
from claims.storing import Lines, Setting

__all__ = ["Compiling"]


@dataclass(frozen=True, kw_only=True)
class Compiling:
    """How a program is compiled and evaluated.

    Attributes:
        name: of its store and artifact.
        test: number of sealed test tasks.
    """

    name: str
    rubric: str
    data: str
    search_calls: int
    demos: int
    sizes: dict[str, int]
    test: int
    gate: bool = False  # whether the gate split decides if the result replaces the program; else the winner is reported

    def before_and_after(self, setting: Setting, plain: Any) -> tuple[dict[str, Evaluation], dict[str, Any]]:
        """Evaluations `before` and `after`, and facts about the search."""
        report = assay.compile(
            copy.deepcopy(plain),
            prompt_format="lean",
            max_search_calls=self.search_calls,
            demos=self.demos,
            sizes=self.sizes,
            gate=self.gate,
            test=False,
            out=setting.scratch / self.name,
            **self._common(setting),
        )
        sides: dict[str, Any] = {"before": plain, "after": report.artifact}
        evaluations = {side: self.evaluated(setting, program) for side, program in sides.items()}
        written = report.to_dict()
        facts = {"winner": report.outcome.winner, "search_calls": written["search_calls"], "gate": written["gate"]}
        return evaluations, facts

    def evaluated(self, setting: Setting, program: Any, model: str | None = None) -> Evaluation:
        """On the sealed test tasks. `model`: by default that of the setting."""
        common = self._common(setting) | ({"model": model} if model else {})
        return assay.evaluate(copy.deepcopy(program), split="test", sizes={"test": self.test}, **common).evaluation

    def _common(self, setting: Setting) -> dict[str, Any]:
        return {
            "rubric": self.rubric,
            "data": f"{self.data}&seed={setting.seed}",
            "model": setting.model,
            "seed": setting.seed,
            "parameters": {"temperature": 0.1},
            "store": setting.scratch / f"{self.name}.db",
            "threads": 1,
            "progress": Lines(),
        }
