"""Preflight of a rubric: unscored checks, judges that do not answer, the time limit for a dead server."""

import json
import socket
from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.cli.main import names_of
from assay.errors import FailureKind, ModelError, RubricError
from assay.evaluation import SilentProgress
from assay.testing import scripted_lm
from assay.traces import Store

PROGRAM = """import dspy


class Triage(dspy.Module):
    def __init__(self):
        super().__init__()
        self.read = dspy.Predict("text -> intent")

    def forward(self, text):
        return self.read(text=text)
"""
FIELD = "name: r\ncriteria:\n- {name: right, check: exact, with: {field: intent}}\n"
JUDGED = FIELD + "- {name: nice, judge: 'Is it nice?', scale: ['no', 'yes']}\n"


class CapturedProgress(SilentProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def answers(request: Any) -> Any:
    return {"yes": 0.9, "no": 0.1} if "material to judge" in str(request) else json.dumps({"intent": "bug"})


def lm() -> Any:
    return scripted_lm(answers, logprobs=True)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "triage.py").write_text(PROGRAM)
    (tmp_path / "r.yaml").write_text(FIELD)
    (tmp_path / "judged.yaml").write_text(JUDGED)
    return tmp_path


def rows(**expected: str) -> list[dict[str, Any]]:
    return [{"text": f"Page {n} crashes", **expected} for n in range(60)]


def evaluated(data: list[dict[str, Any]], model: Any = None, rubric: str = "r.yaml", **options: Any) -> Any:
    return assay.evaluate(
        "triage.py:Triage", rubric=rubric, data=data, lm=model or lm(), prompt_format="json", **options
    )


def test_a_check_without_its_expected_field_stops_the_job_and_names_the_column(place: Path) -> None:
    model = lm()
    with pytest.raises(
        RubricError, match="criterion 'right' could not be graded on any of the first 3 tasks"
    ) as caught:
        assay.compile("triage.py:Triage", rubric="r.yaml", data=rows(label="bug"), lm=model, prompt_format="json")
    assert "has no expected 'intent'; it has label" in str(caught.value)
    assert "rename={'label': 'intent'}" in str(caught.value)
    assert "--" not in str(caught.value)
    printed = caught.value.text(names_of(["compile"]))
    assert "rename it: --rename label=intent" in printed
    assert printed.endswith("--no-preflight skips this check")
    assert model.scripted.calls == 3


def test_the_most_similar_of_several_columns_is_named(place: Path) -> None:
    with pytest.raises(RubricError) as caught:
        evaluated(rows(priority="2", intents="bug"))
    assert "rename={'intents': 'intent'}" in str(caught.value)
    with pytest.raises(RubricError) as caught:
        evaluated(rows(priority="2", queue="bug"))
    assert "rename=" not in str(caught.value)


def test_a_column_of_both_answer_and_data_is_named_as_the_field_of_a_check(place: Path) -> None:
    (place / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact, with: {field: intnet}}\n")
    with pytest.raises(RubricError) as caught:
        evaluated(rows(intent="bug", customer="c1"))
    assert "Name the field in the rubric: {name: right, with: {field: intent}}" in str(caught.value)
    assert "rename=" not in str(caught.value)
    assert caught.value.text(names_of(["evaluate"])).endswith("--no-preflight skips this check")


def test_a_user_check_that_raises_is_reported_with_its_error(place: Path) -> None:
    (place / "mine.py").write_text(
        "def right(task, prediction, rollout):\n    return task.expected['intent'] == prediction['intent']\n"
    )
    (place / "mine.yaml").write_text("name: r\ncriteria:\n- {name: right, check: 'mine.py:right'}\n")
    with pytest.raises(RubricError, match="KeyError: 'intent'") as caught:
        evaluated(rows(label="bug"), rubric="mine.yaml")
    assert "rename={'label': 'intent'}" in str(caught.value)
    (place / "mine.py").write_text("def right(task, prediction, rollout):\n    return prediction['queue'] == 'bug'\n")
    with pytest.raises(RubricError, match="KeyError: 'queue'") as caught:
        evaluated(rows(label="bug"), rubric="mine.yaml")
    assert "rename=" not in str(caught.value)  # no column of the data can correct that
    assert "KeyError: 'queue' (mine.py:2)" in str(caught.value)
    assert "task.inputs has ['text'], task.expected ['label'], and the prediction ['intent']" in str(caught.value)


def test_an_error_of_a_check_that_indexes_the_task_names_its_fields(place: Path) -> None:
    (place / "mine.py").write_text(
        "def right(task, prediction, rollout):\n    wanted = task['label']\n    return wanted == prediction['intent']\n"
    )
    (place / "mine.yaml").write_text("name: r\ncriteria:\n- {name: right, check: 'mine.py:right'}\n")
    with pytest.raises(RubricError) as caught:
        evaluated(rows(label="bug"), rubric="mine.yaml")
    assert "its values are in task.inputs, task.expected and task.metadata: task.expected['label'] (mine.py:2)" in str(
        caught.value
    )


def test_a_check_that_grades_only_later_tasks_does_not_stop_a_job(place: Path) -> None:
    some = [
        {"text": f"Page {n} crashes", "split": "val", **({"intent": "bug"} if n % 5 == 4 else {"other": "x"})}
        for n in range(40)
    ]
    assert evaluated(some).evaluation.report()["undecided"]["right"]["n"] == 32


def test_an_answer_without_any_expected_field_causes_a_warning(place: Path) -> None:
    (place / "plain.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    progress = CapturedProgress()
    evaluated(rows(label="bug"), rubric="plain.yaml", progress=progress)
    assert any("the tasks expect ['label'], and the program answers ['intent']" in line for line in progress.lines)
    progress = CapturedProgress()
    evaluated(rows(intent="sales"), rubric="plain.yaml", progress=progress)
    assert not any("warning" in line for line in progress.lines)


def test_a_check_that_reads_no_expected_output_causes_no_warning(place: Path) -> None:
    (place / "mine.py").write_text("def short(task, prediction, rollout):\n    return 0.0\n")
    own = "name: r\ncriteria:\n- {name: short, check: 'mine.py:short'}\n"
    (place / "own.yaml").write_text(own)
    (place / "both.yaml").write_text(own + "- {name: right, check: exact}\n")
    progress = CapturedProgress()
    evaluated(rows(reference="bug"), rubric="own.yaml", progress=progress)
    assert not any("warning" in line for line in progress.lines)
    evaluated(rows(reference="bug"), rubric="both.yaml", progress=progress)
    assert any("gives 0 (right). Rename a column" in line for line in progress.lines)


def test_an_output_field_that_the_rubric_does_not_read_causes_a_warning(place: Path) -> None:
    def route(text: str) -> str:
        return "bug"

    report = assay.evaluate(route, rubric="r.yaml", data=rows(intent="bug"), lm=lm())
    note = next(note for note in report.to_dict()["notes"] if "the program answers" in note)
    assert "the tasks expect ['intent'], and the program answers ['answer']" in note
    with Store() as store:
        reasons = {verdict.reason for rollout in store.rollouts(split="val") for verdict in rollout.verdicts}
    assert reasons == {"Expected 'bug', and the prediction has no field 'intent'; it has ['answer']."}
    assert (
        assay.evaluate(lambda text: {"intent": "bug"}, rubric="r.yaml", data=rows(intent="bug"), lm=lm()).to_dict()[
            "notes"
        ]
        == []
    )


def test_a_failed_verdict_is_stored_as_a_judge_failure(place: Path) -> None:
    def script(request: Any) -> Any:
        return dspy.lm15.ServerError("down") if "material to judge" in str(request) else answers(request)

    with pytest.raises(
        ModelError,
        match=r"the judge of 'nice' scored none.*No model was chosen for the judge, so the program's, \S+, judges; "
        r"judge_model names another",
    ):
        evaluated(rows(intent="bug"), scripted_lm(script), rubric="judged.yaml")
    with Store() as store:
        kinds = {rollout.failure for rollout in store.rollouts() if rollout.source == "judge"}
    assert kinds == {FailureKind.JUDGE}


@pytest.mark.slow
@pytest.mark.parametrize("role", ["program", "judge", "reflection"])
@pytest.mark.timeout(120)
def test_a_refused_connection_stops_the_job(place: Path, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        base = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    where = (
        {"model": "openai/m", "api_base": base}
        if role == "program"
        else {f"{role}_model": "openai/m", f"{role}_api_base": base}
    )
    job = assay.compile if role == "reflection" else assay.evaluate
    with pytest.raises(ModelError, match="refused"):
        job(
            "triage.py:Triage",
            rubric="judged.yaml",
            data=rows(intent="bug"),
            lm=None if role == "program" else lm(),
            prompt_format="json",
            **where,
        )
