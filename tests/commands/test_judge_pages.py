"""Judges that really ran, as the local page finds them: questions, kept reports, and the card as a file."""

import json
from pathlib import Path
from typing import Any

import pytest
from people_and_judges import kind, label, options

import assay
from assay.commands.judge import show_card
from assay.commands.judge_audit import audit_judge
from assay.commands.judge_drift import replay_anchors
from assay.judges.questions import Question, known_questions
from assay.traces import Rollout, Store
from assay.traces.store.listing import finished_report, list_runs
from assay.web.judges import judge_view
from assay.web.rendering import render

QUESTION = "Is it a right answer?"


def labelled(file: Path) -> None:
    """Stores 100 outputs with labels of two raters, who disagree about every tenth."""
    key = Question(spec=assay.rubrics.JudgeSpec(text=QUESTION)).key
    with Store(file) as store:
        for at in range(100):
            text = f"{'lovely' if at % 2 else 'awful'} answer {at}"
            rollout = Rollout(
                task_id=f"t{at}", inputs={"question": f"q{at}"}, prediction={"answer": text}, status="done"
            )
            store.put_rollout(rollout)
            for rater in ("ann", "bob"):
                yes = (at % 2 == 1) is not (rater == "bob" and at % 10 == 0)
                fields = {"task_input": f"q{at}", "output": text}
                item_id = assay.support.values.digest_of(fields)
                store.put_label(key, item_id, rater, "yes" if yes else "no", fields=fields, rollout_id=rollout.id)


@pytest.mark.slow
def test_a_judge_that_ran_is_on_the_page_with_its_card_audit_and_drift(tmp_path: Path) -> None:
    shared: dict[str, Any] = options(tmp_path, kind)
    labelled(shared["store"])
    report = assay.compile_judge(QUESTION, labels="store", optimizer="calibrate", **shared)
    audit_judge(str(report.artifact), labels="store", **shared)
    replay_anchors(str(report.artifact), **{**shared, **options(tmp_path, kind)})
    with Store(shared["store"]) as store:
        ((key, question),) = known_questions(store).items()
        assert question.sources == (QUESTION, str(report.artifact))
        assert len(question.runs) == 3
        view = judge_view(store, key, where=shared["store"], store_flag=None)
        (audit,) = list_runs(store, kind="judge audit")
    assert view.values["card"].n == report.sizes[report.outcome.split]
    assert view.values["compared"] > 60
    assert 0 < view.values["differing"] <= 10  # those on which Bob differs
    runs = [run["kind"] for run, *_ in (*view.values["audits"], *view.values["drifts"])]
    assert runs == ["judge audit", "judge drift"]
    assert "Raters reach" in render(view.template, title="", csrf="", live_s=0, **view.values)
    kept = json.dumps(finished_report(shared["store"], audit["id"]))
    assert "lovely answer" not in kept  # outputs of labelled items stay where they can be erased
    file = show_card(report.artifact).write_page(tmp_path / "card.html")
    text = file.read_text()
    assert len(text) < 100_000
    assert "<script" not in text
    assert "Weighted kappa" in text or "Cohen&#39;s kappa with raters" in text


def test_a_folder_without_a_card_has_no_report(tmp_path: Path) -> None:
    with pytest.raises(assay.errors.NoArtifact):
        show_card(tmp_path)


@pytest.mark.slow
def test_a_question_is_added_for_raters_without_asking_here(tmp_path: Path) -> None:
    with Store(tmp_path / "a.db"):
        pass
    done = label(tmp_path, "", "--page", "--json")
    data = json.loads(done.stdout)
    assert data["path"] == f"/judges/{data['judge']}/label"
    with Store(tmp_path / "a.db") as store:
        assert known_questions(store)[data["judge"]].spec.text == QUESTION
    assert "no effect" in label(tmp_path, "", "--page", "--rater", "ann").stderr
