"""The recorder: opens rollouts, receives their LM calls and tool calls, and writes them to the store.

The open rollout is stored in DSPy's settings, which DSPy copies to its worker threads and async tasks. Calls outside
any rollout (for instance of a teleprompter or judge) are stored in a separate rollout per phase.
"""

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import dspy

from assay.datasets.tasks import task_key
from assay.errors import FailureKind
from assay.models import Call, ResponseCache
from assay.models.calls import failure_of_program
from assay.models.lm import LanguageModel
from assay.models.meter import Meter
from assay.models.own_lms import is_observed
from assay.models.scope import current_sample
from assay.models.unrecorded import NOTHING, Unrecorded, UnrecordedCalls, accounted, asking, watch_calls
from assay.support.scrubbing import error_text
from assay.support.values import json_text
from assay.traces.listening import Listener, Recording, listeners, listening
from assay.traces.messages.dialects import answer_of, chat_messages
from assay.traces.places import (
    OpenRollout,
    Outside,
    current_agent,
    current_missed_calls,
    current_open_rollout,
    current_rollout,
    opened,
    opened_outside,
    others_open,
    rollouts_of,
)
from assay.traces.records import Rollout, ToolCall, Transition, new_id
from assay.traces.shown import Carried, TaskTexts, message_texts
from assay.traces.store import Store

# -- Reproducible rollout ids, with which a resumed run overwrites its earlier rows instead of adding new ones.
#
# Imports, the gateway and `assay.record` use random ids (`new_id`), because their rollouts are not replayed.


class RolloutIds:
    """Generates the rollout ids of one run. Thread-safe.

    An id is a hash of the run, its phase and scope (such as a trial of a study), the task with its inputs, the sample,
    and the version, parameters and model settings of the program. Rollouts that agree in all of these are numbered;
    they are interchangeable, so their order does not matter.
    """

    def __init__(self) -> None:
        self._repetitions: Counter[str] = Counter()
        self._lock = threading.Lock()

    def of(self, rollout: Rollout, *, scope: str = "", key: str | None = None) -> str:
        """Id of a rollout: 32 hexadecimal digits.

        Args:
            rollout: Its `run_id` and `phase` must be set.
            scope: Scope inside the phase.
            key: Key of its task, if already computed.
        """
        lm = dspy.settings.lm
        identity = [
            rollout.run_id,
            scope,
            rollout.phase,
            rollout.source,
            rollout.program,
            rollout.program_version,
            rollout.task_id,
            key or task_key(rollout.inputs),
            rollout.sample,
            rollout.parameters,
            current_sample.get(),
            None
            if lm is None
            else [lm.model, {key: value for key, value in lm.kwargs.items() if not key.startswith("api_")}],
        ]
        digest = _digest(identity)
        with self._lock:
            number = self._repetitions[digest]
            self._repetitions[digest] += 1
        return digest if number == 0 else _digest([digest, number])


def outside_id(run_id: str, phase: str, scope: str = "") -> str:
    """Id of the rollout that contains the LM calls of a phase outside any other rollout."""
    return _digest([run_id, scope, phase, "outside"])


def _digest(value: Any) -> str:
    text = json_text(value, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


# -- Recorder.


_TEXT = 20_000  # maximum stored characters of a tool result
_OF_TASK = ("task_id", "task_type", "sample", "split", "inputs", "tenant", "data_subject", "consent")


@contextmanager
def aside(rollout: Rollout) -> Iterator[Rollout]:
    """Open a rollout separate from the current one with the active recorder, for instance for a judge's calls."""
    recorder = _active_recorder()
    if recorder is None:
        with opened(OpenRollout(rollout, current_missed_calls())):
            yield rollout
        return
    with recorder.rollout(rollout):
        yield rollout


def checking(rollout: Rollout, *, name: str) -> AbstractContextManager[None]:
    """Inside, LM calls are those of the checks of a rollout that has ended. The active recorder stores them in a
    rollout of its task with the source `check`, which it opens at the first one.

    Args:
        name: Name of the rubric.
    """
    recorder = _active_recorder()
    return nullcontext() if recorder is None else recorder.checking(rollout, name=name)


def _active_recorder() -> "Recorder | None":
    return next((listener for listener in listeners() if isinstance(listener, Recorder)), None)


def note_failure(kind: FailureKind) -> None:
    """Set the failure kind of the open rollout and of its latest call if that has none.

    For programs that detect failures. The run may still be answered: it is then `done`, with this failure kind.
    """
    rollout = current_rollout()
    if rollout is not None:
        rollout.failure = kind
    if rollout is None or not rollout.transitions or rollout.transitions[-1].failure is not None:
        return
    rollout.transitions[-1].failure = kind
    for listener in listeners():
        if isinstance(listener, Recorder) and listener.store is not None:
            listener.store.put_transition(rollout.id, rollout.transitions[-1])
            return


def note_isolation(isolation: str) -> None:
    """Set the isolation of the running tool call of the open rollout. For tools that run code in a sandbox."""
    rollout = current_rollout()
    if rollout is None:
        return
    tools = rollout.transitions[-1].tools if rollout.transitions else rollout.early_tools
    running = next((tool for tool in reversed(tools) if tool.result is None and tool.error is None), None)
    if running is not None:
        running.isolation = isolation  # written when the call ends


def shown_in(request: dict[str, Any]) -> tuple[str, ...]:
    """Keys of the other tasks in the prompt of a call of the open rollout that a gateway records."""
    place = current_open_rollout()
    return place.recorder.shown_in(request, place) if place and isinstance(place.recorder, Recorder) else ()


def _requested_tools(response: dict[str, Any] | None) -> list[ToolCall]:
    """Tool calls of an answer as records."""
    if response is None or all(part["type"] != "tool_call" for part in response["message"]["parts"]):
        return []
    return answer_of(None, response).tool_calls()


class Recorder(Listener):
    """Records rollouts. Pass `recorder.observe` to `get_lm(observers=…)` and run programs inside `recorder.rollout(…)`.

    While `active`, it also records tool calls and counts `unrecorded` LM calls: those of a `dspy.LM` that the program
    creates itself, or of another client.

    Args:
        store: Store to write to; None only fills the `Rollout` objects.
        run_id: Run of the rollouts.
        unrecorded: Unrecorded calls of an earlier attempt of the run.
        replayable: Use reproducible rollout ids, see `RolloutIds`.
        resumed: The store may contain rollouts with these ids from an earlier attempt; their surplus transitions are
            removed.
    """

    def __init__(
        self,
        store: Store | None = None,
        *,
        run_id: str = "",
        unrecorded: Unrecorded = NOTHING,
        replayable: bool = False,
        resumed: bool = False,
    ) -> None:
        self.store, self.run_id = store, run_id
        self.phase = self.scope = ""
        self.meter = Meter()  # counts and caps the calls of models that a program made itself
        self.cache: ResponseCache | None = None  # has the answers of those that an earlier process of the run made
        self.may_lack_rows = resumed  # a process that made calls of this run was killed, or may have been
        self.resumed, self._ids = resumed, RolloutIds() if replayable else None
        self._missed = UnrecordedCalls(unrecorded)
        self.texts = TaskTexts()  # tasks that may be used as demonstrations
        self.carried = Carried()  # tasks of the demonstrations in the program's artifact
        self.demonstrated_tasks: set[str] = set()  # keys of all tasks in prompts so far
        self._lock = threading.Lock()
        self._stopped = False
        self._running: set[int] = set()  # ids of the records of running tool calls
        self._shared: set[str] = set()  # ids of rollouts whose calls other processes may record too
        self._loose: dict[tuple[str, str], Rollout] = {}

    def __deepcopy__(self, memo: object) -> "Recorder":
        return self

    @contextmanager
    def active(self) -> Iterator[None]:
        """Receive tool runs, parse failures and unobserved LM calls inside the context."""
        watch_calls(current_missed_calls)
        with dspy.context(**listening(self)), opened_outside(Outside(self._outside, self._missed, "", recorder=self)):
            yield

    @contextmanager
    def rollout(
        self, rollout: Rollout, *, then_scored: bool = False, key: str | None = None, shared: bool = False
    ) -> Iterator[Rollout]:
        """Open a rollout. It is written when it opens and when it closes, also after an exception.

        Args:
            then_scored: `scored` is called next and writes the rollout again.
            key: Key of its task, if already computed.
            shared: Other processes may record calls of a rollout with this id: the store numbers the turns.
        """
        if shared:
            self._shared.add(rollout.id)
        rollout.run_id, rollout.phase = rollout.run_id or self.run_id, rollout.phase or self.phase
        rollout.started_at = self.by_store(rollout.started_at)
        if self._ids is not None:
            rollout.id = self._ids.of(rollout, scope=self.scope, key=key)
        self._write_rollout(rollout, interim=True)
        missed = self._missed.opened(current_missed_calls)
        try:
            with opened(OpenRollout(rollout, missed, key, recorder=self)):
                yield rollout
        except BaseException as error:
            if rollout.status == "running":
                rollout.status, rollout.error, rollout.failure = "error", error_text(error), failure_of_program(error)
            raise
        finally:
            missed.closed()
            if rollout.status == "running":
                rollout.status = "done"
            rollout.ended_at = self.by_store(time.time())
            self._write_rollout(rollout, interim=then_scored)
            self._trim(rollout)

    def identify(self, rollout: Rollout, transition: Transition) -> None:
        """Give a new call its time by the clock of the store, and an id of its own if its rollout is shared."""
        transition.started_at = self.by_store(transition.started_at)
        if rollout.id in self._shared and self.store is not None:
            transition.id = new_id()

    def by_store(self, at: float) -> float:
        """A time of this machine by the clock of the store, by which schedules and deployments are decided."""
        clock = getattr(self.store, "clock", None)  # a host of a cluster has no store, and keeps its own time
        return at if clock is None else float(clock.of_machine(at))

    @contextmanager
    def checking(self, rollout: Rollout, *, name: str) -> Iterator[None]:
        """See `assay.traces.recorder.checking`."""
        made: list[Rollout] = []
        lock = threading.Lock()

        def of_checks() -> Rollout:
            with lock:
                if not made:
                    of_task = {field: getattr(rollout, field) for field in _OF_TASK}
                    checks = Rollout(
                        run_id=self.run_id, phase=self.phase, group_id=rollout.id, source="check", status="done",
                        program=name, **of_task,
                    )  # fmt: skip
                    if self._ids is not None:
                        checks.id = self._ids.of(checks, scope=f"{self.scope}/{rollout.id}")
                    self._write_rollout(checks)
                    made.append(checks)
            return made[0]

        try:
            with opened(OpenRollout(of_checks, self._missed, recorder=self), counts=False):
                yield
        finally:
            for checks in made:
                checks.ended_at = self.by_store(time.time())
                self._write_rollout(checks)
                self._trim(checks)

    @contextmanager
    def within(self, scope: str) -> Iterator[None]:
        """Give the rollouts inside the context ids of their own scope, for instance a trial of a study."""
        before, self.scope = self.scope, scope
        try:
            yield
        finally:
            self.scope = before

    def finish(self) -> None:
        """Remove surplus transitions of an earlier attempt. Call it at the end of a run."""
        with self._lock:
            loose = list(self._loose.values())
        for rollout in loose:
            self._trim(rollout)

    @property
    def open(self) -> list[Rollout]:
        """Rollouts that have not ended."""
        return [place.rollout for place in rollouts_of(self)]

    def stop(self, reason: str, *, unanswered: int = 0) -> None:
        """End the open rollouts with status `error` and failure `cap`; later changes of their threads are not written.

        Args:
            unanswered: Calls in flight that are not waited for; they count as unrecorded.
        """
        self._missed.add(unanswered)
        for rollout in self.open:
            if rollout.status == "running":
                rollout.status, rollout.error, rollout.failure = "error", reason, FailureKind.CAP
            rollout.ended_at = rollout.ended_at or self.by_store(time.time())
            self._write_rollout(rollout)
        self._stopped = True

    def owner(self) -> str:
        """Id of the rollout to which a call made now belongs."""
        rollout = current_rollout()
        return outside_id(self.run_id, self.phase, self.scope) if rollout is None else rollout.id

    def _trim(self, rollout: Rollout) -> None:
        if self.resumed and self.store is not None:
            self.store.trim(rollout.id, len(rollout.transitions))

    def scored(self, rollout: Rollout, step_rewards: Sequence[dict[str, float]] = ()) -> None:
        """Write the rollout with its score and verdicts, and its transitions with step rewards."""
        self._write_rollout(rollout)
        for transition, rewards in zip(rollout.transitions, step_rewards, strict=False):
            transition.step_rewards = dict(rewards)
            if rewards:
                self._write_call(rollout.id, transition)

    def take_in(
        self,
        rollouts: Sequence[Rollout],
        transitions: Sequence[tuple[str, Transition]],
        *,
        unrecorded: Unrecorded | None = None,
    ) -> None:
        """Add the records of a recorder on another host, which knows only the tasks that it ran.

        Args:
            transitions: Rollout id and transition.
            unrecorded: Unrecorded calls of that recorder.
        """
        if unrecorded is not None:
            self._missed.add(unrecorded.calls)
            if unrecorded.reason is not None:
                self._missed.hide(unrecorded.reason)
        for rollout in rollouts:
            rollout.run_id = self.run_id
            self._write_rollout(rollout)
        places = {rollout.id: OpenRollout(rollout) for rollout in rollouts}
        for rollout_id, transition in transitions:
            if (place := places.get(rollout_id)) is not None:
                demonstrated = {*transition.shown_tasks, *self._tasks_in_prompt(transition.request, place)}
                transition.shown_tasks = tuple(sorted(demonstrated))
                with self._lock:
                    self.demonstrated_tasks.update(demonstrated)
            self._write_call(rollout_id, transition)
        for rollout in rollouts:
            self._trim(rollout)

    @property
    def missed(self) -> Unrecorded:
        """LM calls that did not come through an observed engine, as far as they can be detected."""
        return self._missed.total

    @property
    def unrecorded(self) -> Unrecorded:
        """LM calls that are not in the store: those that did not come through an observed engine, as far as they can
        be detected, those whose row the store refused, and those of processes that were killed. The store has to be
        settled."""
        refused, lost = getattr(self.store, "calls_not_stored", 0), 0
        if self.may_lack_rows and isinstance(self.store, Store):
            stored = sum(usage.calls for usage in self.store.spent(self.run_id).values())
            lost = max(0, self.meter.answered - stored - refused)
        return self._missed.total + Unrecorded(refused=refused, lost=lost)

    def recorded_by_hand(self) -> None:
        """Decrement the unrecorded calls of the open rollout, after the caller has recorded one of them itself."""
        count = current_missed_calls()
        if count is not None and count.total.calls:
            count.add(-1)

    def observe_own(self, call: Call) -> None:
        """As `observe`, for a call of a model that the program made itself."""
        if (place := current_open_rollout() or self._alone()) is not None:
            with self._lock:
                place.own_calls += 1
        self.observe(call)

    def observe(self, call: Call) -> None:
        """Record an LM call of an engine. Must run in the thread that made the call."""
        place = current_open_rollout() or self._alone() or OpenRollout(self._outside())
        rollout, shown_tasks = place.rollout, self.shown_in(call.request, place)
        with self._lock:
            transition = Transition(
                **vars(call),
                t=len(rollout.transitions),
                tools=_requested_tools(call.response),
                shown_tasks=shown_tasks,
                agent=current_agent(),
            )
            self.identify(rollout, transition)
            rollout.transitions.append(transition)
            if not rollout.model:
                rollout.model, rollout.adapters = call.model, call.adapters
        self._write_call(rollout.id, transition)
        if rollout.source == "outside":  # this rollout is in memory as long as the run: drop the texts from memory
            rollout.transitions[-1] = Transition(t=transition.t, model=call.model, request={})

    def shown_in(self, request: dict[str, Any], place: OpenRollout) -> tuple[str, ...]:
        """Keys of the other tasks in the prompt of a call, which count as demonstrated from now on."""
        shown = self._tasks_in_prompt(request, place)
        with self._lock:
            self.demonstrated_tasks.update(shown)
        return shown

    def _tasks_in_prompt(self, request: dict[str, Any], place: OpenRollout) -> tuple[str, ...]:
        """Keys of the other tasks in the prompt of a call."""
        all_carried = [carried for carried in {self.carried, *place.carried} if carried.tasks]
        if not self.texts and not all_carried:
            return ()
        messages = message_texts(chat_messages(request))
        own_task = place.key
        with self._lock:
            tasks = self.texts.tasks_in(messages, own_task=own_task)
            if own_task and self.texts:
                self.texts.record_prompt(own_task, messages)
        # more than instructions and the current task; an agent of another framework has examples in its instructions
        if all_carried and len(messages) > (1 if "dialect" in request else 2):
            carried_tasks = {task for carried in all_carried for task in carried.tasks_in(messages[:-1])}
            tasks = tuple(sorted({*tasks, *carried_tasks} - {own_task}))
        return tasks

    def _alone(self) -> OpenRollout | None:
        """The only open rollout of this recorder, for a call from a thread that was not started in a rollout.

        If several are open, the call is stored outside of them and counted as unrecorded.
        """
        places = others_open(self)
        if len(places) > 1:
            self._missed.add(1)
        return places[0] if len(places) == 1 else None

    def _outside(self) -> Rollout:
        with self._lock:
            key = (self.phase, self.scope)
            if key not in self._loose:
                self._loose[key] = Rollout(run_id=self.run_id, phase=self.phase, source="outside", status="done")
                if self._ids is not None:
                    self._loose[key].id = outside_id(self.run_id, *key)
                self._write_rollout(self._loose[key])
            return self._loose[key]

    def _write_rollout(self, rollout: Rollout, *, interim: bool = False) -> None:
        if self.store is not None and not self._stopped:
            self.store.put_rollout(rollout, interim=interim)

    def _write_call(self, rollout_id: str, transition: Transition) -> None:
        if self.store is not None:
            self.store.put_transition(rollout_id, transition)

    # Methods of `Listener`

    def recording(self, lm: Any) -> Recording | None:
        """What records a call of a model that a program made itself; the model of a job is observed already."""
        place = current_open_rollout()
        if not isinstance(lm, dspy.BaseLM) or is_observed(lm) or (place and place.recorder not in (None, self)):
            return None
        return Recording(self.observe_own, self.meter, self.cache)

    def lm_called(self, lm: Any) -> AbstractContextManager[Any] | None:
        """Count a call that will not be observed.

        If the transport is watched, each HTTP request counts, including retries; answers from DSPy's cache do not.
        """
        if is_observed(lm, self.observe) or is_observed(lm, self.observe_own):
            return None
        ours = isinstance(lm, LanguageModel)
        count = current_missed_calls() or self._missed
        if (ours and not lm.recording.observers) or (isinstance(lm, dspy.LM) and isinstance(lm.engine, str)):
            return asking(count.add)
        count.add(1)
        return accounted()

    def parse_failed(self, text: str) -> None:
        rollout = current_rollout()
        if rollout is not None:
            self.unparsed(rollout, text)

    def unparsed(self, rollout: Rollout, text: str | None = None) -> None:
        """Mark the call whose answer could not be parsed: the latest with this output, else the latest."""
        latest = rollout.transitions[::-1]
        transition = next((t for t in latest if text is not None and t.output == text), next(iter(latest), None))
        if transition is not None and transition.failure is None:
            transition.failure = FailureKind.PARSE
            self._write_call(rollout.id, transition)

    def tool_began(self, tool: Any, arguments: dict[str, Any]) -> tuple[Rollout, ToolCall] | None:
        rollout = current_rollout()
        if rollout is None:
            return None
        called = ToolCall(name=str(getattr(tool, "name", tool)), arguments=dict(arguments))
        with self._lock:
            record = self._record_for(rollout, called)
            self._running.add(id(record))
        return rollout, record

    def _record_for(self, rollout: Rollout, tool: ToolCall) -> ToolCall:
        """Record of a tool that starts: the one of the tool call in the model's answer, else a new one."""
        last = rollout.transitions[-1].tools if rollout.transitions else rollout.early_tools
        unended = [t for t in last if t.result is None and t.error is None and id(t) not in self._running]
        if waiting := [t for t in unended if t.name == tool.name]:
            record = next((t for t in waiting if t.arguments == tool.arguments), waiting[0])
            record.arguments = tool.arguments
            return record
        last.append(tool)
        return tool

    def tool_ended(self, begun: tuple[Rollout, ToolCall] | None, result: Any, error: BaseException | None) -> None:
        if begun is None:
            return
        rollout, tool = begun
        with self._lock:
            self._running.discard(id(tool))
        if error is None:
            tool.result = str(result)[:_TEXT]
        else:
            tool.error = error_text(error)
        for transition in rollout.transitions:
            if any(tool is other for other in transition.tools):
                if error is not None and transition.failure is None:
                    transition.failure = FailureKind.TOOL
                self._write_call(rollout.id, transition)
