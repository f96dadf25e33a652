"""A corridor to walk along, as an environment, and one that hangs."""

import json
import sqlite3
import time
from typing import Any

from assay.datasets import Task
from assay.models import LanguageModel
from assay.programs import Environment, EnvironmentAgent, EnvironmentStep, InvalidAction
from assay.testing import scripted_lm


class Corridor(Environment):
    """A walk along `length` fields to the door. Each step to the right is worth 0.25, the door 1."""

    def reset(self, task: Task) -> EnvironmentStep:
        self.at, self.length = 0, int(task.inputs.get("length", 2))
        self.connection = sqlite3.connect(":memory:")  # may be used only in the thread that opened it
        return self._seen(0.0)

    def step(self, action: str) -> EnvironmentStep:
        self.connection.execute("SELECT 1")
        if self.at >= self.length:
            raise InvalidAction("the door is behind you")
        if action not in ("left", "right"):
            raise InvalidAction(f"{action!r} is not a direction")
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


class Hangs(Corridor):
    def step(self, action: str) -> EnvironmentStep:
        while True:
            time.sleep(0.01)
