"""The time limit of judge commands, of stored rollouts and of every command that runs user code."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from assay.commands.judge_audit import audit_judge
from assay.commands.judge_drift import replay_anchors
from assay.commands.judge_score import score_rows
from assay.commands.scoring import score_rollouts
from assay.errors import ConfigError, FailureKind, ModelError
from assay.rubrics import Criterion, Rubric
from assay.testing import scripted_lm
from assay.traces import Rollout, Store
from rigs.command_line import assay_command


def hangs_on_odd(request: Any) -> Any:
    """A judge's model that never answers about the odd ones."""
    if "odd" in str(request.messages[-1]):
        time.sleep(300)
    return {"yes": 0.9, "no": 0.1}


def judged_rows(path: Path) -> str:
    path.write_text(
        "".join(json.dumps({"output": f"{'odd' if at % 2 else 'even'} thing {at}"}) + "\n" for at in range(4))
    )
    return str(path)


@pytest.mark.parametrize("command", ["score", "drift", "audit"])
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_hanging_verdict_is_unscored_in_judge_commands(command: str, tmp_path: Path) -> None:
    options = {
        "lm": scripted_lm(hangs_on_odd, logprobs=True),
        "store": tmp_path / "j.db",
        "task_timeout": 0.5,
        "threads": 4,
    }
    if command == "score":
        report = score_rows("Is it fine?", data=judged_rows(tmp_path / "d.jsonl"), **options)
        assert (report.verdicts, report.unscored) == ({"no": 0, "yes": 2}, 2)
        assert report.why_unscored == [
            "OverTime: the judge took longer than the limit of 0.5 s, while a model was being asked"
        ]
    elif command == "drift":
        report = replay_anchors(
            "Is it fine?", anchors=tmp_path / "a.json", freeze=judged_rows(tmp_path / "d.jsonl"), **options
        )
        assert (report.frozen, report.coverage) == (4, 0.5)
    else:
        rows = [
            {"input": f"{word} question {at}", "good": "right", "bad": "wrong"}
            for at in range(2)
            for word in ("odd", "even")
        ]
        (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        report = audit_judge(
            "Is it fine?", cases=str(tmp_path / "c.jsonl"), **{**options, "task_timeout": 0.2, "threads": 16}
        )
        assert 0 < report.unscored < report.verdicts
    with Store(tmp_path / "j.db") as store:
        assert {r.failure for r in store.rollouts() if r.status == "error"} == {FailureKind.TIMEOUT}


@pytest.mark.timeout(120)
def test_a_judge_that_never_answers_stops_the_job_in_preflight(tmp_path: Path) -> None:
    def never(request: Any) -> Any:
        time.sleep(300)

    with pytest.raises(ModelError, match=r"did not answer the judge 'Is it fine\?': .*longer than the limit of 0\.3 s"):
        score_rows(
            "Is it fine?",
            data=judged_rows(tmp_path / "d.jsonl"),
            lm=scripted_lm(never),
            store=tmp_path / "j.db",
            task_timeout=0.3,
        )


@pytest.mark.timeout(120)
def test_stored_rollouts_are_scored_within_the_limit(tmp_path: Path) -> None:
    def check(task: Any, prediction: Any, rollout: Any) -> float:
        if prediction["answer"] == "3":
            time.sleep(300)
        return 1.0

    with Store(tmp_path / "s.db") as store:
        for at in range(4):
            store.put_rollout(
                Rollout(task_id=str(at), inputs={"question": str(at)}, prediction={"answer": str(at)}, status="done")
            )
    rubric = Rubric("r", [Criterion(name="odd", check=check)])
    report = score_rollouts(rubric=rubric, store=tmp_path / "s.db", task_timeout=0.5).to_dict()
    assert (report["scored"], report["unscored"]) == (3, 1)
    assert "the check of 'odd' took longer" in report["undecided"]["odd"]["reason"]
    with pytest.raises(ConfigError, match="task_timeout"):
        score_rollouts(rubric=rubric, store=tmp_path / "s.db", task_timeout=0)


def test_training_on_an_export_refuses_a_limit_that_would_have_no_effect(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n")
    done = assay_command("train", "sft", str(tmp_path / "d.jsonl"), "--name", "x", "--task-timeout", "5")
    assert (done.code, "--task-timeout" in done.stderr) == (2, True)
