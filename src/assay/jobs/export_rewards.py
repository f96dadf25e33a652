"""The reward of a GRPO export."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from assay.errors import DataError
from assay.evaluation.stored import task_of
from assay.jobs.loading import load_rubric
from assay.rubrics import Rubric
from assay.rubrics.loading import RubricSource, importable_name
from assay.rubrics.trl_reward import completion_fields, undecided_checks
from assay.traces import Rollout
from assay.traces.export.selection import Turn


class ExportReward:
    """The reward of a GRPO export, tried on exported answers. `notes` name the checks that it leaves out."""

    def __init__(self, rubric: RubricSource) -> None:
        self.source = importable_name(rubric)
        self.rubric = load_rubric(self.source)
        self.notes: list[str] = []

    def check(self, manifest: Mapping[str, Any], answers: Sequence[tuple[Rollout, Turn]]) -> list[str]:
        """The criteria that the reward leaves out, because their checks decide none of the answers.

        Raises:
            DataError: the reward has nothing left, or an essential criterion is undecided; or it is the same for all
                answers, whose stored scores differ.
        """
        outputs = manifest["columns"]["outputs"]
        seen = [(task_of(rollout), _prediction(turn, outputs)) for rollout, turn in answers]
        undecided = undecided_checks(self.rubric, seen)
        reasons = "; ".join(f"{name!r}: {reason}" for name, reason in undecided.items())
        sees = (
            "A reward sees the completion and the task's columns, not the rollout; of the prediction it has "
            f"{', '.join(outputs) or 'answer'}"
        )
        finals = self.rubric.finals
        needed = [c for c in finals if c.weight > 0 and c.name not in undecided]
        essential = [c for c in finals if c.essential is not None and c.name in undecided]
        if undecided and (essential or not needed):
            raise DataError(
                f"the reward of {self.rubric.name!r} would be unscored on every completion ({reasons}). {sees}. Name a "
                "rubric whose checks read the answer, or train on the rollouts with assay train grpo"
            )
        _require_spread(self.rubric.without(undecided), answers, outputs)
        self.notes = [
            f"criterion {name!r} is not computed by reward.py: its check gave no grade on any of {len(answers)} "
            f"exported answers ({reason}). {sees}. The policy is trained on the score of the other criteria"
            for name, reason in undecided.items()
        ]
        return list(undecided)


def _require_spread(rubric: Rubric, answers: Sequence[tuple[Rollout, Turn]], outputs: Sequence[str]) -> None:
    """Raises `DataError` if a reward is the same for all answers, and their stored scores differ.

    A judge is not asked: its stored grade of the rollout is used. Answers without one are left out.
    """
    scored = [
        (rollout.score, decided.score(task_of(rollout), _prediction(turn, outputs)).value)
        for rollout, turn in answers
        if rollout.score is not None and (decided := _with_stored_grades(rubric, rollout)) is not None
    ]
    stored, rewards = sorted({score for score, _ in scored}), {reward for _, reward in scored}
    if len(stored) > 1 and len({str(value) for value in rewards}) == 1:
        raise DataError(
            f"the reward of {rubric.name!r} is {rewards.pop():g} for each of {len(scored)} exported answers, whose "
            f"stored scores are {stored[0]:g} to {stored[-1]:g}: the completion of one call does not hold what the "
            f"rubric scores ({', '.join(outputs) or 'answer'}). Choose the call whose completion is the answer with "
            "`call=…`, export transitions, or train on the rollouts with assay train grpo"
        )


def _prediction(turn: Turn, outputs: Sequence[str]) -> dict[str, Any]:
    """What the reward reads from the completion of a call."""
    return completion_fields([turn.answer], outputs, prompt=turn.messages)


def _with_stored_grades(rubric: Rubric, rollout: Rollout) -> Rubric | None:
    """The rubric with a rollout's stored grades in place of its judges; None if one of them is not stored."""
    stored = {verdict.criterion: verdict.grade for verdict in rollout.verdicts if verdict.scope == "final"}
    judged = [c.name for c in rubric.finals if c.judge is not None]
    if any(stored.get(name) is None for name in judged):
        return None
    criteria = [
        replace(c, judge=None, check=partial(_stored, grade=stored[c.name])) if c.name in judged else c
        for c in rubric.finals
    ]
    return Rubric(rubric.name, criteria) if judged else rubric


def _stored(task: Any, prediction: Any, *, grade: float | None) -> float | None:
    return grade


def notes_of(reward: ExportReward) -> list[str]:
    """Notes on criteria that `reward.py` leaves out, or computes only with a judge model."""
    rubric = reward.rubric
    judged = [c.name for c in rubric.finals if c.judge is not None and rubric.decider(c.name) is None]
    steps = [c.name for c in rubric.criteria if c.scope == "step"]
    notes = [*reward.notes]
    if judged:
        notes.append(
            "reward.py asks the model named by the environment variable ASSAY_JUDGE_MODEL about "
            f"{', '.join(map(repr, judged))}, and raises without it"
        )
    if steps:
        notes.append(
            "step criteria are graded on recorded rollouts and are not part of reward.py: "
            f"{', '.join(map(repr, steps))}"
        )
    return notes
