"""The recorder: opens rollouts, receives every LM call and tool call inside them, writes them to the store.

The rollout that is open travels in DSPy's settings, which DSPy copies into its worker threads and async tasks.
Calls outside any rollout (a teleprompter's proposals, a judge) are kept too, in a rollout of their own a phase.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import dspy

from assay.errors import FailureKind
from assay.models import Call
from assay.models.failures import failure_of_program
from assay.models.lm import LanguageModel
from assay.models.transports import accounted, asking
from assay.scrubbing import said
from assay.traces.dialects import answer_of, chat_messages
from assay.traces.identity import RolloutIds, outside_id
from assay.traces.listening import listeners, listening
from assay.traces.missed import NOTHING, Unrecorded
from assay.traces.places import OpenRollout, current_rollout, missed_here, open_here, opened, others_open
from assay.traces.records import Rollout, ToolCall, Transition
from assay.traces.shown import Carried, TaskTexts, message_texts
from assay.traces.store import Store
from assay.traces.unrecorded import UnrecordedCalls

__all__ = ["Recorder", "aside", "current_rollout", "note_failure"]

_TEXT = 20_000  # characters of a tool's result that are kept


@contextmanager
def aside(rollout: Rollout) -> Iterator[Rollout]:
    """Opens a rollout apart from the one that is open, with the recorder at work: what judges a run is not part of it."""
    recorder = next((listener for listener in listeners() if isinstance(listener, Recorder)), None)
    if recorder is None:
        with opened(OpenRollout(rollout, missed_here())):
            yield rollout
        return
    with recorder.rollout(rollout):
        yield rollout


def note_failure(kind: FailureKind) -> None:
    """Gives the latest call of the open rollout its failure kind, where it has none: for programs that see it themselves."""
    rollout = current_rollout()
    if rollout is None or not rollout.transitions or rollout.transitions[-1].failure is not None:
        return
    rollout.transitions[-1].failure = kind
    for listener in listeners():
        if isinstance(listener, Recorder) and listener.store is not None:
            listener.store.put_transition(rollout.id, rollout.transitions[-1])
            return


def _tools_asked(response: dict[str, Any] | None) -> list[ToolCall]:
    """The tool calls that an answer holds, as records."""
    parts = () if response is None else response["message"]["parts"]
    return answer_of(None, response).tool_calls() if response is not None and any(part["type"] == "tool_call" for part in parts) else []


class Recorder:
    """Pass `recorder.observe` to `get_lm(observers=…)`, and run programs inside `recorder.rollout(…)`.

    While it is `active` it also sees tool calls, and counts LM calls that did not come through an observed engine
    (`unrecorded`): a program that makes its own `dspy.LM`, or calls a model with another client, is counted, never silently missed.

    Args:
        replayable: whether rollouts get ids that a replay of the run gives again, see `RolloutIds`.
        resumed: whether the store may hold rollouts of these ids from an earlier attempt; their further transitions are removed.
    """

    def __init__(
        self, store: Store | None = None, *, run_id: str = "", unrecorded: Unrecorded = NOTHING, replayable: bool = False, resumed: bool = False
    ) -> None:  # fmt: skip
        self.store, self.run_id = store, run_id
        self.phase = self.scope = ""
        self.resumed, self._ids = resumed, RolloutIds() if replayable else None
        self._missed = UnrecordedCalls(unrecorded)
        self.texts = TaskTexts()  # tasks that demonstrations may come from
        self.carried = Carried()  # tasks whose demonstrations the program brought along, as its artifact says
        self.shown: set[str] = set()  # all that was shown so far
        self._lock = threading.Lock()
        self._running: set[int] = set()  # tool calls, by the identity of their records
        self._loose: dict[tuple[str, str], Rollout] = {}

    def __deepcopy__(self, memo: object) -> "Recorder":
        return self

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within: this recorder hears of tools, unparsed answers and calls that it does not observe."""
        with dspy.context(**listening(self)):
            yield

    @contextmanager
    def rollout(self, rollout: Rollout, *, then_scored: bool = False, content: str | None = None) -> Iterator[Rollout]:
        """Opens a rollout. It is written when it opens and again when it closes, however it closes.

        Args:
            then_scored: `scored` is called next, and writes it once more.
            content: the content hash of its inputs, where it is known.
        """
        rollout.run_id, rollout.phase = rollout.run_id or self.run_id, rollout.phase or self.phase
        if self._ids is not None:
            rollout.id = self._ids.of(rollout, scope=self.scope, content=content)
        self._put(rollout, interim=True)
        missed = self._missed.opened(missed_here)
        try:
            with opened(OpenRollout(rollout, missed, content)):
                yield rollout
        except BaseException as error:
            if rollout.status == "running":
                rollout.status, rollout.error, rollout.failure = "error", said(error), failure_of_program(error)
            raise
        finally:
            missed.closed()
            if rollout.status == "running":
                rollout.status = "done"
            rollout.ended_at = time.time()
            self._put(rollout, interim=then_scored)
            self._trim(rollout)

    @contextmanager
    def within(self, scope: str) -> Iterator[None]:
        """Rollouts inside get other ids than those of the same phase, task and program in other scopes, such as trials of a study."""
        before, self.scope = self.scope, scope
        try:
            yield
        finally:
            self.scope = before

    def finish(self) -> None:
        """To be called at the end of a run: removes what an earlier attempt had recorded beyond this one."""
        with self._lock:
            loose = list(self._loose.values())
        for rollout in loose:
            self._trim(rollout)

    def owner(self) -> str:
        """The id of the rollout that a call made now belongs to."""
        rollout = current_rollout()
        return outside_id(self.run_id, self.phase, self.scope) if rollout is None else rollout.id

    def _trim(self, rollout: Rollout) -> None:
        if self.resumed and self.store is not None:
            self.store.trim(rollout.id, len(rollout.transitions))

    def scored(self, rollout: Rollout, step_rewards: Sequence[dict[str, float]] = ()) -> None:
        """Writes the rollout again, with its score and verdicts, and those of its transitions that earned a step reward."""
        self._put(rollout)
        for transition, rewards in zip(rollout.transitions, step_rewards, strict=False):
            transition.step_rewards = dict(rewards)
            if rewards and self.store is not None:
                self.store.put_transition(rollout.id, transition)

    def take_in(self, rollouts: Sequence[Rollout], transitions: Sequence[tuple[str, Transition]], *, unrecorded: Unrecorded | None = None) -> None:
        """Keeps what a recorder on another host recorded of this run: rollouts, transitions by rollout id, and calls it missed."""
        if unrecorded is not None:
            self._missed.add(unrecorded.calls)
            if unrecorded.reason is not None:
                self._missed.hide(unrecorded.reason)
        for rollout in rollouts:
            rollout.run_id = self.run_id
            self._put(rollout)
        if self.store is not None:
            for rollout_id, transition in transitions:
                self.store.put_transition(rollout_id, transition)
        for rollout in rollouts:
            self._trim(rollout)

    @property
    def unrecorded(self) -> Unrecorded:
        """LM calls that did not come through an observed engine, as far as they can be seen."""
        return self._missed.total

    def recorded_by_hand(self) -> None:
        """To be called within a rollout: one of its calls that was counted as unrecorded has been recorded by whoever made it."""
        found = missed_here()
        if found is not None and found.total.calls:
            found.add(-1)

    def observe(self, call: Call) -> None:
        """Receives one LM call from an engine, in the thread that made it."""
        found = open_here() or self._alone() or OpenRollout(self._outside())
        rollout, shown = found.rollout, self._shown(call, found)
        with self._lock:
            self.shown.update(shown)
            transition = Transition(
                t=len(rollout.transitions), model=call.model, weights=call.weights, adapters=call.adapters,
                request=call.request, response=call.response, output=call.text, error=call.error, failure=call.failure,
                constrained=call.constrained, cached=call.cached, prompt_tokens=call.prompt_tokens,
                completion_tokens=call.completion_tokens, thinking_tokens=call.thinking_tokens, token_ids=call.token_ids, logprobs=call.logprobs,
                shown_tasks=shown,
                latency_ms=call.latency_ms, cost_usd=call.cost_usd, started_at=call.started_at,
                tools=_tools_asked(call.response),
            )  # fmt: skip
            rollout.transitions.append(transition)
            if not rollout.model:
                rollout.model, rollout.adapters = call.model, call.adapters
        if self.store is not None:
            self.store.put_transition(rollout.id, transition)
        if rollout.source == "outside":  # it lives as long as the run: keep its row, not its texts
            rollout.transitions[-1] = Transition(t=transition.t, model=call.model, request={})

    def _shown(self, call: Call, here: OpenRollout) -> tuple[str, ...]:
        """The tasks that a call shows beside its own."""
        if not self.texts and not self.carried.tasks:
            return ()
        messages = message_texts(chat_messages(call.request))
        own = here.content
        with self._lock:
            found = self.texts.shown(messages, own=own)
            if own and self.texts:
                self.texts.asked(own, messages)
        if self.carried.tasks and len(messages) > 2:  # more than instructions and the task at hand
            found = tuple(sorted({*found, *self.carried.shown(messages[:-1])} - {own}))
        return found

    def _alone(self) -> OpenRollout | None:
        """What is open, of a call from a thread that was not started in a rollout. Where several are open it is kept outside, and counted."""
        places = others_open()
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
                self._put(self._loose[key])
            return self._loose[key]

    def _put(self, rollout: Rollout, *, interim: bool = False) -> None:
        if self.store is not None:
            self.store.put_rollout(rollout, interim=interim)

    # -- what a `Listener` is told

    def lm_called(self, lm: Any) -> AbstractContextManager[None] | None:
        """Counts a call that will not be observed: its requests where a transport shows them, each try and none that DSPy's cache answers."""
        ours = isinstance(lm, LanguageModel)
        if ours and self.observe in lm.recording.observers:
            return None
        count = missed_here() or self._missed
        if (ours and not lm.recording.observers) or (isinstance(lm, dspy.LM) and isinstance(lm.engine, str)):
            return asking(count.add)
        count.add(1)
        return accounted()

    def parse_failed(self, text: str) -> None:
        rollout = current_rollout()
        if rollout is not None:
            self.unparsed(rollout, text)

    def unparsed(self, rollout: Rollout, text: str | None = None) -> None:
        """Marks the call whose answer could not be parsed: the latest with this output, else the latest."""
        found = next((t for t in reversed(rollout.transitions) if t.output == text), None) if text is not None else None
        found = found or (rollout.transitions[-1] if rollout.transitions else None)
        if found is not None and found.failure is None:
            found.failure = FailureKind.PARSE
            if self.store is not None:
                self.store.put_transition(rollout.id, found)

    def tool_began(self, tool: Any, arguments: dict[str, Any]) -> tuple[Rollout, ToolCall] | None:
        rollout = current_rollout()
        if rollout is None:
            return None
        with self._lock:
            record = self._asked_for(rollout, ToolCall(name=str(getattr(tool, "name", tool)), arguments=dict(arguments)))
            self._running.add(id(record))
        return rollout, record

    def _asked_for(self, rollout: Rollout, tool: ToolCall) -> ToolCall:
        """The record of a tool that is now run: the one that the model's answer asked for, else a new one."""
        last = rollout.transitions[-1].tools if rollout.transitions else rollout.early_tools
        waiting = [t for t in last if t.name == tool.name and t.result is None and t.error is None and id(t) not in self._running]
        if waiting:
            found = next((t for t in waiting if t.arguments == tool.arguments), waiting[0])
            found.arguments = tool.arguments
            return found
        last.append(tool)
        return tool

    def tool_ended(self, begun: tuple[Rollout, ToolCall] | None, result: Any, error: BaseException | None) -> None:
        if begun is None:
            return
        rollout, tool = begun
        with self._lock:
            self._running.discard(id(tool))
        if error is not None:
            tool.error = said(error)
            for transition in rollout.transitions:
                if transition.failure is None and any(tool is other for other in transition.tools):
                    transition.failure = FailureKind.TOOL
        else:
            tool.result = str(result)[:_TEXT]
        if self.store is not None:
            for transition in rollout.transitions:
                if any(tool is other for other in transition.tools):
                    self.store.put_transition(rollout.id, transition)
