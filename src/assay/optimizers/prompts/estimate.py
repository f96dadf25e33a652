"""What a compile will probably take, before it starts. A forecast from the program's form; no model is asked."""

from dataclasses import asdict, dataclass
from typing import Any

import dspy

from assay.datasets import Splits
from assay.evaluation.session import RecordedProgram, Session
from assay.models import LanguageModel, count_tokens
from assay.models.prices import price
from assay.programs import ToolAgent
from assay.support.numbers import counted

__all__ = ["Estimate", "calls_per_run", "estimate_compile", "minutes_text", "price_of"]

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


def minutes_text(minutes: float) -> str:
    """A duration as one says it."""
    return "under a minute" if minutes < 1 else f"about {counted(round(minutes), 'minutes')}"


def estimate_compile(
    student: RecordedProgram, splits: Splits, session: Session, *, demos: int, reported: int
) -> Estimate:
    """Search as far as its cap allows (else ten passes over val), then gate and test.

    Args:
        reported: calls that gate and test are expected to take, see `assay.optimizers.prompts.reserve`; a cap on calls
            keeps them from the search.
    """
    sizes, runs, caps = splits.sizes(), calls_per_run(student.program), session.meter.caps
    judges = sum(c.judge is not None for c in session.rubric.finals)
    search = caps.search_calls if caps.search_calls is not None else 10 * min(50, sizes["val"]) * runs
    if caps.calls is not None:
        search = min(search, max(0, caps.calls - reported))
    calls = search + reported
    judged = round(calls * judges / (runs + judges))  # while searching, too, each run is judged
    task = splits.train[0] if splits.train else splits.val[0]
    task_tokens = count_tokens(session.lm, str(dict(task.inputs))) + count_tokens(session.lm, str(dict(task.expected)))
    prompt = 120 + task_tokens * (1 + demos)
    shares = [(session.lm, calls - judged), *([(session.judge_lm or session.lm, judged)] if judged else [])]
    prices = [price_of(lm, count * prompt, count * _OUTPUT_TOKENS) for lm, count in shares]
    if session.prompt_lm is not None and price_of(session.prompt_lm, 1, 1) != 0:
        prices.append(None)  # how often a reflecting model is asked is not known before
    known_prices = [price for price in prices if price is not None]
    return Estimate(
        search,
        calls,
        calls * (prompt + _OUTPUT_TOKENS),
        sum(known_prices) if len(known_prices) == len(prices) else None,
    )


def price_of(lm: Any, prompt_tokens: int = 1, completion_tokens: int = 1) -> float | None:
    """As `assay.models.prices.price`, for a model as an object."""
    own = lm.recording.price if isinstance(lm, LanguageModel) else None
    return price(lm.model, prompt_tokens, completion_tokens, own=own)
