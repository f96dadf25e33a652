"""The order of the tasks of a curriculum: stages, promotion, replay, resuming."""

import json
import math
from pathlib import Path
from typing import Any

from hypothesis import given, settings, strategies as st

from assay.datasets import Task
from assay.datasets.curriculum import Curriculum, Schedule, Stage, promotion_score


def made(*stages: Stage, steps: int | None = None, seed: int = 0, of: int = 5, say: Any = None) -> Schedule:
    curriculum = Curriculum(name="c", stages=stages, source="c.yaml", sha256="x")
    train, val = (
        {s.name: [Task(id=f"{s.name}-{split}{i}", inputs={"q": i}) for i in range(of)] for s in stages}
        for split in ("train", "val")
    )
    return Schedule(curriculum, train, val, Path("c.json"), seed=seed, steps=steps, say=say or (lambda _: None))


A, B, C = Stage(name="a"), Stage(name="b", replay=0.5), Stage(name="c", replay=0.0)


def ids(tasks: list[Task]) -> list[str]:
    return [task.id for task in tasks]


def test_each_task_of_a_stage_is_drawn_once_before_any_repeats() -> None:
    schedule = made(A, B)
    drawn = [task for step in range(5) for task in ids(schedule.tasks_of_step(step, 2))]
    assert sorted(drawn[:5]) == sorted(drawn[5:]) == [f"a-train{i}" for i in range(5)]
    assert drawn != [task for step in range(5) for task in ids(made(A, B, seed=1).tasks_of_step(step, 2))]


def test_an_unscored_stage_is_not_passed_and_its_score_is_no_number() -> None:
    schedule = made(A, B)
    assert not schedule.scored(math.nan, 1)
    assert schedule.events[0].score is None
    assert "not scored on val" in schedule.notes()[0]
    json.dumps(schedule.report(), allow_nan=False)


def test_a_promotion_score_is_unknown_if_more_than_a_fifth_is_unscored() -> None:
    assert promotion_score([1.0, 0.5, 0.5, 0.0, math.nan]) == 0.5
    assert math.isnan(promotion_score([1.0, 1.0, 1.0, math.nan]))
    assert math.isnan(promotion_score([math.nan]))
    assert math.isnan(promotion_score([]))


def test_a_whole_stage_has_all_its_tasks_and_the_share_of_replays() -> None:
    schedule = made(A, Stage(name="b", replay=0.2), of=8)
    assert len(schedule.whole_stage(0)) == 8
    schedule.scored(1.0, 1)
    tasks = ids(schedule.whole_stage(1))
    assert sum(name.startswith("b") for name in tasks) == 8
    assert sum(name.startswith("a") for name in tasks) == 2  # 2 of 10 are 20 %


@settings(max_examples=40, deadline=None)
@given(
    scores=st.lists(st.sampled_from([0.1, 0.9, math.nan]), min_size=8, max_size=8),
    stop=st.integers(0, 7),
    again=st.booleans(),
)
def test_a_resumed_run_draws_the_same_tasks(scores: list[float], stop: int, again: bool) -> None:
    stages = (Stage(name="a", max_share=0.4), B, C)

    def step(schedule: Schedule, at: int) -> None:
        schedule.tasks_of_step(at, 3)
        schedule.scored(scores[at], at + 1)

    whole, first = made(*stages, steps=8), made(*stages, steps=8)
    for at in range(8):
        step(whole, at)
    for at in range(stop):
        step(first, at)
    if again:  # the step had begun when the process was stopped
        first.tasks_of_step(stop, 3)
    second = made(*stages, steps=8)
    second.restore(json.loads(json.dumps(first.state())))
    for at in range(stop, 8):
        step(second, at)
    assert second.report() == whole.report()


def test_a_curriculum_may_have_one_stage() -> None:
    schedule = made(A)
    schedule.tasks_of_step(0, 2)
    assert schedule.scored(1.0, 1)
    assert schedule.complete
    assert ids(schedule.tasks_of_step(1, 2))
    assert schedule.notes() == []
