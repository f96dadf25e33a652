"""Policy gradient training: repeats rollouts under the current weights, credit assignment per call, optimizer step."""

import itertools
import json
import math
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from assay.datasets.curriculum import promotion_score
from assay.errors import Cancelled, ConfigError, DataError, Diverged, StopRun
from assay.evaluation.progress import Progress, SilentProgress
from assay.optimizers.finetuning.base import Policy, fast_bf16, lean_head, load_policy, lora_of, quiet
from assay.optimizers.finetuning.comparison import MODES, EvalTask, compare_weights, evaluate_weights
from assay.optimizers.finetuning.report import PolicyReport
from assay.optimizers.finetuning.run_folder import (
    POLICY_MEMORY,
    keep_trained,
    last_good,
    model_path,
    rank,
    ready,
    restored,
    save_adapter,
    stoppable,
    working_folder,
    world,
)
from assay.optimizers.finetuning.settings import PolicySettings
from assay.optimizers.finetuning.sources import Recorded, Rollouts, job_of
from assay.reports.training import TrainingLog, curves_of
from assay.support.values import json_text

# -- Makes the trainer of a policy: the order of the tasks, and TRL's settings from ours.
#
# Imports torch and TRL only when a trainer is made.


def task_order(items: int, config: PolicySettings) -> list[int]:
    """Item indices in the order of the steps; every item is taken once before any repeats.

    The order covers the whole run as one epoch, so that a resumed run takes the same items.
    """
    chosen, remaining, order = random.Random(config.seed), list[int](), list[int]()
    for _ in range(config.rollout_steps):
        step, remaining = remaining[: config.prompts_per_step], remaining[config.prompts_per_step :]
        if len(step) < config.prompts_per_step:  # next round; the items of this step come last in it
            remaining = sorted(chosen.sample(range(items), items), key=set(step).__contains__)
            missing = config.prompts_per_step - len(step)
            step, remaining = step + remaining[:missing], remaining[missing:]
        order += step
    return order


def make_trainer(
    policy: Policy,
    config: PolicySettings,
    tasks: int,
    out: Path,
    collect: Callable[..., Any],
    callback: Any,
    *,
    by_place: bool = False,
) -> Any:
    """A trainer of a new LoRA adapter on the rows that `collect` returns for tasks, or for places in their order."""
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import GRPOConfig

    from assay.optimizers.finetuning.trl_trainer import TransitionTrainer

    cuda = torch.cuda.is_available()
    per_device, parts = config.shared_out(world())
    # a checkpoint has no rollouts: save only after the last step that uses them
    every = config.iterations * math.ceil(config.save_every / config.iterations)
    vllm: dict[str, Any] = (
        {"use_vllm": True, "vllm_mode": config.vllm, "vllm_importance_sampling_correction": False}
        if config.vllm != "none"
        else {}
    )
    rollouts = config.prompts_per_step * config.num_generations
    arguments = GRPOConfig(
        output_dir=str(out), max_steps=config.steps, per_device_train_batch_size=per_device,
        gradient_accumulation_steps=parts,
        steps_per_generation=parts, num_generations=config.num_generations if config.num_generations > 1 else rollouts,
        num_iterations=config.iterations, learning_rate=config.learning_rate,
        beta=0.0 if config.kl_in_reward else config.beta,
        epsilon=config.clip[0], epsilon_high=config.clip[1], loss_type=config.loss, temperature=config.temperature,
        importance_sampling_level="sequence" if config.loss == "luspo" else "token",
        max_completion_length=config.max_completion, max_grad_norm=config.max_grad_norm,
        lr_scheduler_type="constant", seed=config.seed,
        logging_steps=1, logging_nan_inf_filter=False, save_strategy="steps", save_steps=every, save_total_limit=2,
        report_to=config.report_to, bf16=fast_bf16(), use_cpu=not cuda, gradient_checkpointing=cuda,
        shuffle_dataset=False, disable_tqdm=True, **vllm,
    )  # fmt: skip
    arguments.num_generations = config.num_generations  # TRL demands 2 for its own baseline, which is unused here
    order = list(enumerate(task_order(tasks, config)))
    rows = Dataset.from_list([{"prompt": "", "index": place if by_place else task} for place, task in order])
    trainer = TransitionTrainer(
        model=policy.model,
        args=arguments,
        train_dataset=rows,
        processing_class=policy.tokenizer,
        peft_config=lora_of(config.lora_r),
        callbacks=[callback],
        collect=collect,
        by_token=config.algorithm == "reinforce++",
        kl_in_reward=config.beta if config.kl_in_reward else 0.0,
    )
    trainer.remove_callback(PrinterCallback)
    callback.trainer = trainer
    return trainer


# -- Curves of a policy gradient run, the alarms they raise, and the convergence rule. Does not stop a training.


_WINDOW = 10  # steps of each window of the convergence rule
_CONVERGED = 0.1  # largest half width of the interval of the difference, in units of the reward
_SMALL = 0.05  # a significant change of the mean reward that a longer training is not worth
_RUN = 3  # consecutive steps before an alarm


class TrainingMonitor:
    """Curves by step, alarms, and whether training has converged. Each alarm is raised once and names a remedy.

    Converged: Welch's 95 % interval of the difference between the mean reward of the last ten steps and of the ten
    steps before reaches at most 0.1 to either side, and contains 0 or reaches at most 0.05. A significant difference
    that is certainly below 0.05 is none that a longer training is worth.

    Args:
        log: receives every value and alarm immediately.
    """

    def __init__(self, log: TrainingLog | None = None) -> None:
        self.curves: dict[str, dict[int, float]] = defaultdict(dict)
        self.alarms: dict[str, str] = {}
        self._log = log

    def update(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Adds the metrics of a step or of an evaluation. Returns the new alarms."""
        for name, value in metrics.items():
            self.curves[name][step] = value
        before = set(self.alarms)
        for name, alarm in self._alarms().items():
            self.alarms.setdefault(name, f"step {step}: {alarm}")
        if self._log is not None:
            self._log.values(step, metrics, self.alarms)
        return [text for name, text in self.alarms.items() if name not in before]

    def alarm(self, step: int, name: str, text: str) -> None:
        """Raises an alarm that no curve shows."""
        self.alarms[name] = text
        if self._log is not None:
            self._log.values(step, {}, self.alarms)

    @property
    def evaluated_steps(self) -> set[int]:
        """Steps at which held-out or retention tasks were evaluated."""
        names = [name for name in self.curves if name.startswith(("held_out_", "retained_"))]
        return {step for name in names for step in self.curves[name]}

    def last(self, name: str, count: int) -> list[float]:
        """The last `count` values of a curve, or fewer."""
        curve = self.curves.get(name, {})
        return [curve[step] for step in sorted(curve)[-count:]]

    def _alarms(self) -> dict[str, str]:
        """All alarms at this step, by name. The thresholds are rules of thumb, not from a paper."""
        alarms = dict[str, str]()
        if self._collapsed("entropy"):
            alarms["entropy"] = (
                f"entropy fell from {self._first('entropy'):.2f} to {self.last('entropy', 1)[0]:.2f} nats per token: "
                "the policy has stopped exploring. Raise `beta=…` or `temperature=…`, or lower `learning_rate=…`"
            )
        if (clipped := self._lasting("clip_ratio/region_mean", lambda share: share > 0.2)) is not None:
            alarms["clip"] = (
                f"{100 * clipped:.0f} % of the tokens are clipped: the policy changes too fast. Lower "
                "`learning_rate=…` or `iterations=…`"
            )
        if self._collapsed("reward_std") and not self._near_maximum():
            alarms["deviation"] = (
                f"the standard deviation of the rewards fell from {self._first('reward_std'):.3f} to "
                f"{self.last('reward_std', 1)[0]:.3f}: little is left to learn from. Take other tasks, raise "
                "`temperature=…` or `num_generations=…`, or give the rubric grades between 0 and 1"
            )
        if (share := self._lasting("zero_variance_groups", lambda share: share >= 0.75)) is not None:
            alarms["zero_variance"] = (
                f"{100 * share:.0f} % of the groups have zero variance, so nothing is learned from them. "
                f"{self._difficulty()}, or raise `num_generations=…` or `temperature=…`"
            )
        distinct = self._lasting("distinct", lambda share: share < 0.3)
        if distinct is not None and not self._near_maximum():
            alarms["distinct"] = (
                f"only {100 * distinct:.0f} % of the answers of a group are distinct: raise `temperature=…`, "
                "`beta=…` or `num_generations=…`"
            )
        if (kl := self._lasting("kl", lambda nats: nats > 0.5)) is not None:
            alarms["kl"] = (
                f"the KL to the model before training is {kl:.2f} nats per token. Raise `beta=…` or lower "
                "`learning_rate=…`"
            )
        if (cut := self._lasting("cut_off", lambda share: share > 0.3)) is not None:
            alarms["cut"] = (
                f"{100 * cut:.0f} % of the answers are truncated: raise `max_completion=…`, or add a criterion on "
                "length to the rubric"
            )
        if self._trend("reward") > 0 and self._trend("turns") > 0 >= self._trend("score"):
            alarms["income"] = (
                "the reward rises with the number of calls and the score does not: step rewards are earned by making "
                "more calls. Lower `step_weight=…` or `discount=…`, or limit the calls with "
                "`parameters={'max_steps': …}`"
            )
        if self._trend("score") > 0 > self._trend("monitor"):
            alarms["hacking"] = (
                "the score by the trained rubric rises while the score by the monitor rubric falls: the trained "
                "rubric is being gamed. Read the samples, and correct its criteria"
            )
        return alarms

    def _first(self, name: str) -> float:
        """Mean of the first values of a curve."""
        return float(np.mean([value for _, value in sorted(self.curves[name].items())[:_RUN]]))

    def _lasting(self, name: str, holds: Callable[[float], bool]) -> float | None:
        """The last value of a curve, if its last three values all hold."""
        last = self.last(name, _RUN)
        return last[-1] if len(last) == _RUN and all(map(holds, last)) else None

    def _collapsed(self, name: str) -> bool:
        """Whether a curve has stayed below a fifth of its first values."""
        return len(self.curves.get(name, {})) > _RUN and max(self.last(name, _RUN)) < 0.2 * self._first(name)

    def _difficulty(self) -> str:
        """What to do about groups of equal rewards."""
        score = (self.last("score", 1) or [math.nan])[0]
        if score >= 0.9:
            return "The tasks are too easy: take harder tasks"
        if score > 0.1:  # neither 0 nor the maximum: the rollouts are alike, and the tasks are not at fault
            return "The answers of a group are alike, or the rubric does not tell them apart: give it finer grades"
        return "The tasks are too hard: train by SFT first (assay train sft), or take easier tasks"

    def _near_maximum(self) -> bool:
        """Whether the score is at least 0.9, where equal rollouts are expected."""
        return min(self.last("score", _RUN) or [1.0]) >= 0.9

    def _trend(self, name: str) -> float:
        """1 for a rising curve, -1 for a falling one (Spearman's rank correlation with the step, p < 0.05), else 0."""
        curve = self.curves.get(name, {})
        if len(curve) < _WINDOW or len(set(curve.values())) < 2:
            return 0.0
        from scipy import stats

        rho, p = stats.spearmanr(sorted(curve), [curve[step] for step in sorted(curve)])
        return math.copysign(1.0, rho) if p < 0.05 else 0.0

    @property
    def converged(self) -> bool | None:
        """By the rule of the class; None before 20 steps."""
        rewards = self.last("reward", 2 * _WINDOW)
        if len(rewards) < 2 * _WINDOW:
            return None
        before, after = rewards[:_WINDOW], rewards[_WINDOW:]
        if np.ptp(rewards) == 0:  # Welch's test is undefined for two constant samples
            return True
        from scipy import stats

        interval = stats.ttest_ind(after, before, equal_var=False).confidence_interval(0.95)
        most = max(-interval.low, interval.high)
        return bool(most <= (_CONVERGED if interval.low <= 0 <= interval.high else _SMALL))


# -- Table printed during a policy gradient training.


_COLUMNS = {
    "reward": "reward",
    "score": "score",
    "entropy": "entropy",
    "kl": "kl",
    "clip_ratio/region_mean": "clipped",
    "zero_variance_groups": "no var.",
    "turns": "turns",
    "tokens": "tokens",
    "step_time": "seconds",
}
HEADING = f"{'step':>5}" + "".join(f"{label:>9}" for label in _COLUMNS.values())


def table_row(step: int, values: Mapping[str, float]) -> str:
    """One row of the table printed during training, under `HEADING`."""
    return f"{step:>5}" + "".join(f"{values[key]:>9.3g}" if key in values else " " * 9 for key in _COLUMNS)


# -- Policy gradient.


_HEADING_EVERY = 20  # lines between two headings of the printed table
_NOTES = "assay.json"  # our state in a checkpoint folder, next to the files of TRL


def train_policy(
    source: Rollouts | Recorded,
    name: str,
    config: PolicySettings,
    *,
    retained: Sequence[EvalTask] = (),
    resume: bool = False,
    progress: Progress | None = None,
) -> PolicyReport:
    """Trains an adapter on the rows of a source and keeps it under `name`, to be served as `MODEL+NAME`.

    Args:
        source: rollouts made during the training, or an export of transitions.
        retained: retention tasks, evaluated every `config.evaluate_every` steps. Training stops if one of them loses
            more than `config.max_score_drop`. Their sessions must run on the `lm` of the source's engine.
    Raises:
        DataError: too few tasks, or nothing to learn from.
        ConfigError: an adapter of this name exists, there is nothing to resume, or retention tasks are never evaluated.
        Cancelled: a signal came; a checkpoint was written.
        Diverged: the loss was not finite before the first checkpoint, or a retention task lost too much.
        ModelError: memory or disk ran out.
    """
    if retained and not config.evaluate_every:
        raise ConfigError("`evaluate_every=0` evaluates none of the retention tasks: give a number of steps")
    if source.items < config.prompts_per_step:
        needed = config.prompts_per_step
        raise DataError(
            f"{source.items} {source.of_what} to train on, and a step takes {needed}: "
            "give more data, or lower `prompts_per_step`"
        )
    job = {
        **config.of_what(),
        "name": name,
        **source.job,
        "retained": [job_of(task, [*task.val, *task.test]) for task in retained],
    }
    made_from = {"model": model_path(config.model), **source.made_from()}
    with working_folder(name, job, made_from=made_from, resume=resume, last=_NOTES) as work, ready(POLICY_MEMORY):
        if source.engine is not None:
            source.engine.work_in(work / f"policy-{rank()}")
        try:
            return _Training(source, name, config, retained, work, progress or SilentProgress()).run(resume)
        finally:
            if source.engine is not None:
                source.engine.close()


class _EndedError(Exception):
    """A retention task lost too much before the first step. Only an exception ends TRL's loop there."""


class _Training:
    """State and steps of one training run."""

    def __init__(
        self,
        source: Rollouts | Recorded,
        name: str,
        config: PolicySettings,
        retained: Sequence[EvalTask],
        work: Path,
        progress: Progress,
    ) -> None:
        self.source, self.name, self.config = source, name, config
        self.retained, self.work, self.progress = list(retained), work, progress
        self.all_eval_tasks = [*([source.eval_task] if source.eval_task is not None else []), *retained]
        self.report = PolicyReport(None, work, config, row_stats=source.row_stats)
        self.monitoring = TrainingMonitor(source.log)
        self.schedule = source.schedule if isinstance(source, Rollouts) else None
        self.best: tuple[float, int, int] | None = None  # score, step, stage of a curriculum
        self.first_scores: dict[str, float] = {}  # first score of each retention task: the reference of max_score_drop
        self.diverged, self.score_dropped = False, False
        self.stop = threading.Event()
        self.rows, self.lines = 1.0, itertools.count()  # rows of the last batch; lines of the printed table
        if source.engine is not None:
            for eval_task in self.all_eval_tasks:
                eval_task.session.executor = source.engine.execute

    # -- the run

    def run(self, resume: bool) -> PolicyReport:
        self.progress.say(f"loading {self.config.model} …")
        policy = load_policy(self.config.model)
        checkpoint = resume and any((self.work / "checkpoints").glob("checkpoint-*"))
        if checkpoint:
            self._remember()
        bar = self.progress.bar(f"{self.config.algorithm}: steps", self.config.steps)
        with quiet(), lean_head(), stoppable() as self.stop, bar as advance:
            if self.source.engine is not None:
                self.source.engine.timeout_s = self.config.rollout_timeout_s
                # several processes must stop together, so they stop between steps only
                self.source.engine.stop = self.stop if world() == 1 else None
            trainer = make_trainer(
                policy,
                self.config,
                self.source.items,
                self.work / "checkpoints",
                self.source.collect,
                self._callback(advance),
                by_place=self.schedule is not None,
            )
            self.report.notes += self.source.begin(trainer, policy)
            try:
                trainer.train(resume_from_checkpoint=True if checkpoint else None)
            except _EndedError:
                pass
            except StopRun:
                self._checkpoint(trainer)
                raise
            self.report.steps = self.report.best_step = trainer.state.global_step
            if self._stopped():
                raise Cancelled(
                    f"stopped at step {self.report.steps}, with a checkpoint in {self.work}; continue with "
                    "`resume=True`"
                )
            if self.diverged:
                self.report.stopped, self.report.best_step = last_good(trainer, self.work, self.report.steps)
            elif self.best is not None:
                restored(trainer.model, self.work / "best")
                self.report.best_step = self.best[1]
            elif self.score_dropped:
                raise Diverged(f"{self.report.stopped}. No earlier evaluation was within it, so no weights are kept")
            self._validate(trainer)
        self.report.notes += self.source.notes() if isinstance(self.source, Rollouts) else []
        self.report.curves = {name: dict(curve) for name, curve in self.monitoring.curves.items()}
        self.report.converged, self.report.alarms = self.monitoring.converged, list(self.monitoring.alarms.values())
        if self.schedule is not None:
            self.report.curriculum = self.schedule.report()
            self.report.notes += self.schedule.notes()
        return self._keep(trainer, policy)

    def _keep(self, trainer: Any, policy: Policy) -> PolicyReport:
        from assay.optimizers.finetuning.trl_trainer import over_ranks

        report, source = self.report, self.source
        report.row_stats.set_sum(over_ranks([report.row_stats.counts]))
        keep_trained(
            report, trainer, policy, self.name, self.work, prompts=source.prompts, made_from=source.made_from()
        )
        if not rank():
            report.write_own_page()
        return report

    # -- during the training

    def _callback(self, advance: Callable[[int], None]) -> Any:
        from transformers import TrainerCallback

        training = self

        class Callback(TrainerCallback):
            trainer: Any = None

            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                advance(state.global_step)
                step = state.global_step
                stopped_in_it = (
                    training._evaluation_due(step, state.max_steps) and step not in training.monitoring.evaluated_steps
                )
                if (not step or stopped_in_it) and not training._evaluate(self.trainer, step):
                    raise _EndedError

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                advance(1)
                if training._stopped() and state.global_step % training.config.iterations == 0:
                    control.should_save = control.should_training_stop = True

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
                if "loss" not in (logs or {}):  # TRL's summary at the end of training
                    return
                training._see(state.global_step, logs)
                if training.diverged:
                    control.should_training_stop, control.should_save = True, False
                    return
                if training._evaluation_due(state.global_step, state.max_steps) and not training._evaluate(
                    self.trainer, state.global_step
                ):
                    control.should_training_stop = True

            def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                training._note(Path(args.output_dir) / f"checkpoint-{state.global_step}")

        return Callback()

    def _see(self, step: int, logged: Mapping[str, Any]) -> None:
        self.diverged = not all(math.isfinite(float(logged[key])) for key in ("loss", "grad_norm") if key in logged)
        metrics = {
            key: float(value)
            for key, value in logged.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        self.rows = metrics.get("rows", self.rows)
        if not self.rows:  # TRL logged values of the blank filler row
            metrics = {
                key: value
                for key, value in metrics.items()
                if key not in ("entropy", "kl") and not key.startswith("clip_ratio")
            }
        for alarm in self.monitoring.update(step, metrics):
            self.progress.say(f"alarm: {alarm}")
        if "step_time" in metrics:
            self.source.row_stats.spend("steps", metrics["step_time"])
        if next(self.lines) % _HEADING_EVERY == 0:
            self.progress.say(HEADING)
        self.progress.say(table_row(step, metrics))

    def _evaluation_due(self, step: int, last: int) -> bool:
        every = self.config.evaluate_every
        return bool(every and step) and (step % every == 0 or step == last)

    def _evaluate(self, trainer: Any, step: int) -> bool:
        """Evaluates the held-out and retention tasks. False: a retention task lost too much.

        The evaluation has its own random state, so that training is the same with it, without it, and after an
        interrupted one that is re-run.
        """
        import torch

        if self.source.engine is None or (not self.config.evaluate_every and step == 0):
            return True
        trainer.mark()
        torch.manual_seed(self.config.seed + step)
        scores = self._scores(trainer)
        trainer.rewind()
        return self._continues(trainer, step, scores)

    def _scores(self, trainer: Any) -> dict[str, float]:
        """Mean scores by curve name, from the first process."""
        from assay.optimizers.finetuning.trl_trainer import over_ranks

        engine, source, at = self.source.engine, self.source, f"step {trainer.state.global_step}"
        assert engine is not None
        engine.sync(trainer)
        scores = dict[str, float]()
        if isinstance(source, Rollouts):
            for mode in MODES:
                result = evaluate_weights(source.eval_task, engine, source.held_out(), mode, phase="validate", scope=at)
                scores[f"held_out_{mode}"] = result.mean
                if mode == "greedy" and self.schedule is not None:
                    scores["promotion"] = promotion_score(result.scores.values())
        for other in self.retained:
            val = other.val[: self.config.eval_tasks]
            result = evaluate_weights(other, engine, val, "greedy", phase="validate", scope=at)
            scores[f"retained_{other.name}"] = result.mean
        known = {name: score for name, score in scores.items() if not math.isnan(score)}
        first: dict[str, float] = over_ranks([known])[0]
        return first

    def _continues(self, trainer: Any, step: int, values: dict[str, float]) -> bool:
        """Whether training continues after this evaluation; keeps the best weights."""
        promotion = values.pop("promotion", math.nan)  # a decision of the curriculum, no curve
        for other in self.retained:
            if (score := values.get(f"retained_{other.name}")) is not None:
                self.first_scores.setdefault(other.name, score)
        self.monitoring.update(step, values)
        of_stage = f" (stage {self.schedule.stage.name})" if self.schedule is not None else ""
        names = {name: name.removeprefix("held_out_").replace("_", " ") for name in values}
        figures = ", ".join(f"{names[name]} {value:.3f}" for name, value in values.items())
        self.progress.say(f"step {step}{of_stage}, on val: {figures}")
        lost = {
            name: first_score - values[f"retained_{name}"]
            for name, first_score in self.first_scores.items()
            if f"retained_{name}" in values
        }
        if exceeding := {name: value for name, value in lost.items() if value > self.config.max_score_drop}:
            losses = ", ".join(f"{name} lost {value:.3f}" for name, value in exceeding.items())
            self.report.stopped = (
                f"step {step}: {losses}, and {self.config.max_score_drop:g} may be lost. "
                "Raise `beta=…` or lower `learning_rate=…`"
            )
            self.monitoring.alarm(step, "forgetting", self.report.stopped)
            self.score_dropped = True
            return False
        stage = 0 if self.schedule is None else self.schedule.position  # that was evaluated
        if self.schedule is not None:
            self.schedule.scored(promotion, math.ceil(step / self.config.iterations))
        scores = [values[f"held_out_{mode}"] for mode in MODES if f"held_out_{mode}" in values]
        # scores of different stages are not comparable: weights of a later stage are preferred
        if step and scores and (self.best is None or (stage, float(np.mean(scores))) >= (self.best[2], self.best[0])):
            self.best = (float(np.mean(scores)), step, stage)
            save_adapter(trainer, self.work / "best")
        return True

    def _stopped(self) -> bool:
        """Whether any process received a signal."""
        from assay.optimizers.finetuning.trl_trainer import over_ranks

        return any(over_ranks([self.stop.is_set()]))

    def _validate(self, trainer: Any) -> None:
        """Compares the model before and after training on the sealed split and the retention tasks, in each mode."""
        engine = self.source.engine
        if engine is None:
            return
        engine.sync(trainer)
        for eval_task in self.all_eval_tasks:
            if eval_task.opens is not None and (openings := eval_task.opens()) is not None:
                self.report.test_openings[eval_task.name] = openings.to_dict()
            self.report.validation |= compare_weights(eval_task, engine)

    # -- our part of a checkpoint

    def _checkpoint(self, trainer: Any) -> None:
        """Writes a checkpoint of the last finished step: its weights are in place, the random state is rewound."""
        folder = self.work / "checkpoints" / f"checkpoint-{trainer.state.global_step}"
        step = trainer.state.global_step  # a checkpoint has no rollouts: write it only where new ones are due
        if step and not step % self.config.iterations and world() == 1 and not (folder / _NOTES).exists():
            trainer.rewind()
            trainer._save_checkpoint(trainer.model, None)
            self._note(folder)

    def _note(self, folder: Path) -> None:
        if rank():
            return
        state = {
            "curves": self.monitoring.curves,
            "alarms": self.monitoring.alarms,
            "memory": self.source.memory.to_json(),
            "best": self.best,
            "curriculum": None if self.schedule is None else self.schedule.state(),
            "kept_at": self.first_scores,
            "tally": self.source.row_stats,
        }
        (folder / _NOTES).write_text(json_text(state), encoding="utf-8")

    def _remember(self) -> None:
        """Restores our state from the newest checkpoint."""
        folder = max(
            (self.work / "checkpoints").glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2])
        )
        state = json.loads((folder / _NOTES).read_text(encoding="utf-8"))
        self.monitoring.curves.update(curves_of(state["curves"]))
        self.monitoring.alarms, self.first_scores = state["alarms"], state["kept_at"]
        self.source.memory.load(state["memory"])
        self.source.row_stats.restore(state["tally"])
        best = state["best"]
        self.best = (best[0], best[1], best[2]) if best else None
        if self.schedule is not None:
            self.schedule.restore(state["curriculum"])
