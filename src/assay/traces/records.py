"""Plain records: a rollout, its transitions, its tool calls, its verdicts. No behaviour; the rooms above fill them."""

import hashlib
import os
import random
import time
from dataclasses import dataclass, field
from typing import Any

from assay.errors import FailureKind

__all__ = ["Rollout", "ToolCall", "Transition", "Verdict", "new_id", "person_digest", "subject_digest"]


_random = random.Random()  # seeded by the system, and by nobody else: asking the system for each id gives up the interpreter's lock
os.register_at_fork(after_in_child=_random.seed)


def new_id() -> str:
    """32 hex digits; ids made later sort later (milliseconds first)."""
    return f"{time.time_ns() // 1_000_000:012x}{_random.getrandbits(80):020x}"


def person_digest(name: str) -> str:
    """A short hash of a rater's or data subject's name, by which what was made from somebody's data is found."""
    return hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:16]


def subject_digest(name: str) -> str:
    """The same of a data subject's name or id, whatever its case and spaces."""
    return person_digest(" ".join(name.casefold().split()))


@dataclass(kw_only=True)
class ToolCall:
    """One tool call; exactly one of `result` and `error` is set once it has ended."""

    name: str
    arguments: dict[str, Any]
    result: str | None = None
    error: str | None = None


@dataclass(kw_only=True)
class Verdict:
    """What a check or judge said of one criterion. `grade` is in [0, 1], or None with a `reason`: unscored.

    `applies` is False where the criterion counts only `when` another one passed, and that one did not: neither graded nor unscored.
    """

    criterion: str
    grade: float | None
    weight: float = 1.0
    scope: str = "final"
    reason: str = ""
    label: str | None = None
    confidence: float | None = None
    cost_usd: float = 0.0
    applies: bool = True


@dataclass(kw_only=True)
class Transition:
    """One LM call of a rollout, at turn `t` (from 0)."""

    t: int
    model: str
    weights: str = ""
    adapters: tuple[str, ...] = ()
    request: dict[str, Any]
    response: dict[str, Any] | None = None
    output: str = ""
    error: str | None = None
    failure: FailureKind | None = None
    tools: list[ToolCall] = field(default_factory=list)
    constrained: bool = False
    cached: bool = False
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    thinking_tokens: int | None = None  # of the completion tokens; None where the engine does not say
    shown_tasks: tuple[str, ...] = ()  # content hashes of the tasks that its demonstrations came from
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    latency_ms: float = 0.0
    cost_usd: float | None = None
    started_at: float = 0.0
    step_rewards: dict[str, float] = field(default_factory=dict)
    return_: float | None = None


@dataclass(kw_only=True)
class Rollout:
    """One run of a program on one task.

    `status` is `running`, `done`, `failed` (the agent's own failure: it counts as a score of 0) or `error`
    (the model or the machinery failed: unscored). `score` is in [0, 1] or None: unscored.
    """

    id: str = field(default_factory=new_id)
    run_id: str = ""
    task_id: str = ""
    task_type: str = "default"
    group_id: str = ""
    sample: int = 0
    program: str = ""
    program_version: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    adapters: tuple[str, ...] = ()
    seed: int | None = None
    split: str = ""
    phase: str = ""
    source: str = "program"
    status: str = "running"
    inputs: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, Any] = field(default_factory=dict)  # what the task expects
    metadata: dict[str, Any] = field(default_factory=dict)  # of the task: difficulty, known entities, whatever a rubric reads
    prediction: dict[str, Any] | None = None
    error: str | None = None
    failure: FailureKind | None = None  # set where `status` is `failed` or `error`, and `check` or `judge` where it ran and could not be scored
    rubric: str = ""
    score: float | None = None
    coverage: float | None = None
    verdicts: list[Verdict] = field(default_factory=list)
    human_rating: float | None = None
    tenant: str | None = None
    data_subject: str | None = None
    consent: str | None = None
    started_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    early_tools: list[ToolCall] = field(default_factory=list)  # called before the first LM call
    transitions: list[Transition] = field(default_factory=list)

    @property
    def tools(self) -> list[ToolCall]:
        """All tool calls, in order."""
        return self.early_tools + [tool for transition in self.transitions for tool in transition.tools]

    @property
    def quality(self) -> float | None:
        """A person's rating where there is one, else the score; None where neither is known or it is not in [0, 1]."""
        found = self.human_rating if self.human_rating is not None else self.score
        return found if found is not None and 0 <= found <= 1 else None

    @property
    def unpriced(self) -> bool:
        """Whether a call that was made has no known price."""
        return any(t.cost_usd is None and t.error is None and not t.cached for t in self.transitions)

    @property
    def cost_usd(self) -> float:
        """What its calls cost, where the price is known; answers from the cache cost nothing."""
        return sum(t.cost_usd or 0.0 for t in self.transitions if not t.cached)

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens over all calls, cached ones included."""
        return sum((t.prompt_tokens or 0) + (t.completion_tokens or 0) for t in self.transitions)
