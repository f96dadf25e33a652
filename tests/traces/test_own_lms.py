"""Models that a program or a metric makes itself are recorded, priced and capped, whichever way they are called."""

import asyncio
import json
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dspy
import pytest
from dspy import lm15

import assay
from assay.errors import BudgetExceeded
from assay.models import Meter
from assay.models.meter import Caps
from assay.testing import ScriptedEngine, scripted_lm
from assay.traces import Recorder, Rollout, Store

NEW = hasattr(dspy.BaseLM, "generate")  # the shapes of DSPy 3.5, see tests/stub_dspy35.py
ANSWER = "<answer>\n1\n</answer>" if NEW else "[[ ## answer ## ]]\n1\n\n[[ ## completed ## ]]"
KEY = "sk-never-to-be-stored"


FAILURES = {  # by model: status and error of the server
    "busy": (429, {"message": "slow down", "type": "rate_limit"}),
    "broken": (500, {"message": "broken"}),
    "small": (400, {"message": "maximum context length is 9 tokens", "code": "context_length_exceeded"}),
}


class _Answers(BaseHTTPRequestHandler):
    count = 0
    lock = threading.Lock()

    def do_POST(self) -> None:
        with self.lock:
            type(self).count += 1
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if (failure := FAILURES.get(body["model"])) is not None:
            self.reply(failure[0], {"error": failure[1]})
            return
        message = {"role": "assistant", "content": ANSWER}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        reply = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "usage": usage}
        self.reply(200, {**reply, "choices": choices})

    def reply(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def server() -> Iterator[tuple[str, type[_Answers]]]:
    handler = type("Counted", (_Answers,), {"count": 0, "lock": threading.Lock()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}/v1", handler
        serving.shutdown()


def own(url: str, model: str = "openai/m", *, kind: type[dspy.LM] = dspy.LM, **options: Any) -> dspy.LM:
    return kind(model, **{"api_base": url, "api_key": KEY, "cache": False, "num_retries": 0, **options})


@contextmanager
def job(caps: Caps | None = None, store: Store | None = None) -> Iterator[tuple[Recorder, Rollout]]:
    recorder = Recorder(store)
    recorder.meter = Meter(caps)
    lm = scripted_lm(lambda request: ANSWER, meter=recorder.meter, observers=[recorder.observe])
    with dspy.context(lm=lm), recorder.active(), recorder.rollout(Rollout()) as rollout:
        yield recorder, rollout


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


def by_messages(lm: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        lm(messages=[{"role": "user", "content": "2+2?"}])


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
    "messages": by_messages,
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
def test_a_call_is_recorded_and_counted_once(name: str, server: tuple[str, type[_Answers]], tmp_path: Path) -> None:
    store = Store(tmp_path / "s.db")
    with job(store=store) as (recorder, rollout):
        CALLS[name](own(server[0]))
    assert server[1].count == 1
    assert (recorder.unrecorded.count, recorder.meter.usage.calls) == (0, 1)
    (call,) = rollout.transitions
    assert (call.model, call.output, call.error, call.cached) == ("openai/m", ANSWER, None, False)
    assert (call.prompt_tokens, call.completion_tokens, call.cost_usd) == (7, 3, None), "its price is unknown"
    assert "2+2?" in json.dumps(call.request)
    store.close()
    assert KEY.encode() not in (tmp_path / "s.db").read_bytes()


@pytest.mark.parametrize("name", CALLS)
def test_no_call_is_sent_beyond_the_cap(name: str, server: tuple[str, type[_Answers]]) -> None:
    lm = own(server[0])
    with pytest.raises(BudgetExceeded), job(Caps(calls=2)):  # noqa: PT012
        for _ in range(4):
            CALLS[name](lm)
        raise BudgetExceeded("an exception of a thread is not raised in the main one", what="calls")
    assert server[1].count == 2


def test_eight_threads_send_as_many_calls_as_the_cap_allows(server: tuple[str, type[_Answers]]) -> None:
    lm = own(server[0])
    with job(Caps(calls=12)) as (recorder, rollout), ThreadPoolExecutor(8) as pool:
        results = [pool.submit(lm, f"{number}?") for number in range(40)]
        refused = sum(isinstance(result.exception(), BudgetExceeded) for result in results)
    assert (server[1].count, len(rollout.transitions), refused) == (12, 12, 28)
    assert recorder.unrecorded.count == 0


@pytest.mark.parametrize(("caps", "sent"), [(Caps(cost_usd=1.0), 2), (Caps(tokens=50), 2)], ids=["dollars", "tokens"])
def test_caps_on_dollars_and_tokens_hold_in_threads(caps: Caps, sent: int) -> None:
    engine = ScriptedEngine(lambda request: ANSWER, price_usd=0.5)
    lm = dspy.LM("mine/m", engine=engine, cache=False)
    with job(caps) as (recorder, rollout), ThreadPoolExecutor(8) as pool:
        results = [pool.submit(lm, f"{number}?", max_tokens=5) for number in range(20)]
        refused = sum(isinstance(result.exception(), BudgetExceeded) for result in results)
    usage = recorder.meter.usage
    assert engine.calls == usage.calls == len(rollout.transitions) == 20 - refused
    assert engine.calls == sent


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


@pytest.mark.skipif(NEW, reason="DSPy 3.5 has no models with a forward")
@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("stream", "request")])
def test_a_model_with_its_own_forward_is_recorded(name: str) -> None:
    lm = Plain("mine/m")
    with job() as (recorder, rollout), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        CALLS[name](lm)
        recorder.meter.caps = Caps(calls=1)
        with pytest.raises(BudgetExceeded):
            lm("again")
    assert lm.calls == 1
    (call,) = rollout.transitions
    assert (call.model, call.output, call.prompt_tokens, call.cost_usd) == ("mine/m", ANSWER, 7, None)
    assert "2+2?" in json.dumps(call.request)


class AnswersItself(dspy.BaseLM):  # type: ignore[misc]
    """A model whose calls do not lead to DSPy's."""

    def __call__(self, prompt: Any = None, messages: Any = None, **kwargs: Any) -> Any:
        return [ANSWER]

    async def acall(self, prompt: Any = None, messages: Any = None, **kwargs: Any) -> Any:
        return [ANSWER]


class RepeatsItself(dspy.LM):  # type: ignore[misc]
    """A model whose calls lead to DSPy's, several times."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for _ in range(2):
            super().__call__(*args, **kwargs)
        return super().__call__(*args, **kwargs)


class ForwardsItself(dspy.LM):  # type: ignore[misc]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.skipif(NEW, reason="DSPy 3.5 has other entries")
@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"stream"}))
def test_a_model_that_answers_itself_is_recorded(name: str) -> None:
    with job(Caps(calls=1)) as (recorder, rollout), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        lm = AnswersItself("mine/m")
        CALLS[name](lm)
        with pytest.raises(BudgetExceeded):
            lm("again")
    (call,) = rollout.transitions
    assert (call.model, call.output, recorder.unrecorded.count) == ("mine/m", ANSWER, 0)
    assert "2+2?" in json.dumps(call.request)


def test_calls_that_lead_to_dspys_are_recorded_there(server: tuple[str, type[_Answers]]) -> None:
    with job() as (recorder, rollout):
        own(server[0], kind=RepeatsItself)("2+2?")
    assert server[1].count == len(rollout.transitions) == recorder.meter.usage.calls == 3


@pytest.mark.skipif(NEW, reason="DSPy 3.5 has no models with a forward")
def test_a_forward_that_leads_to_dspys_keeps_its_retries_and_cache(server: tuple[str, type[_Answers]]) -> None:
    with job() as (_, rollout), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(dspy.LMError):
            own(server[0], "openai/broken", kind=ForwardsItself, num_retries=1)("2+2?")
        lm = own(server[0], kind=ForwardsItself, cache=True)
        for _ in range(2):
            lm(f"once {server[0]}")
    assert server[1].count == 3
    assert [(call.error is None, call.cached) for call in rollout.transitions] == [
        (False, False),
        (False, False),
        (True, False),
        (True, True),
    ]


@pytest.mark.skipif(NEW, reason="DSPy 3.5 has no models with a forward")
def test_a_forward_that_is_called_directly_is_recorded(server: tuple[str, type[_Answers]]) -> None:
    with job() as (recorder, rollout):
        own(server[0]).forward(prompt="2+2?")
        asyncio.run(own(server[0]).aforward(prompt="2+2?"))
    assert server[1].count == len(rollout.transitions) == recorder.meter.usage.calls == 2


def test_a_model_of_dspys_tests_is_recorded() -> None:
    lm = dspy.utils.DummyLM([{"answer": "1"}] * 2)
    with job() as (_, rollout), dspy.context(lm=lm, adapter=dspy.ChatAdapter()):
        say(question="2+2?")
        asyncio.run(say.acall(question="2+2?"))
    assert [call.model for call in rollout.transitions] == ["dummy", "dummy"]


def test_several_completions_are_several_calls(server: tuple[str, type[_Answers]]) -> None:
    with job() as (_, rollout):
        assert len(own(server[0], temperature=1.0)("2+2?", n=3)) == 3
    assert server[1].count == len(rollout.transitions) == 3


def test_a_model_keeps_its_history_and_settings(server: tuple[str, type[_Answers]]) -> None:
    lm = own(server[0], temperature=0.25, max_tokens=50)
    with job() as (_, rollout), dspy.context(disable_history=False):
        lm("2+2?")
    assert [entry["outputs"] for entry in lm.history] == [[ANSWER]]
    assert lm.engine == "auto"
    assert rollout.transitions[0].request["config"] == {"temperature": 0.25, "max_tokens": 50}


def test_calls_outside_a_job_are_left_alone(server: tuple[str, type[_Answers]]) -> None:
    with job():
        pass
    assert own(server[0])("2+2?") == [ANSWER]


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
METRIC = """import dspy

judge = dspy.LM("openai/judge", api_base="URL", api_key="k", cache=False, num_retries=0)


def right(example, pred, trace=None):
    return judge("is it right?") != [] and pred.answer == example.answer
"""


@pytest.mark.parametrize("replaced", [False, True])
def test_models_of_a_program_are_replaced_only_if_asked(
    replaced: bool, server: tuple[str, type[_Answers]], tmp_path: Path
) -> None:
    for name, text in (("mine", PROGRAM), ("metric", METRIC)):
        (tmp_path / f"{name}.py").write_text(text.replace("URL", server[0]))
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: 'metric.py:right'}\n")
    rows = [json.dumps({"question": f"What of {n}?", "answer": "1"}) for n in range(4)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    lm = scripted_lm(lambda request: ANSWER)
    report = assay.evaluate(
        "mine.py:Mine", rubric="r.yaml", data="data.jsonl", lm=lm, split="all", preflight=False, replace_lms=replaced
    )
    data = report.to_dict()
    # per task three calls of the program and one of the metric; the cache of the job's model answers two texts after
    # the first task: 4 + 2 calls of it
    assert (lm.scripted.calls, server[1].count) == ((6, 4) if replaced else (0, 16))
    assert (data["calls"], data["unrecorded"], data["result"]["score"]) == (10 if replaced else 16, 0, 1.0)


@pytest.mark.skipif(NEW, reason="DSPy 3.5 has other entries")
def test_a_model_that_answers_itself_is_replaced_if_asked(tmp_path: Path) -> None:
    say = dspy.Predict("question -> answer")
    say.set_lm(AnswersItself("mine/m"))
    for replaced in (False, True):
        lm = scripted_lm(lambda request: ANSWER)
        assay.evaluate(
            say, rubric="exact", data=[{"question": "2+2?", "answer": "1"}], lm=lm, split="all", preflight=False,
            replace_lms=replaced,
        )  # fmt: skip
        assert lm.scripted.calls == int(replaced)


def project(folder: Path, url: str, *, metric: str = METRIC, program: str = PROGRAM, tasks: int = 4) -> dict[str, Any]:
    """Arguments of a job over a program and a metric that have models of their own."""
    for name, text in (("mine", program), ("metric", metric)):
        (folder / f"{name}.py").write_text(text.replace("URL", url))
    (folder / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: 'metric.py:right'}\n")
    rows = [json.dumps({"question": f"What of {n}?", "answer": "1", "data_subject": f"p{n}"}) for n in range(tasks)]
    (folder / "data.jsonl").write_text("\n".join(rows))
    return {"rubric": "r.yaml", "data": "data.jsonl", "split": "all", "preflight": False}


THREADED_METRIC = """import threading
from concurrent.futures import ThreadPoolExecutor

import dspy

judge = dspy.LM("openai/judge", api_base="URL", api_key="k", cache=False, num_retries=0)
older = ThreadPoolExecutor(2)


def right(example, pred, trace=None):
    judge("here: " + example.question)
    older.submit(judge, "pool: " + example.question).result()
    thread = threading.Thread(target=judge, args=("thread: " + example.question,))
    thread.start()
    thread.join()
    return pred.answer == example.answer
"""


@pytest.mark.slow
def test_calls_of_a_metric_are_in_rollouts_of_their_own(server: tuple[str, type[_Answers]], tmp_path: Path) -> None:
    arguments = project(tmp_path, server[0], metric=THREADED_METRIC, tasks=6)
    report = assay.evaluate(
        "mine.py:Mine", lm=scripted_lm(lambda request: ANSWER), threads=6, store="s.db", **arguments
    ).to_dict()
    assert (report["calls"], report["unrecorded"], server[1].count) == (36, 0, 36)
    with Store(tmp_path / "s.db") as store:
        rollouts = [store.rollout(row.id) for row in store.rollouts()]
        runs = {rollout.id: rollout for rollout in rollouts if rollout.source == "program"}
        checks = [rollout for rollout in rollouts if rollout.source == "check"]
        assert len(runs) == len(checks) == 6
        assert len(rollouts) == 12
        for rollout in checks:
            scored = runs[rollout.group_id]
            assert (rollout.task_id, rollout.split, rollout.data_subject) == (
                scored.task_id,
                scored.split,
                scored.data_subject,
            )
            assert [call.model for call in rollout.transitions] == ["openai/judge"] * 3
            assert all(not call.shown_tasks for call in rollout.transitions), "the task is the rollout's own"
            assert all(scored.inputs["question"] in json.dumps(call.request) for call in rollout.transitions)
        for kind in ("sft", "transitions"):
            exported = assay.export(kind, store="s.db", out=str(tmp_path / kind))
            assert exported.rows
            assert "openai/judge" not in (Path(exported.path) / "data.jsonl").read_text()


def test_a_resumed_job_does_not_send_calls_of_own_models_again(
    server: tuple[str, type[_Answers]], tmp_path: Path
) -> None:
    arguments = project(tmp_path, server[0])
    sent = []
    for cap in (6, 11, 100):
        report = assay.evaluate(
            "mine.py:Mine", model="openai/unused", api_base=server[0], max_calls=cap, resume=bool(sent), threads=1,
            store="s.db", **arguments,
        ).to_dict()  # fmt: skip
        sent.append((server[1].count, report["calls"]))
    assert sent == [(6, 6), (11, 11), (16, 16)]
    with Store(tmp_path / "s.db") as store:
        calls = [call for row in store.rollouts() for call in store.rollout(row.id).transitions]
    assert (len(calls), sum(call.cached for call in calls)) == (16, 0)


def test_a_call_that_is_recorded_by_hand_too_is_one_call(server: tuple[str, type[_Answers]], tmp_path: Path) -> None:
    lm = own(server[0])
    with assay.record({"question": "2+2?"}, store=tmp_path / "s.db") as run:
        for _ in range(2):
            (answer,) = lm("2+2?")
            run.call([{"role": "user", "content": "2+2?"}], answer, model="m", reward=0.5)
        run.call([{"role": "user", "content": "2+2?"}], answer, model="elsewhere")
        lm("another")
    calls = run.rollout.transitions
    assert [call.model for call in calls] == ["openai/m", "openai/m", "elsewhere", "openai/m"]
    assert [call.step_rewards for call in calls] == [{"posted": 0.5}, {"posted": 0.5}, {}, {}]
    assert calls[0].prompt_tokens == 7
