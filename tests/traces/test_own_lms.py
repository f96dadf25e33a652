"""Models that a program or a metric makes itself are recorded, priced and capped, whichever way they are called."""

import asyncio
import json
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dspy
import pytest
from aiohttp import web
from dspy import lm15

import assay
from assay.errors import BudgetExceeded
from assay.models import Meter
from assay.models.meter import Caps
from assay.testing import ScriptedEngine, scripted_lm
from assay.traces import Recorder, Rollout, Store
from rigs.gateway import AnsweringServer
from rigs.serving import chat_completion, served

NEW = hasattr(dspy.BaseLM, "generate")  # the shapes of DSPy 3.5, see tests/stub_dspy35.py
ANSWER = "<answer>\n1\n</answer>" if NEW else "[[ ## answer ## ]]\n1\n\n[[ ## completed ## ]]"
KEY = "sk-never-to-be-stored"
before_3_5 = pytest.mark.skipif(NEW, reason="DSPy 3.5 has other entries and no models with a forward")


class Answers(AnsweringServer):
    """Counts its calls; those of the model `broken` fail."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.count, self.url = 0, ""

    async def _answer(self, request: web.Request) -> web.Response:
        self.count += 1
        if (await request.json())["model"] == "broken":
            return web.json_response({"error": {"message": "broken"}}, status=500)
        return chat_completion("m", ANSWER)


@pytest.fixture
def server() -> Iterator[Answers]:
    answers = Answers()
    with served(answers.app()) as url:
        answers.url = f"{url}/v1"
        yield answers


def own(server: Answers, model: str = "openai/m", *, kind: type[dspy.LM] = dspy.LM, **options: Any) -> dspy.LM:
    return kind(model, **{"api_base": server.url, "api_key": KEY, "cache": False, "num_retries": 0, **options})


@contextmanager
def job(caps: Caps | None = None, store: Store | None = None) -> Iterator[tuple[Recorder, Rollout]]:
    recorder = Recorder(store)
    recorder.meter = Meter(caps)
    lm = scripted_lm(lambda request: ANSWER, meter=recorder.meter, observers=[recorder.observe])
    with dspy.context(lm=lm), recorder.active(), recorder.rollout(Rollout()) as rollout, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield recorder, rollout


# -- every way of a call

say = dspy.Predict("question -> answer")


def by_set_lm(lm: Any) -> None:
    program = dspy.Predict("question -> answer")
    program.set_lm(lm)
    program(question="2+2?")


def by_context(lm: Any) -> None:
    with dspy.context(lm=lm):
        say(question="2+2?")


async def by_async(lm: Any) -> None:
    await asyncio.gather(say.acall(question="2+2?", lm=lm))


async def by_stream(lm: Any) -> None:
    with dspy.context(lm=lm):
        async for _ in dspy.streamify(say)(question="2+2?"):
            pass


def by_request(lm: Any) -> None:
    lm(lm15.Request(model=lm.model, messages=(lm15.Message.user("2+2?"),)))


def in_a_pool(lm: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lm, "2+2?").result()


def in_a_thread(lm: Any) -> None:
    def call() -> None:
        with suppress(BudgetExceeded):
            lm("2+2?")

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def in_parallel(lm: Any) -> None:
    program = dspy.Predict("question -> answer")
    program.lm = lm
    dspy.Parallel(num_threads=2, disable_progress_bar=True)([(program, {"question": "2+2?"})])


CALLS: dict[str, Callable[[Any], Any]] = {
    "set_lm": by_set_lm,
    "context": by_context,
    "argument": lambda lm: say(question="2+2?", lm=lm),
    "text": lambda lm: lm("2+2?"),
    "request": by_request,
    "messages": lambda lm: lm(messages=[{"role": "user", "content": "2+2?"}]),
    "async text": lambda lm: asyncio.run(lm.acall("2+2?")),
    "async": lambda lm: asyncio.run(by_async(lm)),
    "stream": lambda lm: asyncio.run(by_stream(lm)),
    "pool": in_a_pool,
    "thread": in_a_thread,
    "parallel": in_parallel,
}
if NEW:
    del CALLS["messages"]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_recorded_and_counted_once_and_none_is_sent_beyond_the_cap(
    name: str, server: Answers, tmp_path: Path
) -> None:
    lm, path = own(server), tmp_path / "s.db"
    with Store(path) as store, job(Caps(calls=2), store) as (recorder, rollout):
        CALLS[name](lm)
        assert (server.count, recorder.unrecorded.count, recorder.meter.usage.calls) == (1, 0, 1)
        (call,) = rollout.transitions
        for _ in range(3):
            with suppress(BudgetExceeded):  # which a thread or DSPy may keep to itself
                CALLS[name](lm)
        assert (server.count, recorder.meter.usage.calls) == (2, 2)
    assert (call.model, call.output, call.error, call.cached) == ("openai/m", ANSWER, None, False)
    assert (call.prompt_tokens, call.completion_tokens, call.cost_usd) == (9, 3, None), "its price is unknown"
    assert "2+2?" in json.dumps(call.request)
    assert KEY.encode() not in path.read_bytes()


def test_eight_threads_send_as_many_calls_as_the_cap_allows(server: Answers) -> None:
    lm = own(server)
    with job(Caps(calls=12)) as (recorder, rollout), ThreadPoolExecutor(8) as pool:
        results = [pool.submit(lm, f"{number}?") for number in range(40)]
        refused = sum(isinstance(result.exception(), BudgetExceeded) for result in results)
    assert (server.count, len(rollout.transitions), refused) == (12, 12, 28)
    assert recorder.unrecorded.count == 0


@pytest.mark.parametrize("caps", [Caps(cost_usd=1.0), Caps(tokens=50)], ids=["dollars", "tokens"])
def test_caps_on_dollars_and_tokens_hold_in_threads(caps: Caps) -> None:
    engine = ScriptedEngine(lambda request: ANSWER, price_usd=0.5)
    lm = dspy.LM("mine/m", engine=engine, cache=False)
    with job(caps) as (recorder, rollout), ThreadPoolExecutor(8) as pool:
        results = [pool.submit(lm, f"{number}?", max_tokens=5) for number in range(20)]
        refused = sum(isinstance(result.exception(), BudgetExceeded) for result in results)
    assert engine.calls == recorder.meter.usage.calls == len(rollout.transitions) == 20 - refused == 2


# -- models of other classes


class Plain(dspy.BaseLM):  # type: ignore[misc]
    """A model with a `forward` of its own, which counts in it."""

    calls = 0

    def forward(self, prompt: Any = None, messages: Any = None, **kwargs: Any) -> Any:
        self.calls += 1
        message = SimpleNamespace(content=ANSWER, tool_calls=None, reasoning_content=None)
        choice = SimpleNamespace(index=0, message=message, finish_reason="stop")
        usage = {"prompt_tokens": 7, "completion_tokens": 3}
        return SimpleNamespace(choices=[choice], usage=usage, model=self.model)

    async def aforward(self, prompt: Any = None, messages: Any = None, **kwargs: Any) -> Any:
        return self.forward(prompt, messages, **kwargs)


class AnswersItself(dspy.BaseLM):  # type: ignore[misc]
    """A model whose calls do not lead to DSPy's."""

    calls = 0

    def __call__(self, prompt: Any = None, messages: Any = None, **kwargs: Any) -> Any:
        self.calls += 1
        return [ANSWER]

    async def acall(self, prompt: Any = None, messages: Any = None, **kwargs: Any) -> Any:
        return self()


class RepeatsItself(dspy.LM):  # type: ignore[misc]
    """A model whose calls lead to DSPy's, several times."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for _ in range(2):
            super().__call__(*args, **kwargs)
        return super().__call__(*args, **kwargs)


class ForwardsItself(dspy.LM):  # type: ignore[misc]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@before_3_5
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((Plain, name) for name in CALLS if name not in ("stream", "request")),
        *((AnswersItself, name) for name in CALLS if name != "stream"),
    ],
)
def test_a_model_that_answers_itself_is_recorded_and_capped(kind: Any, name: str) -> None:
    with job(Caps(calls=1)) as (recorder, rollout):
        lm = kind("mine/m")
        CALLS[name](lm)
        with pytest.raises(BudgetExceeded):
            lm("again")
    (call,) = rollout.transitions
    assert (lm.calls, call.model, call.output, recorder.unrecorded.count) == (1, "mine/m", ANSWER, 0)
    assert kind is AnswersItself or (call.prompt_tokens, call.cost_usd) == (7, None)
    assert "2+2?" in json.dumps(call.request)


def test_calls_that_lead_to_dspys_are_recorded_there(server: Answers) -> None:
    with job() as (recorder, rollout):
        own(server, kind=RepeatsItself)("2+2?")
    assert server.count == len(rollout.transitions) == recorder.meter.usage.calls == 3


@pytest.mark.parametrize("kind", [dspy.LM, pytest.param(ForwardsItself, marks=before_3_5)])
def test_retries_and_answers_of_dspys_cache_are_recorded(server: Answers, kind: type[dspy.LM]) -> None:
    with job() as (_, rollout):
        with pytest.raises(dspy.LMError):
            own(server, "openai/broken", kind=kind, num_retries=1)("2+2?")
        lm, once = own(server, kind=kind, cache=True), f"once {uuid.uuid4()}"  # which DSPy's cache on the disk has not
        for _ in range(2):
            lm(once)
    assert server.count == 3
    assert [call.error is None for call in rollout.transitions] == [False, False, True, True]
    assert [call.cached for call in rollout.transitions] == [False, False, False, True]
    assert [call.cost_usd for call in rollout.transitions[2:]] == [None, 0.0]


@before_3_5
def test_a_forward_that_is_called_directly_is_recorded(server: Answers) -> None:
    with job() as (recorder, rollout):
        own(server).forward(prompt="2+2?")
        asyncio.run(own(server).aforward(prompt="2+2?"))
    assert server.count == len(rollout.transitions) == recorder.meter.usage.calls == 2


def test_a_model_of_dspys_tests_is_recorded() -> None:
    lm = dspy.utils.DummyLM([{"answer": "1"}] * 2)
    with job() as (_, rollout), dspy.context(lm=lm, adapter=dspy.ChatAdapter()):
        say(question="2+2?")
        asyncio.run(say.acall(question="2+2?"))
    assert [call.model for call in rollout.transitions] == ["dummy", "dummy"]


def test_a_model_keeps_its_history_and_settings_and_is_left_alone_outside_a_job(server: Answers) -> None:
    lm = own(server, temperature=0.25, max_tokens=50)
    with job() as (_, rollout), dspy.context(disable_history=False):
        lm("2+2?")
    assert [entry["outputs"] for entry in lm.history] == [[ANSWER]]
    assert lm.engine == "auto"
    assert rollout.transitions[0].request["config"] == {"temperature": 0.25, "max_tokens": 50}
    assert lm("2+2?") == [ANSWER]
    assert len(rollout.transitions) == 1


def test_a_call_that_is_recorded_by_hand_too_is_one_call(server: Answers, tmp_path: Path) -> None:
    lm, messages = own(server), [{"role": "user", "content": "2+2?"}]
    with assay.record({"question": "2+2?"}, store=tmp_path / "s.db") as run:
        for _ in range(2):
            (answer,) = lm("2+2?")
            run.call(messages, answer, model="m", reward=0.5)
        run.call(messages, answer, model="elsewhere")
        lm("another")
    calls = run.rollout.transitions
    assert [call.model for call in calls] == ["openai/m", "openai/m", "elsewhere", "openai/m"]
    assert [call.step_rewards for call in calls] == [{"posted": 0.5}, {"posted": 0.5}, {}, {}]
    assert calls[0].prompt_tokens == 9


# -- models of a program and of a metric, in a job

PROGRAM = """import dspy


class Mine(dspy.Module):
    def __init__(self):
        super().__init__()
        self.say = dspy.Predict("question -> answer")
        self.lm = dspy.LM("openai/m", api_base="URL", api_key="k", cache=False, num_retries=0)
        self.say.set_lm(self.lm)

    def forward(self, question):
        self.lm("a text")
        self.lm(dspy.lm15.Request(model="openai/m", messages=(dspy.lm15.Message.user("a request"),)))
        return self.say(question=question)
"""
METRIC = """import threading
from concurrent.futures import ThreadPoolExecutor

import dspy

judge = dspy.LM("openai/judge", api_base="URL", api_key="k", cache=False, num_retries=0)
older = ThreadPoolExecutor(2)


def right(example, pred, trace=None):
    return judge("is it right?") != [] and pred.answer == example.answer


def threaded(example, pred, trace=None):
    judge("here: " + example.question)
    older.submit(judge, "pool: " + example.question).result()
    thread = threading.Thread(target=judge, args=("thread: " + example.question,))
    thread.start()
    thread.join()
    return pred.answer == example.answer
"""


def evaluated(server: Answers, *, metric: str = "right", tasks: int = 4, **options: Any) -> dict[str, Any]:
    """The report of a job over a program and a metric that have models of their own."""
    for name, text in (("mine.py", PROGRAM), ("metric.py", METRIC)):
        Path(name).write_text(text.replace("URL", server.url))
    Path("r.yaml").write_text(f"name: r\ncriteria:\n- {{name: right, check: 'metric.py:{metric}'}}\n")
    rows = [{"question": f"What of {n}?", "answer": "1", "data_subject": f"p{n}"} for n in range(tasks)]
    return assay.evaluate("mine.py:Mine", rubric="r.yaml", data=rows, split="all", preflight=False, **options).to_dict()


@pytest.mark.parametrize("replaced", [False, True])
def test_models_of_a_program_are_replaced_only_if_asked(replaced: bool, server: Answers) -> None:
    lm = scripted_lm(lambda request: ANSWER)
    report = evaluated(server, lm=lm, replace_lms=replaced)
    # per task three calls of the program and one of the metric; the cache of the job's model answers two texts after
    # the first task: 4 + 2 calls of it
    assert (lm.scripted.calls, server.count) == ((6, 4) if replaced else (0, 16))
    assert (report["calls"], report["unrecorded"], report["result"]["score"]) == (10 if replaced else 16, 0, 1.0)


@before_3_5
def test_a_model_that_answers_itself_is_replaced_if_asked() -> None:
    say = dspy.Predict("question -> answer")
    say.set_lm(AnswersItself("mine/m"))
    rows = [{"question": "2+2?", "answer": "1"}]
    for replaced in (False, True):
        lm = scripted_lm(lambda request: ANSWER)
        assay.evaluate(say, rubric="exact", data=rows, lm=lm, split="all", preflight=False, replace_lms=replaced)
        assert lm.scripted.calls == int(replaced)


@pytest.mark.slow
def test_calls_of_a_metric_are_in_rollouts_of_their_own(server: Answers) -> None:
    lm = scripted_lm(lambda request: ANSWER)
    report = evaluated(server, metric="threaded", tasks=6, lm=lm, threads=6, store="s.db")
    assert (report["calls"], report["unrecorded"], server.count) == (36, 0, 36)
    with Store("s.db") as store:
        rollouts = [store.rollout(row.id) for row in store.rollouts()]
    runs = {rollout.id: rollout for rollout in rollouts if rollout.source == "program"}
    checks = [rollout for rollout in rollouts if rollout.source == "check"]
    assert (len(runs), len(checks), len(rollouts)) == (6, 6, 12)
    for rollout in checks:
        scored = runs[rollout.group_id]
        for name in ("task_id", "split", "data_subject"):
            assert getattr(rollout, name) == getattr(scored, name)
        assert [call.model for call in rollout.transitions] == ["openai/judge"] * 3
        assert all(not call.shown_tasks for call in rollout.transitions), "the task is the rollout's own"
        assert all(scored.inputs["question"] in json.dumps(call.request) for call in rollout.transitions)
    for kind in ("sft", "transitions"):
        exported = assay.export(kind, store="s.db", out=kind)
        assert exported.rows
        assert "openai/judge" not in (Path(exported.path) / "data.jsonl").read_text()


def test_a_resumed_job_does_not_send_calls_of_own_models_again(server: Answers) -> None:
    sent, options = [], {"model": "openai/unused", "api_base": server.url, "threads": 1, "store": "s.db"}
    for cap in (6, 11, 100):
        report = evaluated(server, max_calls=cap, resume=bool(sent), **options)
        sent.append((server.count, report["calls"]))
    assert sent == [(6, 6), (11, 11), (16, 16)]
    with Store("s.db") as store:
        calls = [call for row in store.rollouts() for call in store.rollout(row.id).transitions]
    assert (len(calls), sum(call.cached for call in calls)) == (16, 0)
