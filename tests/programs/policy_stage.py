"""A scripted model in place of one in training, and runs of the agents that call it."""

import itertools
from typing import Any

from assay.datasets import Task
from assay.evaluation import RecordedProgram, Session
from assay.models import Meter, with_recording
from assay.models.embedded import PolicyBackend
from assay.models.lm import LanguageModel, lm_over
from assay.optimizers.finetuning.engines import TimeoutPool, calls_of
from assay.programs.foreign_agent import ForeignAgent
from assay.rubrics import Criterion, Rubric
from assay.testing import scripted_lm
from assay.traces import Recorder, Store

TASK = Task(id="t", inputs={"question": "How much is 2 + 3?"}, expected={"answer": "5"})


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


def training(policy: LanguageModel, store: Store) -> Session:
    """The session of a training whose rubric accepts every answer."""
    recorder, meter = Recorder(store, run_id="r"), Meter()
    lm = with_recording(policy, meter=meter, observers=[recorder.observe])
    said = Criterion(name="said", check=lambda task, prediction, rollout: "answer" in prediction)
    session = Session(lm=lm, rubric=Rubric("said", [said]), recorder=recorder, meter=meter, program_name="the agent")
    session.register([TASK])
    return session


def trained(program: ForeignAgent, session: Session, timeout_s: float) -> Any:
    """The scored prediction of a run as a training makes it; None if it took too long."""
    recorded = RecordedProgram(program, session)
    recorded.set_parameters({"temperature": 1.0})
    return TimeoutPool(calls_of([(recorded, TASK)], session), 1, timeout_s).finished(None)[0]
