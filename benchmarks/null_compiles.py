"""How often a compile replaces a text of an agent by one that is not better.

    python benchmarks/null_compiles.py --compiles 200

Each compile is a whole job of `assay.compile(agent=…, text=…)`: search, gate, artifact; only the model is scripted. Its
answers are right by a hash of salt, system text and question, with the same probability for each text: no text is
better than another. Each compile has a salt of its own. Prints the share that was adopted, with a 95 % interval of
Clopper and Pearson.
"""

import argparse
import hashlib
import json
import os
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

import assay
from assay.evaluation import SilentProgress
from assay.rubrics import Criterion, Rubric
from assay.testing import scripted_lm

OWN = "Add one to the number and write it."
SHARE = 0.5  # of right answers, of any text
SPLITS = {"train": 40, "val": 40, "gate": 40, "test": 40}
SEARCH_CALLS = 200


def right(task: Any, prediction: Any, rollout: Any) -> float:
    return float(str(prediction.get("answer")) == str(task.expected["answer"]))


RUBRIC = Rubric("right", [Criterion(name="right", check=right)])


class Model:
    """Answers sums by chance, and proposes a new text at each request for one."""

    def __init__(self, salt: str) -> None:
        self.salt, self.proposals = salt, 0

    def __call__(self, request: Any) -> str:
        system, user = str(request.system), request.messages[-1].text or ""
        if "improved_text" in system or "edits" in system:
            self.proposals += 1
            text = f"{OWN} Take care, in version {self.proposals}."
            if "improved_text" in system:
                return _fields(improved_text=text, why="Sums go wrong.")
            own = user.partition("[[ ## text ## ]]\n")[2].partition("\n\n[[ ## failures")[0]
            return _fields(edits=json.dumps([{"passage": own, "new": text, "why": "Sums go wrong."}]))
        digest = hashlib.sha256(f"{self.salt}\0{system}\0{user}".encode()).digest()
        is_right = int.from_bytes(digest[:4], "big") / 2**32 < SHARE
        return str(int(user.split()[2]) + (1 if is_right else 2))


def _fields(**values: str) -> str:
    return "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in values.items()) + "[[ ## completed ## ]]"


def agent(task: dict[str, Any]) -> str:
    messages = [
        {"role": "system", "content": Path("system.md").read_text()},
        {"role": "user", "content": task["inputs"]["question"]},
    ]
    body = json.dumps({"model": task["model"], "messages": messages}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {task['api_key']}"}
    request = urllib.request.Request(f"{task['base_url']}/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])


def adopted(salt: str, optimizer: str) -> bool:
    """Whether a compile replaces the agent's own text."""
    names = [name for name, size in SPLITS.items() for _ in range(size)]
    rows = [
        {"question": f"What is {n} + 1?", "answer": str(n + 1), "split": name} for n, name in enumerate(names, 1000)
    ]
    report = assay.compile(
        agent=agent, text=["system.md"], rubric=RUBRIC, data=rows, lm=scripted_lm(Model(salt)), salt=salt,
        optimizer=optimizer, max_search_calls=SEARCH_CALLS, threads=1, test=False, cache=False,
        progress=SilentProgress(), out="compiled",
    )  # fmt: skip
    return bool(report.replaces)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiles", type=int, default=200)
    parser.add_argument("--optimizer", default="auto")
    parser.add_argument("--seed", type=int, default=0, help="Part of each salt.")
    arguments = parser.parse_args()
    replaced, began = 0, time.process_time()
    for number in range(arguments.compiles):
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            Path("system.md").write_text(OWN)
            replaced += adopted(f"null {arguments.seed} {number}", arguments.optimizer)
        os.chdir("/")
        if number == 0 or (number + 1) % 20 == 0:
            print(f"{number + 1} compiles: {replaced} adopted, {time.process_time() - began:.0f} CPU s", flush=True)
    interval = binomtest(replaced, arguments.compiles).proportion_ci(0.95, method="exact")
    print(
        f"{replaced} of {arguments.compiles} adopted: {100 * replaced / arguments.compiles:.1f} % "
        f"[{100 * interval.low:.1f}, {100 * interval.high:.1f}]"
    )


if __name__ == "__main__":
    main()
