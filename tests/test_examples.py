"""Examples that compare print `before` and `after` with the same keys under `--json`; tested here without training."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import dspy
import pytest

import assay
from assay.rubrics import Criterion, Rubric
from assay.testing import scripted_lm

EXAMPLES = Path(__file__).parent.parent / "examples"
METRICS = ["average_confidence", "task_accuracy", "response_quality", "overall_score"]
ROWS = [
    {"question": f"What is {n} + 0?", "answer": str(n), "split": ("train", "val", "gate", "test")[n % 4]}
    for n in range(32)
]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def right(task: Any, prediction: Any, rollout: Any) -> float:
    return float(prediction["answer"] == task.expected["answer"])


def answers(request: Any) -> str:
    number = (request.messages[-1].text or "").split("What is ")[-1].split()[0]
    return (
        f"[[ ## answer ## ]]\n{number}\n\n[[ ## completed ## ]]"
        if request.config.response_format is None
        else json.dumps({"answer": number})
    )


def answers_if_helped(request: Any) -> str:
    """As `answers` where demonstrations or a high temperature help, else wrong."""
    return answers(request) if len(request.messages) > 2 or (request.config.temperature or 0) > 1 else "wrong"


def job(script: Any = answers) -> dict[str, Any]:
    return {"rubric": Rubric("r", [Criterion(name="right", check=right)]), "data": ROWS, "lm": scripted_lm(script)}


def same_keys(report: dict[str, Any], *more: str) -> None:
    assert report["before"].keys() == report["after"].keys() >= {"score", *more}
    assert all(isinstance(report[side]["score"], float) for side in ("before", "after"))
    json.dumps(report)


@pytest.mark.tutorial
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("custom_agent", ["--trials", "5", "--episodes", "2"]),
        ("rl_training_example", ["--episodes", "2"]),
        ("distributed_tuning", ["--workers", "1", "--trials", "4", "--storage", "sqlite:///study.db"]),
    ],
)
def test_examples_that_compare_print_the_same_keys_before_and_after(
    own_folder: Path, name: str, flags: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *flags, "--json"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    same_keys(json.loads(done.stdout), "parameters")


def test_examples_that_compile_or_tune_print_the_same_keys_before_and_after(own_folder: Path) -> None:
    compiled = assay.compile(
        dspy.Predict("question -> answer"), **job(answers_if_helped), optimizer="labeled", out=own_folder / "a"
    ).to_dict()
    same_keys(example("changelog_dates").result(compiled), "right")
    searched = assay.tune(
        dspy.Predict("question -> answer"), **job(answers_if_helped), trials=4, sizes={"val": 4}
    ).to_dict()
    impact = example("parameter_impact_example")
    same_keys(impact.sides(searched), "tokens_per_task", "parameters")
    assert impact.sides(None) == {"before": None, "after": None}


def test_the_example_of_all_steps_compares_the_plain_agent_with_the_trained_one() -> None:
    from assay.optimizers.finetuning.comparison import compared

    plain, trained = (
        assay.evaluate(dspy.Predict("question -> answer"), **job(), split=split).evaluation for split in ("val", "gate")
    )
    pairs = {"compiled, greedy": compared(plain, plain), "compiled, trained, greedy": compared(plain, trained)}
    report = example("math_qa_training").result(pairs, seed=3)
    same_keys(report, "criteria", "tokens_per_task")
    assert report["after"] == pairs["compiled, trained, greedy"]["after"]
    assert report["comparison"] == pairs


# -- fine-tuning from ratings


def sorts(reasoning: str, label: str) -> Any:
    return scripted_lm(lambda request: f"thought: {reasoning}\nlabel: {label}")


def test_before_and_after_of_fine_tuning_are_shown_side_by_side(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuning = example("finetune_from_ratings")
    Path("m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tuning.messages(0)))
    about = {"rubric": "classify", "data": "m.jsonl", "prompt_format": "lean"}
    arguments = tuning.parsed(["--test-size", "8", "--samples", "3"])
    first, second = (
        tuning.evaluated(arguments, {**about, "store": f"{label}/a.db", "lm": sorts(reasoning, label)}, None)
        for reasoning, label in (("[b]no idea", "account"), ("a parcel is late", "delivery"))
    )
    report = {
        **tuning.metrics(*(list(one[0].runs.values()) for one in (first, second))),
        "samples": tuning.samples(first[0], second[0], first[1], second[1], 3),
    }
    assert list(report["before"]) == list(report["after"]) == METRICS
    assert report["before"]["average_confidence"] is None  # the scripted model gives no log-probabilities
    assert report["before"]["task_accuracy"] == first[0].mean
    assert report["after"]["response_quality"] == second[0].mean
    assert len(report["samples"]) == 3
    for sample in report["samples"]:
        assert sample["before"].keys() == sample["after"].keys() == {"answer", "score", "confidence", "reasoning"}
        assert (sample["before"]["answer"], sample["before"]["reasoning"]) == ("account", "[b]no idea")
        assert (sample["after"]["answer"], sample["after"]["reasoning"]) == ("delivery", "a parcel is late")
        assert sample["after"]["score"] == float(sample["expected"] == "delivery")
    facts = {"rated": 4, "kept": 2, "right_among_rated": 0.5, "right_among_kept": 1.0, "rater": "me", "model": "m"}
    tuning.show({**report, **facts, "gain": {"mean": 0.1, "low": -0.1, "high": 0.3}}, 8)
    printed = capsys.readouterr().out
    assert all(name.replace("_", " ") in printed for name in METRICS)
    assert "[b]no idea" in printed  # what a model writes is no markup
