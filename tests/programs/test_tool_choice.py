"""Which tool is called: a choice among names is scored over all tokens of each name."""

import math
from typing import Any

import dspy
import pytest
from dspy import lm15
from dspy.lm15 import TokenLogprob, TopLogprob

from assay.models.lm import with_recording
from assay.programs import AgentParameters, ToolAgent
from assay.programs.estimate import choice_odds
from assay.testing import ScriptedEngine

Tokens = list[tuple[str, dict[str, float]]]
NAMES = ["search_web", "search_db", "answer"]
# P(search) = 0.8, P(_ | search) = 1, P(db | search_) = 0.7 and P(web | search_) = 0.2 of the 0.9 that begin a choice
DB: Tokens = [
    ('{"action": "', {}),
    ("search", {"search": 0.8, "answer": 0.2}),
    ("_", {"_": 0.9, '"': 0.1}),
    ("db", {"db": 0.7, "web": 0.2, "x": 0.1}),
    ('"}', {'"}': 1.0}),
]
# the written answer leaves both searches at one token: only their sum, 0.45, is known
ANSWER: Tokens = [('{"action": "', {}), ("answer", {"answer": 0.55, "search": 0.45}), ('"}', {'"}': 1.0})]


def decided(tokens: Tokens, action: str) -> dspy.Prediction:
    content = [
        {
            "token": token,
            "logprob": math.log(top.get(token, 1.0)),
            "top_logprobs": [{"token": k, "logprob": math.log(p)} for k, p in top.items()],
        }
        for token, top in tokens
    ]
    return dspy.Prediction(action=action, logprobs={"content": content})


def test_choices_that_diverge_at_the_same_token_have_a_joint_probability() -> None:
    odds = choice_odds(decided(ANSWER, "answer"), "action", NAMES)
    assert odds.together == [(frozenset({"search_web", "search_db"}), pytest.approx(0.45))]
    assert odds.probabilities["answer"] == pytest.approx(0.55)
    assert odds.probabilities["search_web"] == odds.probabilities["search_db"] == pytest.approx(0.225)


class Turns(ScriptedEngine):
    """Answers each call with the next of the given answers, token by token."""

    def __init__(self, *answers: Tokens) -> None:
        super().__init__(lambda _: "", logprobs=True)
        self.answers, self.requests = list(answers), list[Any]()

    def complete(self, request: Any) -> Any:
        self.requests.append(request)
        answer = self.answers.pop(0)
        spelled = tuple(
            TokenLogprob(
                token=token,
                logprob=math.log(top.get(token, 1.0)),
                top=tuple(TopLogprob(token=word, logprob=math.log(p)) for word, p in top.items()),
            )
            for token, top in answer
        )
        text = "".join(token for token, _ in answer)
        return lm15.Response(
            id=None, model=request.model, message=lm15.Message.assistant([lm15.TextPart(text)]), finish_reason="stop",
            usage=lm15.Usage(input_tokens=1, output_tokens=1), logprobs=spelled,
        )  # fmt: skip


def plain(text: str) -> Tokens:
    return [(text, {})]


def agent(threshold: float) -> ToolAgent:
    def search_web(query: str) -> str:
        """Searches the web."""
        return f"web: {query}"

    def search_db(query: str) -> str:
        """Searches the customer database."""
        return f"db: {query}"

    arguments = {name: {"query": (str, dspy.OutputField())} for name in ("search_web", "search_db")}
    parameters = AgentParameters(tool_usage_threshold=threshold, max_steps=2, reasoning_depth=1)
    return ToolAgent("question -> reply", [search_web, search_db], arguments=arguments, parameters=parameters)


def calls_of(engine: Turns, threshold: float) -> list[str]:
    lm = with_recording(dspy.LM("scripted/model", engine=engine, cache=False, num_retries=0))
    with dspy.context(lm=lm):
        return [step["tool"] for step in agent(threshold)(question="Who is Ann?").steps]


def test_tools_with_only_a_joint_probability_are_resolved_by_another_call() -> None:
    among: Tokens = [DB[0], ("search", {"search": 1.0}), ("_", {"_": 1.0}), ("db", {"db": 0.9, "web": 0.1}), ('"}', {})]
    engine = Turns(ANSWER, among, plain('{"query": "Ann"}'), plain('{"reply": "Ann"}'))
    assert calls_of(engine, 0.4) == ["search_db"]  # need 0.45, and search_web comes first in the list
    prompt = str(engine.requests[1])
    assert "search_db" in prompt
    assert "Literal['search_web', 'search_db', 'answer']" not in prompt
