"""State of one open rollout in the gateway, which only `assay.traces.gateway.sessions` changes."""

import time
from dataclasses import dataclass, field
from typing import Any

from assay.errors import FailureKind
from assay.traces.gateway.conversation import Trail
from assay.traces.messages.final_answer import Ending
from assay.traces.records import Rollout, Transition

__all__ = ["Live", "answer_is_final", "keep_tool_result", "unanswered_call"]


@dataclass
class Live:
    """State of an open rollout.

    `upstream` answers all of its calls. It stays when `Gateway.serve_model` sets another one for new rollouts.
    """

    rollout: Rollout
    upstream: Any
    explicit: bool
    adopted: bool = False  # a run of this process opened it: that run writes its row, and keeps its calls in memory
    turns: int = 0
    in_flight: int = 0
    touched: float = field(default_factory=time.monotonic)
    broken: FailureKind | None = None  # how its last call failed
    ended_as: str | None = None  # its final status before a late call reopened it
    scored: bool = False  # it had a score when a late call reopened it
    # tool calls without a result: key of `ClientRequest.call_keys` -> (turn, index of the call in the turn)
    waiting: dict[str, tuple[int, int]] = field(default_factory=dict)
    turns_in_flight: set[int] = field(default_factory=set)  # turns in flight
    partial: bool = False  # its row is updated, not replaced: some fields are no longer in memory
    released: set[str] = field(default_factory=set)  # large fields that only the store holds
    trail: Trail = field(default_factory=Trail)  # its position in the index of conversations
    ending: Ending = field(default_factory=lambda: Ending(known=False))  # the result of its last call
    called: set[str] = field(default_factory=set)  # names of the tools it has called
    step_rewards: dict[int, dict[str, float]] = field(default_factory=dict)


def answer_is_final(live: Live) -> bool:
    """Whether a late answer must not replace the prediction: the rollout was scored with it or has ended with it."""
    rollout = live.rollout
    return live.scored or (
        rollout.status != "running" and (rollout.score is not None or rollout.prediction is not None)
    )


def keep_tool_result(rollout: Rollout, t: int, index: int, result: str) -> None:
    """Sets the result of a tool call, by its turn and its place in the turn, in a rollout that is in memory."""
    for transition in rollout.transitions:
        if transition.t == t and index < len(transition.tools):
            transition.tools[index].result = result


def unanswered_call(t: int, model: str) -> Transition:
    """What is known of a call that was under way when its rollout ended."""
    error = "its rollout ended before it was answered"
    return Transition(t=t, model=model, request={}, error=error, failure=FailureKind.CAP)
