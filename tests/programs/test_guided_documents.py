"""`answer_from_documents` on training tasks: runs that follow the labels, for demonstrations with right answers."""

import json
from typing import Any

import dspy
import pytest

from assay.datasets import load_tasks
from assay.evaluation import RecordedProgram, Session
from assay.models import Caps, Meter
from assay.optimizers.prompts.demonstrations import explore, with_demos
from assay.programs import AnswerFromDocuments
from assay.programs.agent import GUIDE
from assay.rubrics import load_rubric
from assay.shipped.programs.answer_from_documents.program import ABSTAINED
from assay.testing import scripted_lm
from assay.traces import Recorder

DOCUMENTS = [
    {"source": "mill.txt", "text": "The Marlow mill was opened in 1874."},
    {"source": "mill.txt", "text": "The Marlow mill stands 38 metres high."},
    {"source": "inn.txt", "text": "The Selside inn stands 12 metres high."},
]
QUESTION = "How high is the Marlow mill?"


def guided(expected: dict[str, Any]) -> tuple[Any, list[tuple[str, str, str]], int]:
    """Prediction, steps (predictor, passage, output) of the trace, and the number of LM calls."""
    calls: list[Any] = []

    def refuses(request: Any) -> str:
        calls.append(request)
        wanted = json.dumps(request.config.response_format or {})
        return json.dumps({"query": "x"} if '"query"' in wanted else {"answers": "no", "sure": 0.0, "answer": "?"})

    agent = AnswerFromDocuments()
    with dspy.context(lm=scripted_lm(refuses), trace=[], **{GUIDE: expected}):
        result = agent(question=QUESTION, documents=DOCUMENTS)
        names = {id(predictor): name for name, predictor in agent.named_predictors()}
        steps = [
            (names[id(predictor)], str(inputs.get("passage")), next(iter(output.values())))
            for predictor, inputs, output in dspy.settings.trace
        ]
    return result, steps, len(calls)


@pytest.mark.parametrize("expected", [{"passages": []}, {"source": ""}, {"passages": None, "answer": None}])
def test_without_an_answer_in_the_documents_every_passage_is_rejected(expected: dict[str, Any]) -> None:
    result, steps, calls = guided(expected)
    assert (result.answer, result.abstained, calls) == (ABSTAINED, True, 0)
    assert {(name, answers) for name, _, answers in steps} == {("read", "no")}


@pytest.mark.parametrize("expected", [{}, {"answer": "38 metres"}, {"source": "mill.txt"}, {"passages": ["38 metres"]}])
def test_labels_without_passage_or_answer_do_not_guide(expected: dict[str, Any]) -> None:
    assert guided(expected)[2] > 0


def test_demonstrations_have_right_answers_where_the_program_itself_always_abstains() -> None:
    recorder, meter = Recorder(), Meter(Caps(search_calls=100))
    lm = scripted_lm(lambda request: "{}", meter=meter, observers=[recorder.observe])
    session = Session(lm, load_rubric("answer_from_documents"), recorder, meter, threads=1, seed=0)
    program = RecordedProgram(AnswerFromDocuments(), session)
    tasks = load_tasks("documents:facts?size=12&passages=6")
    with session.context():
        exploration = explore(program, tasks, session, prompt_formats=["json"], target=6)
    assert meter.usage.calls == 0
    predictors = dict(with_demos(program.program, exploration.demonstrations).named_predictors())
    assert {demo.answers for demo in predictors["read"].demos} == {"yes", "no"}
    assert all(demo.answer in demo.passage for demo in predictors["respond"].demos)
