"""Cost of recording the calls of a model that a program made itself: the same model and calls, with and without.

The model has an engine that answers after a fixed time. Recorded calls are in an open rollout with store, meter, ledger
and response cache, as in a job. Rounds of both are interleaved, each first in every second round. Prints the median
time of a call and the ratio of the medians.
"""

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dspy
from dspy import lm15

from assay.models import Meter, ResponseCache
from assay.models.ledger import Ledger
from assay.traces import Recorder, Rollout, Store

parser = argparse.ArgumentParser()
parser.add_argument("--latency-ms", type=float, default=20.0)
parser.add_argument("--calls", type=int, default=100, help="calls of a round")
parser.add_argument("--rounds", type=int, default=20)
parser.add_argument("--threads", type=int, default=1)
arguments = parser.parse_args()
REPLY = lm15.Message.assistant([lm15.TextPart("[[ ## answer ## ]]\n1\n\n[[ ## completed ## ]]")])


class Waiting:
    """Answers every request with the same text."""

    def complete(self, request: Any) -> lm15.Response:
        time.sleep(arguments.latency_ms / 1000)
        usage = lm15.Usage(input_tokens=120, output_tokens=12)
        return lm15.Response(id=None, model=request.model, message=REPLY, finish_reason="stop", usage=usage)


lm = dspy.LM("mine/m", engine=Waiting(), cache=False)
say = dspy.Predict("question -> answer")


def plain() -> float:
    """Seconds of a round by its number of calls. They are made in threads, as in a job."""
    with ThreadPoolExecutor(arguments.threads) as pool, dspy.context(lm=lm, disable_history=True):
        settings = dict(dspy.settings.config)

        def call(number: int) -> None:
            with dspy.context(**settings):
                say(question=f"What is {number} + 2?")

        start = time.perf_counter()
        list(pool.map(call, range(arguments.calls)))
        return (time.perf_counter() - start) / arguments.calls


with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "s.db") as store:
    recorder = Recorder(store, run_id="benchmark", replayable=True)
    ledger = Ledger(Path(folder) / "calls.db", owner=recorder.owner)
    recorder.meter, recorder.cache = Meter(ledger=ledger), ResponseCache(Path(folder) / "responses.db")

    def recorded() -> float:
        with recorder.active(), recorder.rollout(Rollout()) as rollout:
            seconds = plain()
        assert len(rollout.transitions) == arguments.calls
        return seconds

    plain(), recorded()  # imports and connections
    pairs = []
    for number in range(arguments.rounds):
        second = recorded() if number % 2 else None
        first = plain()
        pairs.append((first, second if second is not None else recorded()))
    base, with_recording = (statistics.median(column) * 1000 for column in zip(*pairs, strict=True))
result = {"latency_ms": arguments.latency_ms, "threads": arguments.threads, "plain_ms": base}
print(json.dumps({**result, "recorded_ms": with_recording, "ratio": with_recording / base}))
