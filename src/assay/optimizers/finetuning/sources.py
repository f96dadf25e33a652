"""Rows for on-policy training: runs programs under the current weights and scores their rollouts."""

import functools
import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dspy
import numpy as np

from assay.datasets import Task
from assay.datasets.curriculum import Schedule
from assay.errors import ConfigError, DataError, Diverged, Unscored
from assay.models.limits import limited
from assay.models.registry import spec
from assay.optimizers.finetuning.base import Policy, tokenizer_sha
from assay.optimizers.finetuning.comparison import EvalTask
from assay.optimizers.finetuning.engines import PolicyEngine, Run, TimeoutPool
from assay.optimizers.finetuning.report import RowStats
from assay.optimizers.finetuning.rows import (
    Credit,
    Row,
    Trajectory,
    ValueMemory,
    add_hidden,
    assign_credit,
    contains_output,
    trajectory_of,
)
from assay.optimizers.finetuning.run_folder import rank
from assay.optimizers.finetuning.settings import PolicySettings
from assay.programs import program_version
from assay.programs.agent import WRITTEN_DECISIONS
from assay.programs.foreign_agent import ForeignAgent
from assay.reports.training import TrainingLog
from assay.rubrics import Rubric
from assay.rubrics.scoring import ScoredRun
from assay.support.values import json_text
from assay.traces import Rollout, Transition
from assay.traces.export.transitions import checked_manifest, read_transitions, transition_of_row
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
            return math.nan if run.task is None else monitor.score(run.task, run.answer, run.rollout).value

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


# -- Rows for off-policy policy gradient training, from an export of transitions.


_FAR = 0.1  # nats per token between behaviour and policy above which data is called far off policy
_STRANGE = 0.02  # share of calls whose tokens do not decode to their text above which the tokenizer is another one


def _require_own_tokens(differs: "Counter[bool]") -> None:
    """Refuses an export if the tokens of too many calls do not decode to their text."""
    if differs[True] > _STRANGE * differs.total():
        raise DataError(
            f"{differs[True]} of {differs.total()} calls have tokens that do not decode to their text: "
            "they are another tokenizer's"
        )


class Recorded:
    """A source of rows: the groups of a transitions export. `items` is the number of groups whose rewards differ.

    Attributes:
        log: of the run, for its page; None without a run.
    Raises:
        DataError: the export is missing, of another kind, changed since it was written, or has nothing to learn from.
    """

    eval_task = engine = None
    of_what = "groups with nonzero variance"

    def __init__(self, folder: str | Path, config: PolicySettings) -> None:
        self.folder, self.config = Path(folder), config
        self.log: TrainingLog | None = None
        self.manifest = checked_manifest(self.folder, "transitions")
        self.job = {"data": self.manifest["files"]["data.jsonl"]["sha256"]}
        self.row_stats, self.memory = RowStats(), ValueMemory()
        self.rollouts = self._read()
        self.credit = self._credited()
        members = defaultdict(list)
        for rollout in self.rollouts.values():
            if rollout.id in self.credit.advantages:
                members[rollout.group_id].append(rollout.id)
        self.groups = list(members.values())
        self.items = len(self.groups)
        self.trajectories: dict[str, Trajectory] = {}
        self.prompts = [chat_messages(rollout.transitions[0].request) for rollout in self.rollouts.values()][:4]
        if not self.items:
            raise DataError(
                f"{self.folder} has {self.credit.groups} groups, and none has rewards that differ: "
                "there is nothing to learn from it"
            )

    def _read(self) -> dict[str, Rollout]:
        rollouts: dict[str, Rollout] = {}
        calls_of: dict[str, dict[int, tuple[Transition, float]]] = defaultdict(dict)
        for row in read_transitions(self.folder):
            rollout = rollouts.setdefault(
                row["rollout"], Rollout(id=row["rollout"], group_id=row["group"], task_id=row["task"], score=0.0)
            )
            rollout.task_type = row["task_type"]
            # assigned by turn, since an export balanced by copies repeats rows
            calls_of[rollout.id][row["t"]] = (transition_of_row(row), self._reward(row))
        for name, calls in calls_of.items():
            turns = [calls[turn] for turn in sorted(calls)]
            credited = [value for _, value in turns]
            # the difference of two returns is the reward between them, including calls that the export left out
            earned = (
                [now - after for now, after in zip(credited, [*credited[1:], 0.0], strict=True)]
                if self._returns_to_go
                else credited
            )
            for index, ((transition, _), reward) in enumerate(zip(turns, earned, strict=True)):
                transition.t, transition.step_rewards = index, {"reward": reward}
                rollouts[name].transitions.append(transition)
        return rollouts

    @property
    def _returns_to_go(self) -> bool:
        config = self.manifest.get("config", {})
        return config.get("returns") == "to_go" and config.get("discount") == 1.0

    def _reward(self, row: dict[str, Any]) -> float:
        value = row["return" if self._returns_to_go else "reward"]
        if not isinstance(value, int | float) or not np.isfinite(value):
            raise DataError(
                f"{self.folder}: rollout {row['rollout']} has a reward of {value!r}, which is not a finite number"
            )
        return float(value)

    def _credited(self) -> Credit:
        batch = [
            Trajectory(
                group=rollout.group_id,
                rollout=rollout.id,
                rewards=[call.step_rewards["reward"] for call in rollout.transitions],
                features=[
                    {"turn": float(call.t), "prompt_tokens": float(call.prompt_tokens or 0)}
                    for call in rollout.transitions
                ],
                agents=[call.agent for call in rollout.transitions],
            )
            for rollout in self.rollouts.values()
        ]
        return assign_credit(batch, self.config, self.memory)

    def made_from(self) -> dict[str, Any]:
        """Provenance of the data, stored with the adapter."""
        return {"export": str(self.folder.resolve())}

    def begin(self, trainer: Any, policy: Policy) -> list[str]:
        """Makes rows of the calls and compares the policy that sampled them with the current one. Returns notes.

        Raises:
            DataError: the tokens are of another tokenizer, or no call can be trained on.
        """
        self._check_tokenizer(policy)
        # counted from zero: a resumed training has loaded the counts of its first part
        self.row_stats.left_out = Counter(
            {"rollouts of zero-variance groups": len(self.rollouts) - len(self.credit.advantages)}
        )
        stored, unknown = list[Row](), list[Row]()
        weights = (
            (spec(policy.embedded).sha256, tuple(adapter.sha256 for adapter in policy.merged))
            if policy.embedded
            else None
        )
        strange, limited = Counter[bool](), 0
        for rollout in self.rollouts.values():
            if rollout.id not in self.credit.advantages:
                continue
            sampled_by_policy = [(call.weights, call.adapters) == weights for call in rollout.transitions]
            for call in rollout.transitions:
                limited += policy.embedded is not None and _config(call).get("top_p") != 1
                if call.token_ids and call.output.strip():
                    strange[not contains_output(policy.tokenizer.decode(list(call.token_ids)), call.output)] += 1
            behaviour = self.config.temperature == 1.0
            try:
                trajectory = trajectory_of(
                    rollout,
                    policy.tokenizer,
                    max_length=self.config.max_length,
                    behaviour=behaviour,
                    left_out=self.row_stats.left_out,
                )
            except Unscored:
                continue
            self._sort_rows(trajectory, sampled_by_policy, stored, unknown)
            self.trajectories[rollout.id] = trajectory
        _require_own_tokens(strange)
        if not stored and not unknown:
            raise DataError(f"{self.folder} has no call to train on: {dict(self.row_stats.left_out)}")
        if rank():  # every process reads the whole export: count once
            self.row_stats.left_out.clear()
        notes = self._behaviour(trainer, stored, unknown)
        if limited:
            notes.append(
                f"{limited} calls were sampled from llama.cpp's likeliest tokens, "
                "and the ratio is to the whole distribution: `assay collect --untruncated` samples from that"
            )
        return notes

    def _sort_rows(self, trajectory: Any, same: Sequence[bool], stored: list[Row], unknown: list[Row]) -> None:
        """Appends rows with log-probabilities to `stored`, and those of the current weights without to `unknown`.

        Args:
            same: of each turn, whether the current weights sampled it.
        """
        for row in list(trajectory.rows):
            if row.logprobs is not None:
                stored.append(row)
            elif same[row.turn]:
                unknown.append(row)
            else:
                trajectory.rows.remove(row)
                reason = "calls of other weights, whose log-probabilities are not known at this temperature"
                self.row_stats.left_out[reason] += 1

    def _check_tokenizer(self, policy: Policy) -> None:
        recorded = {name for name in self.manifest.get("tokenizers", {}) if name != "not known"}
        policy_sha = tokenizer_sha(policy.tokenizer)
        if other := sorted(recorded - {policy_sha}):
            raise DataError(
                f"{self.folder} has tokens of another tokenizer ({other[0][:12]}…) "
                f"than {policy.name} has ({policy_sha[:12]}…): its token ids mean nothing there. "
                "Train the model that made them, or export sft"
            )

    def _behaviour(self, trainer: Any, stored: list[Row], unknown: list[Row]) -> list[str]:
        """Log-probabilities under the initial policy.

        They become the behaviour of calls that the policy sampled itself (`unknown`, filled in place). For `stored`
        calls they give the distance to the policy that sampled them, which is returned as notes.
        """
        for row, odds in zip(unknown, trainer.logprobs_of(unknown), strict=True):
            row.logprobs = odds
        notes = []
        if unknown:
            notes.append(
                f"{len(unknown)} calls were made by these very weights: their log-probabilities were worked out again"
            )
        if stored:
            gaps = [
                stored_odd - initial_odd
                for row, odds in zip(stored, trainer.logprobs_of(stored), strict=True)
                for stored_odd, initial_odd, chosen in zip(row.logprobs or [], odds, row.trained, strict=True) if chosen
            ]  # fmt: skip
            far = float(np.mean(gaps)) if gaps else 0.0
            low, high = self.config.clip
            least, most = {"cispo": (0.0, high), "sapo": (0.0, np.inf), "vespo": (0.0, np.inf)}.get(
                self.config.loss, (1 - low, 1 + high)
            )
            outside = float(np.mean([not least <= np.exp(-gap) <= most for gap in gaps])) if gaps else 0.0
            notes.append(
                f"off policy by {far:.3f} nats a token; "
                f"{100 * outside:.0f} % of the tokens begin outside the clip range"
            )
            if abs(far) > _FAR or outside > 0.25:
                notes.append(
                    "warning: the data is far off policy: much of it is clipped away or weighs too much. "
                    "Collect anew with these weights"
                )
        return notes

    def collect(self, inputs: list[dict[str, Any]], trainer: Any) -> Any:
        """Rows of this process's share of a step.

        A group appears `config.num_generations` times in a step. Each time a different part of it is taken.
        """
        from assay.optimizers.finetuning.trl_trainer import Batch, over_ranks

        first, chosen = trainer.accelerator.process_index * len(inputs), list[str]()
        for position, item in enumerate(inputs):
            members = self.groups[item["index"]]
            chosen += members[(first + position) % self.config.num_generations :: self.config.num_generations]
        batch = [self.trajectories[name] for name in chosen if name in self.trajectories]
        rows, _ = self.credit.apply_to(batch, Counter())
        self.row_stats.rollouts += len(batch)
        self.row_stats.calls += len(rows)
        totals = list(itertools.chain.from_iterable(over_ranks([[sum(trajectory.rewards) for trajectory in batch]])))
        metrics = {"reward": float(np.mean(totals)), "reward_std": float(np.std(totals))} if totals else {}
        return Batch(rows, metrics={**metrics, "rows": float(len(rows))})


def _config(call: Transition) -> Mapping[str, Any]:
    """The recorded sampling settings of the call."""
    config: Mapping[str, Any] = call.request.get("config", call.request.get("body", {}))
    return config


def export_temperature(folder: str | Path, default: float | None = None) -> float:
    """The temperature at which all calls of a transitions export were sampled.

    Args:
        default: the temperature of calls that were recorded without one.

    Raises:
        ConfigError: several temperatures or another one than `default` were recorded, or none without a `default`.
        DataError: it is not a transitions export.
    """
    counts = Counter(_config(transition_of_row(row)).get("temperature") for row in read_transitions(Path(folder)))
    unrecorded = counts.pop(None, 0)
    if unrecorded and default is None:
        raise ConfigError(
            f"{unrecorded} calls of {folder} have no recorded sampling temperature: set it with `temperature=…`"
        )
    if len(counts) > 1:
        summary = ", ".join(f"{count} at {value:g}" for value, count in sorted(counts.items()))
        raise ConfigError(
            f"{folder} was sampled at several temperatures ({summary}): "
            "export them apart, one policy has one temperature"
        )
    temperature = next(iter(counts), default)
    if default is not None and temperature != default:
        raise ConfigError(
            f"{folder} was sampled at temperature {temperature:g}, not at {default:g}: "
            "the ratio would be to a policy that there never was"
        )
    return float(temperature or 0.0)
