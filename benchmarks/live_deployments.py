"""Two real deployments of the calculator agent, served by the gateway with the embedded model, with a client loop.

    python benchmarks/live_deployments.py FOLDER [--compiled ARTIFACT] [--adapter DIR] [--requests 40] [--without-model]

1. champion = the plain program, candidate = the compiled one (compiled with the sizes of `make demo`, or --compiled);
2. champion = what the first one left, candidate = the compiled program with a LoRA adapter that was trained on another
   task (labels of reviews, or --adapter).

With --without-model the three versions compute the answer and are right with probability 0.2, 0.85 and 0.02: that tries
gateway, clients and decisions in seconds, and says nothing about a model.

Clients send tasks that the compilation did not see, each for one of 300 users, until the deployment ends. Nobody calls
`advance`: the gateway does. Everything is in FOLDER; a step that is there already is not made again. One JSON line a
deployment.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from assay.commands.registry import register
from assay.datasets.splits import load_tasks
from assay.deployment import load_artifact, save_artifact
from assay.deployment.deployments import Deployment, Deployments
from assay.deployment.plan import Metric, Plan, Step
from assay.models import get_lm
from assay.models.lora import adapter_home
from assay.programs import load_program
from assay.traces import Store

MODEL, AGENT = "embedded/smollm2-135m", "calculator"
SEEN = "arithmetic:terms=2-3&digits=2-3&size=600"
FRESH = "arithmetic:terms=2-3&digits=2-3&size=2000&seed=25"
COMPUTED = """
import random, re
import dspy

class Computed(dspy.Module):
    def forward(self, question):
        value = eval(re.sub(r"[^0-9+*/(). -]", "", question).strip(" ."))
        steps = [{{"tool": "calculator", "arguments": {{}}, "result": str(value), "error": None}}]
        return dspy.Prediction(answer=str(value if random.random() < {rate} else value + 1), steps=steps)
"""
REVIEWS = (
    "a film that stays with you", "two hours of boredom", "the actors shine", "the plot makes no sense",
    "funny from start to end", "I left before the end", "beautiful pictures", "a waste of money",
)  # fmt: skip


def plan_of(requests: int) -> Plan:
    """10 %, 50 % (decides) and 95 %, each with at least so many rollouts of both arms."""
    steps = (
        Step(weight=10, requests=requests),
        Step(weight=50, decides=True, requests=requests, max_requests=600),
        Step(weight=95, requests=requests),
    )
    return Plan(steps=steps, metrics=(Metric(success_gain=0.1),))


def compiled_in(folder: Path) -> Path:
    """The compiled program, with the sizes of `make demo`."""
    words = ["compile", "math_qa", "--rubric", "math_qa", "--data", SEEN, "--model", MODEL, "--set", "temperature=0.1"]
    words += ["--max-search-calls", "140", "--gate-size", "10", "--test-size", "10", "--out", "compiled"]
    if not (folder / "compiled").is_dir():
        subprocess.run([sys.executable, "-m", "assay", *words], check=True)
    return folder / "compiled"


def train_on_reviews(folder: Path) -> str:
    """Trains an adapter to label reviews; its name."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Is this review good or bad? {text} ({at})"}],
            "completion": [{"role": "assistant", "content": "bad" if number % 2 else "good"}],
            "quality": 1.0,
            "task": f"{number}-{at}",
        }
        for at in range(8)
        for number, text in enumerate(REVIEWS)
    ]
    (folder / "reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["train", "sft", "reviews.jsonl", "--name", "reviews", "--model", MODEL, "--epochs", "3", "--batch", "4"]
    subprocess.run([sys.executable, "-m", "assay", *words, "--learning-rate", "0.005"], check=True)
    return "reviews"


def broken_in(folder: Path, compiled: Path, adapter: Path | None) -> Path:
    """The compiled program with an adapter of another task."""
    if not (folder / "broken").is_dir():
        if adapter is None:
            name = train_on_reviews(folder)
        else:
            name = adapter.name
            shutil.copytree(adapter, adapter_home() / name, dirs_exist_ok=True)
        artifact, model = load_artifact(compiled), f"{MODEL}+{name}"
        manifest = {name: artifact.manifest[name] for name in ("program", "settings")}
        manifest |= {"model": model, "adapters": list(get_lm(model).recording.backend.adapters)}
        save_artifact(folder / "broken", artifact.program, manifest, splits={}, report="")
    return folder / "broken"


def plain_in(folder: Path, compiled: Path) -> Path:
    """The program as it is shipped, with the parameters of the compiled one: the baseline of the compilation."""
    if not (folder / "plain").is_dir():
        manifest = {name: load_artifact(compiled).manifest[name] for name in ("program", "model")}
        manifest["settings"] = {**load_artifact(compiled).settings, "adapter": "json"}
        save_artifact(folder / "plain", load_program(manifest["program"]), manifest, splits={}, report="")
    return folder / "plain"


def computed_in(folder: Path, rate: float) -> Path:
    """A program without a model that is right with probability `rate`."""
    source = folder / f"source-{rate}" / "computed.py"
    source.parent.mkdir()
    source.write_text(COMPUTED.format(rate=rate))
    name = f"{source}:Computed"
    manifest = {"program": name, "model": "openai/none", "settings": {"adapter": None, "parameters": {}}}
    return save_artifact(folder / f"right-{rate}", load_program(name), manifest, splits={}, report="")


class Clients:
    """Threads that send tasks to the gateway, one after another, until they are stopped."""

    def __init__(self, address: str, count: int, seed: int) -> None:
        self.address, self.counts, self.failures = address, Counter[str](), list[str]()
        self._tasks, self._random = load_tasks(FRESH), random.Random(seed)
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._sending) for _ in range(count)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _sending(self) -> None:
        while not self._ended.is_set():
            with self._lock:
                task, unit = self._random.choice(self._tasks), f"user-{self._random.randrange(300)}"
            body = {"inputs": dict(task.inputs), "expected": dict(task.expected), "task_type": task.task_type}
            data = json.dumps({**body, "unit": unit}).encode()
            request = urllib.request.Request(f"{self.address}/agents/{AGENT}", data)
            try:
                with urllib.request.urlopen(request, timeout=600) as response:  # seconds each on an idle machine
                    answered = str(json.load(response)["version"])
            except OSError as error:
                answered = type(error).__name__
                self.failures.append(str(error)[:300])
            with self._lock:
                self.counts[answered] += 1


def deployed(candidate: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Serves the agent until the deployment of `candidate` has ended; one that was cut off is continued."""
    with Store() as store:
        deployments = Deployments(store.engine)
        active = deployments.active(AGENT)
        deployment = deployments.start(candidate, plan_of(arguments.requests)) if active is None else active
        command = [sys.executable, "-m", "assay", "serve", "--registered", AGENT, "--agent-rubric", "math_qa"]
        command += ["--port", "0", "--json", "--upstream", "http://127.0.0.1:9/v1", "--advance-s", "5"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as gateway:
            assert gateway.stdout is not None
            address, began = json.loads(gateway.stdout.readline())["url"], time.monotonic()
            try:
                with Clients(address, arguments.clients, arguments.seed) as sending:
                    while (state := deployments.get(deployment.id).state).status == "running":
                        time.sleep(1)
                        if time.monotonic() - began > arguments.limit_s:
                            break
            finally:
                gateway.terminate()
            seconds = time.monotonic() - began
        return {
            "candidate": candidate, "status": state.status, "seconds": round(seconds), "sent": dict(sending.counts),
            "failures": sending.failures[:3], "steps": steps_of(deployments, deployment),
                "arms": arms_of(store, deployment),
        }  # fmt: skip


def steps_of(deployments: Deployments, deployment: Deployment) -> list[dict[str, Any]]:
    """The decisions, each with the rollouts of its step."""
    return [
        {name: row[name] for name in ("stage", "action", "rule", "reason", "requests")}
        for row in deployments.history(deployment.id)
    ]


def arms_of(store: Store, deployment: Deployment) -> dict[str, Any]:
    """Scores of all rollouts of the deployment by arm; those that were answered after its end included."""
    scores: dict[str, list[float | None]] = {}
    for rollout in store.rollouts():
        if rollout.deployment == deployment.id and rollout.status in ("done", "failed"):
            scores.setdefault(str(rollout.arm), []).append(rollout.score)
    scored = {arm: [value for value in values if value is not None] for arm, values in scores.items()}
    return {
        arm: {"rollouts": len(scores[arm]), "scored": len(values), "score": round(sum(values) / max(1, len(values)), 3)}
        for arm, values in scored.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--compiled", type=lambda text: Path(text).resolve())
    parser.add_argument(
        "--adapter", type=lambda name: Path(name).resolve(), help="Of another task; else one is trained."
    )
    parser.add_argument("--without-model", action="store_true")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=40, help="Smallest number of rollouts of a step.")
    parser.add_argument("--limit-s", type=float, default=3600.0)
    parser.add_argument("--only", choices=("better", "broken"))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    os.chdir(arguments.folder)
    folder = Path.cwd()
    makers: list[Callable[[], Path]]
    if arguments.without_model:
        makers = [partial(computed_in, folder, rate) for rate in (0.2, 0.85, 0.02)]
    else:
        compiled = arguments.compiled or compiled_in(folder)
        broken = partial(broken_in, folder, compiled, arguments.adapter)
        makers = [partial(plain_in, folder, compiled), lambda: compiled, broken]
    register(AGENT, makers[0]())
    for name, maker in (("better", makers[1]), ("broken", makers[2])):
        if arguments.only in (None, name):
            version = register(AGENT, maker())
            print(json.dumps(deployed(version.name, arguments)), flush=True)


if __name__ == "__main__":
    main()
