"""What a judge sees of a task's inputs, the program's outputs and the expected values."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.commands.judge import Label
from assay.commands.judge_audit import audit_judge
from assay.commands.judge_score import score_rows
from assay.errors import ConfigError, RubricError
from assay.judges import PointwiseJudge, load_labels, resolver
from assay.rubrics import Criterion, JudgeSpec, Rubric
from assay.testing import scripted_lm
from assay.traces import Rollout, Store

SHOWS = ("input.question", "output.answer", "expected.answer")
SAME = JudgeSpec(text="Is the answer the expected one?", shows=SHOWS)
TASK = {"inputs": {"question": "6 * 7?"}, "expected": {"answer": "42"}}


def shown(request: Any, name: str) -> str | None:
    """The value of a field of a judge's prompt; None if it is not there."""
    text = request.messages[-1].text
    for part in (f"{name}: ", f"[[ ## {name} ## ]]\n"):
        if part in text:
            return str(json.loads(text.partition(part)[2].splitlines()[0]))
    return None


def compares(request: Any) -> dict[str, float]:
    """A model that says yes if the answer and the expected answer are equal."""
    equal = shown(request, "output.answer") == shown(request, "expected.answer")
    return {"yes": 0.99, "no": 0.01} if equal else {"yes": 0.01, "no": 0.99}


def scored(spec: JudgeSpec, task: Any, prediction: Any, script: Any = compares, **options: Any) -> Any:
    requests = list[Any]()
    lm = scripted_lm(lambda request: requests.append(request) or script(request), logprobs=True)
    rubric = Rubric("r", [Criterion(name="right", judge=spec)], resolver=resolver(lm), **options)
    return rubric.score(task, prediction), requests


@pytest.mark.parametrize("expected", [{}, {"answer": None}, {"answer": math.nan}, {"other": "42"}])
@pytest.mark.parametrize("shows", [SHOWS, ("task_input", "output", "expected.answer")])
def test_a_missing_expected_value_leaves_the_criterion_unscored(expected: Any, shows: tuple[str, ...]) -> None:
    spec = JudgeSpec(text="Same?", shows=shows)
    result, requests = scored(spec, {"inputs": TASK["inputs"], "expected": expected}, {"answer": "42"})
    assert math.isnan(result.value)
    assert not requests


def test_all_expected_values_are_shown_by_the_name_of_their_origin() -> None:
    spec = JudgeSpec(text="Same?", shows=("task_input", "output", "expected"))
    result, requests = scored(spec, TASK, {"answer": "999"}, lambda request: {"no": 0.9, "yes": 0.1})
    assert result.scored
    assert [shown(requests[-1], name) for name in spec.shows] == ["6 * 7?", "999", "42"]
    assert math.isnan(scored(spec, {"inputs": TASK["inputs"]}, {"answer": "42"})[0].value)


@pytest.mark.parametrize(
    ("task", "prediction"),
    [
        (TASK, {"answer": "999"}),
        ({"inputs": {"answer": "a draft"}, "expected": {}}, {"answer": "999"}),
        ({"inputs": {"answer": "a draft"}, "expected": {"answer": "42"}}, {"reply": "999"}),
    ],
)
def test_a_name_that_several_origins_have_is_refused(task: Any, prediction: Any) -> None:
    result, requests = scored(JudgeSpec(text="Same?", shows=("output", "answer")), task, prediction)
    assert math.isnan(result.value)
    assert not requests


@pytest.mark.parametrize("name", ["expect.answer", "expected.", "a.b.c", "expected.the answer", ".answer"])
def test_an_unknown_origin_is_refused(name: str) -> None:
    with pytest.raises(RubricError):
        JudgeSpec(text="Same?", shows=("output", name))
    with pytest.raises(ConfigError):
        PointwiseJudge("Same?", shows=["output", name])


def test_one_call_for_all_criteria_shows_what_each_of_them_shows() -> None:
    def script(request: Any) -> str:
        equal = shown(request, "output.answer") == shown(request, "expected.answer")
        return json.dumps({"right": "yes" if equal else "no", "polite": "yes"})

    criteria = [Criterion(name="right", judge=SAME), Criterion(name="polite", judge=JudgeSpec(text="Polite?"))]
    rubric = Rubric("r", criteria, resolver=resolver(scripted_lm(script)), judging="together")
    assert rubric.score(TASK, {"answer": "999"}).grades == {"right": 0.0, "polite": 1.0}
    assert rubric.score(TASK, {"answer": "42"}).grades == {"right": 1.0, "polite": 1.0}
    lacking = rubric.score({"inputs": TASK["inputs"], "expected": {}}, {"answer": "42"}).grades
    assert math.isnan(lacking["right"])
    assert lacking["polite"] == 1.0


@pytest.mark.parametrize(
    "row",
    [
        {"input.question": "q", "output.answer": "999", "expected.answer": "42"},
        {"inputs": {"question": "q"}, "output": {"answer": "999"}, "expected": {"answer": "42"}},
        {"question": "q", "output": "999", "expected": "42"},
        {"input": "q", "output": "999", "expected.answer": "42"},
        {"task_input": "q", "outputs": {"answer": "999"}, "expected": "42"},
    ],
)
def test_labels_name_the_origins_as_the_judge_does(tmp_path: Path, row: dict[str, Any]) -> None:
    (tmp_path / "labels.jsonl").write_text(json.dumps({**row, "label": "no", "note": "n"}))
    (item,) = load_labels(str(tmp_path / "labels.jsonl"), labels=("no", "yes"), shows=SHOWS)
    assert item.fields == {"input.question": "q", "output.answer": "999", "expected.answer": "42"}
    assert item.columns == {"note": "n"}


def test_scores_labels_and_audits_show_the_expected_value(tmp_path: Path) -> None:
    judge, store = PointwiseJudge(SAME), tmp_path / "s.db"
    rows = [{"question": "q", "output": answer, "expected": "42"} for answer in ("42", "999")]
    rows.append({"question": "q", "output": "42", "expected": None})
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lm = scripted_lm(compares, logprobs=True)
    report = score_rows(judge, data=str(tmp_path / "data.jsonl"), lm=lm, store=store)
    assert (report.verdicts, report.unscored) == ({"no": 1, "yes": 1}, 1)

    with Store(store) as opened:
        done = Rollout(inputs=TASK["inputs"], expected=TASK["expected"], prediction={"answer": "999"}, status="done")
        opened.put_rollout(done)
        opened.put_rollout(Rollout(inputs={"question": "other"}, prediction={"answer": "1"}, status="done"))
    with Store(store) as opened:
        _, waiting = Label(judge).waiting(opened)
    assert [entry.fields for entry in waiting] == [dict(zip(SHOWS, ("6 * 7?", "999", "42"), strict=True))]

    def knows(request: Any) -> dict[str, float]:
        right = shown(request, "expected.answer") in str(shown(request, "output.answer"))
        return {"yes": 0.9, "no": 0.1} if right else {"yes": 0.1, "no": 0.9}

    audited = audit_judge(judge, lm=scripted_lm(knows, logprobs=True), store=store)
    assert audited.attacks["tells good from bad"]["right"] == 8


def test_a_rubric_that_shows_nothing_new_keeps_its_version() -> None:
    plain = Rubric("r", [Criterion(name="right", judge=JudgeSpec(text="Right?"))])
    assert plain.version == "b2172a48c7ec44e5"
    assert Rubric("r", [Criterion(name="right", judge=JudgeSpec(text="Right?", shows=SHOWS))]).version != plain.version
    assert assay.load_judge("Is it right?", shows=SHOWS).shows == SHOWS


@pytest.mark.slow
def test_a_compiled_judge_is_shown_the_expected_value_in_a_rubric(tmp_path: Path) -> None:
    rows = [
        {"question": f"q{at}?", "output": {"answer": str(at % 7)}, "expected": {"answer": str(at % 3)}}
        for at in range(60)
    ]
    labelled = [{**row, "label": "yes" if row["output"] == row["expected"] else "no"} for row in rows]
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, labelled)))
    lm = scripted_lm(compares, logprobs=True)
    report = assay.compile_judge(
        PointwiseJudge(SAME), labels=str(tmp_path / "labels.jsonl"), lm=lm, store=tmp_path / "s.db",
        out=tmp_path / "judge",
    )  # fmt: skip
    assert report.outcome.agreement is not None
    assert report.outcome.agreement.values["accuracy"] == 1.0
    spec = JudgeSpec(use=str(report.artifact))
    criterion = Criterion(name="right", judge=spec)
    rubric = Rubric("r", [criterion], resolver=resolver(lm, assay.load_judge))
    assert rubric.score(TASK, {"answer": "42"}).value > rubric.score(TASK, {"answer": "999"}).value
    assert math.isnan(rubric.score({"inputs": TASK["inputs"], "expected": {}}, {"answer": "42"}).value)

    (tmp_path / "lacking.jsonl").write_text("\n".join(json.dumps({**row, "expected": {}}) for row in labelled))
    with pytest.raises(ConfigError):
        assay.compile_judge(
            PointwiseJudge(SAME), labels=str(tmp_path / "lacking.jsonl"), lm=lm, store=tmp_path / "s.db",
            out=tmp_path / "other",
        )  # fmt: skip
