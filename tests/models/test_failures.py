"""The kind of a failure follows from the class of the exception, on calls, programs, tools, checks and judges alike."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy
import httpx
import litellm
import openai
import pytest
from dspy import lm15
from dspy.utils.exceptions import ContextWindowExceededError, LMRateLimitError, LMTimeoutError

from assay.datasets import Task
from assay.errors import BudgetExceeded, FailureKind, ModelError
from assay.models import Meter
from assay.models.failures import failure_of_call, failure_of_program, is_own
from assay.optimizers.session import Session, Student
from assay.programs.agent import ToolAgent
from assay.rubrics import Criterion, Rubric
from assay.rubrics.criteria import JudgeSpec
from assay.testing import scripted_lm
from assay.traces import Recorder, Rollout, Store
from assay.traces.selection import Selection, read_groups

REQUEST = httpx.Request("POST", "http://x/v1")


@pytest.mark.parametrize(
    ("error", "of_call", "of_program"),
    [
        (ContextWindowExceededError(message="long"), "context", "context"),
        (lm15.ContextLengthError("long"), "context", "context"),
        (litellm.exceptions.ContextWindowExceededError("long", "m", "openai"), "context", "context"),
        (LMTimeoutError("late"), "timeout", "timeout"),
        (litellm.exceptions.Timeout("late", "m", "openai"), "timeout", "timeout"),
        (openai.APITimeoutError(REQUEST), "timeout", "timeout"),
        (httpx.ReadTimeout("late", request=REQUEST), "timeout", "agent"),
        (TimeoutError("late"), "timeout", "agent"),
        (LMRateLimitError("429"), "model", "model"),
        (openai.APIConnectionError(request=REQUEST), "model", "model"),
        (litellm.exceptions.APIConnectionError("gone", "openai", "m"), "model", "model"),
        (ConnectionRefusedError("gone"), "model", "agent"),
        (ModelError("not pulled"), "model", "model"),
        (BudgetExceeded("cap"), "cap", "cap"),
        (KeyboardInterrupt(), "cap", "cap"),
        (OSError("notes.txt could not be read"), "model", "agent"),
        (ValueError("prompt is too long: context window exceeded, timeout"), "model", "agent"),
    ],
)
def test_the_kind_follows_from_the_class(error: BaseException, of_call: str, of_program: str) -> None:
    assert (failure_of_call(error), failure_of_program(error)) == (of_call, of_program)


def test_a_failure_of_the_models_server_is_not_the_programs_own() -> None:
    assert {kind for kind in FailureKind if not is_own(kind)} == {"model", "timeout", "cap", "check", "judge"}


def answer(request: object) -> str:
    return "[[ ## answer ## ]]\n4\n\n[[ ## completed ## ]]"


class Program(dspy.Module):
    def __init__(self, act: Callable[[Any], Any]) -> None:
        super().__init__()
        self.ask, self.act = dspy.Predict("question -> answer"), act

    def forward(self, question: str) -> Any:
        return self.act(self.ask(question=question))


def raising(error: BaseException) -> Callable[..., Any]:
    def raise_it(*_: Any, **__: Any) -> Any:
        raise error

    return raise_it


def always(task: Any, prediction: Any, rollout: Any) -> bool:
    return True


def ran(store: Store, *, script: Any = answer, act: Callable[[Any], Any] = lambda found: found, check: Any = always) -> Rollout:
    criterion = Criterion(name="c", judge=JudgeSpec(text="Right?")) if check is None else Criterion(name="c", check=check)
    resolver = None if check is not None else lambda spec: raising(ConnectionError("judge is down"))
    recorder, task = Recorder(store), Task(id="t", inputs={"question": "2+2?"}, expected={"answer": "4"})
    session = Session(
        lm=scripted_lm(script, observers=[recorder.observe]), rubric=Rubric("r", [criterion], resolver=resolver), recorder=recorder, meter=Meter(),
        program_name="p", seed=0,
    )  # fmt: skip
    session.know([task], "train")
    with session.context():
        rollout = Student(Program(act), session)(**task.inputs)._rollout
    store.flush()
    return store.rollout(rollout.id)


@pytest.mark.parametrize(
    ("act", "script", "check", "status", "rollout", "transition"),
    [
        (raising(OSError("notes.txt could not be read")), answer, always, "failed", "agent", None),
        (lambda found: found, lambda request: "no section at all", always, "failed", "parse", "parse"),
        (lambda found: found, lambda request: ContextWindowExceededError(message="long"), always, "failed", "context", "context"),
        (lambda found: found, lambda request: LMTimeoutError("late"), always, "error", "timeout", "timeout"),
        (lambda found: found, lambda request: RuntimeError("boom"), always, "error", "model", "model"),
        (raising(openai.APIConnectionError(request=REQUEST)), answer, always, "error", "model", None),
        (lambda found: found, answer, raising(ValueError("check")), "done", "check", None),
        (lambda found: found, answer, None, "done", "judge", None),
        (lambda found: found, answer, always, "done", None, None),
    ],
    ids=["agent", "parse", "context", "timeout", "model", "sdk", "check", "judge", "none"],
)
def test_a_rollout_and_its_call_are_stored_with_their_kind(
    tmp_path: Path, act: Any, script: Any, check: Any, status: str, rollout: str | None, transition: str | None
) -> None:
    with Store(tmp_path / "s.db") as store:
        found = ran(store, script=script, act=act, check=check)
        assert (found.status, found.failure, found.transitions[-1].failure) == (status, rollout, transition)
        if status != "error":
            (episode,) = next(iter(read_groups(store, Selection(), set())))
            expected = {"parse": "parse", "context": "error"}.get(rollout or "")
            assert episode.turns[-1].problem(episode.rollout, True) == expected


def test_a_tool_that_raises_marks_the_call_it_was_called_after(tmp_path: Path) -> None:
    def act(found: Any) -> Any:
        try:
            dspy.Tool(raising(KeyError("no")), name="look")()
        except KeyError:
            pass
        return found

    with Store(tmp_path / "s.db") as store:
        found = ran(store, act=act)
    assert (found.status, found.failure, found.transitions[0].failure) == ("done", None, "tool")


def test_a_cap_that_stops_a_rollout_is_its_kind() -> None:
    recorder, rollout = Recorder(), Rollout()
    with pytest.raises(BudgetExceeded), recorder.rollout(rollout):
        raise BudgetExceeded("no calls left")
    assert (rollout.status, rollout.failure) == ("error", FailureKind.CAP)


def test_a_tool_agent_that_repeats_its_call_is_stopped_for_a_loop(tmp_path: Path) -> None:
    def look(key: str) -> str:
        return f"{key} is unknown"

    def script(request: Any) -> str:
        wanted = request.config.response_format["schema"]["properties"]
        return json.dumps({name: {"action": "look", "key": "x", "need": 1.0}.get(name, "none") for name in wanted})

    arguments = {"look": {"key": (str, dspy.OutputField())}}
    agent = ToolAgent("question -> answer", [look], arguments=arguments, adapter="json")
    with Store(tmp_path / "s.db") as store:
        recorder, rollout = Recorder(store), Rollout()
        with dspy.context(lm=scripted_lm(script, observers=[recorder.observe])), recorder.active(), recorder.rollout(rollout):
            agent(question="what is x?")
        store.flush()
        kinds = [transition.failure for transition in store.rollout(rollout.id).transitions]
    assert kinds.count(FailureKind.LOOP) == 1
