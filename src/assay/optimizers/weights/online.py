"""Rows for a policy gradient from rollouts that are made now: programs run under the weights as they are, and are scored at once."""

import functools
import json
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import dspy
import numpy as np

from assay.datasets import Task
from assay.datasets.tasks import content_hash
from assay.errors import Diverged, Unscored
from assay.models.limits import limited
from assay.optimizers.weights.advantages import ValueMemory, add_hidden, assign_credit
from assay.optimizers.weights.base import Policy
from assay.optimizers.weights.config import PolicyConfig
from assay.optimizers.weights.engines import Crew, PolicyEngine, Run
from assay.optimizers.weights.rows import Tally, Trajectory, trajectory_of
from assay.optimizers.weights.validation import Bench
from assay.programs import program_version
from assay.programs.agent import WRITTEN_DECISIONS
from assay.rubrics import Rubric
from assay.traces import Rollout
from assay.traces.dialects import chat_messages
from assay.traces.records import subject_digest

__all__ = ["Rollouts", "job_of"]


class Rollouts:
    """A source of rows: groups of rollouts of a program on tasks, made by the engine. `items` is how many tasks there are."""

    def __init__(
        self, bench: Bench, tasks: Sequence[Task], config: PolicyConfig, engine: PolicyEngine, *, watching: Rubric | None = None
    ) -> None:  # fmt: skip
        self.bench, self.tasks, self.config, self.engine, self.watching = bench, list(tasks), config, engine, watching
        self.tally, self.memory = Tally(), ValueMemory()
        self.of_what, self.items = "tasks", len(self.tasks)
        self.prompts: list[list[dict[str, Any]]] = []
        self.job = {**job_of(bench, self.tasks), "watching": watching.version if watching is not None else None}

    def made_from(self) -> dict[str, Any]:
        """What the adapter remembers of its data: hashes of the people whose tasks it was trained on."""
        people = {subject_digest(str(task.metadata["data_subject"])) for task in self.tasks if task.metadata.get("data_subject")}
        return {"people": sorted(people)}

    def begin(self, trainer: Any, policy: Policy) -> list[str]:
        """Called once before the first step; what there is to be noted."""
        return []

    def collect(self, inputs: list[dict[str, Any]], trainer: Any) -> Any:
        """Rows of this process's share of a step: its rollouts, their credit over all processes, and what is told of them."""
        from assay.optimizers.weights.trainer import Batch, over_ranks

        clock = time.perf_counter()
        self.engine.sync(trainer)
        step, session = trainer.state.global_step, self.bench.session
        first, run_id = trainer.accelerator.process_index * len(inputs), over_ranks([session.recorder.run_id])[0]
        runs: list[Run] = []
        for at, given in enumerate(inputs):
            student = self.bench.student.another(step * self.config.num_generations + (first + at) % self.config.num_generations)
            student.group = f"{run_id}/{step}"
            runs.append((student, self.tasks[given["index"]]))
        synced = time.perf_counter()
        with session.recorder.within(f"step {step}"), session.phase("train"), dspy.context(**{WRITTEN_DECISIONS: True}):
            found = self.engine.play(runs, session)
        self.tally.spend("sync", synced - clock)
        self.tally.spend("rollouts", time.perf_counter() - synced)
        batch = self._trajectories(found, trainer._tokenizer)
        if self.config.value == "head":
            add_hidden(batch, trainer.hidden_of)
        world = over_ranks([one.without_rows() for one in batch])
        if not world:
            raise Diverged(f"no rollout of a whole step could be scored: {dict(self.tally.left_out)}")
        self.prompts = [chat_messages(one._rollout.transitions[0].request) for one in found if one is not None and one._rollout.transitions][:4]
        credit = assign_credit(world, self.config, self.memory)
        rows, flat = credit.given_to(batch, self.tally.left_out)
        self.tally.rollouts += len(runs)
        self.tally.calls += len(rows)
        rollouts = over_ranks([_told(prediction._rollout) for prediction in found if prediction is not None])
        passed = len(rows) + (len(flat) if self.config.beta else 0)  # through the model
        told = {
            **_numbers(world, rollouts),
            "flat_groups": credit.flat / max(1, credit.groups),
            "explained_variance": credit.explained,
            "rows": float(sum(over_ranks([passed]))),
        }
        if self.watching is not None:
            with session.phase("train"):
                told["watched"] = _mean([value for part in over_ranks([self._watched(found)]) for value in part])
        self._sample(step, found, credit.advantages)
        return Batch(rows, flat, {name: value for name, value in told.items() if math.isfinite(value)})

    def _trajectories(self, found: Sequence[Any], tokenizer: Any) -> list[Trajectory]:
        """Of the scored rollouts; the others are counted."""
        left, kept, backend = self.tally.left_out, list[Trajectory](), self.engine.lm.recording.backend
        for prediction in found:
            if prediction is None:
                left[f"rollouts given up after {self.config.rollout_timeout_s:g} s"] += 1
                continue
            try:
                one = trajectory_of(
                    prediction._rollout, tokenizer, ours=lambda call: call.model == self.config.model and call.adapters == backend.adapters,
                    max_length=self.config.max_length, behaviour=self.engine.behaviour, step_weight=self.config.step_weight,
                    outcome_weight=self.config.outcome_weight, left=left,
                )  # fmt: skip
            except Unscored:
                left[f"rollouts without a score ({(prediction._rollout.error or 'the rubric could not decide')[:120]})"] += 1
                continue
            kept.append(one)
        return kept

    def _watched(self, found: Sequence[Any]) -> list[float]:
        """Scores of the rollouts by the rubric that is not trained on; NaN where it could not decide, or took too long."""
        session, watching = self.bench.session, self.watching
        assert watching is not None

        def score(prediction: Any) -> float:
            task = session.tasks.get(content_hash(prediction._rollout.inputs))
            if task is None:
                return math.nan
            return watching.score(task, getattr(prediction, "_failed", None) or prediction, prediction._rollout).value

        with session.context(), limited(session.task_timeout):
            calls = [functools.partial(score, prediction) for prediction in found if prediction is not None]
            scores = Crew(calls, session.threads, self.config.rollout_timeout_s).finished(self.engine.stop)
        return [math.nan if one is None else one for one in scores]

    def _sample(self, step: int, found: Sequence[Any], advantages: Mapping[str, list[float]]) -> None:
        """Keeps one rollout of every so many steps, and of the last, as it was, for people."""
        if not self.config.samples_every or not any(found) or (step % self.config.samples_every and step < self.config.steps - 1):
            return
        rollout: Rollout = next(prediction for prediction in found if prediction is not None)._rollout
        calls = [{"t": call.t, "output": call.output, "rewards": call.step_rewards} for call in rollout.transitions]
        told = {"step": step, "inputs": rollout.inputs, "score": rollout.score, "calls": calls, "advantages": advantages.get(rollout.id)}
        self.tally.samples.append(told)


def job_of(bench: Bench, tasks: Sequence[Task]) -> dict[str, Any]:
    """What identifies a training: it is resumed only with the same."""
    student, rubric = bench.student, bench.session.rubric
    return {
        "program": f"{bench.name}@{program_version(student.program, student.settings['adapter'])}", "parameters": student.settings,
        "rubric": f"{rubric.name}@{rubric.version}", "data": [task.content_hash for task in tasks],
    }  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    """Of those that are numbers; NaN where none is."""
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


def _told(rollout: Rollout) -> dict[str, Any]:
    """What the numbers of a step are made of, of one rollout."""
    return {
        "group": rollout.group_id, "score": rollout.score, "answer": json.dumps(rollout.prediction, sort_keys=True, default=str),
        "grades": {v.criterion: v.grade for v in rollout.verdicts if v.grade is not None and v.scope == "final"},
        "tokens": [t.completion_tokens or 0 for t in rollout.transitions], "failed": rollout.status != "done",
        "cut": [(t.response or {}).get("finish_reason") == "length" for t in rollout.transitions],
    }  # fmt: skip


def _numbers(world: Sequence[Trajectory], rollouts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of a step, over all processes: returns, scores, criteria, step rewards by turn, diversity, lengths."""
    totals = [math.fsum(one.rewards) for one in world]
    found = {"reward": float(np.mean(totals)) if totals else math.nan, "reward_std": float(np.std(totals)) if totals else math.nan}
    by_turn: dict[int, list[float]] = defaultdict(list)
    for one in world:
        for turn, reward in enumerate(one.rewards):
            by_turn[turn].append(reward)
    found |= {f"turn_reward/{turn}": float(np.mean(values)) for turn, values in by_turn.items() if turn < 12}
    grades: dict[str, list[float]] = defaultdict(list)
    answers: dict[str, list[str]] = defaultdict(list)
    for told in rollouts:
        for name, grade in told["grades"].items():
            grades[name].append(grade)
        answers[told["group"]].append(told["answer"])
    found |= {f"criteria/{name}": float(np.mean(values)) for name, values in grades.items()}
    scores = [told["score"] for told in rollouts if told["score"] is not None]
    calls = [count for told in rollouts for count in told["tokens"]]
    cut = [one for told in rollouts for one in told["cut"]]
    found["score"] = _mean(scores)
    found["distinct"] = float(np.mean([len(set(said)) / len(said) for said in answers.values()])) if answers else math.nan
    found["turns"] = len(calls) / max(1, len(rollouts))
    found["tokens"] = float(np.mean(calls)) if calls else math.nan
    found["cut_off"] = float(np.mean(cut)) if cut else 0.0
    found["failed"] = float(np.mean([told["failed"] for told in rollouts])) if rollouts else math.nan
    return found
