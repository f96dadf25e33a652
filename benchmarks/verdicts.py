"""Verdicts a second: an assay judge, which reads one token's probabilities, against stock DSPy over the same
llama.cpp server, one by one, interleaved. Three times: the same questions through `dspy.Predict` (its default
adapter, the verdict written out and parsed); the very messages that the judge sends, through a stock `dspy.LM` that
writes until it ends; and the same for one token with its alternatives, which is what the judge does. And the share of
repeated verdicts that the cache serves, and how fast.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import dspy

from assay.datasets import load_tasks
from assay.evaluation import Session
from assay.evaluation.judged import judge_items
from assay.judges import Item, PointwiseJudge
from assay.models import Meter, ResponseCache, get_lm
from assay.models.embedded import server_url
from assay.optimizers.judges import agreement_rubric
from assay.testing import scripted_lm
from assay.traces import Recorder, Store

QUESTION = "Is the output a right answer to the task?"

parser = argparse.ArgumentParser()
parser.add_argument("--verdicts", type=int, default=20, help="in each round")
parser.add_argument("--rounds", type=int, default=5)
arguments = parser.parse_args()

NAME = "embedded/smollm2-135m"
plain = dspy.LM(
    "openai/smollm2-135m",
    api_base=f"{server_url(NAME)}/v1",
    api_key="none",
    cache=False,
    temperature=0.0,
    max_tokens=1,
    logprobs=True,
    top_logprobs=20,
)
loose = dspy.LM(
    "openai/smollm2-135m",
    api_base=f"{server_url(NAME)}/v1",
    api_key="none",
    cache=False,
    temperature=0.0,
    max_tokens=300,
)
stock = dspy.LM(
    "openai/smollm2-135m",
    api_base=f"{server_url(NAME)}/v1",
    api_key="none",
    cache=False,
    temperature=0.0,
    max_tokens=300,
)
ask = dspy.Predict(
    dspy.Signature(
        {
            "task_input": (str, dspy.InputField()),
            "output": (str, dspy.InputField()),
            "verdict": (Literal["no", "yes"], dspy.OutputField()),
        },
        QUESTION,
    )
)
judge = PointwiseJudge(QUESTION)


def items(start: int) -> list[Item]:
    tasks = load_tasks(f"arithmetic:size={arguments.verdicts}&seed={start}")
    return [
        Item(
            id=f"{start}-{at}",
            fields={"task_input": t.inputs["question"], "output": f"The answer is {at}."},
            ratings=(),
        )
        for at, t in enumerate(tasks)
    ]


def ours(batch: list[Item], session: Session) -> int:
    return len(batch) - judge_items(judge, batch, session, name="ours").unscored


def theirs(batch: list[Item]) -> int:
    read = 0
    for item in batch:
        try:
            with dspy.context(lm=stock):
                ask(**item.fields)
            read += 1
        except Exception:  # stock DSPy could not parse what the model wrote: unscored, but time was spent
            pass
    return read


def written(batch: list[Item]) -> list[list[dict[str, str]]]:
    """The messages that the judge would send for these items; a scripted model takes them, so that the server has not
    seen them."""
    sent: list[list[dict[str, str]]] = []

    def take(request: Any) -> dict[str, float]:
        system = [{"role": "system", "content": str(request.system)}] if request.system else []
        sent.append([*system, *({"role": message.role, "content": str(message.text)} for message in request.messages)])
        return {"no": 0.5, "yes": 0.5}

    with dspy.context(lm=scripted_lm(take, logprobs=True)):
        for item in batch:
            judge(**item.fields)
    return sent


_SETTINGS = ("temperature", "max_tokens", "logprobs", "top_logprobs")


def same_messages(sent: list[list[dict[str, str]]], lm: dspy.LM) -> int:
    """How many of the messages the model answered, with its own settings: a request has none of them."""
    settings = {name: lm.kwargs[name] for name in _SETTINGS if name in lm.kwargs}
    requests = (dspy.lm15.request_from_openai_chat({"model": lm.model, "messages": one, **settings}) for one in sent)
    return sum(bool(lm(request)) for request in requests)


ONE, FREE = "stock, same messages, one token", "stock, same messages, written out"
seconds: dict[str, list[float]] = {"ours": [], "stock": [], ONE: [], FREE: []}
read: dict[str, int] = dict.fromkeys(seconds, 0)
with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "s.db") as store:
    recorder, meter = Recorder(store), Meter()
    lm = get_lm(NAME, cache=ResponseCache(Path(folder) / "c.db"), meter=meter, observers=[recorder.observe])
    session = Session(
        lm=lm,
        rubric=agreement_rubric(judge.spec),
        recorder=recorder,
        meter=meter,
        threads=lm.recording.backend.concurrency,
    )
    ours(items(10_000), session)
    theirs(items(10_000)[:2])
    for round_ in range(arguments.rounds):
        batch = items(round_)
        others, more = written(items(100 + round_)), written(items(200 + round_))
        sides: list[tuple[str, Any]] = [
            ("ours", lambda b=batch: ours(b, session)),
            ("stock", lambda b=batch: theirs(b)),
        ]
        sides += [
            (name, lambda sent=sent, lm=lm: same_messages(sent, lm))
            for name, sent, lm in ((ONE, others, plain), (FREE, more, loose))
        ]
        for name, run in sides if round_ % 2 else sides[::-1]:
            clock = time.perf_counter()
            read[name] += run()
            seconds[name].append(time.perf_counter() - clock)
    before = meter.usage.cached
    clock = time.perf_counter()
    for round_ in range(arguments.rounds):
        ours(items(round_), session)
    again = time.perf_counter() - clock
    repeated, served = arguments.rounds * arguments.verdicts, meter.usage.cached - before

rates = {name: arguments.verdicts / statistics.median(values) for name, values in seconds.items()}
print(
    json.dumps(
        {
            "verdicts_per_second": rates,
            "ratio": rates["ours"] / rates["stock"],
            "ratio_same_messages": {
                "written out": rates["ours"] / rates[FREE],
                "one token": rates["ours"] / rates[ONE],
            },
            "verdicts_read": {name: count / (arguments.rounds * arguments.verdicts) for name, count in read.items()},
            "repeated": {"share_from_cache": served / repeated, "verdicts_per_second": repeated / again},
        }
    )
)
