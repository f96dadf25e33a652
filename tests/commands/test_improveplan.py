"""How an improvement divides its caps among steps, gates and the sealed test."""

import json
from dataclasses import asdict
from typing import Any

from hypothesis import given, strategies as st

from assay.models import Caps
from assay.models.meter import Usage
from assay.optimizers.budget import ImprovePlan, ReportPlan, StepPlan, training_runs
from assay.optimizers.finetuning.settings import PolicySettings

SEARCH = StepPlan(step="prompts", runs=300, least=10)
TRAINING = StepPlan(step="grpo", runs=100, least=100)


def planned(*steps: StepPlan, gate: int = 10, test: int = 10, **pair: Any) -> ImprovePlan:
    return ImprovePlan(report=ReportPlan(gate=gate, test=test, pair=Usage(**{"calls": 2, **pair})), steps=steps)


def test_gates_and_test_are_reserved_and_searches_share_the_remaining_budget() -> None:
    plan = planned(SEARCH, SEARCH)
    assert plan.shares(Caps(calls=200)) == [70, 70]  # 200 less two gates of 20 and a test of 20, halved
    turn = plan.turn(0, Caps(calls=200), 200)
    assert (turn.end, turn.work, turn.reserved) == (2, 70, 20 + 20 + 20 + 70)
    assert (
        turn.after == 20 + 20 + 10
    )  # while its gate runs: the second gate, the test, and the minimum with which the second step starts


def test_unused_budget_of_a_step_goes_to_later_steps() -> None:
    plan = planned(SEARCH, SEARCH)
    turn = plan.turn(1, Caps(calls=200), 200 - 10 - 20)  # the first searched with 10 calls, and its gate took 20
    assert turn.work == 170 - 20 - 20


def test_training_is_started_only_if_all_of_its_runs_fit() -> None:
    plan = planned(SEARCH, TRAINING)
    assert plan.shares(Caps(calls=200)) == [200 - 60 - 100, 100]
    assert plan.shares(Caps(calls=150)) == [150 - 40]  # the gate of a step that does not fit is not kept
    assert (
        "1 of the 2 steps fit the caps: step 2, grpo, is started only where 100 calls are left"
        in plan.lines(Caps(calls=150))[-1]
    )
    assert planned(TRAINING).shares(Caps(calls=100)) == []


def test_without_caps_every_step_gets_its_requested_runs() -> None:
    plan = planned(SEARCH, TRAINING)
    assert plan.shares(Caps()) == [300, 100]
    assert plan.runs == 300 + 100 + 20 + 20 + 20
    assert plan.lines(Caps())[0] == (
        "steps: 1 prompts, about 300 calls; 2 grpo, about 100 calls. Up to 20 calls for the gate of each, 20 for "
        "the sealed test"
    )


def test_the_tightest_cap_decides() -> None:
    plan = planned(SEARCH, SEARCH, prompt_tokens=20)  # 10 tokens a run
    assert plan.shares(Caps(calls=10_000, tokens=2000)) == [70, 70]
    assert plan.remaining(Caps(calls=10_000, tokens=2000), Usage(calls=5, prompt_tokens=100)) == 190


def test_a_stored_plan_is_reused_by_the_next_process() -> None:
    plan = planned(SEARCH, TRAINING)
    assert ImprovePlan.of(json.loads(json.dumps(asdict(plan)))).shares(Caps(calls=200)) == plan.shares(Caps(calls=200))


STEPS = st.lists(st.sampled_from([SEARCH, TRAINING, StepPlan(step="sft", runs=40, least=10)]), min_size=1, max_size=4)


@given(STEPS, st.integers(0, 3000), st.integers(1, 40), st.integers(1, 40))
def test_steps_that_fit_at_the_start_are_started_whatever_earlier_steps_use(
    steps: list[StepPlan], cap: int, gate: int, test: int
) -> None:
    plan, caps = planned(*steps, gate=gate, test=test), Caps(calls=cap)
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
    assert (
        training_runs(PolicySettings(), val=50) == 30 * 4 * 6 + 4 * 2 * 16
    )  # evaluated before step 1 and after steps 10, 20 and 30
    short = PolicySettings(steps=5, prompts_per_step=2, num_generations=3, iterations=2, evaluate_every=4, eval_tasks=8)
    assert (
        training_runs(short, val=6, retained=1) == 3 * 2 * 3 + 3 * 3 * 6
    )  # sampled before steps 1, 3 and 5; evaluated at 0, 4 and 5
    assert training_runs(PolicySettings(steps=5, evaluate_every=0), val=6) == 5 * 4 * 6
