"""An environment of a few steps, and an agent that plays it."""

import json
import sqlite3
from typing import Any

import assay
from assay.datasets import Task
from assay.models import LanguageModel
from assay.programs import (
    Environment,
    EnvironmentAgent,
    EnvironmentStep,
    InvalidAction,
)
from assay.rubrics import Criterion, Rubric
from assay.rubrics.environments import episode_ended, episode_reward, step_reward, valid_actions
from assay.testing import scripted_lm


class Corridor(Environment):
    """A walk along `length` fields to the door. Each step to the right is worth 0.25, the door 1."""

    def reset(self, task: Task) -> EnvironmentStep:
        self.at, self.length = 0, int(task.inputs.get("length", 2))
        self.connection = sqlite3.connect(":memory:")  # belongs to the thread that opened it
        return self._seen(0.0)

    def step(self, action: str) -> EnvironmentStep:
        self.connection.execute("SELECT 1")
        if self.at >= self.length:
            raise InvalidAction("the door is behind you")
        if action not in ("left", "right"):
            raise InvalidAction(f"{action!r} is no direction")
        before = self.at
        self.at = max(0, self.at + (1 if action == "right" else -1))
        return self._seen(1.0 if self.at >= self.length else 0.25 * (self.at - before))

    def _seen(self, reward: float) -> EnvironmentStep:
        done = self.at >= self.length
        text = "The door." if done else f"Field {self.at} of {self.length}."
        return EnvironmentStep(observation=text, reward=reward, done=done, info={"at": self.at})


def playing(actions: list[str], environment: Any = Corridor, **options: Any) -> tuple[Any, LanguageModel, list[str]]:
    """An agent, and a model that writes these actions; the texts are the prompts that it was sent."""
    prompts: list[str] = []
    turns = iter(actions)

    def script(request: Any) -> str:
        prompts.append("\n".join(message.text or "" for message in request.messages))
        return json.dumps({"action": next(turns)})

    return EnvironmentAgent(environment, "Walk right to the door.", **options), scripted_lm(script), prompts


def evaluated(environment: Any, rubric: Rubric, tmp_path: Any, actions: str = "right", **options: Any) -> Any:
    lm = scripted_lm(lambda request: json.dumps({"action": actions}))
    return assay.evaluate(
        EnvironmentAgent(environment, "Walk right to the door.", inputs=["length"], timeout_s=0.3),
        rubric=rubric,
        data=[{"length": length, "split": "test"} for length in (1, 2, 3)],
        split="test",
        lm=lm,
        store=tmp_path / "a.db",
        threads=2,
        **{"preflight": False, **options},
    )


DOOR = Rubric(
    "door",
    [
        Criterion(name="reward", check=episode_reward, arguments={"high": 1.0}),
        Criterion(name="ended", check=episode_ended),
        Criterion(name="valid", check=valid_actions),
        Criterion(name="by_step", check=step_reward, scope="step", weight=0.4),
    ],
)
