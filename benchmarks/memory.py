"""Resident memory of one process over thousands of calls: `assay.evaluate` of a program, with a judge where the model
is embedded.

    python benchmarks/memory.py [--model scripted | embedded/smollm2-135m] [--calls 5000] [--minutes 12] [--every 500]

A task is two calls. With the scripted server both are the program's, with 20 alternatives a token; with an embedded
model one is the program's (two tokens) and one the judge's decision, which asks for 200 alternatives. One line every
so many calls, then the growth from call 1,000 on. Ends at the number of calls or after so many minutes.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import dspy

import assay
from assay.errors import Cancelled
from assay.testing.scripted_server import running

SETTLED = 1000  # calls after which buffers and caches are full
FILLER = "word " * 100


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


class Watch:
    """Of the process: counts tasks, and prints memory every so many calls."""

    tasks, every, until = 0, 500, float("inf")
    seen: list[tuple[int, float]] = []

    @classmethod
    def task(cls) -> None:
        if time.monotonic() > cls.until:
            raise Cancelled("the time is over")
        cls.tasks += 1
        if cls.tasks * 2 % cls.every == 0:
            cls.seen.append((cls.tasks * 2, resident_mb()))
            print(f"| {cls.tasks * 2} | {cls.seen[-1][1]:.0f} |", flush=True)


class Asks(dspy.Module):  # type: ignore[misc]
    """Asks its model without DSPy's adapters, which would take most of a scripted call's time."""

    def __init__(self, scripted: bool) -> None:
        super().__init__()
        self.scripted = scripted

    def forward(self, question: str) -> Any:
        Watch.task()
        options: dict[str, Any] = {"logprobs": True, "top_logprobs": 20} if self.scripted else {"max_tokens": 2}
        texts = [
            dspy.settings.lm(f"{part}{question}", **options)[0] for part in (["a ", "b "] if self.scripted else [""])
        ]
        text = texts[-1]["text"] if isinstance(texts[-1], dict) else texts[-1]
        prediction = dspy.Prediction(answer=text)
        dspy.settings.trace.append((self, {"question": question}, prediction))  # as DSPy's predictors do
        return prediction


def evaluated(model: dict[str, Any], scripted: bool, calls: int) -> None:
    criterion = {"name": "said", "check": "assay.rubrics.checks:regex", "with": {"pattern": "."}}
    judged = {"name": "polite", "judge": "Is this a polite answer?"}
    tasks = [{"question": f"{FILLER if scripted else ''}How is day {at}?", "split": "val"} for at in range(calls // 2)]
    with tempfile.TemporaryDirectory() as folder:
        rubric = Path(folder) / "r.yaml"
        rubric.write_text(json.dumps({"name": "r", "criteria": [criterion if scripted else judged]}))
        assay.evaluate(
            Asks(scripted),
            rubric=rubric,
            data=tasks,
            sizes={"val": calls},
            store=Path(folder) / "s.db",
            threads=1,
            preflight=False,
            **model,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="scripted")
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--every", type=int, default=500)
    arguments = parser.parse_args()
    Watch.every, Watch.until = arguments.every, time.monotonic() + 60 * arguments.minutes
    print("| calls | MB resident |\n|---|---|")
    try:
        if arguments.model == "scripted":
            with running(delay_ms=0) as address:
                evaluated({"model": "openai/m", "api_base": address}, True, arguments.calls)
        else:
            evaluated({"model": arguments.model}, False, arguments.calls)
    except Cancelled as error:
        print(f"ended: {error}")
    settled = next((mb for calls, mb in Watch.seen if calls >= SETTLED), None)
    if settled is not None:
        print(f"growth from {SETTLED} to {Watch.seen[-1][0]} calls: {Watch.seen[-1][1] - settled:.1f} MB")


if __name__ == "__main__":
    main()
