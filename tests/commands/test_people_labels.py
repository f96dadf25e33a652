"""Human labels in the store: queues, labelling in the terminal, judges compiled on them."""

import json
from pathlib import Path
from typing import Any

import pytest
from people_and_judges import GOOD, kind, label, options

import assay
from assay.commands.judge import Label, forget_rater
from assay.commands.judge_score import score_rows
from assay.errors import ConfigError, DataError
from assay.judges import Judge, PairwiseJudge, PointwiseJudge
from assay.judges.questions import key_of
from assay.testing import scripted_lm
from assay.traces import Rollout, Store


def filled(store: Path, count: int = 24) -> None:
    with Store(store) as opened:
        for at in range(count):
            for sample in range(2):
                opened.put_rollout(
                    Rollout(
                        task_id=f"t{at}",
                        inputs={"question": f"q{at}"},
                        prediction={
                            "answer": f"{'lovely' if (at + sample) % 2 else 'awful'} {at} {sample}",
                            "steps": [],
                        },
                        split="test" if at == 0 else "train",
                        status="done",
                    )
                )
        opened.put_rollout(Rollout(inputs={"question": "judge"}, prediction={"verdict": "yes"}, source="judge"))
        opened.put_rollout(Rollout(inputs={"question": "failed"}, prediction=None, status="failed"))


def test_undecided_outputs_are_queued_for_raters(tmp_path: Path) -> None:
    filled(tmp_path / "a.db")
    with Store(tmp_path / "a.db") as store:
        _, waiting = Label(GOOD, rater="ann", limit=100).waiting(store)
        assert len(waiting) == 46  # neither the sealed task, nor the judge's, nor the failed one
        assert waiting[0].fields.keys() == {"task_input", "output"}
        store.put_label(question_of(GOOD), waiting[0].item_id, "ann", "yes", fields=waiting[0].fields)
        assert len(Label(GOOD, rater="ann", limit=100).waiting(store)[1]) == 45
        assert len(Label(GOOD, rater="bob", limit=100).waiting(store)[1]) == 46
        _, pairs = Label(PairwiseJudge(), rater="ann", limit=100).waiting(store)
        assert len(pairs) == 23
        assert all(pair.fields["output_a"] != pair.fields["output_b"] for pair in pairs)


def question_of(judge: Judge) -> str:
    from assay.judges.questions import key_of

    return key_of(judge)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "typed", "expected_labels"),
    [
        (["0", "1", "2"], ["1", "0", "3", "2"], ["1", "0", "2"]),  # 3 is not an option here
        (["-1", "0", "1"], ["1", "-1"], ["1", "-1"]),
        (["q", "r", "s"], ["q", "s", "2", "/s", "/q", "r"], ["q", "s", "r"]),
    ],
)
def test_scale_words_are_not_parsed_as_commands(
    tmp_path: Path, scale: list[str], typed: list[str], expected_labels: list[str]
) -> None:
    filled(tmp_path / "a.db")
    (tmp_path / "j.yaml").write_text(f"text: How is it?\nscale: {json.dumps(scale)}\n")
    result = label(tmp_path, "\n".join(typed) + "\n", "--rater", "ann", "--json", judge="j.yaml")
    assert result.code == 0, result.stderr
    with Store(tmp_path / "a.db") as store:
        assert [
            row["label"] for row in store.labels(question_of(PointwiseJudge({"text": "How is it?", "scale": scale})))
        ] == expected_labels


@pytest.mark.slow
def test_terminal_labels_are_stored_compiled_and_forgotten(tmp_path: Path) -> None:
    filled(tmp_path / "a.db", count=60)
    first = label(
        tmp_path,
        "yes\nwhat?\n2\nwhy not\ns\n1\nbecause\nq\n".replace("yes\n", "yes\nsays so\n", 1),
        "--rater",
        "ann",
        "--rationale",
        "--json",
    )
    assert json.loads(first.stdout) == {"rater": "ann", "labelled": 3, "asked": 20}, first.stderr
    assert "'what?' is not on the scale" in first.stderr
    with Store(tmp_path / "a.db") as store:
        labels = list(store.labels(question_of(PointwiseJudge("Is it a right answer?"))))
        assert [(row["label"], row["rationale"]) for row in labels] == [
            ("yes", "says so"),
            ("yes", "why not"),
            ("no", "because"),
        ]
        _, waiting = Label("Is it a right answer?", rater="bob", limit=118).waiting(store)
        for entry in waiting:
            text = "yes" if "lovely" in str(entry.fields["output"]) else "no"
            store.put_label(
                question_of(PointwiseJudge("Is it a right answer?")), entry.item_id, "bob", text, fields=entry.fields
            )
    report = assay.compile_judge(
        "Is it a right answer?",
        labels="store",
        lm=scripted_lm(kind, logprobs=True),
        store=tmp_path / "a.db",
        optimizer="calibrate",
    )
    assert report.sizes["train"] > 20
    assert report.outcome.agreement is not None
    assert forget_rater("nobody", store=tmp_path / "a.db").to_dict() == {"rater": "nobody", "removed": 0, "judges": []}
    result = forget_rater("ann", store=tmp_path / "a.db").to_dict()
    assert (result["removed"], result["judges"]) == (3, [str(report.artifact)])
    assert forget_rater("bob", store=tmp_path / "a.db").to_dict()["judges"] == [str(report.artifact)]
    with pytest.raises(DataError, match="assay judge label"):
        assay.compile_judge(
            "Is it a right answer?", labels="store", lm=scripted_lm(kind, logprobs=True), store=tmp_path / "a.db"
        )


@pytest.mark.postgres
def test_labels_work_in_postgresql(postgres_url: str) -> None:
    with Store(postgres_url) as store:
        store.put_label("q", "i", "ann", "yes", fields={"output": "a\0b"}, rationale="\ud800")
        store.put_label("q", "i", "ann", "no", fields={"output": "a"})
        assert [(row["label"], row["output"]) for row in store.labels("q")] == [("no", "a")]
        store.put_artifact("/somewhere", ["abc"])
        assert store.artifacts_of("abc") == ["/somewhere"]
        assert store.forget_rater("ann") == 1
        assert list(store.labels("q")) == []


def test_judge_of_other_fields_is_labelled_and_compiled_by_those_fields(tmp_path: Path) -> None:
    judge = PointwiseJudge(GOOD.spec, shows=["question", "answer"])
    with Store(tmp_path / ".assay" / "a.db") as store:
        for at in range(120):
            store.put_rollout(
                Rollout(task_id=str(at), status="done", inputs={"question": f"q{at}"}, prediction={"answer": f"a{at}"})
            )
        store.flush()
        _, waiting = Label(judge, rater="me", limit=200).waiting(store)
        assert {tuple(entry.fields) for entry in waiting} == {("question", "answer")}
        for at, entry in enumerate(waiting):
            store.put_label(
                key_of(judge),
                entry.item_id,
                "me",
                "yes" if at % 2 else "no",
                fields=entry.fields,
                rollout_id=entry.rollout_id,
            )
    report = assay.compile_judge(judge, labels="store", optimizer="calibrate", **options(tmp_path))
    assert sum(report.sizes.values()) == 120


def test_sentence_judge_may_declare_its_scale(tmp_path: Path) -> None:
    rows = tmp_path / "d.jsonl"
    rows.write_text(json.dumps({"output": "thing"}) + "\n")
    script: Any = lambda request: {"bad": 0.1, "fine": 0.2, "good": 0.7}  # noqa: E731
    report = score_rows(
        "How good is it, as a thing?", data=str(rows), scale=["bad", "fine", "good"], **options(tmp_path, script)
    )
    assert report.verdicts == {"bad": 0, "fine": 0, "good": 1}
    with pytest.raises(ConfigError, match="scale: applies only to a judge given as a sentence"):
        score_rows(GOOD, data=str(rows), scale=["bad", "good"], **options(tmp_path))
