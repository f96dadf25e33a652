"""A model of its own with an engine of its own, beside the job's model."""

import json
import os
import urllib.request
from typing import Any

import dspy


class Engine:
    """Posts the text of a request to a chat server."""

    def complete(self, request: Any) -> Any:
        texts = [part.text for message in request.messages for part in message.parts]
        system = str(request.system or "")
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "\n".join(texts)}]
        body = json.dumps({"model": request.model, "messages": messages}).encode()
        place = os.environ["PROGRAMS_SERVER"] + "/chat/completions"
        with urllib.request.urlopen(urllib.request.Request(place, body)) as answer:
            return dspy.lm15.response_from_openai_chat(json.load(answer))


class Program(dspy.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plan = dspy.Predict("question -> plan")
        self.plan.set_lm(dspy.LM("openai/planner", engine=Engine(), cache=False))
        self.respond = dspy.ChainOfThought("question, plan -> answer")

    def forward(self, question: str) -> dspy.Prediction:
        return self.respond(question=question, plan=self.plan(question=question).plan)
