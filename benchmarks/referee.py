"""How often the referee's rule promotes a text without a gain, and how often it promotes a better one.

    python benchmarks/referee.py [--draws 1000] [--seed 0] [--submissions 200] [--tasks 40 100 300]

The rule is the referee's own (`assay.evaluation.adaptive`): the screen on val, then a look at gate. Answers are right
or wrong; an edit answers half of the tasks anew, so a difference has a deviation of 0.5, and a text's answer to a task
does not change. Optimisers submit:

- random: edits of the original text;
- climbs on gate: edits of the champion, which is all that the gate releases;
- climbs on val: keeps each edit that raises the mean on val, so that it overfits val;
- rare losses: edits that gain 0.1 on 90 % of the tasks and lose 0.9 on the others, with a mean of 0.

False: any promotion of a text whose true mean is not above the champion's, in a run of all submissions. Power: any of
10 truly better edits among the submissions is promoted, the others being without effect. `5 % each time` is a paired
test of 5 % for each submission, to show that the optimisers can deceive a rule. Shares have exact 95 % intervals.
Prints the tables of a page in Markdown.

    python benchmarks/referee.py --real runs.jsonl --draws 24 [--tasks 100] [--gains 0] [--processes 1]

runs the same optimisers against a whole referee in place of its rule: opened with `open_referee`, with its folder,
store, sealed splits and looks file, and asked by the methods that its MCP server calls. The agent is scripted: its
answers are right by a hash of salt, edits in its text and question, with the probabilities above; it calls its model
(scripted too) as long as its text has no edit. A run ends once it is decided: at the promotion that is asked about, or
when no look is left, as the referee then refuses all submissions. Each run is a line of the file, and is not repeated;
the table is of all lines (`--draws 0`: of those that are there).
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from intervals import row, share

from assay.evaluation.adaptive import AdaptiveGate, look_level, passes_screen
from assay.evaluation.statistics import shows_gain

BETTER = 10  # truly better edits among the submissions, for the power
OPTIMISERS = ("random", "climbs on gate", "climbs on val")
Rng = np.random.Generator


@dataclass(frozen=True)
class Text:
    """Scores of a text on val and on gate, and its true mean."""

    val: np.ndarray
    gate: np.ndarray
    mean: float

    def edited(self, rng: Rng, gain: float = 0.0) -> "Text":
        """With half of the tasks answered anew. `gain`: true gain over a text that is right on half of the tasks."""
        right = 0.5 + 2 * gain

        def anew(scores: np.ndarray) -> np.ndarray:
            return np.where(rng.random(len(scores)) < 0.5, rng.random(len(scores)) < right, scores).astype(float)

        return Text(anew(self.val), anew(self.gate), (self.mean + right) / 2)

    def with_rare_losses(self, rng: Rng) -> "Text":
        """With 0.1 more on 90 % of the tasks and 0.9 less on the others: the mean of the differences is 0."""

        def moved(scores: np.ndarray) -> np.ndarray:
            return scores + np.where(rng.random(len(scores)) < 0.1, -0.9, 0.1)

        return replace(self, val=moved(self.val), gate=moved(self.gate))


def original(rng: Rng, tasks: int) -> Text:
    val, gate = ((rng.random(tasks) < 0.5).astype(float) for _ in range(2))
    return Text(val, gate, mean=0.5)


class Referee:
    """Decides on submissions by the rule; keeps the champion."""

    def __init__(self, champion: Text) -> None:
        self.champion, self.gate, self.promoted = champion, AdaptiveGate(), list[bool]()

    @property
    def open(self) -> bool:
        return not self.gate.used_up

    def on_val(self, text: Text) -> float:
        """Mean score on val."""
        return float(text.val.mean())

    def submit(self, text: Text) -> None:
        if not self.accepts(text):
            return
        self.promoted.append(text.mean > self.champion.mean + 1e-9)
        self.champion = text

    def accepts(self, text: Text) -> bool:
        return passes_screen(text.val - self.champion.val) and self.gate.look(text.gate - self.champion.gate)


class EachTime(Referee):
    """A paired one-sided test of 5 % for each submission, on gate alone."""

    open = True

    def accepts(self, text: Text) -> bool:
        return shows_gain(text.gate - self.champion.gate, level=0.05)


def submitted(how: str, referee: Any, rng: Rng, count: int, gains: np.ndarray) -> None:
    """Submits `count` texts. `gains`: the true gain of each edit."""
    start = current = referee.champion
    for gain in gains[:count]:
        if not referee.open:
            return
        if how == "random":
            text = start.edited(rng, gain)
        elif how == "climbs on gate":
            text = referee.champion.edited(rng, gain)
        elif how == "climbs on val":
            text = current.edited(rng, gain)
            if referee.on_val(text) <= referee.on_val(current):
                continue
            current = text
        else:
            text = referee.champion.with_rare_losses(rng)
        referee.submit(text)


def gains_of(rng: Rng, count: int, gain: float) -> np.ndarray:
    """The true gains of edits, of which some are better if `gain` is not 0."""
    gains = np.zeros(count)
    if gain:
        gains[rng.choice(count, BETTER, replace=False)] = gain
    return gains


def runs(arguments: argparse.Namespace, how: str, tasks: int, rule: type[Referee], gain: float) -> str:
    """The share of false runs; with a gain, of runs in which a better text was promoted."""
    rng, results = np.random.default_rng([arguments.seed, tasks, round(100 * gain)]), []
    for _ in range(arguments.draws):
        gains = gains_of(rng, arguments.submissions, gain)
        referee = rule(original(rng, tasks))
        submitted(how, referee, rng, arguments.submissions, gains)
        results.append(any(referee.promoted) if gain else not all(referee.promoted))
    return share(results)


# -- The whole referee.


TEXT, OWN = "system.md", "Add one to the number and write it."
FILES = {
    TEXT: OWN,
    "rubric.yaml": 'name: sums\ncriteria:\n  - {name: correct, weight: 1, check: "checks.py:right"}\n',
    "checks.py": """
def right(task, prediction, rollout):
    return float(str(prediction.get("answer")) == str(task.expected["answer"]))
""",
    "agent.py": """
import hashlib, json, re, urllib.request

def draws(*words):
    digest = hashlib.sha256("\\0".join((SALT, *words)).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32, int.from_bytes(digest[4:8], "big") / 2**32

def is_right(edits, question):
    for edit in reversed(edits):
        changes, draw = draws(edit, question)
        if changes < 0.5:  # the last edit that answers this task anew
            return draw < 0.5 + 2 * int(edit[-2:]) / 100
    return draws("own", question)[1] < 0.5

def ask_model(task, system, question):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = json.dumps({"model": task["model"], "messages": messages}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + task["api_key"]}
    request = urllib.request.Request(task["base_url"] + "/chat/completions", body, headers)
    urllib.request.urlopen(request, timeout=60).close()

def solve(task):
    system, question = task["texts"]["system.md"], task["inputs"]["question"]
    edits = re.findall("[0-9a-f]{6}-[0-9]{2}", system)
    if not edits:
        ask_model(task, system, question)
    return str(int(question.split()[2]) + (1 if is_right(edits, question) else 2))
""",
}


@dataclass(frozen=True)
class Written:
    """A text of the scripted agent, and its true mean."""

    edits: tuple[str, ...] = ()
    mean: float = 0.5

    def edited(self, rng: Rng, gain: float = 0.0) -> "Written":
        """As `Text.edited`. The agent reads the gain, in per cent, at the end of the edit."""
        edit = f"{rng.integers(16**6):06x}-{round(100 * gain):02d}"
        return Written((*self.edits, edit), (self.mean + 0.5 + 2 * gain) / 2)

    @property
    def texts(self) -> dict[str, str]:
        return {TEXT: f"{OWN} Rules: {' '.join(self.edits)}" if self.edits else OWN}


class WholeReferee:
    """An opened referee, as the optimisers use it.

    Args:
        gain: of the better edits; 0 if there are none.
    """

    def __init__(self, referee: Any, gain: float) -> None:
        self.referee, self.gain = referee, gain
        self.champion, self.promoted, self.submissions, self.looks_left = Written(), list[bool](), 0, 1
        self.refused = 0  # submissions that break a rule of the referee, such as one of a text that was submitted
        self.seen = dict[Written, float]()  # scores on val

    @property
    def open(self) -> bool:
        decided = any(self.promoted) if self.gain else bool(self.promoted)
        return self.looks_left > 0 and not decided

    def on_val(self, text: Written) -> float:
        if text not in self.seen:
            self.seen[text] = float(self.referee.score(text.texts)["score"])
        return self.seen[text]

    def submit(self, text: Written) -> None:
        answer = self.referee.submit(text.texts)
        if answer["reason"].startswith("not run"):
            raise RuntimeError(answer["reason"])
        self.refused += answer["outcome"] == "refused"
        self.submissions, self.looks_left = self.submissions + 1, answer["looks_left"]
        if answer["promoted"]:
            self.promoted.append(bool(text.mean > self.champion.mean + 1e-9))
            self.champion = text


def whole_run(how: str, tasks: int, gain: float, seed: int, count: int) -> dict[str, Any]:
    """One run of an optimiser against a referee of its own; its line of the file."""
    began = time.monotonic()
    rng = np.random.default_rng([seed, tasks, round(100 * gain), OPTIMISERS.index(how)])
    with tempfile.TemporaryDirectory() as folder:
        with opened(Path(folder), f"{how} {tasks} {gain:g} {seed}", tasks) as opened_one:
            referee = WholeReferee(opened_one, gain)
            submitted(how, referee, rng, count, gains_of(rng, count, gain))
            budget = opened_one.budget()
        os.chdir("/")
    return {
        "how": how, "tasks": tasks, "gain": gain, "seed": seed, "count": count, "submissions": referee.submissions,
        "refused": referee.refused, "looks": budget["looks"], "true": sum(referee.promoted),
        "false": referee.promoted.count(False), "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


@contextmanager
def opened(folder: Path, salt: str, tasks: int) -> Iterator[Any]:
    """A referee with this many tasks of val and of gate, opened in a new workspace and served."""
    from assay.commands.referee import open_referee
    from assay.evaluation import SilentProgress
    from assay.jobs.referee import opened_referee
    from assay.jobs.referee_folder import RefereeFolder
    from assay.testing import scripted_lm

    def model(name: str, *, cache: Any, meter: Any, observers: Any, **settings: Any) -> Any:
        return scripted_lm(lambda request: "0", cache=cache, meter=meter, observers=observers)

    os.environ["ASSAY_HOME"] = str(folder / "home")  # of the list of looks
    work, data = folder / "work", folder / "data.jsonl"
    work.mkdir()
    os.chdir(work)
    for name, text in {**FILES, "agent.py": f"SALT = {salt!r}\n{FILES['agent.py']}"}.items():
        Path(name).write_text(text)
    splits = [name for name, size in {"train": 1, "val": tasks, "gate": tasks, "test": 8}.items() for _ in range(size)]
    rows = [
        {"question": f"What is {n} + 1?", "answer": str(n + 1), "split": split} for n, split in enumerate(splits, 1000)
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in rows))
    with mock.patch("assay.jobs.opening.get_lm", model):
        open_referee(
            agent="agent.py:solve", text=[TEXT], delivery="task", rubric="rubric.yaml", data=str(data),
            model="openai/scripted", threads=1, cache=False, progress=SilentProgress(), out=folder / "referee",
        )  # fmt: skip
        with opened_referee(RefereeFolder(folder / "referee"), progress=SilentProgress()) as referee:
            yield referee


def real(arguments: argparse.Namespace) -> None:
    """Makes the runs that the file does not have, and prints its table."""
    path = Path(arguments.real)
    seeds = range(arguments.seed, arguments.seed + arguments.draws)
    wanted = [
        (how, tasks, gain, seed, arguments.submissions)
        for seed in seeds for tasks in arguments.tasks for gain in arguments.gains
        for how in (OPTIMISERS[:1] if gain else OPTIMISERS)
    ]  # fmt: skip
    names = ("how", "tasks", "gain", "seed", "count")
    there = {tuple(line[name] for name in names) for line in lines_of(path)}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.processes, mp_context=context, max_tasks_per_child=10) as pool:
        try:
            for run in as_completed([pool.submit(whole_run, *key) for key in wanted if key not in there]):
                line = json.dumps(run.result())
                with path.open("a") as file:
                    file.write(line + "\n")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    rows = lines_of(path)
    sizes = sorted({line["tasks"] for line in rows})
    row("whole referee, % of runs", [f"{n} tasks" for n in sizes])
    row("---", ["---"] * len(sizes))

    def cells(name: str, field: str, hows: tuple[str, ...], gain: float) -> None:
        found = [
            [line for line in rows if line["tasks"] == n and line["gain"] == gain and line["how"] in hows]
            for n in sizes
        ]
        if any(found):
            row(
                name,
                [f"{share([bool(line[field]) for line in part])} of {len(part)}" if part else "–" for part in found],
            )

    for how in OPTIMISERS:
        cells(f"false promotion, {how}", "false", (how,), 0)
    cells("false promotion, all", "false", OPTIMISERS, 0)
    for gain in sorted({line["gain"] for line in rows} - {0}):
        cells(f"power, random, +{gain:g}", "true", OPTIMISERS, gain)
    seconds = [line["seconds"] for line in rows]
    print(f"\n{len(rows)} runs, {sum(line['submissions'] for line in rows):,} submissions, {sum(seconds):,.0f} s")


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--submissions", type=int, default=200)
    parser.add_argument("--tasks", type=int, nargs="+", default=[40, 100, 300])
    parser.add_argument("--real", metavar="FILE", help="Run whole referees; the file has a line for each run.")
    parser.add_argument(
        "--gains", type=float, nargs="+", default=[0, 0.1, 0.2], help="Of the better edits; with --real."
    )
    parser.add_argument("--processes", type=int, default=1, help="With --real.")
    arguments = parser.parse_args()
    if arguments.real:
        real(arguments)
        return

    def table(title: str, rows: dict[str, Callable[[int], str]]) -> None:
        row(title, [f"{n} tasks" for n in arguments.tasks])
        row("---", ["---"] * len(arguments.tasks))
        for name, cell in rows.items():
            row(name, [cell(n) for n in arguments.tasks])
        print()

    def of(how: str, rule: type[Referee] = Referee, gain: float = 0.0) -> Callable[[int], str]:
        return lambda tasks: runs(arguments, how, tasks, rule, gain)

    def one_look(tasks: int) -> str:
        rng, level = np.random.default_rng([arguments.seed, tasks]), look_level(1, 0)
        texts = [Text(np.zeros(1), np.zeros(tasks), 0.0).with_rare_losses(rng) for _ in range(10 * arguments.draws)]
        return share([shows_gain(text.gate, level=level) for text in texts])

    table("false promotion, % of runs", {how: of(how) for how in (*OPTIMISERS, "rare losses")})
    table("the same, 5 % each time", {how: of(how, EachTime) for how in OPTIMISERS[:1]})
    table("power, % of runs", {
        f"{how}, +{gain:g}": of(how, gain=gain) for how in ("random", "climbs on val") for gain in (0.1, 0.2)
    })  # fmt: skip
    table("one look at its first level, rare losses: accepted, %", {"90 % +0.1, 10 % -0.9 (mean 0)": one_look})


if __name__ == "__main__":
    main()
