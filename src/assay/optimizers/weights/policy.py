"""The policy gradient: rollouts of a program under the weights as they are, credit for each of its calls, a step; again."""

import itertools
import json
import math
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from assay.errors import Cancelled, ConfigError, DataError, Diverged, MissingExtra, StopRun
from assay.models.adapters import keep_adapter, list_adapters, served_as
from assay.optimizers.session import Progress
from assay.optimizers.weights.base import Policy, lean_head, load_policy, quiet, tokenizer_sha
from assay.optimizers.weights.config import PolicyConfig
from assay.optimizers.weights.guards import Watch
from assay.optimizers.weights.making import make_trainer
from assay.optimizers.weights.offline import Recorded
from assay.optimizers.weights.online import Rollouts, job_of
from assay.optimizers.weights.page import of_other_seeds, write_report
from assay.optimizers.weights.rows import Tally
from assay.optimizers.weights.validation import MODES, Bench, compared, look
from assay.optimizers.weights.work import (
    last_good,
    rank,
    ready,
    restored,
    save_adapter,
    stoppable,
    told_agreement,
    training_id,
    working_folder,
    world,
)
from assay.reprs import Shown

__all__ = ["PolicyReport", "train_policy"]

_NOTES = "assay.json"  # in a checkpoint, beside what TRL keeps


@dataclass(repr=False)
class PolicyReport(Shown):
    """What `train_policy` did. `name` is the model to serve (None where the base is none of ours: `path` then holds PEFT's folder).

    `curves[name][step]` are the numbers of each step; `validation[bench][mode]` has `before`, `after` and their paired `gain` on tasks
    that nothing was trained on or chosen by. `agreement` is the share of prompts that torch and the served GGUF continue with the same
    greedy text.
    """

    name: str | None
    path: Path
    config: PolicyConfig
    curves: dict[str, dict[int, float]] = field(default_factory=dict)
    validation: dict[str, dict[str, Any]] = field(default_factory=dict)
    test_openings: dict[str, dict[str, int]] = field(default_factory=dict)  # by bench, see `assay.traces.sealing.Openings`
    alarms: list[str] = field(default_factory=list)
    converged: bool | None = None
    best_step: int | None = None
    steps: int = 0
    tally: Tally = field(default_factory=Tally)
    report: Path | None = None
    agreement: float | None = None
    stopped: str | None = None
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        told = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "tally"}
        paths = {"path": str(self.path), "report": str(self.report) if self.report else None}
        return {**told, **self.tally.to_dict(), **paths, "config": asdict(self.config)}


def train_policy(
    source: Rollouts | Recorded,
    name: str,
    config: PolicyConfig,
    *,
    retained: Sequence[Bench] = (),
    resume: bool = False,
    progress: Progress | None = None,
) -> PolicyReport:
    """Trains an adapter on the rows of a source, and keeps it under `name`, to be served as `MODEL+NAME`.

    Args:
        source: rollouts that are made as it goes, or an export of transitions.
        retained: other programs or tasks, looked at along the way: a loss of more than `config.forget` stops training. Their sessions
            must run on the `lm` of the source's engine.
    Raises:
        DataError: too few tasks, or nothing to learn from. ConfigError: there is an adapter of this name, nothing to resume, or
            something to be retained that is never looked at.
        Cancelled: a signal came; a checkpoint was written. Diverged: the loss was no number before there was any checkpoint, or too
            much was forgotten. ModelError: memory or disk ran out.
    """
    if retained and not config.evaluate_every:
        raise ConfigError("what is to be retained is looked at every --evaluate-every steps, and 0 is never: give a number of steps")
    if source.items < config.tasks:
        raise DataError(f"{source.items} {source.of_what} to train on, and a step takes {config.tasks}: give more data, or lower --tasks")
    job = {**config.of_what(), "name": name, **source.job, "retained": [job_of(one, [*one.val, *one.test]) for one in retained]}
    with working_folder(name, job, resume=resume, last=_NOTES) as work, ready():
        if source.engine is not None:
            source.engine.work_in(work / f"policy-{rank()}")
        try:
            return _Training(source, name, config, retained, work, progress or Progress()).run(resume)
        finally:
            if source.engine is not None:
                source.engine.close()


class _EndedError(Exception):
    """A look before the first step found too much forgotten: nothing else ends TRL's loop there."""


class _Training:
    """One run, with all that it holds."""

    def __init__(
        self, source: Rollouts | Recorded, name: str, config: PolicyConfig, retained: Sequence[Bench], work: Path, shown: Progress
    ) -> None:  # fmt: skip
        self.source, self.name, self.config, self.retained, self.work, self.shown = source, name, config, list(retained), work, shown
        self.benches = [*([source.bench] if source.bench is not None else []), *retained]
        self.report, self.watch = PolicyReport(None, work, config, tally=source.tally), Watch()
        self.best: tuple[float, int] | None = None
        self.kept_at: dict[str, float] = {}  # what the retained benches scored before
        self.diverged, self.forgot = False, False
        self.stop = threading.Event()
        self.rows, self.lines = 1.0, itertools.count()  # of the last batch; of the table
        if source.engine is not None:
            for one in self.benches:
                one.session.executor = source.engine.execute

    # -- the run

    def run(self, resume: bool) -> PolicyReport:
        self.shown.say(f"loading {self.config.model} …")
        policy = load_policy(self.config.model)
        checkpoint = resume and any((self.work / "checkpoints").glob("checkpoint-*"))
        if checkpoint:
            self._remember()
        bar = self.shown.bar(f"{self.config.algorithm}: steps", self.config.steps)
        with quiet(), lean_head(), stoppable() as self.stop, bar as advance:
            if self.source.engine is not None:
                self.source.engine.timeout_s = self.config.rollout_timeout_s
                self.source.engine.stop = self.stop if world() == 1 else None  # several processes stop together, between steps
            trainer = make_trainer(policy, self.config, self.source.items, self.work / "checkpoints", self.source.collect, self._callback(advance))
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
                raise Cancelled(f"stopped at step {self.report.steps}, with a checkpoint in {self.work}; continue with resume=True")
            if self.diverged:
                self.report.stopped, self.report.best_step = last_good(trainer, self.work, self.report.steps)
            elif self.best is not None:
                restored(trainer.model, self.work / "best")
                self.report.best_step = self.best[1]
            elif self.forgot:
                raise Diverged(f"{self.report.stopped}. No weights of an earlier look are within it, so none are kept")
            self._validate(trainer)
        self.report.curves, self.report.converged = {name: dict(curve) for name, curve in self.watch.curves.items()}, self.watch.converged
        self.report.alarms = list(self.watch.alarms.values())
        return self._keep(trainer, policy)

    def _keep(self, trainer: Any, policy: Policy) -> PolicyReport:
        report, kept = self.report, self.work / "adapter"
        self._tell_of_all()
        save_adapter(trainer, kept)
        if rank():
            report.path = kept
            return report
        if policy.embedded is None:
            report.path = kept
            report.notes.append(f"{self.config.model} is no embedded model: the adapter stays in PEFT's form, for vLLM or transformers")
            return self._told()
        made = {
            **report.to_dict(), **self.source.made_from(), "tokenizer_sha256": tokenizer_sha(policy.tokenizer), "training": training_id(self.work),
        }  # fmt: skip
        adapter = keep_adapter(self.name, kept, base=policy.embedded, after=policy.merged, made=made)
        report.name, report.path = served_as(adapter), adapter.path
        report.agreement = told_agreement(trainer, policy, adapter, self.source.prompts, report.notes)
        shutil.rmtree(self.work, ignore_errors=True)
        return self._told()

    def _tell_of_all(self) -> None:
        """Counts of all processes."""
        from assay.optimizers.weights.trainer import over_ranks

        tally = self.report.tally
        every = over_ranks([(tally.rollouts, tally.calls, dict(tally.left_out))])
        tally.rollouts, tally.calls = sum(one[0] for one in every), sum(one[1] for one in every)
        tally.left_out = sum((Counter(one[2]) for one in every), Counter())

    def _told(self) -> PolicyReport:
        """The report, with its page beside the adapter where the pictures can be drawn."""
        try:
            told = self.report.to_dict()
            others = of_other_seeds(told, (adapter.made for adapter in list_adapters()))
            self.report.report = write_report(self.report.path / "training.html", told, others)
        except (MissingExtra, OSError) as error:
            self.report.notes.append(f"no page was written: {error}")
        return self.report

    # -- along the way

    def _callback(self, advance: Callable[[int], None]) -> Any:
        from transformers import TrainerCallback

        mine = self

        class Callback(TrainerCallback):  # type: ignore[misc]
            trainer: Any = None

            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                advance(state.global_step)
                step = state.global_step
                stopped_in_it = mine._due(step, state.max_steps) and step not in mine._looks()
                if (not step or stopped_in_it) and not mine._look(self.trainer, step):
                    raise _EndedError

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                advance(1)
                if mine._stopped() and state.global_step % mine.config.iterations == 0:
                    control.should_save = control.should_training_stop = True

            def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
                if "loss" not in (logs or {}):  # the end's own summary
                    return
                mine._see(state.global_step, logs)
                if mine.diverged:
                    control.should_training_stop, control.should_save = True, False
                    return
                if mine._due(state.global_step, state.max_steps) and not mine._look(self.trainer, state.global_step):
                    control.should_training_stop = True

            def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                mine._note(Path(args.output_dir) / f"checkpoint-{state.global_step}")

        return Callback()

    def _see(self, step: int, logged: Mapping[str, Any]) -> None:
        self.diverged = not all(math.isfinite(float(logged[key])) for key in ("loss", "grad_norm") if key in logged)
        told = {key: float(value) for key, value in logged.items() if isinstance(value, int | float) and math.isfinite(value)}
        self.rows = told.get("rows", self.rows)
        if not self.rows:  # TRL tells of the blank row that stood in
            told = {key: value for key, value in told.items() if key not in ("entropy", "kl") and not key.startswith("clip_ratio")}
        for alarm in self.watch.see(step, told):
            self.shown.say(f"alarm: {alarm}")
        if "step_time" in told:
            self.source.tally.spend("steps", told["step_time"])
        if next(self.lines) % _HEAD_EVERY == 0:
            self.shown.say(_HEAD)
        self.shown.say(_line(step, told))

    def _due(self, step: int, last: int) -> bool:
        every = self.config.evaluate_every
        return bool(every and step) and (step % every == 0 or step == last)

    def _looks(self) -> set[int]:
        """Steps that were looked at."""
        return {step for name, curve in self.watch.curves.items() if name.startswith(("held_out_", "retained_")) for step in curve}

    def _look(self, trainer: Any, step: int) -> bool:
        """Held-out tasks under the weights as they are, and what was to be retained. False: too much of that is lost. It has random numbers
        of its own, so that the training is the same with a look, without, and with one that was stopped and comes again."""
        import torch

        if self.source.engine is None or (not self.config.evaluate_every and step == 0):
            return True
        trainer.mark()
        torch.manual_seed(self.config.seed + step)
        told = self._looked(trainer)
        trainer.rewind()
        return self._judge(trainer, step, told)

    def _looked(self, trainer: Any) -> dict[str, float]:
        """Mean scores by name, as the first process has them."""
        from assay.optimizers.weights.trainer import over_ranks

        engine, bench, told = self.source.engine, self.source.bench, dict[str, float]()
        at = f"step {trainer.state.global_step}"
        assert engine is not None
        engine.sync(trainer)
        for mode in MODES:
            if bench is None:
                break
            found = look(bench, engine, bench.val[: self.config.held_out], mode, phase="validate", scope=at)
            if not math.isnan(found.mean):
                told[f"held_out_{mode}"] = found.mean
        for other in self.retained:
            found = look(other, engine, other.val[: self.config.held_out], "greedy", phase="validate", scope=at)
            if not math.isnan(found.mean):
                told[f"retained_{other.name}"] = found.mean
        first: dict[str, float] = over_ranks([told])[0]
        return first

    def _judge(self, trainer: Any, step: int, told: Mapping[str, float]) -> bool:
        """Whether training may go on after a look that found this; keeps the best weights."""
        for other in self.retained:
            if (score := told.get(f"retained_{other.name}")) is not None:
                self.kept_at.setdefault(other.name, score)
        for name, value in told.items():
            self.watch.curves[name][step] = value
        self.shown.say(f"step {step}: " + ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in told.items()))
        lost = {name: kept - told[f"retained_{name}"] for name, kept in self.kept_at.items() if f"retained_{name}" in told}
        if forgotten := {name: value for name, value in lost.items() if value > self.config.forget}:
            said = ", ".join(f"{name} lost {value:.3f}" for name, value in forgotten.items())
            self.report.stopped = f"step {step}: {said}, and {self.config.forget:g} may be lost. Raise --beta or lower --learning-rate"
            self.watch.alarms["forgetting"], self.forgot = self.report.stopped, True
            return False
        seen = [told[f"held_out_{mode}"] for mode in MODES if f"held_out_{mode}" in told]
        if step and seen and (self.best is None or float(np.mean(seen)) >= self.best[0]):
            self.best = (float(np.mean(seen)), step)
            save_adapter(trainer, self.work / "best")
        return True

    def _stopped(self) -> bool:
        """Whether a signal came, to any process."""
        from assay.optimizers.weights.trainer import over_ranks

        return any(over_ranks([self.stop.is_set()]))

    def _validate(self, trainer: Any) -> None:
        """The sealed split and the retained ones, before and after, greedily and sampled."""
        engine = self.source.engine
        if engine is None:
            return
        engine.sync(trainer)
        for bench in self.benches:
            found: dict[str, Any] = {}
            if bench.opens is not None and (openings := bench.opens()) is not None:
                self.report.test_openings[bench.name] = openings.to_dict()
            for mode in MODES if bench.test else ():
                with engine.before():
                    before = look(bench, engine, bench.test, mode, phase="test", scope="before")
                after = look(bench, engine, bench.test, mode, phase="test", scope="after")
                if not rank():
                    found[mode] = compared(before, after)
            if found or rank():
                self.report.validation[bench.name] = found

    # -- what a checkpoint keeps beside TRL's

    def _checkpoint(self, trainer: Any) -> None:
        """Between steps the weights are those of the last one: with the random numbers of then, a checkpoint of now is one of then."""
        folder = self.work / "checkpoints" / f"checkpoint-{trainer.state.global_step}"
        step = trainer.state.global_step  # rollouts that are used again are not in a checkpoint
        if step and not step % self.config.iterations and world() == 1 and not (folder / _NOTES).exists():
            trainer.rewind()
            trainer._save_checkpoint(trainer.model, None)
            self._note(folder)

    def _note(self, folder: Path) -> None:
        if rank():
            return
        told = {
            "curves": self.watch.curves, "alarms": self.watch.alarms, "memory": self.source.memory.to_json(), "best": self.best,
            "kept_at": self.kept_at, "tally": self.source.tally.to_dict(),
        }  # fmt: skip
        (folder / _NOTES).write_text(json.dumps(told, default=str), encoding="utf-8")

    def _remember(self) -> None:
        """What was known at the last checkpoint."""
        folder = max((self.work / "checkpoints").glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        told = json.loads((folder / _NOTES).read_text(encoding="utf-8"))
        for name, curve in told["curves"].items():
            self.watch.curves[name] = {int(step): value for step, value in curve.items()}
        self.watch.alarms, self.kept_at = told["alarms"], told["kept_at"]
        self.source.memory.take(told["memory"])
        self.source.tally.take(told["tally"])
        self.best = (told["best"][0], told["best"][1]) if told["best"] else None


_HEAD_EVERY = 20  # steps
_SHOWN = {
    "reward": "reward", "score": "score", "entropy": "entropy", "kl": "kl", "clip_ratio/region_mean": "clipped", "flat_groups": "flat",
    "turns": "turns", "tokens": "tokens", "step_time": "seconds",
}  # fmt: skip
_HEAD = f"{'step':>5}" + "".join(f"{label:>9}" for label in _SHOWN.values())


def _line(step: int, told: Mapping[str, float]) -> str:
    """A row of the table that grows in the terminal, under `_HEAD`."""
    return f"{step:>5}" + "".join(f"{told[key]:>9.3g}" if key in told else " " * 9 for key in _SHOWN)
