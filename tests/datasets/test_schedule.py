"""The order of the tasks of a curriculum: stages, promotion, replay, resuming."""

import json
import math
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from assay.datasets import Task
from assay.datasets.curriculum import Curriculum, Stage
from assay.datasets.schedule import Schedule, promotion_score


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


def test_a_stage_is_passed_at_its_val_score_and_not_below() -> None:
    lines: list[str] = []
    schedule = made(A, B, say=lines.append)
    schedule.tasks_of_step(0, 2)
    assert not schedule.scored(0.79, 1)
    assert schedule.stage is A
    assert ids(schedule.val_tasks(2)) == ["a-val0", "a-val1"]
    assert schedule.scored(0.8, 2)
    assert schedule.stage is B
    assert lines == ["curriculum, step 2: stage 'a': val 0.800 reaches 0.8; continuing with stage 'b'"]
    assert schedule.scored(1.0, 3)
    assert schedule.complete
    assert schedule.stage is B
    assert not schedule.scored(1.0, 4)


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


def test_a_limit_ends_a_stage_that_is_not_passed_but_never_the_last_one() -> None:
    lines: list[str] = []
    shares = {"a": 0.25, "b": 0.3, "c": 0.1}  # of 8 steps: 2, 2, 1
    schedule = made(*(Stage(name=name, max_share=share) for name, share in shares.items()), steps=8, say=lines.append)
    schedule.tasks_of_step(0, 2)
    schedule.scored(0.3, 1)
    names = [schedule.stage.name for step in range(1, 8) if schedule.tasks_of_step(step, 2)]
    assert names == ["a", "b", "b", "c", "c", "c", "c"]
    assert "limit reached without promotion at 0.8; its best val score is 0.300; continuing with stage 'b'" in lines[0]
    assert "never scored" in lines[1]
    assert [row["status"] for row in schedule.report()["stages"]] == ["not passed", "not passed", "not passed"]
    assert len(schedule.notes()) == 3
    assert schedule.scored(0.9, 8)
    assert schedule.report()["stages"][2]["status"] == "passed"


def test_replay_draws_the_given_share_from_earlier_stages() -> None:
    schedule = made(A, B, C)
    schedule.tasks_of_step(0, 2)
    assert not any(entry.replayed for entry in schedule.order)  # there is no earlier stage
    schedule.scored(1.0, 1)
    for step in range(1, 101):
        schedule.tasks_of_step(step, 10)
    replayed = [entry for entry in schedule.order if entry.replayed]
    # 1000 draws with probability 0.5: 500 with a standard deviation of 16
    assert 430 < len(replayed) < 570
    assert {entry.stage for entry in replayed} == {"a"}
    schedule.scored(1.0, 101)
    schedule.tasks_of_step(101, 50)
    assert {entry.stage for entry in schedule.order[-50:]} == {"c"}


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
