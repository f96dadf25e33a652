"""Expected sources that an index or the documents of a task do not have, reported before a model is called."""

from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.commands.evaluate import Evaluate
from assay.datasets import Task
from assay.jobs.documents import absent_sources
from assay.jobs.loading import load_rubric
from assay.jobs.planning import plan_of
from assay.programs import AnswerFromDocuments, DocumentIndex, TextRetriever
from assay.testing import scripted_lm
from rigs.projects import Said

RUBRIC = load_rubric("answer_from_documents")


@pytest.fixture
def index(tmp_path: Path) -> DocumentIndex:
    for name in ("pumps.md", "gates/hollin.md", "weirs.md"):
        file = tmp_path / "docs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"About {name}.")
    assay.index(tmp_path / "docs", store=tmp_path / "s.db")
    return DocumentIndex(tmp_path / "s.db")


def agent(index: DocumentIndex) -> AnswerFromDocuments:
    return AnswerFromDocuments(store=index.address.url)


def tasks(*sources: Any, **inputs: Any) -> list[Task]:
    rows = enumerate(sources, 1)
    return [Task(id=f"t{n}", inputs={"question": "?", **inputs}, expected={"source": source}) for n, source in rows]


def test_absent_sources_are_counted_and_answered_by_near_names(index: DocumentIndex) -> None:
    wrong = tasks("pumps.md", "docs/pumps.md", "hollin", "wiers.md", ["weirs.md", "abc", "zzz"])
    (message,) = absent_sources(agent(index), RUBRIC, wrong)
    assert message == (
        "the index 'documents' does not have 5 of the 7 expected sources, so 'retrieved' is below 1 on 4 of 5 tasks: "
        "'abc', 'docs/pumps.md' (there is 'pumps.md'), 'hollin' (there is 'gates/hollin.md') and 2 more. "
        "A source is the path of a file relative to the indexed folder"
    )
    (message,) = absent_sources(agent(index), RUBRIC, tasks("wiers.md", "Gates\\HOLLIN.md"))
    assert "'Gates\\\\HOLLIN.md' (there is 'gates/hollin.md')" in message
    assert "'wiers.md' (there is 'weirs.md')" in message


def test_documents_of_a_task_are_compared_with_its_own_sources(index: DocumentIndex) -> None:
    own = tasks("a.md", "pumps.md", documents=[{"source": "a.md", "text": "A."}])
    (message,) = absent_sources(agent(index), RUBRIC, own)
    assert message.startswith("'retrieved' is below 1 on 1 of 2 tasks, because their own documents")
    assert message.endswith("task 't2' expects 'pumps.md'")


def test_an_index_of_a_users_own_program_is_found(index: DocumentIndex) -> None:
    class Own(dspy.Module):
        def __init__(self) -> None:
            super().__init__()
            self.docs = index

    assert "'pump.md' (there is 'pumps.md')" in absent_sources(Own(), RUBRIC, tasks("pump.md"))[0]


def test_there_is_no_warning_where_nothing_is_wrong_or_known(index: DocumentIndex, tmp_path: Path) -> None:
    right = [*tasks("pumps.md", "", None), Task(id="p", inputs={}, expected={"passages": ["x"], "source": "none.md"})]
    assert absent_sources(agent(index), RUBRIC, right) == []
    other = assay.Rubric("other", [assay.Criterion(name="any", check=lambda *_: True)])
    assert absent_sources(agent(index), other, tasks("none.md")) == []
    assert absent_sources(AnswerFromDocuments(retriever=TextRetriever(["x"])), RUBRIC, tasks("none.md")) == []
    assert absent_sources(AnswerFromDocuments(store=str(tmp_path / "no.db")), RUBRIC, tasks("none.md")) == []


def test_it_is_said_before_the_first_call_and_reported(index: DocumentIndex) -> None:
    said, at_first_call = Said(), list[int]()

    def reply(request: Any) -> str:
        at_first_call.append(len([line for line in said.lines if line.startswith("warning: the index 'documents'")]))
        return '{"query": "pumps", "answers": "yes", "sure": 1, "answer": "x", "thought": ""}'

    rows = [{"question": f"About pump {n}?", "answer": "x", "source": "pump.md"} for n in range(20)]
    report = assay.evaluate(
        agent(index), rubric="answer_from_documents", data=rows, lm=scripted_lm(reply), store=index.address.url,
        progress=said,
    )  # fmt: skip
    assert at_first_call[0] == 1
    assert any("'pump.md' (there is 'pumps.md')" in note for note in report.notes)
    estimate = plan_of(Evaluate(program=agent(index), rubric="answer_from_documents", data=rows, lm=scripted_lm(reply)))
    assert any("'pump.md' (there is 'pumps.md')" in caution for caution in estimate.cautions)
