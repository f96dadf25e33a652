"""The continuous loop twice without a person: production, pool, improve, deploy; then again with another task type.

    python benchmarks/loop_twice.py FOLDER [--scripted] [--weights] [--seed 1]

The agent puts messages of customers into queues, whose names only the examples explain; it is one predictor with the
embedded model. With --scripted it adds numbers on a scripted server, whose answers become right with demonstrations:
that tries the loop and says nothing about a model. Production sends tasks through `assay.deployed`; after each batch
`assay loop run` is called, as a schedule does, with `method: improve`. When a deployment has ended, the second task
type joins the traffic: messages for a queue that no task had before. A cycle that finds nothing better is followed by
the next one, once there is as much new traffic again. The result has the steps as the store has them, and the
production score before and after each phase, with 95 % intervals.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import assay
from assay.commands.loop import run_loop, start_loop
from assay.commands.registry import register
from assay.deployment import save_artifact
from assay.deployment.deployments import Deployments
from assay.deployment.loops import Loops
from assay.evaluation.statistics import mean_interval
from assay.programs import load_program
from assay.testing.scripted_server import running
from assay.traces import Store

AGENT, MODEL, BATCH = "helper", "embedded/smollm2-135m", 20
QUEUES = """
from typing import Literal
import dspy

class Queues(dspy.Module):
    def __init__(self):
        super().__init__()
        queue = (Literal["red", "green", "blue", "black"], dspy.OutputField())
        fields = {"message": (str, dspy.InputField()), "queue": queue}
        self.choose = dspy.Predict(dspy.Signature(fields, "Choose the queue of the message."))

    def forward(self, message):
        return self.choose(message=message)
"""
SUMS = """
import dspy

class Sums(dspy.Module):
    def __init__(self):
        super().__init__()
        self.solve = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.solve(question=question)
"""
# queue -> what its messages say; those of the last one are the task type that arrives later
MESSAGES = {
    "green": (
        "my parcel has not arrived", "where is my delivery", "the courier left the parcel at the wrong door",
        "the tracking of my parcel shows nothing", "can you deliver on Saturday", "my delivery is late",
    ),
    "blue": (
        "the amount on my invoice is wrong", "I was charged twice", "please send me the invoice again",
        "my card was charged and I ordered nothing", "which tax is on my invoice", "I cannot pay by card",
    ),
    "red": (
        "I forgot my password", "I cannot log in", "my account is locked", "the reset link for my password is dead",
        "how do I change the email of my account", "somebody else uses my account",
    ),
    "black": (
        "the lamp is broken", "the chair has a scratch", "the kettle does not get hot", "the table has no screws",
        "the radio makes no sound", "the handle of the pan fell off",
    ),
}  # fmt: skip
PLAN = {
    "steps": [
        {"weight": 10, "requests": 20},
        {"weight": 50, "decides": True, "requests": 20, "max_requests": 400},
        {"weight": 95, "requests": 20},
    ]
}
Task = tuple[str, dict[str, Any], dict[str, Any]]  # task type, inputs, expected outputs


def tasks_of(scripted: bool) -> list[list[Task]]:
    """The tasks of the first phase, and those that join in the second."""
    if scripted:
        texts = ("What is {} + 1?", "A shop sold some parcels and then one more. What is {} + 1?")
        return [
            [(kind, {"question": text.format(n)}, {"answer": str(n + 1)}) for n in range(first, first + 3000)]
            for kind, text, first in (("plain", texts[0], 10), ("parcels", texts[1], 5000))
        ]
    queues = {"orders": ("green", "blue", "red"), "products": ("black",)}
    return [
        [
            (kind, {"message": f"Order {number}: {text}."}, {"queue": queue})
            for queue in names
            for text in MESSAGES[queue]
            for number in range(1000, 1200)
        ]
        for kind, names in queues.items()
    ]


def prepare(folder: Path, address: str | None, weights: bool) -> str:
    """Writes the agent, its first version and the file of the loop. Returns the rubric."""
    field, source = ("queue", QUEUES) if address is None else ("answer", SUMS)
    check = "exact" if address is None else "numeric"
    (folder / "agent.py").write_text(source)
    (folder / "r.yaml").write_text(
        f"name: right\ncriteria:\n- {{name: right, check: assay.rubrics.checks:{check}, with: {{field: {field}}}}}\n"
    )
    program, rubric = f"{folder}/agent.py:{'Queues' if address is None else 'Sums'}", "r.yaml"
    if address is None:
        manifest: dict[str, Any] = {"model": MODEL, "settings": {"adapter": "lean", "parameters": {"temperature": 0.1}}}
        options: dict[str, Any] = {"max_search_calls": 300, "demos": 8, "sizes": {"gate": 40, "test": 8}}
    else:
        manifest = {"model": "openai/m", "settings": {"adapter": "chat", "parameters": {}}, "api_base": address}
        options = {"api_base": address, "prompt_format": "chat", "max_search_calls": 60, "sizes": {"gate": 30}}
    options["order"] = ["prompts", "sft"] if weights else ["prompts"]
    save_artifact(folder / "one", load_program(program), {"program": program, **manifest}, splits={}, report="")
    register(AGENT, folder / "one")
    (folder / "plan.yaml").write_text(json.dumps(PLAN))
    loop = {
        "rubric": rubric, "method": "improve", "options": options, "every_days": 0,
        "min_new_tasks": 100 if address is None else 30,
        # not more tasks than a cycle needs: a task type that has just arrived gets its share of them
        "pool": {
            "privacy": "patterns", "min_task_types": 1, "min_clean": 0.5,
            **({"min_points": 240, "max_tasks": 240} if address is None else {"min_points": 50}),
        },
        "deploy": {"plan": "plan.yaml"},
    }  # fmt: skip
    (folder / "loop.yaml").write_text(json.dumps(loop))
    start_loop(AGENT, file=folder / "loop.yaml")
    return rubric


class Production:
    """Sends tasks to the agent, each of them once."""

    def __init__(self, rubric: str, tasks: list[list[Task]], seed: int) -> None:
        self.agent = assay.deployed(AGENT, rubric=rubric)
        self._random, self._tasks = random.Random(seed), tasks
        for phase in tasks:
            self._random.shuffle(phase)

    def send(self, phases: int) -> None:
        """One batch, of the task types of so many phases."""
        for _ in range(BATCH):
            kind, inputs, expected = self._tasks[self._random.randrange(phases)].pop()
            self.agent(inputs, expected=expected, task_type=kind, unit=f"user-{self._random.randrange(300)}")
        self.agent.store.flush()

    def champion(self, phases: int, batches: int = 2) -> dict[str, Any]:
        """Score of what production answers now, with a 95 % interval."""
        began = time.time()
        for _ in range(batches):
            self.send(phases)
        scores = [r.score for r in self.agent.store.rollouts() if r.started_at >= began and r.phase == "deployed"]
        known = [score for score in scores if score is not None]
        low, high = mean_interval(known)
        version = self.agent.router.champion.name
        return {"version": version, "n": len(known), "score": sum(known) / len(known), "low": low, "high": high}


def cycle(production: Production, phases: int, limit: int) -> list[str]:
    """Sends batches and runs the loop until a deployment has ended. Returns what the runs did."""
    actions = []
    for _ in range(limit):
        production.send(phases)
        report = run_loop(AGENT)
        actions.append(f"{report.action}: {report.reason}"[:200])
        if report.action == "failed" or (report.action == "advance" and report.deployment is None):
            break
    return actions


@contextmanager
def server(scripted: bool, folder: Path) -> Iterator[str | None]:
    """Address of the scripted server; None for the embedded model."""
    with running(folder / "requests") if scripted else nullcontext() as address:
        yield address


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--scripted", action="store_true")
    parser.add_argument("--weights", action="store_true", help="Train weights after the prompts.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=int, default=60, help="Batches of a phase.")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    os.chdir(arguments.folder)
    os.environ.setdefault("OPENAI_API_KEY", "none")
    with server(arguments.scripted, Path.cwd()) as address:
        production = Production(
            prepare(Path.cwd(), address, arguments.weights), tasks_of(arguments.scripted), arguments.seed
        )
        for phases in (1, 2):
            line: dict[str, Any] = {"phase": phases, "before": production.champion(phases)}
            began = time.monotonic()
            line["runs"] = cycle(production, phases, arguments.limit)
            print(
                json.dumps({**line, "after": production.champion(phases), "seconds": round(time.monotonic() - began)})
            )
    with Store() as store:
        for step in Loops(store.engine).steps(AGENT):
            reason = step.detail.get("reason")
            print(json.dumps({"cycle": step.cycle, "step": step.step, "status": step.status, "reason": reason}))
        for deployment in Deployments(store.engine).all(AGENT):
            print(json.dumps({"deployment": deployment.candidate, "status": deployment.state.status}))


if __name__ == "__main__":
    main()
