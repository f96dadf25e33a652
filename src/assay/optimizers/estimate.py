"""What a compile will probably take, before it starts. A forecast from the program's form; no model is asked."""

from dataclasses import asdict, dataclass
from typing import Any

import dspy

from assay.datasets import Splits
from assay.models import count_tokens
from assay.models.hosted import quiet_litellm
from assay.models.roles import is_embedded
from assay.optimizers.session import Session, Student
from assay.programs import ToolAgent

__all__ = ["Estimate", "estimate_compile", "price_of"]

_OUTPUT_TOKENS = 40


@dataclass(frozen=True)
class Estimate:
    """`cost_usd` is None where no price is known for the model."""

    search_calls: int
    calls: int
    tokens: int
    cost_usd: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def calls_per_run(program: dspy.Module) -> int:
    """A tool agent decides, calls, decides and answers; any other program is taken to ask each predictor once."""
    return 4 if isinstance(program, ToolAgent) else max(1, len(program.predictors()))


def estimate_compile(student: Student, splits: Splits, session: Session, *, demos: int) -> Estimate:
    """Search as far as its cap allows (else ten passes over val), then gate and test for two programs."""
    sizes, runs = splits.sizes(), calls_per_run(student.program)
    cap = session.meter.caps.search_calls
    search = cap if cap is not None else 10 * min(50, sizes["val"]) * runs
    judges = sum(c.judge is not None for c in session.rubric.finals)
    reported = 2 * (sizes["gate"] + sizes["test"])
    calls = search + reported * (runs + judges)
    judged = round(calls * judges / (runs + judges))  # while searching, too, each run is judged
    if session.meter.caps.calls is not None:
        calls = min(calls, session.meter.caps.calls)
        search = min(search, calls)
        judged = min(judged, calls)
    task = splits.train[0] if splits.train else splits.val[0]
    shown = count_tokens(session.lm, str(dict(task.inputs))) + count_tokens(session.lm, str(dict(task.expected)))
    prompt = 120 + shown * (1 + demos)
    shares = [(session.lm, calls - judged), *([(session.judge_lm or session.lm, judged)] if judged else [])]
    prices = [price_of(lm, count * prompt, count * _OUTPUT_TOKENS) for lm, count in shares]
    if session.prompt_lm is not None and price_of(session.prompt_lm, 1, 1) != 0:
        prices.append(None)  # how often a reflecting model is asked is not known before
    known = [price for price in prices if price is not None]
    return Estimate(search, calls, calls * (prompt + _OUTPUT_TOKENS), sum(known) if len(known) == len(prices) else None)


def price_of(lm: Any, prompt_tokens: int = 1, completion_tokens: int = 1) -> float | None:
    """Dollars for so many tokens, 0 for embedded models, None where no price is known."""
    if is_embedded(lm.model):
        return 0.0
    try:
        return float(sum(quiet_litellm().cost_per_token(model=lm.model, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)))
    except Exception:  # litellm raises its own kinds for models it has no price for
        return None
