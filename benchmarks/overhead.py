"""`assay.evaluation.evaluate` with recording, store and rubric against `dspy.Evaluate`: same engine, metric and tasks.

Runs of both are interleaved, each first in every second round; the response cache is off, so every call is asked.
Prints the ratio of the medians.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import dspy

from assay.datasets import load_tasks
from assay.evaluation import RecordedProgram, Session, evaluate
from assay.models import Meter, get_lm
from assay.models.embedded import LlamaBackend
from assay.optimizers.prompts.named import to_examples
from assay.programs import AgentParameters, MathQA
from assay.rubrics import load_rubric
from assay.traces import Recorder, Store


class Bare:
    """The same engine as DSPy would have it: no recording, no cache, no meter."""

    def __init__(self) -> None:
        self.backend = LlamaBackend("embedded/smollm2-135m")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def complete(self, request: Any) -> Any:
        return self.backend.complete(request)[0]


parser = argparse.ArgumentParser()
parser.add_argument("--tasks", type=int, default=6)
parser.add_argument("--rounds", type=int, default=20)
arguments = parser.parse_args()

tasks = load_tasks(f"arithmetic:size={arguments.tasks}")
rubric = load_rubric("math_qa")
program = MathQA(parameters=AgentParameters(temperature=0.1), prompt_format="lean")
plain = dspy.LM("embedded/smollm2-135m", engine=Bare(), cache=False, seed=0, max_tokens=512)

with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "s.db") as store:
    recorder, meter = Recorder(store), Meter()
    recorded = get_lm("embedded/smollm2-135m", seed=0, meter=meter, observers=[recorder.observe])
    session = Session(recorded, rubric, recorder, meter, "math_qa", threads=1)
    student, examples = RecordedProgram(program, session), to_examples(tasks)

    def bare() -> float:
        start = time.perf_counter()
        with dspy.context(lm=plain):
            dspy.Evaluate(devset=examples, metric=rubric.metric(), num_threads=1, display_progress=False)(program)
        return time.perf_counter() - start

    def ours() -> float:
        start = time.perf_counter()
        evaluate(student, tasks, session)
        return time.perf_counter() - start

    bare(), ours()  # both warm the engine's prompt prefixes
    pairs = []
    for number in range(arguments.rounds):
        second = ours() if number % 2 else None
        first = bare()
        pairs.append((first, second if second is not None else ours()))
    base, with_recording = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(json.dumps({"dspy_s": base, "assay_s": with_recording, "ratio": with_recording / base, "pairs": pairs}))
