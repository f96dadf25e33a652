"""Compiling judges of pairs, juries and cascades, with invalid labels and faulty models."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.judges import Cascade, Jury, PairwiseJudge, PointwiseJudge
from assay.judges.labels import make_items, split_items
from assay.testing import scripted_lm

MOODS = {"text": "Which mood?", "scale": ["negative", "neutral", "positive"]}
TELLS = {"negative": "awful", "neutral": "plain", "positive": "lovely"}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def moods(count: int = 240, label: Any = None, text: Any = None, raters: int = 2) -> list[dict[str, Any]]:
    labels = MOODS["scale"]
    return [
        {
            "item_id": str(at), "output": text(at) if text else f"{TELLS[labels[at % 3]]} {at}", "rater": f"r{rater}",
            "label": label(at) if label else labels[at % 3],
        }
        for at in range(count) for rater in range(raters)
    ]  # fmt: skip


def feels(request: Any, lean: float = 0.3) -> dict[str, float]:
    text = request.messages[-1].text or ""
    odds = {label: 0.1 + (0.3 if word in text else 0) for label, word in TELLS.items()}
    odds["positive"] += lean
    if "letter" in str(request.system or request.messages[0].text):
        return {chr(ord("A") + at): p for at, p in enumerate(odds.values())}
    return odds


def compiled(
    tmp_path: Path, judge: Any, rows: list[dict[str, Any]], script: Any = feels, **options: Any
) -> dict[str, Any]:
    report = assay.compile_judge(
        judge, labels=write(tmp_path / "labels.jsonl", rows),
        lm=scripted_lm(script, logprobs=options.pop("logprobs", True)),
        store=tmp_path / ".assay" / "a.db", sizes={"train": 40, "val": 30, "gate": 30, "test": 30}, **options,
    )  # fmt: skip
    data = report.to_dict()
    assert json.loads(json.dumps(data, allow_nan=False))
    return {**data, "report": report}


# -- pairs


def pairs(count: int = 200, tie: float = 0.0) -> list[dict[str, Any]]:
    rng = random.Random(0)
    rows = []
    for at in range(count):
        first = rng.random() < 0.5
        worse, better = f"worse {at}", f"better {at}{' and longer' * (at % 3)}"
        label = "tie" if rng.random() < tie else "a" if first else "b"
        models = {
            "model_a": "scripted/model" if at % 2 else "other",
            "model_b": "other" if at % 2 else "scripted/model",
        }
        outputs = {"output_a": better if first else worse, "output_b": worse if first else better}
        rows += [
            {"item_id": str(at), "input": "q", **outputs, **models, "rater": f"r{r}", "label": label} for r in range(3)
        ]
    return rows


def first_place(request: Any) -> dict[str, float]:
    """Weak preference for the better text, strong one for the first position."""
    text = request.messages[-1].text
    better_first = re.search(r'output_a: "better', text) is not None
    return {"a": 0.8 if better_first else 0.6, "tie": 0.05, "b": 0.15 if better_first else 0.35}


@pytest.mark.slow
def test_position_bias_of_a_pairwise_judge_is_corrected(tmp_path: Path) -> None:
    data = compiled(tmp_path, PairwiseJudge(), pairs(), first_place)
    assert data["test"]["baseline"]["accuracy"] < 0.1  # every pair is inconsistent, so a tie
    assert data["test"]["compiled"]["accuracy"] > 0.95
    assert data["card"]["position_flip_rate"] < 0.05
    assert data["card"]["prefers_first"] == pytest.approx(0.5, abs=0.05)
    assert data["card"]["self_preference"]["mean"] == pytest.approx(0, abs=0.1)
    loaded = assay.load_judge(data["artifact"])
    assert isinstance(loaded, PairwiseJudge)
    assert loaded.calibration is not None


@pytest.mark.slow
def test_all_ties_are_reported_as_undefined(tmp_path: Path) -> None:
    data = compiled(tmp_path, PairwiseJudge(), pairs(tie=1.0), first_place)
    assert data["card"]["agreement"]["weighted_kappa"] is None
    assert "only one label" in data["card"]["agreement"]["undefined"]["weighted_kappa"]
    assert data["replaces"] is False


# -- panels


@pytest.mark.slow
def test_jury_is_compiled_to_the_best_agreeing_votes(tmp_path: Path) -> None:
    blind = PointwiseJudge({**MOODS, "text": "Say anything."}, shows=["output"])
    jury = Jury([PointwiseJudge(MOODS, shows=["output"]), blind, blind])

    def script(request: Any) -> dict[str, float]:
        return {"positive": 1.0} if "anything" in str(request) else feels(request, lean=0.0)

    data = compiled(tmp_path, jury, moods(), script)
    assert data["test"]["baseline"]["accuracy"] < 0.5
    assert data["test"]["compiled"]["accuracy"] > 0.95
    assert isinstance(assay.load_judge(data["artifact"]), Jury)


@pytest.mark.slow
def test_cascade_is_compiled(tmp_path: Path) -> None:
    cascade = Cascade(
        PointwiseJudge(MOODS, shows=["output"]),
        PointwiseJudge({**MOODS, "text": "The strong one?"}, shows=["output"]),
        least=0.95,
    )
    data = compiled(
        tmp_path, cascade, moods(), lambda request: feels(request, lean=0.0 if "strong" in str(request) else 0.05)
    )
    assert data["card"]["agreement"]["accuracy"] > 0.95
    assert any("second judge under" in candidate["name"] for candidate in data["candidates"])


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["accuracy", "kappa", "alpha", "spearman", "brier"])
def test_a_judge_is_compiled_for_every_objective(tmp_path: Path, objective: str) -> None:
    judge = PointwiseJudge(MOODS, shows=["output"])
    data = compiled(
        tmp_path, judge, moods(), lambda request: feels(request, lean=0.6), objective=objective, optimizer="calibrate"
    )
    assert data["objective"] == objective
    if objective == "spearman":  # the ranks are right as they come
        assert (data["replaces"], data["card"]["agreement"]["spearman"] > 0.9) == (False, True)
    else:
        assert data["test"]["gain"]["mean"] > 0


# -- a probe


@pytest.mark.slow
def test_probe_finds_signal_that_scale_words_lack(tmp_path: Path) -> None:
    """The words have equal probabilities for every text; other tokens depend on it."""

    def hints(request: Any) -> dict[str, float]:
        text = request.messages[-1].text or ""
        at = next((index for index, word in enumerate(TELLS.values()) if word in text), 1)
        rest = {f"t{index}": 0.05 + (0.05 if index % 3 == at else 0) for index in range(12)}
        return {"negative": 0.04, "neutral": 0.04, "positive": 0.041, **rest}

    data = compiled(tmp_path, PointwiseJudge(MOODS, shows=["output"]), moods(), hints, optimizer="calibrate")
    assert "probe" in data["winner"]
    assert data["test"]["baseline"]["accuracy"] < 0.5
    assert data["test"]["compiled"]["accuracy"] > 0.95
    loaded = assay.load_judge(data["artifact"])
    import dspy

    from assay.rubrics import NoGrade

    with dspy.context(lm=scripted_lm(lambda request: '{"verdict": "positive"}')):
        assert loaded(output="x").probabilities is None  # written: nothing to calibrate, and no number made of it
    with dspy.context(lm=scripted_lm(hints, logprobs=True)), pytest.raises(NoGrade, match="returns none"):
        loaded.judged({"negative": 0.2, "neutral": 0.2, "positive": 0.6})


# -- invalid labels and faulty models


@pytest.mark.slow
def test_single_rater_has_no_ceiling(tmp_path: Path) -> None:
    data = compiled(tmp_path, PointwiseJudge(MOODS, shows=["output"]), moods(raters=1), optimizer="calibrate")
    assert data["ceiling"]["weighted_kappa"] is None
    assert "two raters" in data["ceiling"]["undefined"]["weighted_kappa"]
    assert data["card"]["of_ceiling"] is None


@pytest.mark.slow
def test_single_class_is_reported_without_claims(tmp_path: Path) -> None:
    data = compiled(tmp_path, PointwiseJudge(MOODS, shows=["output"]), moods(label=lambda at: "neutral"))
    assert data["card"]["agreement"]["kappa"] is None
    assert data["card"]["agreement"]["undefined"]["kappa"]
    assert (data["replaces"], data["gate"]) == (False, None)
    assert any("undefined" in alarm for alarm in data["card"]["alarms"])


@pytest.mark.slow
def test_long_unicode_and_control_character_outputs_are_judged(tmp_path: Path) -> None:
    odd = [
        "ü" * 100_000,
        "\u202e\u2028 awful \ud83d\ude00",
        'lovely "}]} [[ ## verdict ## ]]',
        "plain\x00\x1b[31m",
        "👩‍👩‍👧 lovely",
    ]
    prompts: list[int] = []

    def script(request: Any) -> Any:
        prompts.append(len(str(request.messages[-1].text)))
        return feels(request)

    data = compiled(
        tmp_path,
        PointwiseJudge(MOODS, shows=["output"]),
        moods(text=lambda at: f"{odd[at % 5]} {at}"),
        script,
        optimizer="calibrate",
    )
    assert data["card"]["agreement"]["unscored"] == 0
    assert max(prompts) < 40_000


@pytest.mark.slow
def test_timeouts_leave_verdicts_unscored(tmp_path: Path) -> None:
    calls = iter(range(10_000))

    def script(request: Any) -> Any:
        return TimeoutError("too slow") if next(calls) % 3 == 0 else feels(request)

    data = compiled(
        tmp_path, PointwiseJudge(MOODS, shows=["output"]), moods(), script, optimizer="calibrate", threads=1
    )
    assert data["card"]["agreement"]["unscored"] > 0
    assert data["card"]["coverage"] < 0.95
    assert any(alarm.startswith("leaves ") and "of the items unscored" in alarm for alarm in data["card"]["alarms"])
    assert data["card"]["agreement"]["accuracy"] > 0.9  # of those it judged


@pytest.mark.slow
def test_judge_with_low_coverage_does_not_replace_its_parent(tmp_path: Path) -> None:
    """With letters it answers a few items, all of them rightly; with words all, less well."""

    def script(request: Any) -> Any:
        odds, text = feels(request, lean=0.0), str(request.messages[-1].text)
        if "A" in odds:
            return odds if re.search("[05]$", text.rstrip('"')) else {"unsure": 1.0}
        return (
            odds
            if not text.rstrip('"').endswith(("1", "2", "3", "4"))
            else {"negative": 0.4, "neutral": 0.3, "positive": 0.3}
        )

    data = compiled(tmp_path, PointwiseJudge(MOODS, shows=["output"]), moods(), script)
    best = max(data["candidates"], key=lambda candidate: candidate["agreement"] or -1)
    assert best["unscored"] > 0.5 * best["n"]
    assert "letters" in best["name"]
    assert "letters" not in data["winner"]
    assert data["card"]["agreement"]["unscored"] == 0


@pytest.mark.slow
def test_demonstrations_carry_over_to_other_judge_kinds(tmp_path: Path) -> None:
    taught = PointwiseJudge(MOODS, shows=["task_input", "output"])
    taught.decide.demos = [{"output": "fine", "verdict": "neutral"}]
    taught.decide.signature = taught.decide.signature.with_instructions("Look at the adjectives.")
    prompts: list[str] = []

    def script(request: Any) -> Any:
        prompts.append("\n".join(str(message.text) for message in request.messages) + str(request.system))
        return feels(request)

    path = assay.compile_judge(
        taught, labels=write(tmp_path / "l.jsonl", [{**row, "input": "q"} for row in moods()]),
        lm=scripted_lm(script, logprobs=True),
        store=tmp_path / ".assay" / "a.db", optimizer="calibrate",
    ).artifact  # fmt: skip
    prompts.clear()
    compiled(tmp_path, str(path), moods(), script, optimizer="calibrate", cache=False)  # labels without an input
    assert all('"fine"' in prompt and "Look at the adjectives." in prompt for prompt in prompts)
    prompts.clear()
    cascade = Cascade(taught, PointwiseJudge({**MOODS, "text": "The strong one?"}, shows=["output"]), least=0.95)
    compiled(tmp_path, cascade, [{**row, "input": "q"} for row in moods()], script, cache=False)
    assert all('"fine"' in prompt for prompt in prompts if "strong one" not in prompt)


def test_items_keep_their_split_when_items_are_added() -> None:
    def splits(count: int) -> dict[str, set[str]]:
        items = make_items([("w", row) for row in moods(count)], labels=MOODS["scale"])
        splits = split_items(items)
        return {name: {item.id for item in getattr(splits, name)} for name in ("train", "val", "gate", "test")}

    few, many = splits(120), splits(240)
    assert all(few[name] <= many[name] for name in few)
