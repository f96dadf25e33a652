"""The rollouts that are open in a gateway: which one a call belongs to, its turns, its rewards, how it ends.

A call names its rollout, or is found by its conversation (`assay.traces.conversation`). Rollouts that begin with the same messages, tools
and schema are of one task and one group. Does not talk HTTP or to models.
"""

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from assay.datasets import SPLITS
from assay.datasets.tasks import consent_text
from assay.errors import ConfigError, FailureKind, StoreError, UnknownRollout
from assay.traces.conversation import Asked, Conversations, Trail
from assay.traces.dialects import Answer
from assay.traces.ending import NO_ANSWER, NOT_RECORDED, Ending, answered_with, prediction_of
from assay.traces.records import Rollout, Transition, new_id
from assay.traces.store import Store

__all__ = ["Live", "LiveRollouts", "check_status", "close_left", "rollout_id_of"]

_LARGEST = 1e6  # of a step reward
_NEVER_CLOSED = "the rollout was never closed"
_IN_FLIGHT = "the gateway ended before a call was answered"
_FIELDS = ("task_id", "task_type", "group_id", "split", "program", "program_version", "inputs", "expected", "metadata", "parameters", "tenant",
           "data_subject", "consent")  # fmt: skip
_LARGE_FIELDS = ("inputs", "expected", "metadata", "prediction")
_LARGE_PART = 4096  # characters
_MAPPINGS = ("inputs", "expected", "metadata", "parameters")
_SHORT = {"split": 32, "program_version": 64, "consent": 64}  # characters; others 1,000


def rollout_id_of(name: str) -> str:
    """The store's id of a rollout by the name that a client gave it: 32 hex digits stand for themselves."""
    plain = name.lower()
    if len(plain) == 32 and all(c in "0123456789abcdef" for c in plain):
        return plain
    return hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:32]


@dataclass
class Live:
    """An open rollout. `upstream` is what answers it: it stays the same while others may get a newer model."""

    rollout: Rollout
    upstream: Any
    explicit: bool
    turns: int = 0
    in_flight: int = 0
    touched: float = field(default_factory=time.monotonic)
    broken: FailureKind | None = None  # how its last call failed
    ended_as: str | None = None  # how it had ended before a late call opened it again
    scored: bool = False  # it had ended with a score before a late call opened it again
    waiting: dict[str, tuple[int, int]] = field(
        default_factory=dict
    )  # tool calls without a result, by `Asked.call_keys`: their turn, and which of its calls
    flying: set[int] = field(default_factory=set)  # turns that are being answered
    partial: bool = False  # its row is changed and not written anew: some of it is not in memory any more
    let_go: set[str] = field(default_factory=set)  # large fields of the rollout that the store alone holds
    trail: Trail = field(default_factory=Trail)  # where its conversation is
    ending: Ending = field(default_factory=lambda: Ending(known=False))  # what its last call answered
    called: set[str] = field(default_factory=set)  # names of the tools that it called
    step_rewards: dict[int, dict[str, float]] = field(default_factory=dict)


class LiveRollouts:
    """Args:
    idle_s: a rollout that was found by its conversation ends after so long without a call; one that was opened is then
        called unclosed: it ends with an error and without a score.
    """

    def __init__(self, store: Store, *, run_id: str = "", idle_s: float = 600.0) -> None:
        self.store, self.run_id, self.idle_s = store, run_id, idle_s
        self.open: dict[str, Live] = {}
        self.ended: dict[str, Live] = {}  # those whose last row may not be in the database yet
        self._conversations: Conversations[Live] = Conversations(self.open)
        self.closed = self.unclosed = 0

    # -- opening

    def begin(
        self, upstream: Any, name: str | None = None, told: Mapping[str, Any] | None = None, *, explicit: bool = True, known: Rollout | None = None
    ) -> Live:  # fmt: skip
        """Opens a rollout.

        Raises:
            ConfigError: an unknown field, or one of the wrong kind.
        """
        fields = _checked(told or {})
        if name and (rollout_id_of(name) in self.open or (known is not None and known.id == rollout_id_of(name))):
            raise ConfigError(f"rollout {name!r} is there already: choose another name, or send calls under this name to continue it")
        rollout = Rollout(id=rollout_id_of(name) if name else new_id(), run_id=self.run_id, source="gateway", phase="serve", **fields)
        rollout.model, rollout.adapters = upstream.named, tuple(upstream.adapters)
        if name and rollout.id != name:
            rollout.metadata = {**rollout.metadata, "client_id": name[:200]}
        rollout.group_id = rollout.group_id or rollout.task_id
        live = self.open[rollout.id] = Live(rollout, upstream, explicit)
        self.put(live)
        return live

    def put(self, live: Live) -> None:
        """Writes a rollout's row. Large fields are the store's alone from then on: open rollouts must not hold every prompt in memory."""
        if live.partial:
            self.store.put_changes(live.rollout, without=live.let_go)
        else:
            self.store.put_rollout(live.rollout)
        for name in _LARGE_FIELDS:
            value = getattr(live.rollout, name)
            if value and sum(len(part) if isinstance(part, str) else _LARGE_PART for part in value.values()) > _LARGE_PART:
                live.let_go.add(name)
                live.partial = True
                setattr(live.rollout, name, {})

    def at_hand(self, name: str) -> Live | None:
        """The rollout of that name that is open, or has ended a moment ago, so that its row may not be in the database yet."""
        rollout_id = rollout_id_of(name)
        return self.open.get(rollout_id) or self.ended.get(rollout_id)

    def stored(self, name: str) -> Rollout | None:
        """The rollout of that name as it is in the store, None where there is none. Reads the store; what is not `at_hand` was written before.

        Raises:
            StoreError: it could not be read, or what an earlier gateway left is not in the database yet. It may then be there, and must not be
                begun anew.
        """
        if self.store.behind:
            raise StoreError("the rows that an earlier process left are not in the database yet: it is locked or away")
        try:
            return self.store.rollout(rollout_id_of(name))
        except UnknownRollout:
            return None

    def of_gateway(self, name: str) -> Rollout:
        """The rollout of that name in the store. Reads the store, as `stored` does.

        Raises:
            UnknownRollout: there is none, or it was not recorded by a gateway: what others recorded is never written to from here.
        """
        found = self.stored(name)
        if found is None:
            raise UnknownRollout(f"there is no rollout {name!r}")
        return _own(found)

    def was_ended(self, name: str, stored: Rollout | None) -> bool:
        """Whether somebody has ended the rollout of that name, or scored it after its end. One that only was idle for too long may go on.

        Args:
            stored: the rollout as it is in the store, where it is not `at_hand`.
        """
        live = self.at_hand(name)
        rollout = live.rollout if live is not None else stored
        if rollout is None or rollout.status == "running":
            return live is not None and live.scored
        return rollout.score is not None or rollout.error != _NEVER_CLOSED

    def named(self, name: str, upstream: Any, rollout: Rollout | None) -> Live:
        """The open rollout of that name; one that was closed or left by an earlier gateway, as it stands in the store, is opened
        again; a new name begins one."""
        found = self.open.get(rollout_id_of(name))
        if found is not None:
            return found
        if (ended := self.ended.pop(rollout_id_of(name), None)) is not None:
            ended.upstream = upstream
            return self._reopened(ended)
        if rollout is None:
            return self.begin(upstream, name)
        _own(rollout)
        called = {tool.name for tool in rollout.tools}
        live = self.open[rollout.id] = Live(rollout, upstream, True, turns=_turns(rollout), called=called)
        rollout.transitions = []
        return self._reopened(live)

    def _reopened(self, live: Live) -> Live:
        rollout = live.rollout
        live.ended_as = rollout.status if rollout.status in ("done", "failed") else None
        live.scored = rollout.score is not None and rollout.status != "running"
        rollout.status, rollout.ended_at = "running", None
        self.open[rollout.id] = live
        return live

    def of_conversation(self, request: Asked, upstream: Any) -> Live:
        """The rollout whose conversation this request continues, or a new one."""
        if (found := self._conversations.find(request)) is not None:
            return found
        task = request.task
        return self.begin(upstream, told={"task_id": task, "group_id": task, "inputs": {"prompt": request.prompt}}, explicit=False)

    # -- calls

    def asked(self, live: Live, request: Asked) -> int:
        """Notes a call that is about to be made, and the tool results that it brings; returns its turn."""
        self._conversations.asked(live, request)
        for key, result in request.brought.items():
            if (found := live.waiting.pop(key, None)) is not None:
                self.store.put_tool_result(live.rollout.id, *found, result[:20_000])
        turn, live.turns = live.turns, live.turns + 1
        live.in_flight += 1
        live.flying.add(turn)
        live.touched = time.monotonic()
        return turn

    def answered(
        self, live: Live, transition: Transition, request: Asked, answer: Answer | None, response_id: str | None, *, again: bool = False,
        request_json: str | None = None,
    ) -> None:  # fmt: skip
        """Keeps a call that has ended, however it ended.

        Args:
            again: it failed in a way that clients try again by themselves.
            request_json: the transition's request as JSON without secrets, where that was written before.
        """
        live.in_flight -= 1
        live.flying.discard(transition.t)
        live.broken = transition.failure if transition.error is not None else None
        live.touched = time.monotonic()
        if answer is not None:
            transition.tools = answer.tool_calls()
            if any(tool.error is not None for tool in transition.tools):  # arguments that are no JSON object
                transition.failure = FailureKind.PARSE
            live.waiting.update({key: (transition.t, at) for at, key in enumerate(request.call_keys(answer))})
            ending = answered_with(transition.request, answer, live.called)
            live.ending = Ending(known=ending.known)
            if not _answer_stands(live):
                live.rollout.prediction = prediction_of(ending.value)
                live.let_go.discard("prediction")
            live.called.update(name for _, name, _ in answer.tools)
            self._conversations.answered(live, request, answer, response_id)
            self.put(live)  # its prediction: a gateway that is killed leaves it
        elif again:
            self._conversations.failed(live, request, transition.output)
        transition.step_rewards = live.step_rewards.pop(transition.t, {})
        self.store.put_transition(live.rollout.id, transition, request_json=request_json)

    # -- rewards and the end

    def reward(self, name: str, value: Any, *, t: Any = None, criterion: str = "posted", stored: Rollout | None = None) -> Rollout:
        """A rollout's score in [0, 1], or with `t` a step reward of any size for that turn. Also of rollouts that have ended.

        Args:
            stored: the rollout as it is in the store, where it is not `at_hand`; without it the store is waited for.
        Raises:
            ConfigError: no finite number, out of range, or no such turn.
            UnknownRollout: there is no such rollout.
        """
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
            raise ConfigError(f"reward={value!r} must be a finite number of at most {_LARGEST:g}; where nothing is known, post none")
        live = self.at_hand(name)
        if t is None and not 0 <= value <= 1:
            raise ConfigError(
                f"reward={value!r} is a rollout's score and must be between 0 and 1; with \"t\" it is that turn's and may be any number"
            )
        if t is not None and (isinstance(t, bool) or not isinstance(t, int) or t < 0):
            raise ConfigError(f"t={t!r} must be a turn's number, from 0 on")
        target = live.rollout if live is not None else _own(stored) if stored is not None else self.of_gateway(name)
        if t is not None:
            return self._step_reward(live, target, t, criterion, float(value))
        target.score, target.coverage, target.rubric = float(value), 1.0, target.rubric or "posted"
        if live is not None:
            self.put(live)
        else:
            self.store.put_rollout(target)
        return target

    def _step_reward(self, live: Live | None, rollout: Rollout, t: int, criterion: str, value: float) -> Rollout:
        turns = _turns(rollout) if live is None else live.turns
        if t >= turns or (live is None and all(found.t != t for found in rollout.transitions)):
            raise ConfigError(f"t={t}: rollout {rollout.id} has {turns} turns, the first is 0")
        if live is not None and t in live.flying:
            live.step_rewards.setdefault(t, {})[criterion[:100]] = value
        else:
            self.store.put_step_reward(rollout.id, t, criterion[:100], value)
        return rollout

    def close(
        self, name: str, *, status: str = "done", prediction: Any = None, error: str | None = None, failure: FailureKind | None = None,
        stored: Rollout | None = None,
    ) -> Rollout:  # fmt: skip
        """Ends a rollout.

        Args:
            stored: the rollout as it is in the store, where it is not open; without it the store is waited for.
            failure: its kind where the status is `failed` or `error`; by default that of its last call, else `agent` or `model`.
        Raises:
            ConfigError: an unknown status. UnknownRollout: no such rollout is open here, or was left open by a gateway that is gone.
        """
        check_status(status)
        live = self.open.pop(rollout_id_of(name), None)
        if live is None:
            left = self.stored(name) if stored is None and rollout_id_of(name) not in self.ended else stored
            if left is None or left.status != "running":
                raise UnknownRollout(f"no rollout {name!r} is open")
            live = Live(_own(left), None, True)
            left.transitions = []
        rollout = live.rollout
        rollout.status, rollout.error, rollout.ended_at = status, error, time.time()
        by_default = live.broken or (FailureKind.AGENT if status == "failed" else FailureKind.MODEL)
        rollout.failure = None if status == "done" else failure or by_default
        if prediction is not None:
            live.let_go.discard("prediction")
            rollout.prediction = dict(prediction) if isinstance(prediction, Mapping) else {"answer": prediction}
        self._conversations.forget(live)
        live.trail, live.waiting = Trail(), {}
        self.put(live)
        self.ended[rollout.id] = live
        self.closed += 1
        return rollout

    def settled(self, written: Mapping[str, float | None]) -> None:
        """Lets go of rollouts that have ended and whose rows are in the database.

        Args:
            written: their ids, with the time at which they had ended.
        """
        for rollout_id, ended_at in written.items():
            if (live := self.ended.get(rollout_id)) is not None and live.rollout.ended_at == ended_at:
                del self.ended[rollout_id]

    def sweep(self, *, all_of_them: bool = False) -> int:
        """Ends rollouts that were idle for too long, or all of them; how many."""
        late = time.monotonic() - self.idle_s
        found = [live for live in self.open.values() if all_of_them or (not live.in_flight and live.touched < late)]
        for live in found:
            if live.ended_as is not None:
                self.close(live.rollout.id, status=live.ended_as, failure=live.rollout.failure)
            elif live.explicit:
                self.unclosed += 1
                self.close(live.rollout.id, status="error", error=_NEVER_CLOSED, failure=live.broken or FailureKind.AGENT)
            elif live.in_flight:
                self.close(live.rollout.id, status="error", error=_IN_FLIGHT, failure=FailureKind.CAP)
            elif live.broken:
                self.close(live.rollout.id, status="error", error="its last call failed")
            elif live.rollout.prediction is None and live.ending.known:  # out of steps: the agent's own failure
                self.close(live.rollout.id, status="failed", error=NO_ANSWER)
            else:
                self.close(live.rollout.id, error=NOT_RECORDED if live.rollout.prediction is None else None)
        return len(found)


def close_left(store: Store, *, idle_s: float) -> dict[str, int]:
    """Ends rollouts that gateways left open when they were killed: those with an answer are done, the others were never closed.

    Args:
        idle_s: seconds since the last call, or the beginning.
    """
    ended = {"done": 0, "error": 0}
    store.flush()
    for rollout_id in [r.id for r in store.rollouts(limit=None) if r.source == "gateway" and r.status == "running"]:
        rollout = store.rollout(rollout_id)
        if time.time() - max([rollout.started_at, *(t.started_at + t.latency_ms / 1000 for t in rollout.transitions)]) < idle_s:
            continue
        rollout.status = "error" if rollout.prediction is None else "done"
        rollout.failure = FailureKind.AGENT if rollout.prediction is None else None
        rollout.error, rollout.ended_at, rollout.transitions = _NEVER_CLOSED if rollout.prediction is None else None, time.time(), []
        store.put_rollout(rollout)
        ended[rollout.status] += 1
    return ended


def _own(rollout: Rollout) -> Rollout:
    if rollout.source != "gateway":
        raise UnknownRollout(f"rollout {rollout.id!r} was not recorded by a gateway (source {rollout.source!r}): it cannot be changed from here")
    return rollout


def _answer_stands(live: Live) -> bool:
    """Whether a call that is answered late leaves the rollout's answer as it is: it was scored with that answer, or has ended with one."""
    rollout = live.rollout
    return live.scored or (rollout.status != "running" and (rollout.score is not None or rollout.prediction is not None))


def _turns(rollout: Rollout) -> int:
    """One more than its last turn: where a gateway was killed, one of several calls at once may be missing."""
    return max((transition.t for transition in rollout.transitions), default=-1) + 1


def check_status(status: str) -> None:
    """Raises `ConfigError` where a rollout cannot end so."""
    if status not in ("done", "failed", "error"):
        raise ConfigError(f"status={status!r} must be done, failed (the agent's own failure) or error (the machinery's)")


def _checked(told: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := sorted(set(told) - {*_FIELDS, "group"}):
        raise ConfigError(f"{unknown} are no fields of a rollout; there are {', '.join(_FIELDS)}")
    found: dict[str, Any] = {}
    for name, value in told.items():
        key = "group_id" if name == "group" else name
        if value is None:
            continue
        if key == "consent" and isinstance(value, bool):
            value = consent_text(value)
        if key in _MAPPINGS:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name}={value!r} must be an object")
            found[key] = dict(value)
        elif key == "split" and value not in ("", *SPLITS):
            raise ConfigError(f"split={value!r} must be one of {', '.join(SPLITS)}, or none")
        elif not isinstance(value, str) or len(value) > _SHORT.get(key, 1000):
            raise ConfigError(f"{name} must be a text of at most {_SHORT.get(key, 1000)} characters")
        else:
            found[key] = value
    return found
