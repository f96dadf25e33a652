"""A model of its own as a subclass of BaseLM, beside the job's model."""

import json
import os
import urllib.request
from types import SimpleNamespace
from typing import Any

import dspy


class ChatServer(dspy.BaseLM):
    def forward(self, prompt: Any = None, messages: Any = None, **options: Any) -> Any:
        body = {
            "model": self.model.removeprefix("openai/"),
            "messages": messages or [{"role": "user", "content": prompt}],
        }
        place = os.environ["PROGRAMS_SERVER"] + "/chat/completions"
        with urllib.request.urlopen(urllib.request.Request(place, json.dumps(body).encode())) as answer:
            return json.load(answer, object_hook=lambda fields: _Fields(**fields))


class _Fields(SimpleNamespace):
    def __iter__(self) -> Any:
        return iter(vars(self).items())


class Program(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plan = dspy.Predict("question -> plan")
        self.plan.set_lm(ChatServer("openai/planner"))
        self.respond = dspy.ChainOfThought("question, plan -> answer")

    def forward(self, question: str) -> dspy.Prediction:
        return self.respond(question=question, plan=self.plan(question=question).plan)
