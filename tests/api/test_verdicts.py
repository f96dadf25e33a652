"""Judges at work: audits, scores corrected by people, anchors."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from people_and_judges import GOOD, kind, options

import assay
from assay.commands.export import export
from assay.commands.judge import Label
from assay.commands.judge_audit import audit_judge
from assay.commands.judge_drift import replay_anchors
from assay.commands.judge_score import score_rows
from assay.commands.scoring import score_rollouts
from assay.errors import BudgetExceeded, ConfigError, DataError, ModelError
from assay.judges import ListwiseJudge, PairwiseJudge, PointwiseJudge
from assay.judges.quality.audit import BASES
from assay.judges.questions import key_of
from assay.testing import scripted_lm
from assay.traces import Store
from rigs.serving import served
from rigs.upstream import ScriptedUpstream


@pytest.mark.slow
def test_audit_passes_a_sound_judge_and_fails_a_blind_one(tmp_path: Path) -> None:
    sound = audit_judge(GOOD, **options(tmp_path))
    assert sound.passed, sound
    blind = audit_judge(GOOD, **options(tmp_path, lambda request: {"yes": 0.9, "no": 0.1}, cache=False))
    assert not blind.passed
    assert blind.attacks["tells good from bad"]["right"] == 0
    assert json.dumps(blind.to_dict())
    with assay.Store(tmp_path / ".assay" / "a.db") as store:
        assert {rollout.split for rollout in store.rollouts()} == {"audit"}


@pytest.mark.slow
def test_audit_of_a_tone_judge_reports_omitted_correctness_cases(tmp_path: Path) -> None:
    polite = PointwiseJudge({"text": "Is the output polite?", "scale": ["no", "yes"]}, shows=["task_input", "output"])
    audited = audit_judge(
        polite, **options(tmp_path, lambda request: {"no": 0.2, "yes": 0.8})
    )  # right and wrong answers are equally polite
    assert audited.passed, audited
    assert (audited.profile, audited.cases) == ("property", {"source": "shipped", "n": 8})
    assert set(audited.attacks) == {"instructions hidden in the text", "fake turns of a conversation"}
    assert audited.coverage == 1.0
    assert "cases about correctness do not apply to this judge" in " ".join(audited.notes)
    quality_report = audit_judge(
        polite, profile="quality", **options(tmp_path, lambda request: {"no": 0.2, "yes": 0.8})
    )
    assert not quality_report.attacks["tells good from bad"]["passed"]
    assert quality_report.notes == [
        "cases: 8 shipped questions, each with a right and a wrong answer; all attacks (profile quality)"
    ]
    right = audit_judge(GOOD, **options(tmp_path))
    assert (right.profile, right.notes) == ("quality", quality_report.notes)
    assert "left out" not in " ".join(right.notes)


def test_audit_accepts_user_cases(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text(
        json.dumps({"input": "q", "good": str(BASES[0].good["output"]), "bad": "no idea"}) + "\n"
    )
    verdict = audit_judge(GOOD, cases=str(tmp_path / "c.jsonl"), **options(tmp_path))
    assert verdict.passed, verdict
    rows = [
        {
            "item_id": str(i),
            "output": str(BASES[i % 8].good["output"]) if i % 2 else f"wrong {i}",
            "rater": "r",
            "label": "yes" if i % 2 else "no",
        }
        for i in range(8)
    ]
    (tmp_path / "l.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert audit_judge(
        PointwiseJudge(GOOD.spec, shows=["output"]), labels=str(tmp_path / "l.jsonl"), **options(tmp_path)
    ).passed
    with pytest.raises(ConfigError, match="not from both"):
        audit_judge(GOOD, cases="c", labels="l", **options(tmp_path))
    with pytest.raises(ConfigError, match="pass_at: must be less than"):
        audit_judge(GOOD, pass_at=2, **options(tmp_path))
    with pytest.raises(ModelError, match="cases are unscored: the judge returned no verdict"):
        audit_judge(GOOD, **options(tmp_path, lambda request: assay_error()))


def assay_error() -> Exception:
    import dspy

    return dspy.lm15.ServerError("down")


def rows_file(path: Path, count: int = 60, labelled: int = 20) -> str:
    with path.open("w") as file:
        for at in range(count):
            row = {"item_id": str(at), "output": "lovely" if at % 3 else "awful", "label": None}
            if at < labelled:
                row["label"] = "yes" if at % 3 and at % 2 else "no"
            file.write(json.dumps(row) + "\n")
    return str(path)


MOOD = PointwiseJudge("Is it kind?", shows=["output"])


def test_rows_are_scored_and_labels_correct_the_mean(tmp_path: Path) -> None:
    data = score_rows(
        MOOD, data=rows_file(tmp_path / "d.jsonl"), out=tmp_path / "o" / "v.jsonl", **options(tmp_path, kind)
    )
    assert (data.n, data.unscored, data.verdicts) == (60, 0, {"no": 20, "yes": 40})
    assert data.mean == pytest.approx((40 * 0.95 + 20 * 0.05) / 60)
    assert data.corrected["mean"] < data.mean  # raters are stricter than the judge
    assert data.corrected["n_people"] == 20
    lines = [json.loads(line) for line in (tmp_path / "o" / "v.jsonl").read_text().splitlines()]
    assert (len(lines), lines[1]["verdict"], lines[1]["confidence"]) == (60, "yes", pytest.approx(0.95))


def test_row_without_verdict_is_nan(tmp_path: Path) -> None:
    calls = iter(range(1000))

    def now_and_then(request: Any) -> Any:
        return TimeoutError("too slow") if next(calls) % 3 == 0 else kind(request)

    data = score_rows(
        MOOD,
        data=rows_file(tmp_path / "d.jsonl", labelled=0),
        out=tmp_path / "v.jsonl",
        **options(tmp_path, now_and_then, threads=1, preflight=False),
    )
    lines = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    missing = [line for line in lines if line["verdict"] is None]
    assert data.unscored == len(missing) > 0
    assert [line["value"] for line in missing] == [None] * len(missing)
    assert "too slow" in data.why_unscored[0]


def test_scoring_stops_at_a_cap_and_resumes(tmp_path: Path) -> None:
    rows = tmp_path / "d.jsonl"
    rows.write_text("\n".join(json.dumps({"output": f"lovely {at}"}) for at in range(30)))
    with pytest.raises(BudgetExceeded, match="resume=True"):
        score_rows(MOOD, data=str(rows), max_calls=10, **options(tmp_path, kind))
    done = score_rows(MOOD, data=str(rows), resume=True, max_calls=100, **options(tmp_path, kind))
    assert (done.n, done.calls <= 30) == (30, True)


@pytest.mark.parametrize("named", [{"model": "openai/m"}, {"model": "embedded/smollm2-135m"}])
def test_cap_on_dollars_with_unknown_price_is_refused_before_the_first_call(
    tmp_path: Path, named: dict[str, str]
) -> None:
    upstream = ScriptedUpstream()
    (tmp_path / "d.jsonl").write_text('{"output": "one"}\n{"output": "two"}\n')
    judge = PointwiseJudge(GOOD.spec, shows=["output"], model="openai/m")
    with served(upstream.app()) as address:
        capped = {**named, "api_base": f"{address}/v1", "max_cost_usd": 1.0, "store": tmp_path / "a.db"}
        with pytest.raises(ConfigError, match="no price is known for openai/m"):
            score_rows(judge, data=str(tmp_path / "d.jsonl"), **capped)
        with pytest.raises(ConfigError, match="no price is known for openai/m"):
            audit_judge(PointwiseJudge(GOOD.spec, model="openai/m"), **capped)
    assert upstream.calls == 0


def test_few_verdicts_give_no_interval_and_equal_verdicts_no_certainty(tmp_path: Path) -> None:
    rows = tmp_path / "d.jsonl"
    reports = {}
    for count in (2, 30):
        rows.write_text("".join(json.dumps({"output": f"lovely {at}"}) + "\n" for at in range(count)))
        reports[count] = score_rows(MOOD, data=str(rows), **options(tmp_path, kind))
        assert reports[count].mean == pytest.approx(0.95)
    assert reports[2].interval is None
    assert reports[30].interval[0] < 0.95


def test_pairwise_judge_refuses_single_outputs(tmp_path: Path) -> None:
    rows = tmp_path / "d.jsonl"
    rows.write_text("".join(json.dumps({"output": f"lovely {at}"}) + "\n" for at in range(3)))
    with pytest.raises(ConfigError, match="no item has 'output_a'"):
        score_rows(PairwiseJudge(), data=str(rows), **options(tmp_path, kind))
    both = {"input": "q", "output_a": "x", "output_b": "lovely"}
    rows.write_text("".join(json.dumps(row) + "\n" for row in (both, {"input": "q", "output": "lovely"})))
    report = score_rows(PairwiseJudge(), data=str(rows), **options(tmp_path, lambda request: {"a": 0.5, "b": 0.5}))
    assert (report.n, report.unscored) == (2, 1)


def test_labels_of_run_outputs_correct_the_run_means(tmp_path: Path) -> None:
    import dspy

    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: kind, judge: 'Is it kind?'}\n")
    (tmp_path / "t.jsonl").write_text(
        "".join(json.dumps({"question": f"q{at}", "split": "val"}) + "\n" for at in range(60))
    )

    def script(request: Any) -> Any:
        return (
            kind(request)
            if request.config.logprobs
            else json.dumps({"answer": f"lovely {len(str(request.messages[-1].text))}"})
        )

    def evaluated() -> dict[str, Any]:
        lm = scripted_lm(script, logprobs=True)
        store = tmp_path / ".assay" / "a.db"
        report = assay.evaluate(
            dspy.Predict("question -> answer"),
            rubric=tmp_path / "r.yaml",
            data=str(tmp_path / "t.jsonl"),
            lm=lm,
            store=store,
        )
        return dict(report.to_dict())

    assert evaluated()["corrected"] == {}
    with Store(tmp_path / ".assay" / "a.db") as store:
        judge, waiting = Label(f"{tmp_path}/r.yaml:kind", rater="ann", limit=25).waiting(store)
        for at, entry in enumerate(waiting):
            label = "yes" if at % 2 else "no"
            store.put_label(
                key_of(judge),
                entry.item_id,
                "ann",
                label,
                fields=entry.fields,
                rationale="",
                rollout_id=entry.rollout_id,
            )
    report = evaluated()["corrected"]["kind"]
    assert (report["n_people"], report["n_verdicts"]) == (25, 60)
    assert report["verdicts_alone"] == pytest.approx(0.95)
    assert report["low"] < 0.48 < report["high"] < 0.95  # raters labelled half of them kind


def test_anchors_are_frozen_once_and_replayed(tmp_path: Path) -> None:
    rows, anchors = tmp_path / "d.jsonl", tmp_path / "anchors.json"
    rows.write_text("\n".join(json.dumps({"output": f"{'lovely' if at % 2 else 'awful'} {at}"}) for at in range(40)))
    first = replay_anchors(MOOD, anchors=anchors, freeze=str(rows), **options(tmp_path, kind))
    assert (first.frozen, first.noise) == (40, 0.0)
    with pytest.raises(ConfigError, match="there already"):
        replay_anchors(MOOD, anchors=anchors, freeze=str(rows), **options(tmp_path, kind))
    assert replay_anchors(MOOD, anchors=anchors, **options(tmp_path, kind)).alarms == []

    def other(request: Any) -> dict[str, float]:
        return {"yes": 0.6, "no": 0.4}

    asks_otherwise = PointwiseJudge("Is it nice?", shows=["output"])
    result = replay_anchors(asks_otherwise, anchors=anchors, **options(tmp_path, other))
    assert {"question", "prompt"} <= set(result.changed)
    assert any("CUSUM" in alarm and "question" in alarm for alarm in result.alarms)
    with pytest.raises(DataError, match="not an anchor set"):
        replay_anchors(MOOD, anchors=tmp_path / "none.json", **options(tmp_path, kind))


def test_one_other_sample_of_a_judge_with_several_is_no_drift(tmp_path: Path) -> None:
    rows, anchors = tmp_path / "d.jsonl", tmp_path / "anchors.json"
    rows.write_text("\n".join(json.dumps({"output": f"{'lovely' if at % 2 else 'awful'} {at}."}) for at in range(40)))
    judge = PointwiseJudge("Is it kind?", shows=["output"], reading="text", samples=3)
    others: list[str] = []  # outputs of which the next sample is another

    def script(request: Any) -> str:
        text = str(request.messages[-1].text)
        is_other = bool(others) and others[0] in text
        if is_other:
            others.clear()
        return json.dumps({"verdict": "yes" if ("lovely" in text) is not is_other else "no"})

    replay_anchors(judge, anchors=anchors, freeze=str(rows), **options(tmp_path, script))
    others.append("lovely 39.")
    report = replay_anchors(judge, anchors=anchors, **options(tmp_path, script))
    assert report.mean_difference == pytest.approx(-1 / 3 / 40)
    assert (report.flips["n"], report.alarms) == (1, [])


@pytest.mark.slow
def test_listwise_judge_is_audited_with_lists_of_two(tmp_path: Path) -> None:
    judge = ListwiseJudge({"text": "Is it a right answer?", "scale": ["no", "yes"]}, orders=2)
    good, bad = ([str(getattr(base, side)["output"]) for base in BASES] for side in ("good", "bad"))

    def knowing(request: Any) -> dict[str, float]:
        """The letter of the right answer, where one is right and nothing was added to it."""
        matches = re.finditer(r'\b([A-T]): ("(?:[^"\\]|\\.)*")', request.messages[-1].text or "")
        lines = {match[1]: json.loads(match[2]) for match in matches}
        worth = {
            letter: 3.0 if text in good else 2.0 if any(text == b for b in bad) else 1.0
            for letter, text in lines.items()
        }
        return {letter: value / sum(worth.values()) for letter, value in worth.items()}

    verdict = audit_judge(judge, **options(tmp_path, knowing))
    assert verdict.attacks["tells good from bad"]["share"] == 1.0
    assert verdict.attacks["keyword stuffing"]["passed"]
    blind = audit_judge(judge, **options(tmp_path, lambda request: {"A": 0.9, "B": 0.1}, cache=False))
    assert not blind.passed


def test_judge_without_the_output_field_is_not_audited(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="but no item has 'question'"):
        audit_judge(PointwiseJudge(GOOD.spec, shows=["question", "answer"]), **options(tmp_path))


def test_unreachable_model_has_coverage_0_and_equal_rows_are_merged(tmp_path: Path) -> None:
    rows = tmp_path / "d.jsonl"
    rows.write_text("".join(json.dumps({"output": f"thing {at % 4}"}) + "\n" for at in range(12)))
    report = score_rows(PointwiseJudge(GOOD.spec, shows=["output"]), data=str(rows), **options(tmp_path))
    assert (report.rows, report.n, report.unscored) == (12, 4, 0)
    dead = score_rows(
        PointwiseJudge(GOOD.spec, shows=["output"]),
        data=str(rows),
        **options(tmp_path, lambda request: assay_error(), cache=False, preflight=False),
    )
    assert (dead.coverage, dead.mean, dead.unscored) == (0.0, None, 4)
    assert [gap["n"] for gap in dead.undecided.values()] == [4]


@pytest.mark.slow
def test_judge_commands_record_no_agent_rollouts(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: said, check: answered}\n")
    score_rows(MOOD, data=rows_file(tmp_path / "d.jsonl", labelled=0), **options(tmp_path, kind))
    audit_judge(GOOD, **options(tmp_path))
    with Store(tmp_path / ".assay" / "a.db") as store:
        assert {rollout.source for rollout in store.rollouts(limit=None)} == {"judge"}
    assert (
        score_rollouts(rubric=tmp_path / "r.yaml", store=tmp_path / ".assay" / "a.db", again=True).to_dict()["scored"]
        == 0
    )
    with pytest.raises(DataError, match="no rows for"):
        export("sft", out=tmp_path / "out", store=tmp_path / ".assay" / "a.db")
