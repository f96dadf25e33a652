"""Failure kinds follow from the exception's class, for calls, programs, tools, checks and judges."""

import asyncio
import errno
import http.client
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy
import httpx
import litellm
import openai
import pytest
from dspy import lm15
from dspy.utils.exceptions import AdapterParseError, ContextWindowExceededError, LMRateLimitError, LMTimeoutError

from assay.datasets import Task
from assay.errors import BudgetExceeded, ModelError
from assay.evaluation.session import RecordedProgram, Session
from assay.models import Meter
from assay.models.calls import failure_of_call, failure_of_program
from assay.rubrics import Criterion, Rubric
from assay.rubrics.criteria import JudgeSpec
from assay.testing import scripted_lm
from assay.traces import Recorder, Rollout, Store
from assay.traces.export.selection import read_groups
from assay.traces.export.settings import Selection

REQUEST = httpx.Request("POST", "http://x/v1")


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "of_call", "of_program"),
    [
        (ContextWindowExceededError(message="long"), "context", "context"),
        (lm15.ContextLengthError("long"), "context", "context"),
        (litellm.exceptions.ContextWindowExceededError("long", "m", "openai"), "context", "context"),
        (LMTimeoutError("late"), "timeout", "timeout"),
        (litellm.exceptions.Timeout("late", "m", "openai"), "timeout", "timeout"),
        (openai.APITimeoutError(REQUEST), "timeout", "timeout"),
        (httpx.ReadTimeout("late", request=REQUEST), "timeout", "timeout"),
        (TimeoutError("late"), "timeout", "timeout"),
        (LMRateLimitError("429"), "model", "model"),
        (openai.APIConnectionError(request=REQUEST), "model", "model"),
        (litellm.exceptions.APIConnectionError("gone", "openai", "m"), "model", "model"),
        (ConnectionRefusedError("gone"), "model", "model"),
        (httpx.ConnectError("gone", request=REQUEST), "model", "model"),
        (socket.gaierror(-2, "Name or service not known"), "model", "model"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "model", "model"),
        (http.client.IncompleteRead(b""), "model", "model"),
        (ssl.SSLError("handshake"), "model", "model"),
        (caused(RuntimeError("step 1 failed"), LMRateLimitError("429")), "model", "model"),
        (caused(RuntimeError("step 1 failed"), LMTimeoutError("late")), "model", "timeout"),
        (caused(RuntimeError("step 1 failed"), ContextWindowExceededError(message="long")), "model", "context"),
        (caused(KeyError("x"), ValueError("y")), "model", "agent"),
        (caused(AdapterParseError("A", dspy.Signature("a -> b"), "no"), LMRateLimitError("429")), "parse", "parse"),
        (
            ExceptionGroup("tasks", [ValueError("cancelled"), caused(RuntimeError("x"), LMRateLimitError("429"))]),
            "model",
            "model",
        ),
        (ExceptionGroup("tasks", [ExceptionGroup("more", [ConnectionResetError("gone")])]), "model", "model"),
        (ExceptionGroup("tasks", [ValueError("x")]), "model", "agent"),
        (ModelError("not pulled"), "model", "model"),
        (BudgetExceeded("cap"), "cap", "cap"),
        (KeyboardInterrupt(), "cap", "cap"),
        (OSError("notes.txt could not be read"), "model", "agent"),
        (ValueError("prompt is too long: context window exceeded, timeout"), "model", "agent"),
    ],
)
def test_the_failure_kind_follows_from_the_exception_class(error: BaseException, of_call: str, of_program: str) -> None:
    assert (failure_of_call(error), failure_of_program(error)) == (of_call, of_program)


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


def ran(program: dspy.Module, script: Any = answer, *, check: Any = always, store: Store | None = None) -> Rollout:
    """The scored rollout of a program; its criterion has a judge that is down where there is no check."""
    criterion = Criterion(name="c", check=check, judge=None if check else JudgeSpec(text="Right?"))
    resolver = None if check else lambda spec: raising(ConnectionError("judge is down"))
    recorder, task = Recorder(store), Task(id="t", inputs={"question": "2+2?"}, expected={"answer": "4"})
    session = Session(
        lm=scripted_lm(script, observers=[recorder.observe]), rubric=Rubric("r", [criterion], resolver=resolver),
        recorder=recorder, meter=Meter(), program_name="p",
    )  # fmt: skip
    session.register([task])
    with session.context():
        rollout = RecordedProgram(program, session).run(task).rollout
    assert isinstance(rollout, Rollout)
    return rollout


@pytest.mark.parametrize(
    ("act", "script", "check", "status", "rollout", "transition"),
    [
        (raising(OSError("notes.txt could not be read")), answer, always, "failed", "agent", None),
        (lambda result: result, lambda request: "no section at all", always, "failed", "parse", "parse"),
        (
            lambda result: result,
            lambda request: ContextWindowExceededError(message="long"),
            always,
            "failed",
            "context",
            "context",
        ),
        (lambda result: result, lambda request: LMTimeoutError("late"), always, "error", "timeout", "timeout"),
        (lambda result: result, lambda request: RuntimeError("boom"), always, "error", "model", "model"),
        (raising(openai.APIConnectionError(request=REQUEST)), answer, always, "error", "model", None),
        (lambda result: result, answer, raising(ValueError("check")), "done", "check", None),
        (lambda result: result, answer, None, "done", "judge", None),
        (lambda result: result, answer, always, "done", None, None),
    ],
    ids=["agent", "parse", "context", "timeout", "model", "sdk", "check", "judge", "none"],
)
def test_a_rollout_and_its_call_are_stored_with_their_failure_kind(
    tmp_path: Path, act: Any, script: Any, check: Any, status: str, rollout: str | None, transition: str | None
) -> None:
    with Store(tmp_path / "s.db") as store:
        rollout_id = ran(Program(act), script, check=check, store=store).id
        store.flush()
        stored = store.rollout(rollout_id)
        assert (stored.status, stored.failure, stored.transitions[-1].failure) == (status, rollout, transition)
        if status != "error":
            (episode,) = next(iter(read_groups(store, Selection(), set())))
            expected = {"parse": "parse", "context": "error"}.get(rollout or "")
            assert episode.turns[-1].problem(episode.rollout, True) == expected


class Wrapping(dspy.Module):
    """Programs that wrap, replace or swallow the exception of their model's client."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.ask, self.how = dspy.Predict("question -> answer"), how

    def forward(self, question: str) -> Any:
        return getattr(self, self.how)(question)

    def raised(self, question: str) -> Any:
        try:
            return self.ask(question=question)
        except Exception as error:
            raise RuntimeError("step 1 failed") from error

    def hidden(self, question: str) -> Any:
        failed = False
        try:
            return self.ask(question=question)
        except Exception:
            failed = True
        raise KeyError(f"no answer: {failed}")

    def emptied(self, question: str) -> Any:
        try:
            return self.ask(question=question)
        except Exception:
            return dspy.Prediction(answer="")

    def fallback(self, question: str) -> Any:
        try:
            return self.ask(question=question)
        except Exception:
            return dspy.Prediction(answer="I do not know")

    def parallel(self, question: str) -> Any:
        run = dspy.Parallel(num_threads=2, disable_progress_bar=True)
        return run([(self.ask, dspy.Example(question=f"{question} {n}").with_inputs("question")) for n in range(2)])[0]

    def counted(self, question: str) -> Any:
        run = dspy.Parallel(num_threads=2, disable_progress_bar=True, max_errors=1)
        return run([(self.ask, dspy.Example(question=f"{question} {n}").with_inputs("question")) for n in range(2)])[0]

    def grouped(self, question: str) -> Any:
        async def both() -> Any:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.ask.acall(question=f"{question} {n}")) for n in range(2)]
            return tasks[0].result()

        return asyncio.run(both())


@pytest.mark.parametrize("how", ["raised", "hidden", "emptied", "parallel", "counted", "grouped"])
def test_an_unreachable_server_is_never_a_score_however_the_program_handles_it(how: str) -> None:
    results = ran(Wrapping(how), lambda request: LMRateLimitError("503"))
    assert (results.status, results.score, results.failure) == ("error", None, "model")
    if how != "counted":  # DSPy's Parallel stops after a number of errors of any kind
        unparsed = ran(Wrapping(how), lambda request: "no section at all")
        assert (unparsed.status, unparsed.score) in (("failed", 0.0), ("done", 0.0)), (
            "its own failure stays a score of 0"
        )


def test_a_program_that_answers_despite_a_failed_call_is_scored() -> None:
    results = ran(Wrapping("fallback"), lambda request: LMRateLimitError("503"))
    assert (results.status, results.score, results.failure) == ("done", 1.0, None)


def test_a_cap_inside_a_task_group_stops_the_run() -> None:
    with pytest.raises(BudgetExceeded):
        ran(Wrapping("grouped"), raising(BudgetExceeded("no calls left")))
