"""Where the cycles of a loop stand: which step comes next, when the next cycle is due, what the budget leaves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from assay.deployment.loops import DONE, ENDED, FAILED, RUNNING, STEPS, WAITING, LoopStep

_WEEK_S = 7 * 86400.0
_TOLERANCE_S = 60.0  # of clocks


@dataclass(frozen=True, kw_only=True)
class Position:
    """The cycle that is to be continued.

    Attributes:
        cycle: its number, from 1.
        steps: its steps so far, by name.
        step: the next one, or the one that was started and has not ended.
    """

    cycle: int
    steps: Mapping[str, LoopStep]
    step: str

    @property
    def attempts(self) -> int:
        """How often the next step was begun before, and was killed or failed."""
        before = self.steps.get(self.step)
        return before.attempts if before is not None and before.status in (RUNNING, FAILED) else 0

    @property
    def improves(self) -> bool:
        """Whether the improvement has begun, so that the cycle is no longer one that waits for data."""
        return "improve" in self.steps


def position(steps: Sequence[LoopStep], attempts: int) -> Position:
    """The next step of the newest cycle, or the first of a new one.

    A cycle whose pool has too little begins again with the pool. A step that failed, or whose process was killed, is
    begun again until it had `attempts`.
    """
    number = max((step.cycle for step in steps), default=0)
    last = {step.step: step for step in steps if step.cycle == number}
    if not last or _is_closed(last, attempts):
        return Position(cycle=number + 1, steps={}, step=STEPS[0])
    if any(last[name].status == WAITING for name in ("pool", "gates") if name in last):
        return Position(cycle=number, steps=last, step=STEPS[0])
    done = next(name for name in STEPS if name not in last or last[name].status != DONE)
    return Position(cycle=number, steps=last, step=done)


def _is_closed(steps: Mapping[str, LoopStep], attempts: int) -> bool:
    if "deploy" in steps and steps["deploy"].status == DONE:
        return True
    return any(step.status == ENDED or (step.status == FAILED and step.attempts >= attempts) for step in steps.values())


def due_in(steps: Sequence[LoopStep], every_s: float, now: float) -> float:
    """Seconds until the next cycle may improve; 0 if it may now. A cycle counts from the start of its improvement.

    If the newest one began in the future, a clock was changed: the next cycle may begin, and counts from then on.
    """
    begun = next((step.started_at for step in reversed(steps) if step.step == "improve"), None)
    if begun is None or begun > now + _TOLERANCE_S:
        return 0.0
    return max(0.0, begun + every_s - now)


def spent(steps: Sequence[LoopStep], now: float) -> tuple[int, float]:
    """LM calls and dollars of the improvements that began in the last seven days, or in the future by this clock."""
    recent = [step.detail for step in steps if step.step == "improve" and step.started_at > now - _WEEK_S]
    return sum(int(d.get("calls") or 0) for d in recent), sum(float(d.get("cost_usd") or 0.0) for d in recent)
