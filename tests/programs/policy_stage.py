"""A scripted model in place of one in training, for tests of the agents that call it."""

import itertools
from typing import Any

from assay.models.embedded import PolicyBackend
from assay.models.lm import LanguageModel, lm_over
from assay.testing import scripted_lm


def scripted_policy() -> LanguageModel:
    """A model with the chat replies of llama.cpp, each another text of one token."""
    numbers = itertools.count(1)
    backend = scripted_lm(lambda request: "unused").recording.backend

    def chat(body: dict[str, Any]) -> dict[str, Any]:
        number = next(numbers)
        token = {"id": number, "token": f"answer {number}", "logprob": -0.5, "bytes": list(f"answer {number}".encode())}
        message = {"role": "assistant", "content": f"answer {number}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": {"content": [token]}}
        return {"id": f"c{number}", "choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}

    backend.chat, backend.chat_fields = chat, PolicyBackend.chat_fields
    return lm_over(backend, "scripted/policy", max_tokens=8, seed=0).copy(top_p=1.0)
