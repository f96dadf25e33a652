"""Loses processes, nodes and drivers of a Ray cluster in the middle of a job: `make chaos`. Not in CI.

    python benchmarks/chaos_ray.py [--tasks 60] [--cases folder exits worker node driver calls dollars]

Two nodes on this machine, of which the second does not see the folder of the program. Each case evaluates the program
on a server that counts its requests; scores are compared with those of threads. A line for each case: what the server
answered, what is stored and what counts as unrecorded. Where nothing was killed both sides are equal; after a kill no
call is missing from the right side. Caps are never exceeded by calls. Exits with 1 if anything is wrong.
"""

import argparse
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import assay
from assay.errors import AssayError
from assay.evaluation import SilentProgress

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from rigs.chaos import Server, serving
from rigs.ray_cluster import Node, two_nodes

FILES = {
    "sums.py": """
import os
from pathlib import Path
import dspy
import helper

class Sums(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        from late import numbers
        folder = os.environ["CHAOS_PIDS"]
        Path(folder, str(os.getpid())).touch()
        answer = self.answer(question=question)
        if question in (Path(__file__).parent / "exits.txt").read_text().splitlines():
            os._exit(7)
        return dspy.Prediction(answer=helper.shown(answer.answer), numbers=numbers(question))
""",
    "helper.py": "def shown(answer):\n    return str(answer)\n",
    "late.py": "import re\n\ndef numbers(text):\n    return re.findall('[0-9]+', text)\n",
    "exits.txt": "",
    "check.py": "import helper\n\ndef read(task, prediction, rollout):\n    return bool(prediction['numbers'])\n",
    "r.yaml": "name: sums\ncriteria:\n- {name: right, check: exact}\n- {name: read, check: 'check.py:read'}\n",
}
EXITS = "What is 7 + 1?"
PRICE = "1,1"  # dollars for a million tokens
CAP_CALLS, CAP_USD = 20, 0.002
COMMAND = "import json, sys; sys.path.append(sys.argv[1]); import chaos_ray; chaos_ray.run(**json.loads(sys.argv[2]))"


@dataclass
class Case:
    """A job and what is done to it.

    Args:
        harm: called in a thread once the job is at work; gets the cluster's second node and the folder of process ids.
        most: number of calls that must not be exceeded.
        most_usd: dollars likewise, without what the calls in flight cost beyond their reservation: the server counts
            more tokens in a prompt than the estimate.
    """

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    harm: Callable[[Node, Path], None] | None = None
    exits: bool = False
    most: int | None = None
    most_usd: float | None = None
    driver: bool = False  # is killed and resumed


def kill_worker(node: Node, pids: Path) -> None:
    os.kill(int(next(pids.iterdir()).name), signal.SIGKILL)


def kill_node(node: Node, pids: Path) -> None:
    node.kill()


CASES = {
    "folder": Case("second node has no folder"),
    "exits": Case("a task ends its process", exits=True),
    "worker": Case("worker killed", harm=kill_worker),
    "driver": Case("driver killed and resumed", driver=True),
    "calls": Case("cap on calls, 8 threads", {"max_calls": CAP_CALLS, "threads": 8}, most=CAP_CALLS),
    "calls16": Case("cap on calls, 16 threads", {"max_calls": CAP_CALLS, "threads": 16}, most=CAP_CALLS),
    "dollars": Case("cap on dollars, 8 threads", {"max_cost_usd": CAP_USD, "threads": 8}, most_usd=CAP_USD),
    "dollars16": Case("cap on dollars, 16 threads", {"max_cost_usd": CAP_USD, "threads": 16}, most_usd=CAP_USD),
    "node": Case("node killed", harm=kill_node),  # last: the node does not come back
}


def run(**settings: Any) -> tuple[dict[str, float], int | None]:
    """Scores by task, and the number of unrecorded calls that the report has."""
    report = assay.evaluate(
        "sums.py:Sums", rubric="r.yaml", data="d.jsonl", split="all", preflight=False, prompt_format="chat",
        model="openai/m", progress=SilentProgress(), **{"threads": 8, "price": PRICE, **settings},
    )  # fmt: skip
    return dict(report.evaluation.scores), report.unrecorded


def accounts(store: Path) -> tuple[int, int, float, float]:
    """Calls stored, rollouts or runs that are still running, and dollars: of all calls, and of the dearest."""
    with closing(sqlite3.connect(store)) as db:

        def count(query: str) -> int:
            return int(db.execute(query).fetchone()[0] or 0)

        spent, most = db.execute("SELECT sum(cost_usd), max(cost_usd) FROM transitions WHERE NOT cached").fetchone()

        running = sum(count(f"SELECT count(*) FROM {table} WHERE status = 'running'") for table in ("rollouts", "runs"))
        stored = count("SELECT count(*) FROM transitions WHERE NOT cached AND error IS NULL")
        return stored, running, spent or 0.0, most or 0.0


@contextmanager
def harmed(case: Case, node: Node, pids: Path, server: Server, after: int) -> Iterator[None]:
    """Inside, the harm is done once the server has answered some calls."""
    ended, first = threading.Event(), server.requests

    def harm() -> None:
        while server.requests < first + after and not ended.wait(0.02):
            pass
        if not ended.is_set() and case.harm is not None:
            case.harm(node, pids)

    thread = threading.Thread(target=harm, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def killed(address: str, settings: dict[str, Any], server: Server, after: int) -> None:
    """Runs the job in a process of its own and kills it once the server has answered some calls."""
    command = [sys.executable, "-c", COMMAND, str(Path(__file__).parent), json.dumps(settings)]
    first, environment = server.requests, {**os.environ, "RAY_ADDRESS": address}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while server.requests < first + after and process.poll() is None:
        time.sleep(0.02)
    process.kill()
    process.wait()


def tried(case: Case, scratch: Path, server: Server, cluster: Any, node: Node, tasks: int) -> list[str]:
    """Runs a case; prints its line. Returns what is wrong."""
    Path("exits.txt").write_text(EXITS if case.exits else "")
    pids, store = Path(os.environ["CHAOS_PIDS"]), scratch / f"{case.name}.db"
    for pid in pids.iterdir():
        pid.unlink()
    settings = {"store": str(store), "api_base": server.address, "executor": "ray", **case.settings}
    before, began, problems = server.requests, time.monotonic(), list[str]()
    scores, unrecorded = dict[str, float](), None
    try:
        if case.driver:
            killed(cluster.address, settings, server, tasks // 3)
            settings["resume"] = True
        with harmed(case, node, pids, server, tasks // 3):
            scores, unrecorded = run(**settings)
    except AssayError as error:
        problems.append(f"{type(error).__name__}: {error}")
    seconds, sent = time.monotonic() - began, server.requests - before
    stored, running, spent, dearest = accounts(store)
    counted = stored + (unrecorded or 0)
    lost = case.harm is not None or case.exits or case.driver
    if sent > counted if lost else sent != counted:
        problems.append(f"{sent} calls were sent, {counted} are counted")
    if running:
        problems.append(f"{running} rollouts or runs are still running")
    if case.most is not None and sent > case.most:
        problems.append(f"{sent} calls with a cap of {case.most}")
    if case.most_usd is not None and spent > case.most_usd + case.settings["threads"] * dearest:
        problems.append(f"${spent:.4f} with a cap of ${case.most_usd}")
    if not case.settings:
        Path("exits.txt").write_text("")
        expected, _ = run(store=str(scratch / "threads.db"), api_base=server.address, executor="threads", resume=False)
        expected |= {"7": 0.0} if case.exits else {}
        problems += [] if scores == expected else ["the scores differ from those of threads"]
    cells = [case.name, sent, stored, unrecorded, len(scores), f"{seconds:.0f}", "; ".join(problems) or "none"]
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=60)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        scratch, project = Path(folder), Path(folder) / "project"
        for name, text in FILES.items():
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            (project / name).write_text(text)
        rows = [{"id": str(n), "question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(arguments.tasks)]
        (project / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (scratch / "pids").mkdir()
        os.environ |= {"CHAOS_PIDS": str(scratch / "pids"), "OPENAI_API_KEY": "none"}
        os.chdir(project)
        with serving(scratch / "log", delay_ms=300) as server, two_nodes(project) as (cluster, node):
            print("| case | sent | stored | unrecorded | tasks scored | seconds | problems |")
            print("|---|---|---|---|---|---|---|")
            for name in arguments.cases:
                wrong += bool(tried(CASES[name], scratch, server, cluster, node, arguments.tasks))
        os.chdir("/")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
