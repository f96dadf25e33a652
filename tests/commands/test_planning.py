"""`--dry-run`: estimates of each command, and how an improvement divides its caps among steps, gates and the test."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

import assay
from assay.commands.compile import Compile
from assay.commands.evaluate import Evaluate
from assay.commands.improve import Improve
from assay.errors import DataError
from assay.jobs.planning import plan_of
from assay.models import Caps
from assay.models.meter import Usage
from assay.optimizers.budget import ImprovePlan, ReportPlan, StepPlan, training_runs
from assay.optimizers.finetuning.settings import PolicySettings
from assay.testing import scripted_lm
from rigs.command_line import assay_command
from rigs.projects import sums, write_project, write_rows

PROGRAM = "mine.py:Mine"
MODEL = {"model": "openai/gpt-4o-mini"}


@pytest.fixture
def job(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    return write_project(100)


def four() -> Any:
    return scripted_lm(lambda request: json.dumps({"answer": "4"}))


def dry_run(command: str, *flags: str) -> Any:
    arguments = ["--rubric", "r.yaml", "--data", "data.jsonl", "--model", MODEL["model"], "--dry-run", "--json"]
    return assay_command(command, PROGRAM, *arguments, *flags).report


def test_estimates_match_hand_calculation_and_minutes_come_from_the_store(job: dict[str, Any]) -> None:
    lm = four()
    job |= {"lm": lm, "prompt_format": "json", "sizes": {"val": 8}}
    assert plan_of(Evaluate(PROGRAM, **job, samples=2)).minutes is None
    assert lm.scripted.calls == 0
    assay.evaluate(PROGRAM, **job)
    estimate = plan_of(Evaluate(PROGRAM, **job, samples=2))
    assert estimate.calls == 16  # 2 runs of 8 tasks, a call each
    assert estimate.minutes is not None
    assert 0 < estimate.minutes < 1
    assert plan_of(Compile(PROGRAM, **job, max_calls=50)).calls == 50


def test_a_job_with_too_few_tasks_is_refused_as_without_dry_run(job: dict[str, Any]) -> None:
    write_rows("data.jsonl", sums(3))
    with pytest.raises(DataError, match=r"3 distinct tasks.*at least 4") as ran:
        assay.compile(PROGRAM, lm=four(), **job)
    for command in (Compile(PROGRAM, lm=four(), **job), Improve(PROGRAM, name="better", **job)):
        with pytest.raises(DataError) as planned:
            plan_of(command)
        assert str(planned.value) == str(ran.value)


def test_repeated_and_contradicting_rows_are_named_with_and_without_dry_run(job: dict[str, Any]) -> None:
    more = [{"question": "What is 5 + 2?", "answer": "7"}, {"question": "What is 6 + 2?", "answer": "9"}]
    write_rows("data.jsonl", [{"row": at, **row} for at, row in enumerate([*sums(100), *more])])
    planned = json.dumps(dry_run("evaluate"))
    assert "data.jsonl:101 " in planned
    assert "data.jsonl:102 " in planned
    report = assay.evaluate(PROGRAM, lm=four(), prompt_format="json", sizes={"val": 8}, **job)
    repeated = report.to_dict()["data"]["repeated"]
    assert (repeated["count"], repeated["contradictions"]) == (2, 1)
    assert any("data.jsonl:102 " in note for note in report.notes)


@pytest.mark.parametrize(
    ("check", "others", "contradictions"),
    [
        ("exact", ["OTHER", "Other ", "other"], 0),
        ("fields_match", ["OTHER", "else"], 1),
        ("exact, with: {case: true}", ["OTHER", "other"], 1),
        ("contains, with: {text: other}", ["OTHER", "other"], 1),  # it compares no expected value
        ("exact", [3, "3.0"], 2),
    ],
)
def test_rows_contradict_each_other_only_where_the_check_tells_them_apart(
    job: dict[str, Any], check: str, others: list[Any], contradictions: int
) -> None:
    Path("r.yaml").write_text(f"name: r\ncriteria:\n- {{name: right, check: {check}}}\n")
    job["data"] = [{"question": f"What is {at}?", "answer": "other"} for at in range(30)]
    job["data"] += [{"question": "What is 5?", "answer": other} for other in others]
    report = assay.evaluate(PROGRAM, lm=four(), prompt_format="json", sizes={"val": 2}, **job)
    assert report.to_dict()["data"]["repeated"]["contradictions"] == contradictions


# -- improvements


def test_improve_estimate_includes_training_calls(job: dict[str, Any]) -> None:
    def calls(*flags: str) -> int:
        return int(dry_run("improve", "--grpo", "model=embedded/smollm2-135m", "--name", "up", *flags)["calls"])

    compiled = plan_of(Compile(PROGRAM, **job, **MODEL))
    assert calls("--order", "prompts") == compiled.calls  # one search, one gate, one test
    few, more = calls("--order", "grpo", "--grpo", "steps=2"), calls("--order", "grpo", "--grpo", "steps=7")
    assert more - few == 5 * 4 * 6
    held_out = min(16, compiled.sizes["val"])
    assert calls("--order", "grpo,grpo", "--grpo", "steps=2") - few > 2 * 4 * 6 + 2 * 2 * held_out  # and a gate
    assert calls("--order", "grpo", "--grpo", "steps=7", "--max-calls", "100") == 100


def test_improve_plan_divides_caps_among_steps(job: dict[str, Any]) -> None:
    grpo = {"model": "embedded/smollm2-135m", "steps": 1, "prompts_per_step": 2, "num_generations": 10}

    def planned(**changed: Any) -> Any:
        options = {**job, **MODEL, "sizes": {"gate": 10, "test": 10}, "order": ["prompts", "grpo"], "max_calls": 200}
        return plan_of(Improve(PROGRAM, name="up", **options, grpo={**grpo, "evaluate_every": 0, **changed}))

    estimate = planned()
    assert estimate.to_dict()["steps"] == [  # 200 less 60
        {"step": "prompts", "calls": 300, "share": 120},
        {"step": "grpo", "calls": 20, "share": 20},
    ]
    assert (
        "steps: 1 prompts, 120 of about 300 calls; 2 grpo, about 20 calls. Up to 20 calls for the gate of each, "
        "20 for the sealed test"
    ) in estimate.lines()
    estimate = planned(steps=10)
    assert estimate.to_dict()["steps"][1] == {"step": "grpo", "calls": 200, "share": None}
    assert any(line.startswith("warning: 1 of the 2 steps fit the caps: step 2, grpo") for line in estimate.lines())


SEARCH = StepPlan(step="prompts", runs=300, least=10)
TRAINING = StepPlan(step="grpo", runs=100, least=100)


def divided(*steps: StepPlan, gate: int = 10, test: int = 10, **pair: Any) -> ImprovePlan:
    return ImprovePlan(report=ReportPlan(gate=gate, test=test, pair=Usage(**{"calls": 2, **pair})), steps=steps)


def test_gates_and_test_are_reserved_and_steps_share_the_remaining_budget() -> None:
    plan = divided(SEARCH, SEARCH)
    assert plan.shares(Caps(calls=200)) == [70, 70]  # 200 less two gates of 20 and a test of 20, halved
    turn = plan.turn(0, Caps(calls=200), 200)
    assert (turn.end, turn.work, turn.reserved) == (2, 70, 20 + 20 + 20 + 70)
    # while its gate runs: the second gate, the test, and the minimum with which the second step starts
    assert turn.after == 20 + 20 + 10
    # the first searched with 10 calls, and its gate took 20
    assert plan.turn(1, Caps(calls=200), 200 - 10 - 20).work == 170 - 20 - 20
    tokens = divided(SEARCH, SEARCH, prompt_tokens=20)  # 10 tokens a run: the tightest cap decides
    assert tokens.shares(Caps(calls=10_000, tokens=2000)) == [70, 70]
    assert tokens.remaining(Caps(calls=10_000, tokens=2000), Usage(calls=5, prompt_tokens=100)) == 190


def test_training_is_started_only_if_all_of_its_runs_fit() -> None:
    plan = divided(SEARCH, TRAINING)
    assert plan.shares(Caps()) == [300, 100]
    assert plan.runs == 300 + 100 + 20 + 20 + 20
    assert plan.shares(Caps(calls=200)) == [200 - 60 - 100, 100]
    assert plan.shares(Caps(calls=150)) == [150 - 40]  # the gate of a step that does not fit is not kept
    assert divided(TRAINING).shares(Caps(calls=100)) == []
    stored = ImprovePlan.of(json.loads(json.dumps(asdict(plan))))  # for the next process
    assert stored.shares(Caps(calls=200)) == plan.shares(Caps(calls=200))


STEPS = st.lists(st.sampled_from([SEARCH, TRAINING, StepPlan(step="sft", runs=40, least=10)]), min_size=1, max_size=4)


@given(STEPS, st.integers(0, 3000), st.integers(1, 40), st.integers(1, 40))
def test_steps_that_fit_at_the_start_are_started_whatever_earlier_steps_use(
    steps: list[StepPlan], cap: int, gate: int, test: int
) -> None:
    plan, caps = divided(*steps, gate=gate, test=test), Caps(calls=cap)
    first, shares = plan.turn(0, caps, cap), plan.shares(caps)
    if first.work >= steps[0].least:
        assert len(shares) >= first.end
    remaining = float(cap)
    for at, share in enumerate(shares):
        turn = plan.turn(at, caps, remaining)
        assert steps[at].least <= share <= turn.work
        remaining -= share + 2 * turn.report.gate
        assert remaining >= 2 * turn.report.test - 1e-6  # the sealed test is still there


def test_runs_of_a_training_match_hand_calculation() -> None:
    # evaluated before step 1 and after steps 10, 20 and 30
    assert training_runs(PolicySettings(), val=50) == 30 * 4 * 6 + 4 * 2 * 16
    short = PolicySettings(steps=5, prompts_per_step=2, num_generations=3, iterations=2, evaluate_every=4, eval_tasks=8)
    # sampled before steps 1, 3 and 5; evaluated at 0, 4 and 5
    assert training_runs(short, val=6, retained=1) == 3 * 2 * 3 + 3 * 3 * 6
    assert training_runs(PolicySettings(steps=5, evaluate_every=0), val=6) == 5 * 4 * 6
