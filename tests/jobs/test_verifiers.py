"""Judges as verifiers of refinement: which are accepted, and how their calls are recorded."""

import json
from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.datasets import Task
from assay.errors import ConfigError
from assay.programs import Refine
from assay.rubrics.conversations import judged_turn
from assay.testing import scripted_lm
from assay.traces import Rollout, Transition

SPLITS = ("train", "val", "gate", "test")


def compiled(folder: Path, agrees: bool) -> Path:
    """A judge compiled on labels that follow the word `good`, or that it cannot know."""
    rows = [
        {
            "item_id": str(at),
            "output": f"{'good' if at // 4 % 2 else 'poor'} text {at}",
            "rater": "r",
            "label": "yes" if (at // 4 if agrees else at // 8) % 2 else "no",
            "split": SPLITS[at % 4],
        }
        for at in range(96)
    ]
    (folder / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "judge.yaml").write_text("name: good\ntext: Is it good?\nscale: [no, yes]\nshows: [output]\n")
    lm = scripted_lm(verdict, logprobs=True)
    report = assay.compile_judge(
        str(folder / "judge.yaml"),
        labels=str(folder / "labels.jsonl"),
        lm=lm,
        out=folder / "artifact",
        store=folder / "a",
    )
    return report.artifact


def verdict(request: Any) -> Any:
    p = 0.9 if "good text" in str(request.messages[-1].text) else 0.2
    return {"yes": p, "no": 1 - p}


@pytest.mark.parametrize(
    ("shows", "seen"), [(["output"], {"Which day?"}), (["earlier", "output"], {"Which day?", "Hi"})]
)
def test_a_judge_of_a_turn_sees_what_it_shows_and_not_the_reaction(
    tmp_path: Path, shows: list[str], seen: set[str]
) -> None:
    prompts: list[str] = []

    def reply(request: Any) -> Any:
        prompts.append(str(request.messages[-1].text))
        return {"yes": 0.8, "no": 0.2}

    path = tmp_path / "judge.yaml"
    path.write_text(f"name: polite\ntext: Is it polite?\nscale: [no, yes]\nshows: {json.dumps(shows)}\n")
    check = judged_turn(assay.load_verifier(str(path), lm=scripted_lm(reply, logprobs=True)))
    texts = (("user", "Hi"), ("agent", "Which day?"), ("user", "Rather late."))
    messages = [{"role": role, "content": text} for role, text in texts]
    rollout = Rollout(prediction={"messages": messages, "turn_calls": [[0, 1]]})
    rollout.transitions = [Transition(t=0, model="m", request={})]
    task = Task(id="t", inputs={"service": "tables"})
    assert check(task, {"transition": rollout.transitions[0]}, rollout).value > 0.5
    assert prompts
    assert {text for _, text in texts if any(text in prompt for prompt in prompts)} == seen


@pytest.mark.slow
def test_a_compiled_judge_that_agrees_with_people_verifies_and_is_recorded_apart(tmp_path: Path) -> None:
    verifier = assay.load_verifier(compiled(tmp_path, agrees=True), lm=scripted_lm(verdict, logprobs=True))
    answers = iter(["poor text", "good text"])
    refine = Refine(dspy.Predict("question -> output"), verifier, halt_at=0.5)
    refine.set_parameters({"reasoning_depth": 10})
    lm = scripted_lm(lambda request: json.dumps({"output": next(answers)}))

    def right(task: Any, prediction: dict[str, Any], rollout: Any) -> bool:
        return len(rollout.transitions) == 2 and prediction["output"] == "good text"

    with dspy.context(lm=lm):
        result = assay.evaluate(
            refine,
            rubric=assay.Rubric("r", [assay.Criterion(name="right", check=right)]),
            data=[dspy.Example(question="why?", split="test").with_inputs("question")],
            store=tmp_path / "b.db",
            split="test",
            preflight=False,
        )
    assert result.to_dict()["result"]["score"] == 1.0
    with assay.Store(tmp_path / "b.db") as store:
        sources = [rollout.source for rollout in store.rollouts(limit=None)]
    assert sources.count("judge") == 2


@pytest.mark.slow
def test_a_compiled_judge_without_agreement_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="shows no agreement with raters"):
        assay.load_verifier(folder := compiled(tmp_path, agrees=False))
    with pytest.raises(ConfigError, match="shows no agreement with raters"):  # the card belongs to the object too
        assay.load_verifier(assay.load_judge(folder))


def test_judges_that_cannot_verify_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pairs.yaml").write_text("name: better\ntext: Which is better?\ncompare: pairs\n")
    with pytest.raises(ConfigError, match="compares outputs"):
        assay.load_verifier(tmp_path / "pairs.yaml")


def test_a_verifier_without_a_model_does_not_decide() -> None:
    verifier = assay.load_verifier("Is it good?")
    refine = Refine(dspy.Predict("question -> output"), verifier)
    with dspy.context(lm=scripted_lm(lambda request: json.dumps({"output": "x"}))):
        assert refine(question="why?").rounds[0]["probability"] is None
