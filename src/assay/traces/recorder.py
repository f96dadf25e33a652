"""The recorder: opens rollouts, receives every LM call and tool call inside them, writes them to the store.

The rollout that is open travels in DSPy's settings, which DSPy copies into its worker threads and async tasks.
Calls outside any rollout (a teleprompter's proposals, a judge) are kept too, in a rollout of their own a phase.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import dspy
from dspy.utils.callback import BaseCallback

from assay.models import Call
from assay.traces.records import Rollout, ToolCall, Transition
from assay.traces.store import Store

__all__ = ["Recorder", "aside", "current_rollout"]

_KEY = "assay_rollout"
_TEXT = 20_000  # characters of a tool's result that are kept


def current_rollout() -> Rollout | None:
    """The rollout that is open in this thread or task."""
    found = dspy.settings.get(_KEY)
    return found if isinstance(found, Rollout) else None


@contextmanager
def aside(rollout: Rollout) -> Iterator[Rollout]:
    """Opens a rollout apart from the one that is open, with the recorder at work: what judges a run is not part of it."""
    recorder = next((callback for callback in dspy.settings.callbacks if isinstance(callback, Recorder)), None)
    if recorder is None:
        with dspy.context(**{_KEY: rollout}):
            yield rollout
        return
    with recorder.rollout(rollout):
        yield rollout


class Recorder(BaseCallback):  # type: ignore[misc]
    """Pass `recorder.observe` to `get_lm(observers=…)`, and run programs inside `recorder.rollout(…)`.

    As a DSPy callback it also sees tool calls, and counts LM calls that did not come through an observed engine
    (`unseen`): a program that makes its own `dspy.LM` is counted, never silently missed.
    """

    def __init__(self, store: Store | None = None, *, run_id: str = "", unseen: int = 0) -> None:
        self.store, self.run_id = store, run_id
        self.phase = ""
        self.unseen = unseen
        self._lock = threading.Lock()
        self._tools: dict[str, tuple[Rollout, ToolCall]] = {}
        self._loose: dict[str, Rollout] = {}

    def __deepcopy__(self, memo: object) -> "Recorder":
        return self

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within: this recorder is among DSPy's callbacks."""
        with dspy.context(callbacks=[*dspy.settings.callbacks, self]):
            yield

    @contextmanager
    def rollout(self, rollout: Rollout) -> Iterator[Rollout]:
        """Opens a rollout. It is written when it opens and again when it closes, however it closes."""
        rollout.run_id, rollout.phase = rollout.run_id or self.run_id, rollout.phase or self.phase
        self._put(rollout)
        try:
            with dspy.context(**{_KEY: rollout}):
                yield rollout
        except BaseException as error:
            if rollout.status == "running":
                rollout.status, rollout.error = "error", f"{type(error).__name__}: {error}"
            raise
        finally:
            if rollout.status == "running":
                rollout.status = "done"
            rollout.ended_at = time.time()
            self._put(rollout)

    def scored(self, rollout: Rollout, step_rewards: Sequence[dict[str, float]] = ()) -> None:
        """Writes the rollout again, with its score and verdicts, and those of its transitions that earned a step reward."""
        self._put(rollout)
        for transition, rewards in zip(rollout.transitions, step_rewards, strict=False):
            transition.step_rewards = dict(rewards)
            if rewards and self.store is not None:
                self.store.put_transition(rollout.id, transition)

    def take_in(self, rollouts: Sequence[Rollout], transitions: Sequence[tuple[str, Transition]], *, unseen: int = 0) -> None:
        """Keeps what a recorder on another host recorded of this run: rollouts, transitions by rollout id, and calls it missed."""
        with self._lock:
            self.unseen += unseen
        for rollout in rollouts:
            rollout.run_id = self.run_id
            self._put(rollout)
        if self.store is not None:
            for rollout_id, transition in transitions:
                self.store.put_transition(rollout_id, transition)

    def observe(self, call: Call) -> None:
        """Receives one LM call from an engine, in the thread that made it."""
        rollout = current_rollout() or self._outside()
        with self._lock:
            transition = Transition(
                t=len(rollout.transitions), model=call.model, weights=call.weights, adapters=call.adapters,
                request=call.request, response=call.response, output=call.text, error=call.error,
                constrained=call.constrained, cached=call.cached, prompt_tokens=call.prompt_tokens,
                completion_tokens=call.completion_tokens, token_ids=call.token_ids, logprobs=call.logprobs,
                latency_ms=call.latency_ms, cost_usd=call.cost_usd, started_at=call.started_at,
            )  # fmt: skip
            rollout.transitions.append(transition)
            if not rollout.model:
                rollout.model, rollout.adapters = call.model, call.adapters
        if self.store is not None:
            self.store.put_transition(rollout.id, transition)
        if rollout.source == "outside":  # it lives as long as the run: keep its row, not its texts
            rollout.transitions[-1] = Transition(t=transition.t, model=call.model, request={})

    def _outside(self) -> Rollout:
        with self._lock:
            if self.phase not in self._loose:
                self._loose[self.phase] = Rollout(run_id=self.run_id, phase=self.phase, source="outside", status="done")
                self._put(self._loose[self.phase])
            return self._loose[self.phase]

    def _put(self, rollout: Rollout) -> None:
        if self.store is not None:
            self.store.put_rollout(rollout)

    # -- DSPy's callbacks

    def on_lm_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        from assay.models import LanguageModel

        engine = getattr(instance, "engine", None)
        if not isinstance(instance, LanguageModel) or engine is None or self.observe not in engine.observers:
            with self._lock:
                self.unseen += 1

    def on_tool_start(self, call_id: str, instance: Any, inputs: dict[str, Any]) -> None:
        rollout = current_rollout()
        if rollout is None:
            return
        arguments = inputs.get("kwargs", inputs)
        tool = ToolCall(name=str(getattr(instance, "name", instance)), arguments=dict(arguments) if isinstance(arguments, dict) else {})
        with self._lock:
            self._tools[call_id] = (rollout, tool)
            (rollout.transitions[-1].tools if rollout.transitions else rollout.early_tools).append(tool)

    def on_tool_end(self, call_id: str, outputs: Any | None, exception: Exception | None = None) -> None:
        with self._lock:
            rollout, tool = self._tools.pop(call_id, (None, None))
        if rollout is None or tool is None:
            return
        if exception is not None:
            tool.error = f"{type(exception).__name__}: {exception}"
        else:
            tool.result = str(outputs)[:_TEXT]
        if self.store is not None:
            for transition in rollout.transitions:
                if any(tool is other for other in transition.tools):
                    self.store.put_transition(rollout.id, transition)
