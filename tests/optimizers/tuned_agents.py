"""Agents with a known best parameter, their tasks, and searches over them."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dspy

import assay
from assay.optimizers.parameters import AgentObjective, Point, SearchConfig, Space, open_study, search
from assay.programs import RANGES, Agent
from assay.testing import scripted_lm


class Aims:
    """An agent that scores higher the closer its temperature is to 0.6 and its steps to 8; deterministic per task."""

    def __init__(self) -> None:
        self.parameters: dict[str, Any] = {}
        self.executed = 0

    def set_parameters(self, parameters: Mapping[str, Any]) -> None:
        self.parameters = dict(parameters)

    def execute(self, task: Any) -> Any:
        self.executed += 1
        off = abs(self.parameters["temperature"] - 0.6) + abs(math.log2(self.parameters["max_steps"] / 8)) / 4
        return int(task) / 40 < 0.95 - off

    @staticmethod
    def right(task: Any, output: Any) -> dict[str, float]:
        return {"accuracy": float(output)}


TASKS = [str((number * 7) % 40) for number in range(40)]


TWO = Space(
    programs=["agent"], acting={"agent": list(RANGES)}, ranges={"temperature": (0.1, 2.0), "max_steps": (1, 50)}
)


def searched(
    agent: Any = None, space: Space = TWO, *, url: str | None = None, name: str = "s", tasks: Any = TASKS, **config: Any
) -> Any:
    settings = SearchConfig(**{"trials": 30, **config})
    study, objective = open_study(name, url, space, settings), AgentObjective(agent or Aims(), Aims.right)
    default = Point("agent", {"temperature": 1.5, "max_steps": 30})
    return search(objective, tasks, space, settings, study, defaults=[default])


class Guesses(Agent):
    """Answers in one step; its model is more accurate at lower temperatures."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.answer = dspy.Predict("question -> answer")

    def solve(self, **inputs: Any) -> Any:
        return self.answer(**inputs)


def cool(request: Any) -> str:
    text = str(request.messages[-1].text)
    number = int(text.split("number ")[1].split()[0].strip('".,}'))
    right = number / 100 < 1.1 - (request.config.temperature or 1.0)
    return json.dumps({"answer": "yes" if right else "no"})


JOB: dict[str, Any] = {"rubric": "r.yaml", "data": "d.jsonl", "store": ".assay/a.db"}


def write(folder: Path) -> None:
    rows = [{"question": f"number {at} of all", "answer": "yes"} for at in range(100)]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")


def tuned(folder: Path, *, program: Any = None, **options: Any) -> Any:
    write(folder)
    job = {name: str(folder / path) for name, path in JOB.items()}
    trials = {"trials": 12} if options.get("method", "optuna") == "optuna" else {}
    return assay.tune(program or Guesses(), **{"lm": scripted_lm(cool), **job, **trials, **options})
