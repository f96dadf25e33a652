"""Judges that know the right answer or grade everything alike: audits, scores, labels of raters, anchors, pages."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.commands.export import export
from assay.commands.judge import Label, forget_rater, show_card
from assay.commands.judge_audit import audit_judge, replay_anchors
from assay.commands.judge_score import score_rows
from assay.commands.scoring import score_rollouts
from assay.errors import BudgetExceeded, ConfigError, DataError, ModelError, NoArtifact
from assay.judges import ListwiseJudge, PairwiseJudge, PointwiseJudge
from assay.judges.quality.audit import BASES
from assay.judges.questions import Question, key_of, known_questions
from assay.support.values import digest_of
from assay.testing import scripted_lm
from assay.traces import Rollout, Store
from assay.traces.store.listing import finished_report, list_runs
from assay.web.judges import judge_view
from assay.web.rendering import render
from rigs.command_line import Done, assay_command
from rigs.projects import write_rows
from rigs.serving import ChatServer

QUESTION = "Is it a right answer?"
SCALED = {"text": QUESTION, "scale": ["no", "yes"]}
GOOD = PointwiseJudge(SCALED)
MOOD = PointwiseJudge("Is it kind?", shows=["output"])
STORE = Path(".assay/a.db")
Masses = dict[str, float]


@pytest.fixture(autouse=True)
def folder(own_folder: Path) -> Path:
    return own_folder


def knows(request: Any) -> Masses:
    """A model that knows the shipped answers and resists every attack."""
    text = request.messages[-1].text or ""
    right = any(str(base.good["output"])[-12:] in text and str(base.bad["output"]) not in text for base in BASES)
    return {"yes": 0.9, "no": 0.1} if right else {"yes": 0.1, "no": 0.9}


def kind(request: Any) -> Masses:
    return {"yes": 0.95, "no": 0.05} if "lovely" in (request.messages[-1].text or "") else {"yes": 0.05, "no": 0.95}


def blind(request: Any) -> Masses:
    return {"yes": 0.9, "no": 0.1}


def options(script: Any = knows, **more: Any) -> dict[str, Any]:
    return {"lm": scripted_lm(script, logprobs=True), "store": STORE, **more}


def outputs(count: int, *, every: int = 1, labelled: int = 0) -> str:
    """A file of outputs, of which each number `every` is awful and the others are lovely; a rater judges strictly."""
    rows = []
    for at in range(count):
        label = ("yes" if at % 3 and at % 2 else "no") if at < labelled else None
        mood = "awful" if every > 1 and at % every == 0 else "lovely"
        rows.append({"item_id": str(at), "output": f"{mood} {at}.", "label": label})
    return write_rows("outputs.jsonl", rows)


# -- audits


@pytest.mark.slow
def test_audit_passes_a_sound_judge_and_fails_a_blind_one() -> None:
    sound = audit_judge(GOOD, **options())
    assert sound.passed, sound
    failed = audit_judge(GOOD, **options(blind, cache=False))
    assert (failed.passed, failed.attacks["tells good from bad"]["right"]) == (False, 0)
    assert json.dumps(failed.to_dict())
    with Store(STORE) as store:
        assert {rollout.split for rollout in store.rollouts()} == {"audit"}
        assert {rollout.source for rollout in store.rollouts()} == {"judge"}
    Path("r.yaml").write_text("name: r\ncriteria:\n- {name: said, check: answered}\n")
    assert score_rollouts(rubric="r.yaml", store=STORE, again=True).to_dict()["scored"] == 0
    with pytest.raises(DataError, match="no rows for"):
        export("sft", out="out", store=STORE)


@pytest.mark.slow
def test_audit_of_a_tone_judge_reports_omitted_correctness_cases() -> None:
    polite = PointwiseJudge({"text": "Is the output polite?", "scale": ["no", "yes"]}, shows=["task_input", "output"])
    audited = audit_judge(polite, **options(blind))  # right and wrong answers are equally polite
    assert audited.passed, audited
    assert (audited.profile, audited.cases) == ("property", {"source": "shipped", "n": 8})
    assert set(audited.attacks) == {"instructions hidden in the text", "fake turns of a conversation"}
    assert audited.coverage == 1.0
    assert "cases about correctness do not apply to this judge" in " ".join(audited.notes)
    report = audit_judge(polite, profile="quality", **options(blind))
    assert not report.attacks["tells good from bad"]["passed"]
    assert report.notes == [
        "cases: 8 shipped questions, each with a right and a wrong answer; all attacks (profile quality)"
    ]
    right = audit_judge(GOOD, **options())
    assert (right.profile, right.notes) == ("quality", report.notes)


def test_audit_accepts_user_cases_and_labels() -> None:
    write_rows("c.jsonl", [{"input": "q", "good": str(BASES[0].good["output"]), "bad": "no idea"}])
    assert audit_judge(GOOD, cases="c.jsonl", **options()).passed
    rows = [
        {"item_id": str(at), "output": str(BASES[at].good["output"]) if at % 2 else f"wrong {at}", "rater": "r",
         "label": "yes" if at % 2 else "no"} for at in range(8)
    ]  # fmt: skip
    write_rows("l.jsonl", rows)
    assert audit_judge(PointwiseJudge(GOOD.spec, shows=["output"]), labels="l.jsonl", **options()).passed


def down(request: Any) -> Exception:
    return dspy.lm15.ServerError("down")


def test_an_audit_that_would_say_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="not from both"):
        audit_judge(GOOD, cases="c", labels="l", **options())
    with pytest.raises(ConfigError, match="pass_at: must be less than"):
        audit_judge(GOOD, pass_at=2, **options())
    with pytest.raises(ModelError, match="cases are unscored: the judge returned no verdict"):
        audit_judge(GOOD, **options(down))
    with pytest.raises(ConfigError, match="but no item has 'question'"):
        audit_judge(PointwiseJudge(GOOD.spec, shows=["question", "answer"]), **options())


@pytest.mark.slow
def test_listwise_judge_is_audited_with_lists_of_two() -> None:
    good, bad = ([str(getattr(base, side)["output"]) for base in BASES] for side in ("good", "bad"))

    def knowing(request: Any) -> Masses:
        """The letter of the right answer, where one is right and nothing was added to it."""
        matches = re.finditer(r'\b([A-T]): ("(?:[^"\\]|\\.)*")', request.messages[-1].text or "")
        lines = {match[1]: json.loads(match[2]) for match in matches}
        worth = {letter: 3.0 if text in good else 2.0 if text in bad else 1.0 for letter, text in lines.items()}
        return {letter: value / sum(worth.values()) for letter, value in worth.items()}

    judge = ListwiseJudge(SCALED, orders=2)
    attacks = audit_judge(judge, **options(knowing)).attacks
    assert attacks["tells good from bad"]["share"] == 1.0
    assert attacks["keyword stuffing"]["passed"]
    assert not audit_judge(judge, **options(lambda request: {"A": 0.9, "B": 0.1}, cache=False)).passed


# -- scores of outputs


def test_rows_are_scored_and_labels_correct_the_mean() -> None:
    data = score_rows(MOOD, data=outputs(60, every=3, labelled=20), out="o/v.jsonl", **options(kind))
    assert (data.n, data.unscored, data.verdicts) == (60, 0, {"no": 20, "yes": 40})
    assert data.mean == pytest.approx((40 * 0.95 + 20 * 0.05) / 60)
    assert data.corrected["mean"] < data.mean  # raters are stricter than the judge
    assert data.corrected["n_people"] == 20
    lines = [json.loads(line) for line in Path("o/v.jsonl").read_text().splitlines()]
    assert (len(lines), lines[1]["verdict"], lines[1]["confidence"]) == (60, "yes", pytest.approx(0.95))


def test_row_without_verdict_is_nan() -> None:
    calls = iter(range(1000))

    def now_and_then(request: Any) -> Any:
        return TimeoutError("too slow") if next(calls) % 3 == 0 else kind(request)

    data = score_rows(MOOD, data=outputs(12), out="v.jsonl", **options(now_and_then, threads=1, preflight=False))
    lines = [json.loads(line) for line in Path("v.jsonl").read_text().splitlines()]
    missing = [line for line in lines if line["verdict"] is None]
    assert data.unscored == len(missing) > 0
    assert [line["value"] for line in missing] == [None] * len(missing)
    assert "too slow" in data.why_unscored[0]


def test_scoring_stops_at_a_cap_and_resumes() -> None:
    with pytest.raises(BudgetExceeded, match="resume=True"):
        score_rows(MOOD, data=outputs(30), max_calls=10, **options(kind))
    done = score_rows(MOOD, data=outputs(30), resume=True, max_calls=100, **options(kind))
    assert (done.n, done.calls <= 30) == (30, True)


def test_cap_on_dollars_with_unknown_price_is_refused_before_the_first_call() -> None:
    judge = PointwiseJudge(GOOD.spec, shows=["output"], model="openai/m")
    with ChatServer(lambda body: "yes").serving() as server:
        for model in ("openai/m", "embedded/smollm2-135m"):
            capped = {"model": model, "api_base": server.url, "max_cost_usd": 1.0, "store": "a.db"}
            with pytest.raises(ConfigError, match="no price is known for openai/m"):
                score_rows(judge, data=outputs(2), **capped)
            with pytest.raises(ConfigError, match="no price is known for openai/m"):
                audit_judge(PointwiseJudge(GOOD.spec, model="openai/m"), **capped)
        assert server.models == []


def test_few_verdicts_give_no_interval_and_equal_verdicts_no_certainty() -> None:
    few, more = (score_rows(MOOD, data=outputs(count), **options(kind)) for count in (2, 30))
    assert [few.mean, more.mean] == pytest.approx([0.95, 0.95])
    assert few.interval is None
    assert more.interval[0] < 0.95


def test_pairwise_judge_refuses_single_outputs() -> None:
    with pytest.raises(ConfigError, match="no item has 'output_a'"):
        score_rows(PairwiseJudge(), data=outputs(3), **options(kind))
    both = {"input": "q", "output_a": "x", "output_b": "lovely"}
    rows = write_rows("pairs.jsonl", [both, {"input": "q", "output": "lovely"}])
    report = score_rows(PairwiseJudge(), data=rows, **options(lambda request: {"a": 0.5, "b": 0.5}))
    assert (report.n, report.unscored) == (2, 1)


def test_unreachable_model_has_coverage_0_and_equal_rows_are_merged() -> None:
    rows = write_rows("d.jsonl", [{"output": f"thing {at % 4}"} for at in range(12)])
    report = score_rows(MOOD, data=rows, **options())
    assert (report.rows, report.n, report.unscored) == (12, 4, 0)
    dead = score_rows(MOOD, data=rows, **options(down, cache=False, preflight=False))
    assert (dead.coverage, dead.mean, dead.unscored) == (0.0, None, 4)
    assert [gap["n"] for gap in dead.undecided.values()] == [4]


def test_sentence_judge_may_declare_its_scale() -> None:
    def good(request: Any) -> Masses:
        return {"bad": 0.1, "fine": 0.2, "good": 0.7}

    report = score_rows("How good is it?", data=outputs(1), scale=["bad", "fine", "good"], **options(good))
    assert report.verdicts == {"bad": 0, "fine": 0, "good": 1}
    with pytest.raises(ConfigError, match="scale: applies only to a judge given as a sentence"):
        score_rows(GOOD, data=outputs(1), scale=["bad", "good"], **options())


def test_labels_of_run_outputs_correct_the_run_means() -> None:
    Path("r.yaml").write_text("name: r\ncriteria:\n- {name: kind, judge: 'Is it kind?'}\n")
    write_rows("t.jsonl", [{"question": f"q{at}", "split": "val"} for at in range(60)])

    def script(request: Any) -> Any:
        if request.config.logprobs:
            return kind(request)
        return json.dumps({"answer": f"lovely {len(str(request.messages[-1].text))}"})

    def corrected() -> dict[str, Any]:
        program = dspy.Predict("question -> answer")
        data = assay.evaluate(program, rubric="r.yaml", data="t.jsonl", **options(script)).to_dict()
        return dict(data["corrected"])

    assert corrected() == {}
    with Store(STORE) as store:
        judge, waiting = Label("r.yaml:kind", rater="ann", limit=25).waiting(store)
        for at, entry in enumerate(waiting):
            put(store, judge, entry, "ann", "yes" if at % 2 else "no")
    report = corrected()["kind"]
    assert (report["n_people"], report["n_verdicts"]) == (25, 60)
    assert report["verdicts_alone"] == pytest.approx(0.95)
    assert report["low"] < 0.48 < report["high"] < 0.95  # raters labelled half of them kind


# -- drift


def test_anchors_are_frozen_once_and_replayed() -> None:
    rows, anchors = outputs(40, every=2), Path("anchors.json")
    first = replay_anchors(MOOD, anchors=anchors, freeze=rows, **options(kind))
    assert (first.frozen, first.noise) == (40, 0.0)
    with pytest.raises(ConfigError, match="there already"):
        replay_anchors(MOOD, anchors=anchors, freeze=rows, **options(kind))
    assert replay_anchors(MOOD, anchors=anchors, **options(kind)).alarms == []
    other = PointwiseJudge("Is it nice?", shows=["output"])
    result = replay_anchors(other, anchors=anchors, **options(lambda request: {"yes": 0.6, "no": 0.4}))
    assert {"question", "prompt"} <= set(result.changed)
    assert any("CUSUM" in alarm and "question" in alarm for alarm in result.alarms)
    with pytest.raises(DataError, match="not an anchor set"):
        replay_anchors(MOOD, anchors=Path("none.json"), **options(kind))


def test_one_other_sample_of_a_judge_with_several_is_no_drift() -> None:
    judge = PointwiseJudge("Is it kind?", shows=["output"], reading="text", samples=3)
    others: list[str] = []  # outputs of which the next sample is another

    def script(request: Any) -> str:
        text = str(request.messages[-1].text)
        is_other = bool(others) and others[0] in text
        if is_other:
            others.clear()
        return json.dumps({"verdict": "yes" if ("lovely" in text) is not is_other else "no"})

    replay_anchors(judge, anchors=Path("anchors.json"), freeze=outputs(40, every=2), **options(script))
    others.append("lovely 39.")
    report = replay_anchors(judge, anchors=Path("anchors.json"), **options(script))
    assert report.mean_difference == pytest.approx(-1 / 3 / 40)
    assert (report.flips["n"], report.alarms) == (1, [])


# -- labels of raters


def put(store: Store, judge: Any, entry: Any, rater: str, label: str) -> None:
    fields = {"fields": entry.fields, "rationale": "", "rollout_id": entry.rollout_id}
    store.put_label(key_of(judge), entry.item_id, rater, label, **fields)


def fill(count: int = 24) -> None:
    """Stores two outputs of each task, of which the first is of the sealed test split, a verdict and a failure."""
    with Store(STORE) as store:
        for at in range(count):
            for sample in range(2):
                answer = f"{'lovely' if (at + sample) % 2 else 'awful'} {at} {sample}"
                store.put_rollout(
                    Rollout(
                        task_id=f"t{at}", inputs={"question": f"q{at}"}, prediction={"answer": answer, "steps": []},
                        split="test" if at == 0 else "train", status="done",
                    )
                )  # fmt: skip
        store.put_rollout(Rollout(inputs={"question": "judge"}, prediction={"verdict": "yes"}, source="judge"))
        store.put_rollout(Rollout(inputs={"question": "failed"}, prediction=None, status="failed"))


def label(answers: str, *flags: str, judge: str = QUESTION) -> Done:
    return assay_command("judge", "label", judge, "--store", str(STORE), *flags, stdin=answers)


def test_undecided_outputs_are_queued_for_raters() -> None:
    fill()
    with Store(STORE) as store:

        def waiting(judge: Any, rater: str) -> Any:
            return Label(judge, rater=rater, limit=100).waiting(store)[1]

        entries = waiting(GOOD, "ann")
        assert len(entries) == 46  # neither the sealed task, nor the judge's, nor the failed one
        assert entries[0].fields.keys() == {"task_input", "output"}
        put(store, GOOD, entries[0], "ann", "yes")
        assert [len(waiting(GOOD, rater)) for rater in ("ann", "bob")] == [45, 46]
        pairs = waiting(PairwiseJudge(), "ann")
        assert len(pairs) == 23
        assert all(pair.fields["output_a"] != pair.fields["output_b"] for pair in pairs)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "typed", "expected"),
    [
        (["0", "1", "2"], ["1", "0", "3", "2"], ["1", "0", "2"]),  # 3 is not an option here
        (["-1", "0", "1"], ["1", "-1"], ["1", "-1"]),
        (["q", "r", "s"], ["q", "s", "2", "/s", "/q", "r"], ["q", "s", "r"]),
    ],
)
def test_scale_words_are_not_parsed_as_commands(scale: list[str], typed: list[str], expected: list[str]) -> None:
    fill()
    Path("j.yaml").write_text(f"text: How is it?\nscale: {json.dumps(scale)}\n")
    result = label("\n".join(typed) + "\n", "--rater", "ann", "--json", judge="j.yaml")
    assert result.code == 0, result.stderr
    question = key_of(PointwiseJudge({"text": "How is it?", "scale": scale}))
    with Store(STORE) as store:
        assert [row["label"] for row in store.labels(question)] == expected


@pytest.mark.slow
def test_terminal_labels_are_stored_compiled_and_forgotten() -> None:
    fill(count=60)
    first = label("yes\nsays so\nwhat?\n2\nwhy not\ns\n1\nbecause\nq\n", "--rater", "ann", "--rationale", "--json")
    assert first.report == {"rater": "ann", "labelled": 3, "asked": 20}, first.stderr
    assert "'what?' is not on the scale" in first.stderr
    judge = PointwiseJudge(QUESTION)
    with Store(STORE) as store:
        labels = [(row["label"], row["rationale"]) for row in store.labels(key_of(judge))]
        assert labels == [("yes", "says so"), ("yes", "why not"), ("no", "because")]
        for entry in Label(QUESTION, rater="bob", limit=118).waiting(store)[1]:
            put(store, judge, entry, "bob", "yes" if "lovely" in str(entry.fields["output"]) else "no")
    report = assay.compile_judge(QUESTION, labels="store", optimizer="calibrate", **options(kind))
    assert report.sizes["train"] > 20
    assert report.outcome.agreement is not None

    def forgotten(rater: str) -> tuple[int, list[str]]:
        result = forget_rater(rater, store=STORE).to_dict()
        return result["removed"], result["judges"]

    assert forgotten("nobody") == (0, [])
    assert forgotten("ann") == (3, [str(report.artifact)])
    assert forgotten("bob")[1] == [str(report.artifact)]
    with pytest.raises(DataError, match="assay judge label"):
        assay.compile_judge(QUESTION, labels="store", **options(kind))


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


def test_judge_of_other_fields_is_labelled_and_compiled_by_those_fields() -> None:
    judge = PointwiseJudge(GOOD.spec, shows=["question", "answer"])
    with Store(STORE) as store:
        for at in range(120):
            fields: dict[str, Any] = {"inputs": {"question": f"q{at}"}, "prediction": {"answer": f"a{at}"}}
            store.put_rollout(Rollout(task_id=str(at), status="done", **fields))
        store.flush()
        _, waiting = Label(judge, rater="me", limit=200).waiting(store)
        assert {tuple(entry.fields) for entry in waiting} == {("question", "answer")}
        for at, entry in enumerate(waiting):
            put(store, judge, entry, "me", "yes" if at % 2 else "no")
    report = assay.compile_judge(judge, labels="store", optimizer="calibrate", **options())
    assert sum(report.sizes.values()) == 120


# -- pages


@pytest.mark.slow
def test_a_judge_that_ran_is_on_the_page_with_its_card_audit_and_drift() -> None:
    key = Question(spec=assay.rubrics.JudgeSpec(text=QUESTION)).key
    with Store(STORE) as store:  # labels of two raters, who disagree about every tenth
        for at in range(100):
            text = f"{'lovely' if at % 2 else 'awful'} answer {at}"
            inputs = {"question": f"q{at}"}
            rollout = Rollout(task_id=f"t{at}", inputs=inputs, prediction={"answer": text}, status="done")
            store.put_rollout(rollout)
            fields = {"task_input": f"q{at}", "output": text}
            for rater in ("ann", "bob"):
                yes = (at % 2 == 1) is not (rater == "bob" and at % 10 == 0)
                word = "yes" if yes else "no"
                store.put_label(key, digest_of(fields), rater, word, fields=fields, rollout_id=rollout.id)
    report = assay.compile_judge(QUESTION, labels="store", optimizer="calibrate", **options(kind))
    audit_judge(str(report.artifact), labels="store", **options(kind))
    replay_anchors(str(report.artifact), **options(kind))
    with Store(STORE) as store:
        ((key, question),) = known_questions(store).items()
        assert (question.sources, len(question.runs)) == ((QUESTION, str(report.artifact)), 3)
        view = judge_view(store, key, store_flag=None)
        (audit,) = list_runs(store, kind="judge audit")
        kept = json.dumps(finished_report(store, audit["id"]))
    assert view.values["card"].n == report.sizes[report.outcome.split]
    assert view.values["compared"] > 60
    assert 0 < view.values["differing"] <= 10  # those on which Bob differs
    runs = [run["kind"] for run, *_ in (*view.values["audits"], *view.values["drifts"])]
    assert runs == ["judge audit", "judge drift"]
    assert "Raters reach" in render(view.template, title="", csrf="", live_s=0, **view.values)
    assert "lovely answer" not in kept  # outputs of labelled items are in rollouts alone
    text = show_card(report.artifact).write_page("card.html").read_text()
    assert len(text) < 100_000
    assert "<script" not in text
    assert "Weighted kappa" in text or "Cohen&#39;s kappa with raters" in text
    with pytest.raises(NoArtifact):
        show_card(Path())


@pytest.mark.slow
def test_a_question_is_added_for_raters_without_asking_here() -> None:
    with contextlib.closing(Store(STORE)):
        data = label("", "--page", "--json").report
    assert data["path"] == f"/judges/{data['judge']}/label"
    with Store(STORE) as store:
        assert known_questions(store)[data["judge"]].spec.text == QUESTION
    assert "no effect" in label("", "--page", "--rater", "ann").stderr
