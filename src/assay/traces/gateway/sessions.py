"""Open rollouts of a gateway: assigns calls to rollouts, numbers turns, stores rewards, ends rollouts.

A call names its rollout, or the rollout is found by the conversation (`assay.traces.gateway.conversation`). Rollouts
that begin with the same messages, tools and schema belong to one task and one group. Does not use HTTP or call models.
"""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from assay.datasets import SPLITS
from assay.datasets.tasks import consent_text, known_outputs, task_key
from assay.errors import ConfigError, FailureKind, StoreError, UnknownRollout
from assay.support.names import nearest, one_of
from assay.traces.gateway.conversation import Conversations, Trail
from assay.traces.gateway.requests import Beginnings, ClientRequest
from assay.traces.gateway.texts import TextSwap
from assay.traces.messages.dialects import Answer, answer_of, each
from assay.traces.messages.final_answer import NO_ANSWER, NOT_RECORDED, Ending, answered_with, prediction_of
from assay.traces.messages.parts import is_tool_error
from assay.traces.records import Rollout, Transition, new_id
from assay.traces.store import Store
from assay.traces.store.upserts import POSTED

# -- Rules for what clients send about a rollout: its name, its fields, its status. Does not change rollouts.


_LARGEST_REWARD = 1e6  # of a step reward
_NAME_CHARS = 200
_FIELDS = (
    "task_id",
    "task_type",
    "group_id",
    "split",
    "program",
    "program_version",
    "inputs",
    "expected",
    "metadata",
    "parameters",
    "tenant",
    "data_subject",
    "consent",
)
_MAPPINGS = ("inputs", "expected", "metadata", "parameters")
_TEXT_CHARS = 1000
_SHORT = {"split": 32, "program_version": 64, "consent": 64}  # characters, as wide as the store's columns


def rollout_id_of(name: str) -> str:
    """The store's id of a rollout by the name that a client chose. A name of 32 hex digits is the id itself."""
    plain = name.lower()
    if len(plain) == 32 and all(c in "0123456789abcdef" for c in plain):
        return plain
    return hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:32]


def check_name(name: Any) -> str | None:
    """The name of a new rollout. Raises `ConfigError` unless it is None or a short text without a slash."""
    if name is not None and (not isinstance(name, str) or not 0 < len(name) <= _NAME_CHARS or "/" in name):
        raise ConfigError(f"id must be a text of at most {_NAME_CHARS} characters without a slash")
    return name


def check_status(status: str) -> None:
    """Raises `ConfigError` if `status` is not one that a rollout can end with."""
    if status not in ("done", "failed", "error"):
        raise ConfigError(
            f"status={status!r} must be done, failed (the agent's own failure) or error (an infrastructure failure)"
        )


def check_reward(value: Any, t: Any) -> None:
    """Raises `ConfigError` unless `value` is a score in [0, 1] or, with a turn `t`, a finite step reward."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST_REWARD:
        raise ConfigError(
            f"reward={value!r} must be a finite number of at most {_LARGEST_REWARD:g}; "
            "if there is no reward, post nothing"
        )
    if t is None and not 0 <= value <= 1:
        raise ConfigError(
            f"reward={value!r} is a rollout's score and must be between 0 and 1; "
            'with "t" it is the reward of that turn and may be any number'
        )
    if t is not None and (isinstance(t, bool) or not isinstance(t, int) or t < 0):
        raise ConfigError(f"t={t!r} must be the index of a turn, >= 0")


def checked_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a new rollout as keyword arguments of `Rollout`; fields that are None are left out.

    Raises:
        ConfigError: a field is unknown, of the wrong type or too long.
    """
    if unknown := sorted(set(fields) - {*_FIELDS, "group"}):
        known = ("id", "group", *_FIELDS)
        hint = f". Did you mean {near!r}?" if (near := nearest(unknown[0], known)) else ""
        raise ConfigError(
            f"a rollout has no field {', '.join(map(repr, unknown))}; its fields are {', '.join(known)}{hint}"
        )
    checked: dict[str, Any] = {}
    for name, value in fields.items():
        key = "group_id" if name == "group" else name
        if value is None:
            continue
        if key == "consent" and isinstance(value, bool):
            value = consent_text(value)
        if key in _MAPPINGS:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name}={value!r} must be an object")
            checked[key] = known_outputs(value) if key == "expected" else dict(value)
        elif key == "split" and value not in ("", *SPLITS):
            raise ConfigError(f"split={value!r} {one_of(value, SPLITS, other='none')}")
        elif not isinstance(value, str) or len(value) > _SHORT.get(key, _TEXT_CHARS):
            raise ConfigError(f"{name} must be a text of at most {_SHORT.get(key, _TEXT_CHARS)} characters")
        else:
            checked[key] = value
    return checked


def failure_kind(value: Any) -> FailureKind | None:
    """The failure kind that a client sent, or None. Raises `ConfigError` if there is no such kind."""
    if value is None:
        return None
    try:
        return FailureKind(value)
    except ValueError:
        raise ConfigError(f"failure={value!r} {one_of(value, FailureKind)}") from None


def text_or_none(value: Any) -> str | None:
    """The error text that a client sent, or None. Raises `ConfigError` if it is not a text."""
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"error={value!r} must be a text")
    return value


def gateway_rollout(rollout: Rollout) -> Rollout:
    """The rollout itself. Raises `UnknownRollout` if a gateway did not record it: then clients may not change it."""
    if rollout.source != "gateway":
        raise UnknownRollout(
            f"rollout {rollout.id!r} was not recorded by a gateway (source {rollout.source!r}): "
            "it cannot be changed from here"
        )
    return rollout


# -- State of one open rollout in the gateway, which only `assay.traces.gateway.sessions` changes.


@dataclass
class Live:
    """State of an open rollout.

    `upstream` answers all of its calls. It stays when `Gateway.serve_model` sets another one for new rollouts.
    """

    rollout: Rollout
    upstream: Any
    explicit: bool
    adopted: bool = False  # a run of this process opened it: that run writes its row, and keeps its calls in memory
    # Its calls so far, by `Transition.key`: a call's turn in this process is its place here. Those of other gateways
    # are added when this one reads them, see `LiveRollouts.catch_up`.
    calls: list[str | int] = field(default_factory=list)
    last_call: float = 0.0  # start of the last call of this gateway
    latest: float = 0.0  # start of the last call that is known here
    touched: float = field(default_factory=time.monotonic)
    broken: FailureKind | None = None  # how its last call failed
    ended_as: str | None = None  # its final status before a late call reopened it
    scored: bool = False  # it had a score when a late call reopened it
    # tool calls without a result: key of `ClientRequest.call_keys` -> (turn, index of the call in the turn)
    waiting: dict[str, tuple[int, int]] = field(default_factory=dict)
    turns_in_flight: set[int] = field(default_factory=set)  # turns in flight
    released: set[str] = field(default_factory=set)  # large fields that only the store holds
    trail: Trail = field(default_factory=Trail)  # its position in the index of conversations
    ending: Ending = field(default_factory=lambda: Ending(known=False))  # the result of its last call
    called: set[str] = field(default_factory=set)  # names of the tools it has called
    step_rewards: dict[int, dict[str, float]] = field(default_factory=dict)
    texts: TextSwap | None = None  # of the version of its agent

    @property
    def turns(self) -> int:
        """Number of its calls that are known here."""
        return len(self.calls)

    @property
    def in_flight(self) -> int:
        """Number of calls that are not answered yet."""
        return len(self.turns_in_flight)

    @property
    def answer_is_final(self) -> bool:
        """Whether a late answer must not replace the prediction: the rollout was scored with it or ended with it."""
        rollout = self.rollout
        decided = rollout.score is not None or rollout.prediction is not None
        return self.scored or (rollout.status != "running" and decided)


def keep_tool_result(rollout: Rollout, t: int, index: int, result: str, *, failed: bool) -> None:
    """Sets the result, or the error, of a tool call in a rollout that is in memory, by turn and place in the turn."""
    for transition in rollout.transitions:
        if transition.t == t and index < len(transition.tools):
            setattr(transition.tools[index], "error" if failed else "result", result)


# -- Ends rollouts that earlier gateways left open. Reads and writes the store only; no gateway needs to run.


NEVER_CLOSED = "the rollout was never closed"  # also how such a rollout is recognised when it continues


def close_abandoned(store: Store, *, idle_s: float) -> dict[str, int]:
    """Ends rollouts that killed gateways left open: `done` with an answer, else `error` (never closed).

    Args:
        idle_s: seconds since the last call, or since the start, after which a rollout is ended.
    Returns:
        Number of rollouts ended as `done`, ended as `error`, and still `running` because of a later call.
    """
    ended = {"done": 0, "error": 0, "running": 0}
    store.flush()
    now = store.clock.now()
    for rollout_id in [r.id for r in store.rollouts(limit=None) if r.source == "gateway" and r.status == "running"]:
        rollout = store.rollout(rollout_id)
        last_call = max([rollout.started_at, *(t.started_at + t.latency_ms / 1000 for t in rollout.transitions)])
        if now - last_call < idle_s:
            ended["running"] += 1
            continue
        end: dict[str, Any] = {"status": "done", "error": None, "failure": None}
        if rollout.prediction is None:
            end = {"status": "error", "error": NEVER_CLOSED, "failure": FailureKind.AGENT}
        # Without `answered_at`, a later answer of a gateway that holds it open after all replaces the prediction.
        end |= {"ended_at": now, "answered_at": None}
        last = max([rollout.started_at, *(transition.started_at for transition in rollout.transitions)])
        store.put_changes(rollout_id, end, only="idle", at=last)
        ended[end["status"]] += 1
    return ended


# -- Sessions.


_LARGE_FIELDS = ("inputs", "expected", "metadata", "prediction")
_LARGE_PART = 4096  # characters of a field from which on only the store holds it
_READ = 20  # calls of another gateway whose texts are read, the latest ones
_IN_FLIGHT = "the gateway ended before a call was answered"


def _item_ids(transition: Transition) -> list[str]:
    body = (transition.response or {}).get("body") or {}
    items = body.get("output") if transition.request.get("dialect") == "responses" else None
    return [item["id"] for item in each(items) if isinstance(item.get("id"), str)]


def read_call(call: Transition) -> tuple[ClientRequest | None, Answer | None]:
    """Request and answer of a stored call; None for a call that no gateway recorded, and for one without an answer."""
    dialect, body = call.request.get("dialect"), call.request.get("body")
    if not isinstance(dialect, str) or not isinstance(body, Mapping):
        return None, None
    answered = (call.response or {}).get("body") if call.error is None else None
    return ClientRequest(dialect, body), answer_of(dialect, answered) if isinstance(answered, Mapping) else None


def _positions(live: Live, request: ClientRequest) -> Iterator[tuple[tuple[int, int], str, bool]]:
    """Turn and place of the calls that wait for a result, with the results in a request and whether they are errors;
    they wait no longer.

    A result belongs to the call of its id. Where the client changed the ids, the results after the last answer belong
    to the calls of the latest turn in order.
    """
    for key, result in request.results_by_key.items():
        if (position := live.waiting.pop(key, None)) is not None:
            yield position, result, key in request.failed_calls or is_tool_error(result)
    latest = max((turn for turn, _ in live.waiting.values()), default=-1)
    waiting = {position: key for key, position in live.waiting.items()}
    for call_id, place, result in request.results_in_order if waiting else ():
        waits = waiting.get((latest, place))
        if waits is not None and call_id not in live.trail.calls:
            yield live.waiting.pop(waits), result, call_id in request.failed_calls or is_tool_error(result)


class LiveRollouts:
    """Rollouts that are open, and those that ended so recently that their rows may not be in the database.

    Args:
        idle_s: seconds without a call after which a rollout ends. One that a client opened explicitly then counts as
            unclosed: it ends with an error and without a score.
    """

    def __init__(self, store: Store, *, run_id: str = "", idle_s: float = 600.0) -> None:
        self.store, self.run_id, self.idle_s = store, run_id, idle_s
        self.open: dict[str, Live] = {}
        self.ended: dict[str, Live] = {}  # rollouts whose last row may not be in the database yet
        self.conversations: Conversations[Live] = Conversations(self.open)
        self.beginnings = Beginnings()
        self.shared = False  # other gateways record in this store
        self.closed = self.unclosed = 0
        self.late_calls = 0  # calls with the token of a rollout that had ended; they were refused

    # -- opening

    def begin(
        self,
        upstream: Any,
        name: str | None = None,
        fields: Mapping[str, Any] | None = None,
        *,
        explicit: bool = True,
        existing: Rollout | None = None,
    ) -> Live:
        """Opens a rollout.

        Args:
            fields: fields that the client sent, see `checked_fields`.
            explicit: a client opened it; False if its first call did.
            existing: the rollout of this name that exists already.
        Raises:
            ConfigError: a field is unknown or of the wrong type, or the name is taken.
        """
        checked = checked_fields(fields or {})
        if name and (rollout_id_of(name) in self.open or (existing is not None and existing.id == rollout_id_of(name))):
            raise ConfigError(
                f"rollout {name!r} exists already: choose another name, or send calls under this name to continue it"
            )
        rollout = Rollout(
            id=rollout_id_of(name) if name else new_id(), run_id=self.run_id, source="gateway", phase="serve",
            started_at=self.store.clock.now(), **checked,
        )  # fmt: skip
        rollout.model, rollout.adapters = upstream.named, tuple(upstream.adapters)
        if name and rollout.id != name:
            rollout.metadata = {**rollout.metadata, "client_id": name[:200]}
        rollout.task_id = rollout.task_id or task_key(rollout.inputs)
        rollout.group_id = rollout.group_id or rollout.task_id
        live = self.open[rollout.id] = Live(rollout, upstream, explicit)
        self.store.begin_rollout(rollout)
        self._release_texts(live)
        return live

    def adopt(self, rollout: Rollout, upstream: Any) -> Live:
        """Takes the calls of a rollout that a run of this process opened, until `release`.

        The run writes the rollout's row; its calls are stored as they end, and kept in `rollout.transitions`.
        """
        live = self.open[rollout.id] = Live(rollout, upstream, True, adopted=True)
        return live

    def release(self, live: Live) -> None:
        """Ends `adopt`: from now on calls of the rollout are refused. A call that is still under way counts as
        failed in memory; the store gets its answer."""
        self.open.pop(live.rollout.id, None)
        self.conversations.forget(live)
        live.trail, live.waiting = Trail(), {}
        rollout, error = live.rollout, "its rollout ended before it was answered"
        for t in live.turns_in_flight:
            unanswered = Transition(t=t, model=rollout.model, request={}, error=error, failure=FailureKind.CAP)
            rollout.transitions.append(unanswered)
        rollout.transitions.sort(key=lambda transition: transition.t)
        self.ended[rollout.id] = live

    def put(self, live: Live, *names: str, only: str = "", at: float = 0.0, **more: Any) -> None:
        """Writes fields of a rollout to its row.

        Args:
            only, at: see `Store.put_changes`.
            more: columns that a rollout in memory does not have.
        """
        if live.adopted:
            return
        values = {name: getattr(live.rollout, name) for name in names if name not in live.released} | more
        self.store.put_changes(live.rollout.id, values, only=only, at=at)
        self._release_texts(live)

    def put_keys(self) -> None:
        """Writes the keys of all open conversations, for another gateway that has come."""
        for live in self.open.values():
            if not live.adopted:
                self.store.put_keys(live.rollout.id, self.conversations.new_keys(live))

    def put_beginning(self, live: Live, *names: str, at: float | None = None) -> None:
        """Writes fields of a rollout's beginning, unless another gateway has begun it earlier.

        Args:
            at: start of the call that tells them; None: they are of the rollout's begin.
        """
        self.put(live, *names, only="begun", at=live.rollout.started_at if at is None else at)

    def _release_texts(self, live: Live) -> None:
        """Drops large fields from memory once they were written: open rollouts must not hold every prompt."""
        for name in _LARGE_FIELDS:
            value = getattr(live.rollout, name)
            if value and sum(len(v) if isinstance(v, str) else _LARGE_PART for v in value.values()) > _LARGE_PART:
                live.released.add(name)
                setattr(live.rollout, name, {})

    def open_or_recent(self, name: str) -> Live | None:
        """The rollout of that name if it is open, or ended so recently that its row may not be in the database."""
        rollout_id = rollout_id_of(name)
        return self.open.get(rollout_id) or self.ended.get(rollout_id)

    def stored(self, name: str) -> Rollout | None:
        """The rollout of that name from the store, or None. Rollouts that are not `open_or_recent` have been written.

        Raises:
            StoreError: the store could not be read, or rows of an earlier gateway are not in the database yet. The
                rollout may be among them, so it must not be created again.
        """
        if self.store.behind:
            raise StoreError(
                "the rows that an earlier process left are not in the database yet: it is locked or unreachable"
            )
        try:
            return self.store.rollout(rollout_id_of(name))
        except UnknownRollout:
            return None

    def of_gateway(self, name: str) -> Rollout:
        """The rollout of that name from the store, see `stored`.

        Raises:
            UnknownRollout: there is none, or a gateway did not record it. The gateway never changes such rollouts.
        """
        rollout = self.stored(name)
        if rollout is None:
            raise UnknownRollout(f"there is no rollout {name!r}")
        return gateway_rollout(rollout)

    def was_ended(self, name: str, stored: Rollout | None) -> bool:
        """Whether a client ended the rollout of that name or scored it after its end. An idle timeout does not count.

        Args:
            stored: the rollout from the store, if it is not `open_or_recent`.
        """
        live = self.open_or_recent(name)
        rollout = live.rollout if live is not None else stored
        if live is not None and live.adopted:
            ended = live.rollout.id not in self.open
        elif rollout is None or rollout.status == "running":
            ended = live is not None and live.scored
        else:
            ended = rollout.score is not None or rollout.error != NEVER_CLOSED
        self.late_calls += ended
        return ended

    def named(self, name: str, upstream: Any, rollout: Rollout | None) -> Live:
        """The open rollout of that name.

        A rollout that was closed, or left open by an earlier gateway (`rollout`, from the store), is reopened. A new
        name opens a new rollout.
        """
        live = self.open.get(rollout_id_of(name))
        if live is not None:
            return live
        if (ended := self.ended.pop(rollout_id_of(name), None)) is not None:
            ended.upstream = upstream
            return self._reopened(ended)
        if rollout is None:
            return self.begin(upstream, name)
        return self.take_up(gateway_rollout(rollout), upstream)

    def take_up(self, rollout: Rollout, upstream: Any, *, explicit: bool = True) -> Live:
        """Opens a rollout of another gateway, or of an earlier one, as the store has it."""
        live = self.open[rollout.id] = Live(rollout, upstream, explicit)
        calls, rollout.transitions = rollout.transitions, []
        self.catch_up(live, calls)
        self._release_texts(live)
        return self._reopened(live)

    def catch_up(self, live: Live, calls: Sequence[Transition]) -> None:
        """Adds calls of other gateways to the state of a rollout.

        Args:
            calls: calls of the rollout in the store, in order. Those that are known already are left out.
        """
        known = set(live.calls)
        added = [call for call in calls if call.key not in known]
        for call in added:
            live.calls.append(call.key)
            live.called.update(tool.name for tool in call.tools)
        first = len(live.calls) - len(added)
        for turn, call in list(enumerate(added, first))[-_READ:]:
            request, answer = read_call(call)
            if request is None:
                continue
            self.conversations.index_request(live, request)
            is_last, live.latest = call.started_at >= live.latest, max(call.started_at, live.latest)
            if is_last:
                live.broken = call.failure if call.error is not None else None
            if answer is None:
                continue
            keys = enumerate(zip(request.call_keys(answer), call.tools, strict=False))
            waiting = {key: (turn, at) for at, (key, tool) in keys if tool.result is None and tool.error is None}
            live.waiting.update(waiting)
            if is_last:  # else the conversation has gone on from here
                body = (call.response or {}).get("body") or {}
                response_id = body.get("id") if request.dialect in ("responses", "messages") else None
                self.conversations.answered(live, request, answer, response_id, _item_ids(call))

    def _reopened(self, live: Live) -> Live:
        rollout = live.rollout
        live.ended_as = rollout.status if rollout.status in ("done", "failed") else None
        live.scored = rollout.score is not None and rollout.status != "running"
        had_ended = rollout.status != "running"
        rollout.status, rollout.ended_at = "running", None
        self.open[rollout.id] = live
        if had_ended:
            self.put(live, "status", "ended_at")
        return live

    def of_conversation(self, request: ClientRequest, upstream: Any) -> Live:
        """The rollout whose conversation this request continues, or a new one."""
        if (live := self.conversations.find(request)) is not None:
            return live
        fields = {"task_id": request.task, "group_id": request.task, "inputs": {"prompt": request.prompt}}
        return self.begin(upstream, fields=fields, explicit=False)

    # -- calls

    def register_call(self, live: Live, request: ClientRequest, started_at: float) -> int:
        """Registers a call, stores the tool results in it, and returns its turn."""
        self.conversations.index_request(live, request)
        for (turn, index), result, failed in _positions(live, request):
            self.store.put_tool_result(live.rollout.id, live.calls[turn], index, result[:20_000], failed=failed)
            if live.adopted:
                keep_tool_result(live.rollout, turn, index, result[:20_000], failed=failed)
        turn = live.turns
        live.calls.append(turn if live.adopted else new_id())
        live.turns_in_flight.add(turn)
        live.touched, live.last_call, live.latest = time.monotonic(), started_at, max(live.latest, started_at)
        return turn

    def answered(
        self,
        live: Live,
        transition: Transition,
        request: ClientRequest,
        answer: Answer | None,
        response_id: str | None,
        *,
        again: bool = False,
        request_json: str | None = None,
    ) -> None:
        """Stores a call that has ended, successfully or not.

        Args:
            again: the call failed in a way that clients retry by themselves.
            request_json: the transition's request as JSON without secrets, if the caller has it already.
        """
        live.turns_in_flight.discard(transition.t)
        live.broken = transition.failure if transition.error is not None else None
        live.touched = time.monotonic()
        if answer is not None:
            transition.tools = answer.tool_calls()
            if any(tool.error is not None for tool in transition.tools):  # arguments that are not a JSON object
                transition.failure = FailureKind.PARSE
            live.waiting.update({key: (transition.t, index) for index, key in enumerate(request.call_keys(answer))})
            ending = answered_with(transition.request, answer, live.called)
            live.ending = Ending(known=ending.known)
            if not live.answer_is_final:
                live.rollout.prediction = prediction_of(ending.value)
                live.released.discard("prediction")
                # stored at once, so that it survives if the gateway is killed
                if not live.adopted:
                    self.store.put_answer(live.rollout.id, live.rollout.prediction, self.store.clock.now())
                    self._release_texts(live)
            live.called.update(name for _, name, _ in answer.tools)
            self.conversations.answered(live, request, answer, response_id, _item_ids(transition))
        elif again:
            self.conversations.failed(live, request, transition.output)
        transition.step_rewards = live.step_rewards.pop(transition.t, {})
        known = any(other is transition for other in live.rollout.transitions)
        if live.adopted and live.rollout.id in self.open and not known:
            live.rollout.transitions.append(transition)
        self.store.put_transition(live.rollout.id, transition, request_json=request_json)
        if self.shared and not live.adopted:
            self.store.put_keys(live.rollout.id, self.conversations.new_keys(live))

    def completed(
        self,
        live: Live,
        transition: Transition,
        request: ClientRequest,
        answer: Answer | None,
        response_id: str | None,
        *,
        request_json: str | None = None,
    ) -> None:
        """Stores a background call, which was stored unfinished, with its response."""
        self.answered(live, transition, request, answer, response_id, request_json=request_json)
        if live.rollout.id not in self.open:
            self.conversations.forget(live)

    # -- rewards and the end

    def reward(
        self, name: str, value: Any, *, t: Any = None, criterion: str = "posted", stored: Rollout | None = None
    ) -> Rollout:
        """Sets a rollout's score in [0, 1] or, with `t`, a step reward of that turn. The rollout may have ended.

        Args:
            stored: the rollout from the store, if it is not `open_or_recent`, without it the store is read here; or if
                `t` is a turn that another gateway may have recorded.
        Raises:
            ConfigError: the value is not finite or out of range, or there is no such turn.
            UnknownRollout: there is no such rollout.
        """
        check_reward(value, t)
        live = self.open_or_recent(name)
        if live is None:
            rollout = stored = self.of_gateway(name) if stored is None else gateway_rollout(stored)
        else:
            rollout = live.rollout
        if t is not None:
            self._step_reward(live, stored, rollout.id, t, criterion[:100], float(value))
            return rollout
        self._score(live or Live(rollout, None, True), float(value))
        return rollout

    def _score(self, live: Live, value: float) -> None:
        rollout = live.rollout
        rollout.score, rollout.coverage, rollout.rubric = value, 1.0, rollout.rubric or POSTED
        ended = ("ended_at",) if rollout.ended_at is not None else ()  # one that was sent elsewhere is sent again
        self.put(live, "score", "coverage", "rubric", *ended)

    def _step_reward(
        self, live: Live | None, stored: Rollout | None, rollout_id: str, t: int, criterion: str, value: float
    ) -> None:
        calls = {transition.t: transition.key for transition in stored.transitions} if stored is not None else {}
        if t not in calls and live is not None and t < live.turns:
            if t in live.turns_in_flight:
                live.step_rewards.setdefault(t, {})[criterion] = value
                return
            calls[t] = live.calls[t]
        if t not in calls:
            turns = max([*calls, -1 if live is None else live.turns - 1], default=-1) + 1
            raise ConfigError(f"t={t}: rollout {rollout_id} has {turns} turns, the first is 0")
        self.store.put_step_reward(rollout_id, calls[t], criterion, value)

    def close(
        self,
        name: str,
        *,
        status: str = "done",
        prediction: Any = None,
        error: str | None = None,
        failure: FailureKind | None = None,
        reward: Any = None,
        stored: Rollout | None = None,
        idle: bool = False,
    ) -> Rollout:
        """Ends a rollout.

        Args:
            reward: its score, as of `reward`; None: it stays as it is.
            idle: nobody ended it: it stays as it is if another gateway has ended it, or had a later call.
            failure: kind for the statuses `failed` and `error`; by default the last call's, else `agent` or `model`.
            stored: the rollout from the store, if it is not open; without it the store is read here.
        Raises:
            ConfigError: `status` is unknown, or the reward is not a score.
            UnknownRollout: no such rollout is open here or was left open by an earlier gateway. Nothing is changed.
        """
        check_status(status)
        if reward is not None:
            check_reward(reward, None)
        live = self.open.get(rollout_id_of(name))
        if live is not None and live.adopted:  # its run says how it ended
            if reward is not None:
                self._score(live, float(reward))
            self.release(live)
            return live.rollout
        live = self.open.pop(rollout_id_of(name), None)
        if live is None:
            stored_rollout = self.stored(name) if stored is None and rollout_id_of(name) not in self.ended else stored
            if stored_rollout is None or stored_rollout.status != "running":
                raise UnknownRollout(f"no rollout {name!r} is open")
            live = Live(gateway_rollout(stored_rollout), None, True)
            stored_rollout.transitions = []
        rollout = live.rollout
        if reward is not None:
            self._score(live, float(reward))
        rollout.status, rollout.error, rollout.ended_at = status, error, self.store.clock.now()
        by_default = live.broken or (FailureKind.AGENT if status == "failed" else FailureKind.MODEL)
        rollout.failure = None if status == "done" else failure or by_default
        if prediction is not None:
            live.released.discard("prediction")
            rollout.prediction = dict(prediction) if isinstance(prediction, Mapping) else {"answer": prediction}
            self.put(live, "prediction", answered_at=rollout.ended_at)
        self.conversations.forget(live)
        live.trail, live.waiting = Trail(), {}
        end = ("status", "error", "failure", "ended_at")
        self.put(live, *end, only="idle" if idle else "", at=live.last_call or rollout.started_at)
        self.ended[rollout.id] = live
        self.closed += 1
        return rollout

    def drop(self, rollout_id: str) -> None:
        """Drops an open rollout that another gateway has ended."""
        live = self.open.get(rollout_id)
        if live is not None and not live.in_flight:
            del self.open[rollout_id]
            self.conversations.forget(live)

    def settled(self, written: Mapping[str, float | None]) -> None:
        """Drops ended rollouts whose rows are in the database from memory.

        Args:
            written: rollout id -> time at which it had ended when its row was written.
        """
        for rollout_id, ended_at in written.items():
            if (live := self.ended.get(rollout_id)) is not None and live.rollout.ended_at == ended_at:
                del self.ended[rollout_id]

    def sweep(self, *, all_of_them: bool = False) -> int:
        """Ends rollouts that were idle for longer than `idle_s`, or all rollouts. Returns their number."""
        late = time.monotonic() - self.idle_s
        idle = [
            live
            for live in self.open.values()
            if not live.adopted and (all_of_them or (not live.in_flight and live.touched < late))
        ]
        for live in idle:
            if live.calls and not live.last_call:  # only read here: another gateway had its calls
                self.drop(live.rollout.id)
                continue
            self.unclosed += live.ended_as is None and live.explicit
            status, error, failure = _idle_end(live)
            self.close(live.rollout.id, status=status, error=error, failure=failure, idle=True)
        return len(idle)


def _idle_end(live: Live) -> tuple[str, str | None, FailureKind | None]:
    """Status, error and failure kind with which an idle rollout ends; without a kind that of its last call."""
    if live.ended_as is not None:
        return live.ended_as, None, live.rollout.failure
    if live.explicit:
        return "error", NEVER_CLOSED, live.broken or FailureKind.AGENT
    if live.in_flight:
        return "error", _IN_FLIGHT, FailureKind.CAP
    if live.broken:
        return "error", "its last call failed", None
    if live.rollout.prediction is not None:
        return "done", None, None
    # an agent that ran out of steps has failed by itself
    return ("failed", NO_ANSWER, None) if live.ending.known else ("done", NOT_RECORDED, None)
