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
    study = open_study(name, url, space, settings)
    return search(
        AgentObjective(agent or Aims(), Aims.right),
        tasks,
        space,
        settings,
        study,
        defaults=[Point("agent", {"temperature": 1.5, "max_steps": 30})],
    )


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


def tuned(tmp_path: Path, **options: Any) -> Any:
    (tmp_path / "d.jsonl").write_text(
        "".join(json.dumps({"question": f"number {at} of all", "answer": "yes"}) + "\n" for at in range(100))
    )
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: 'assay.rubrics.checks:exact'}\n")
    program = options.pop("program", Guesses())
    return assay.tune(
        program,
        rubric=tmp_path / "r.yaml",
        data=str(tmp_path / "d.jsonl"),
        lm=options.pop("lm", scripted_lm(cool)),
        store=tmp_path / ".assay" / "a.db",
        **(({"trials": 12} if options.get("method", "optuna") == "optuna" else {}) | options),
    )
