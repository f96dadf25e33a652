"""Rows for on-policy training: runs programs under the current weights and scores their rollouts."""

import functools
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import dspy
import numpy as np

from assay.datasets import Task
from assay.datasets.schedule import Schedule
from assay.errors import Diverged, Unscored
from assay.models.limits import limited
from assay.optimizers.finetuning.advantages import ValueMemory, add_hidden, assign_credit
from assay.optimizers.finetuning.base import Policy
from assay.optimizers.finetuning.comparison import EvalTask
from assay.optimizers.finetuning.engines import PolicyEngine
from assay.optimizers.finetuning.rollout_pool import Run, TimeoutPool
from assay.optimizers.finetuning.rows import RowStats, Trajectory, trajectory_of
from assay.optimizers.finetuning.settings import PolicySettings
from assay.programs import program_version
from assay.programs.agent import WRITTEN_DECISIONS
from assay.programs.foreign.agent import ForeignAgent
from assay.reports.training_log import TrainingLog
from assay.rubrics import Rubric
from assay.rubrics.scoring import ScoredRun
from assay.support.values import json_text
from assay.traces import Rollout
from assay.traces.messages.dialects import chat_messages
from assay.traces.records import subject_digest


class Rollouts:
    """A source of rows: groups of rollouts of a program on tasks, made by the engine. `items` is the number of tasks.

    Args:
        monitor: monitor rubric. Its scores are logged as the curve `monitor`, never trained on.
        schedule: of a curriculum: decides which of the tasks a step takes, and which val tasks an evaluation.
        log: of the run, for its page.
    """

    def __init__(
        self,
        eval_task: EvalTask,
        tasks: Sequence[Task],
        config: PolicySettings,
        engine: PolicyEngine,
        *,
        monitor: Rubric | None = None,
        schedule: Schedule | None = None,
        log: TrainingLog | None = None,
    ) -> None:
        self.eval_task, self.tasks, self.config = eval_task, list(tasks), config
        self.engine, self.monitor, self.schedule, self.log = engine, monitor, schedule, log
        self._step: tuple[int, list[Task]] | None = None  # the last step of a curriculum, and its tasks
        self.row_stats, self.memory = RowStats(), ValueMemory()
        self.of_what, self.items = "tasks", len(self.tasks)
        self.prompts: list[list[dict[str, Any]]] = []
        self.job = {**job_of(eval_task, self.tasks), "watching": monitor.version if monitor is not None else None}
        if schedule is not None:
            self.job["curriculum"] = schedule.curriculum.sha256
            self.items = min(len(tasks_of_stage) for tasks_of_stage in schedule.train.values())
            self.of_what = "tasks in the smallest stage"

    def made_from(self) -> dict[str, Any]:
        """Provenance stored with the adapter: hashes of the data subjects of its tasks, for erasure."""
        subjects = {
            subject_digest(str(task.metadata["data_subject"]))
            for task in self.tasks
            if task.metadata.get("data_subject")
        }
        return {"people": sorted(subjects)}

    def _task_at(self, index: int) -> Task:
        """The task of an input; with a curriculum its index is the place in the order of all steps."""
        if self.schedule is None:
            return self.tasks[index]
        step, place = divmod(index, self.config.prompts_per_step)
        if self._step is None or self._step[0] != step:
            self._step = (step, self.schedule.tasks_of_step(step, self.config.prompts_per_step))
        return self._step[1][place]

    def held_out(self) -> Sequence[Task]:
        """The val tasks of an evaluation during the training: those of the current stage of a curriculum."""
        if self.schedule is None:
            return self.eval_task.val[: self.config.eval_tasks]
        return self.schedule.val_tasks(self.config.eval_tasks)

    def notes(self) -> list[str]:
        """Notes for the report at the end."""
        program = self.eval_task.recorded.program
        return program.notes() if isinstance(program, ForeignAgent) else []

    def begin(self, trainer: Any, policy: Policy) -> list[str]:
        """Called once before the first step. Returns notes for the report."""
        return []

    def collect(self, inputs: list[dict[str, Any]], trainer: Any) -> Any:
        """Rows of this process's share of a step: rollouts, credit over the rollouts of all processes, and metrics."""
        from assay.optimizers.finetuning.trl_trainer import Batch, over_ranks

        clock = time.perf_counter()
        self.engine.sync(trainer)
        step, session = trainer.state.global_step, self.eval_task.session
        first, run_id = trainer.accelerator.process_index * len(inputs), over_ranks([session.recorder.run_id])[0]
        runs: list[Run] = []
        for position, item in enumerate(inputs):
            recorded = self.eval_task.recorded.another(
                step * self.config.num_generations + (first + position) % self.config.num_generations
            )
            recorded.group = f"{run_id}/{step}"
            runs.append((recorded, self._task_at(item["index"])))
        synced = time.perf_counter()
        with session.recorder.within(f"step {step}"), session.phase("train"), dspy.context(**{WRITTEN_DECISIONS: True}):
            scored_runs = self.engine.play(runs, session)
        self.row_stats.spend("sync", synced - clock)
        self.row_stats.spend("rollouts", time.perf_counter() - synced)
        batch = self._trajectories(scored_runs, trainer._tokenizer)
        if self.config.value == "head":
            add_hidden(batch, trainer.hidden_of)
        world = over_ranks([trajectory.without_rows() for trajectory in batch])
        if not world:
            raise Diverged(f"no rollout of a whole step could be scored: {dict(self.row_stats.left_out)}")
        rollouts = [run.rollout for run in scored_runs if run is not None]
        self.prompts = [chat_messages(rollout.transitions[0].request) for rollout in rollouts if rollout.transitions][
            :4
        ]
        credit = assign_credit(world, self.config, self.memory)
        rows, flat = credit.apply_to(batch, self.row_stats.left_out)
        self.row_stats.rollouts += len(runs)
        self.row_stats.calls += len(rows)
        summaries = over_ranks([_summary(rollout) for rollout in rollouts])
        passed = len(rows) + (
            len(flat) if self.config.beta else 0
        )  # rows that the model processes: a KL is taken of zero-variance groups too
        metrics = {
            **_numbers(world, summaries),
            "zero_variance_groups": credit.zero_variance / max(1, credit.groups),
            "explained_variance": credit.explained,
            "rows": float(sum(over_ranks([passed]))),
        }
        if self.monitor is not None:
            with session.phase("train"):
                metrics["monitor"] = _mean(
                    [value for part in over_ranks([self._monitor_scores(scored_runs)]) for value in part]
                )
        self._sample(step, rollouts, credit.advantages)
        return Batch(rows, flat, {name: value for name, value in metrics.items() if math.isfinite(value)})

    def _trajectories(self, runs: Sequence[ScoredRun | None], tokenizer: Any) -> list[Trajectory]:
        """Trajectories of the scored rollouts; the others are counted as left out."""
        excluded, trajectories, backend = self.row_stats.left_out, list[Trajectory](), self.engine.lm.recording.backend
        for run in runs:
            if run is None:
                excluded[f"rollouts given up after {self.config.rollout_timeout_s:g} s"] += 1
                continue
            rollout = run.rollout
            if not rollout.transitions and rollout.score is not None:
                excluded["rollouts without a call"] += 1
                continue
            try:
                trajectory = trajectory_of(
                    rollout,
                    tokenizer,
                    is_policy=lambda call: call.model == self.config.model and call.adapters == backend.adapters,
                    max_length=self.config.max_length,
                    behaviour=self.engine.behaviour,
                    step_weight=self.config.step_weight,
                    outcome_weight=self.config.outcome_weight,
                    left_out=excluded,
                )
            except Unscored:
                reason = rollout.error or "the rubric could not decide"
                excluded[f"rollouts without a score ({reason[:120]})"] += 1
                continue
            trajectories.append(trajectory)
        return trajectories

    def _monitor_scores(self, runs: Sequence[ScoredRun | None]) -> list[float]:
        """Scores of the rollouts by the monitor rubric; NaN where it could not decide or took too long."""
        session, monitor = self.eval_task.session, self.monitor
        assert monitor is not None

        def score(run: ScoredRun) -> float:
            rollout = run.rollout
            task = session.tasks.find(rollout.inputs, rollout.expected)
            if task is None:
                return math.nan
            return monitor.score(task, run.prediction, rollout).value

        with session.context(), limited(session.task_timeout):
            calls = [functools.partial(score, run) for run in runs if run is not None]
            scores = TimeoutPool(calls, session.threads, self.config.rollout_timeout_s).finished(self.engine.stop)
        return [math.nan if value is None else value for value in scores]

    def _sample(self, step: int, rollouts: Sequence[Rollout], advantages: Mapping[str, list[float]]) -> None:
        """Keeps one rollout every `samples_every` steps, and of the last step, for the report."""
        if (
            not self.config.samples_every
            or not rollouts
            or (step % self.config.samples_every and step < self.config.steps - 1)
        ):
            return
        rollout = rollouts[0]
        calls = [{"t": call.t, "output": call.output, "rewards": call.step_rewards} for call in rollout.transitions]
        sample = {
            "step": step,
            "inputs": rollout.inputs,
            "score": rollout.score,
            "calls": calls,
            "advantages": advantages.get(rollout.id),
        }
        self.row_stats.samples.append(sample)
        if self.log is not None:
            self.log.sample(step, rollout.id, advantages.get(rollout.id) or ())


def job_of(eval_task: EvalTask, tasks: Sequence[Task]) -> dict[str, Any]:
    """What identifies a training. A training is resumed only if it is unchanged."""
    recorded, rubric = eval_task.recorded, eval_task.session.rubric
    return {
        "program": f"{eval_task.name}@{program_version(recorded.program, recorded.settings['adapter'])}",
        "parameters": recorded.settings,
        "rubric": f"{rubric.name}@{rubric.version}",
        "data": [task.key for task in tasks],
    }


def _mean(values: Sequence[float]) -> float:
    """Mean of the values that are not NaN; NaN if there is none."""
    scored = [value for value in values if not math.isnan(value)]
    return float(np.mean(scored)) if scored else math.nan


def _summary(rollout: Rollout) -> dict[str, Any]:
    """The parts of a rollout that the metrics of a step need; small, since processes exchange them."""
    return {
        "group": rollout.group_id,
        "score": rollout.score,
        "answer": json_text(rollout.prediction, sort_keys=True),
        "grades": {v.criterion: v.grade for v in rollout.verdicts if v.grade is not None and v.scope == "final"},
        "tokens": [t.completion_tokens or 0 for t in rollout.transitions],
        "failed": rollout.status != "done",
        "cut": [(t.response or {}).get("finish_reason") == "length" for t in rollout.transitions],
    }


def _numbers(world: Sequence[Trajectory], rollouts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Metrics of a step over all processes: returns, scores, criteria, step rewards by turn, diversity, lengths."""
    totals = [math.fsum(trajectory.rewards) for trajectory in world]
    metrics = {
        "reward": float(np.mean(totals)) if totals else math.nan,
        "reward_std": float(np.std(totals)) if totals else math.nan,
    }
    by_turn: dict[int, list[float]] = defaultdict(list)
    for trajectory in world:
        for turn, reward in enumerate(trajectory.rewards):
            by_turn[turn].append(reward)
    metrics |= {f"turn_reward/{turn}": float(np.mean(values)) for turn, values in by_turn.items() if turn < 12}
    grades: dict[str, list[float]] = defaultdict(list)
    answers: dict[str, list[str]] = defaultdict(list)
    for rollout in rollouts:
        for name, grade in rollout["grades"].items():
            grades[name].append(grade)
        answers[rollout["group"]].append(rollout["answer"])
    metrics |= {f"criteria/{name}": float(np.mean(values)) for name, values in grades.items()}
    scores = [rollout["score"] for rollout in rollouts if rollout["score"] is not None]
    calls = [count for rollout in rollouts for count in rollout["tokens"]]
    cut = [flag for rollout in rollouts for flag in rollout["cut"]]
    metrics["score"] = _mean(scores)
    metrics["distinct"] = (
        float(np.mean([len(set(texts)) / len(texts) for texts in answers.values()])) if answers else math.nan
    )
    metrics["turns"] = len(calls) / max(1, len(rollouts))
    metrics["tokens"] = float(np.mean(calls)) if calls else math.nan
    metrics["cut_off"] = float(np.mean(cut)) if cut else 0.0
    metrics["failed"] = float(np.mean([rollout["failed"] for rollout in rollouts])) if rollouts else math.nan
    return metrics
