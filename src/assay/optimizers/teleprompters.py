"""DSPy's teleprompters by name. They propose; who wins is decided elsewhere (`assay.optimizers.prompts`)."""

import copy
import importlib
import inspect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dspy
from dspy import teleprompt

from assay.datasets import Task
from assay.errors import BudgetExceeded, ConfigError
from assay.optimizers.demonstrations import Demonstration, Exploration, choose, explore, with_demos
from assay.optimizers.estimate import calls_per_run
from assay.optimizers.named import check_settings, refusal, short_name
from assay.optimizers.session import Session, Student
from assay.programs import ADAPTERS
from assay.programs.compose import EnsembleProgram, NearestDemos, input_key

__all__ = ["OPTIMIZERS", "Proposal", "auto_adapters", "check_optimizer", "least_runs", "propose", "to_examples", "val_share"]


@dataclass
class Proposal:
    """What an optimizer is given. A predictor shows at most `demos` bootstrapped demonstrations, and `labels` of the data's own."""

    student: Student
    train: list[Task]
    val: list[Task]
    session: Session
    threshold: float = 0.8
    demos: int = 4
    labels: int = 16
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the optimizer, before our own
    cut: BudgetExceeded | None = None  # the cap that ended the optimizer before it was done

    def made(self, found: Any, **ours: Any) -> Any:
        """The optimizer, with the user's settings before ours."""
        if self.settings.get("auto"):  # it sets these two by itself
            ours = {name: value for name, value in ours.items() if name not in ("num_candidates", "max_metric_calls")}
        return found(**{**ours, **self._for(found.__init__)})

    def compiled(self, optimizer: Any, **ours: Any) -> Any:
        """What the optimizer makes of the student, with the user's settings before ours."""
        if self.settings.get("auto"):
            ours.pop("num_trials", None)
        return optimizer.compile(self.student, **{**ours, **self._for(optimizer.compile)})

    def _for(self, function: Any) -> dict[str, Any]:
        known = inspect.signature(function).parameters
        return {name: value for name, value in self.settings.items() if name in known}

    def runs(self, otherwise: int) -> int:
        """Runs of the program that the calls left allow, a tenth of them kept for proposals; `otherwise` where nothing caps them."""
        left = self.session.meter.search_calls_left()
        if not math.isfinite(left):
            return otherwise
        measured = self.session.measured
        each = (measured.calls + measured.judge_calls) if measured else calls_per_run(self.student.program)
        return max(1, int(0.9 * left / max(1.0, each)))

    def passes(self, otherwise: int, *, most: int) -> int:
        """Evaluations on all of val that the calls left allow, from 1 to `most`."""
        return otherwise if not math.isfinite(self.session.meter.search_calls_left()) else min(most, max(1, self.runs(0) // max(1, len(self.val))))

    def metric(self, *, feedback: bool = False) -> Any:
        return self.session.rubric.metric(threshold=self.threshold, feedback=feedback, tasks=self.session.tasks)

    def examples(self) -> list[dspy.Example]:
        return to_examples(_shuffled(self.train, self.session.seed))

    def explored(self) -> Exploration:
        """Successes of the program's variants on train, within a third of the calls that are left."""
        session = self.session
        adapters = [self.student.settings["adapter"]]
        left = session.meter.search_calls_left()
        return explore(self.student, self.train, session, adapters=adapters, max_calls=left / 3, threshold=self.threshold)

    def teacher(self) -> Student:
        """The variant that succeeds most: with a plain program that never does, there is nothing else to learn from."""
        return self.explored().teacher or self.student

    @property
    def prompt_lm(self) -> Any:
        return self.session.prompt_lm or self.session.lm


def _shuffled(tasks: Sequence[Task], seed: int) -> list[Task]:
    order = list(tasks)
    random.Random(seed).shuffle(order)  # DSPy draws its demonstrations with a fixed seed of its own
    return order


def to_examples(tasks: Sequence[Task]) -> list[dspy.Example]:
    """Tasks as DSPy examples."""
    return [dspy.Example(**task.inputs, **task.expected).with_inputs(*task.inputs) for task in tasks]


def _labeled(p: Proposal) -> Student:
    return p.compiled(p.made(teleprompt.LabeledFewShot, k=p.labels), trainset=p.examples(), sample=False)


class _Bootstrap(teleprompt.BootstrapFewShot):  # type: ignore[misc]
    """Shows what it has collected where a cap ends it; DSPy's loses it."""

    cut: BudgetExceeded | None = None

    def _bootstrap(self, **options: Any) -> None:
        try:
            super()._bootstrap(**options)
        except BudgetExceeded as cap:
            if not any(self.name2traces.values()):
                raise
            self.cut = cap
            self.validation: list[Any] = []


def _bootstrap(p: Proposal) -> Student:
    optimizer = p.made(_Bootstrap, metric=p.metric(), max_bootstrapped_demos=p.demos, max_labeled_demos=0, max_rounds=2, max_errors=10**9)
    explored = p.explored()
    try:
        compiled = p.compiled(optimizer, teacher=explored.teacher or p.student, trainset=p.examples())
    except BudgetExceeded as cap:
        if not explored.demonstrations:
            raise
        p.cut = cap
        return with_demos(p.student, choose(explored.demonstrations, p.demos, seed=p.session.seed, diverse=True), adapter=explored.adapter)
    p.cut = optimizer.cut
    return compiled


def _bootstrap_search(p: Proposal) -> Student:
    optimizer = p.made(
        teleprompt.BootstrapFewShotWithRandomSearch, metric=p.metric(), max_bootstrapped_demos=p.demos, max_labeled_demos=p.labels,
        num_candidate_programs=max(1, p.passes(7, most=19) - 3),  # it tries three programs beside them
        num_threads=p.session.threads, max_errors=10**9,
    )  # fmt: skip
    return p.compiled(optimizer, teacher=p.teacher(), trainset=p.examples(), valset=to_examples(p.val))


def _knn(p: Proposal) -> Student:
    found = p.explored().demonstrations
    if not found:
        found = [
            Demonstration(t, tuple((n, dict(t.inputs), dict(t.expected)) for n, _ in p.student.program.named_predictors()), 1.0) for t in p.train
        ]
    pool = []
    for demonstration in found:
        demos: dict[str, list[dict[str, Any]]] = {}
        for name, given, output in demonstration.steps:
            demos.setdefault(name, []).append({**given, **output})
        pool.append({"key": input_key(dict(demonstration.task.inputs)), "demos": demos})
    return Student(NearestDemos(copy.deepcopy(p.student.program), pool, k=p.demos), p.session)


def _copro(p: Proposal) -> Student:
    optimizer = p.made(
        teleprompt.COPRO, prompt_model=p.prompt_lm, metric=p.metric(), breadth=3, depth=max(1, p.passes(8, most=12) // 4)
    )  # fmt: skip
    options = {"num_threads": p.session.threads, "display_progress": False}
    return p.compiled(optimizer, trainset=to_examples(p.val), eval_kwargs=options)


def _mipro(p: Proposal) -> Student:
    optimizer = p.made(
        teleprompt.MIPROv2, metric=p.metric(), prompt_model=p.prompt_lm, task_model=p.session.lm, auto=None, num_candidates=3,
        max_bootstrapped_demos=p.demos, max_labeled_demos=p.labels, num_threads=p.session.threads, max_errors=10**9, seed=p.session.seed,
    )  # fmt: skip
    return p.compiled(
        optimizer, trainset=p.examples(), valset=to_examples(p.val), teacher=p.teacher(), num_trials=max(1, p.passes(7, most=30) - 1),
        minibatch=False, seed=p.session.seed,
    )  # fmt: skip


def _simba(p: Proposal) -> Student:
    size = min(8, len(p.train))
    step = 7 * size  # runs of one step: three programs are sampled, and up to four candidates tried
    train, steps = p.examples(), 8
    if math.isfinite(p.session.meter.search_calls_left()):  # it ends with up to four programs on all of its train tasks
        runs = p.runs(0)
        train = train[: max(size, runs // 12)]
        steps = min(8, max(1, (runs - 4 * len(train)) // step))
    optimizer = p.made(
        teleprompt.SIMBA, metric=p.metric(), bsize=size, num_candidates=3, max_steps=steps,
        max_demos=p.demos, prompt_model=p.prompt_lm, num_threads=p.session.threads,
    )  # fmt: skip
    return p.compiled(optimizer, trainset=train, seed=p.session.seed)


def _gepa(p: Proposal) -> Student:
    optimizer = p.made(
        teleprompt.GEPA, metric=p.metric(feedback=True), reflection_lm=p.prompt_lm, max_metric_calls=p.runs(max(40, 4 * len(p.val))),
        num_threads=p.session.threads, seed=p.session.seed, warn_on_score_mismatch=False,
    )  # fmt: skip
    return p.compiled(optimizer, trainset=p.examples(), valset=to_examples(p.val))


def _infer_rules(p: Proposal) -> Student:
    optimizer = p.made(
        teleprompt.InferRules, metric=p.metric(), num_candidates=max(1, p.passes(4, most=11) - 1), num_rules=5, num_threads=p.session.threads,
        max_errors=10**9, max_bootstrapped_demos=p.demos, max_labeled_demos=p.labels, teacher_settings={"lm": p.prompt_lm},
    )  # fmt: skip
    return p.compiled(optimizer, teacher=p.teacher(), trainset=p.examples(), valset=to_examples(p.val))


def _ensemble(p: Proposal) -> Student:
    found = p.explored()
    adapter = p.student.settings["adapter"]
    members = [
        with_demos(p.student, choose(found.demonstrations, p.demos, seed=p.session.seed + i, diverse=i == 0), adapter=adapter).program
        for i in range(3)
    ]
    return Student(EnsembleProgram(members), p.session)


class _Optuna(teleprompt.BootstrapFewShotWithOptuna):  # type: ignore[misc]
    """DSPy's objective shows one demonstration however many were asked for, and fails on a predictor that no run ever
    called (a review pass), which has none to draw."""

    shown = 4

    def objective(self, trial: Any) -> float:
        program = self.student.reset_copy()
        for (name, known), (_, predictor) in zip(self.compiled_teleprompter.named_predictors(), program.named_predictors(), strict=True):
            count = len(known.demos)
            drawn = [trial.suggest_int(f"{name} demo {slot}", 0, count - 1) for slot in range(min(self.shown, count))]
            predictor.demos = [known.demos[index] for index in dict.fromkeys(drawn)]
        trial.set_user_attr("program", program)
        return float(dspy.Evaluate(devset=self.valset, metric=self.metric, num_threads=self.num_threads)(program).score)


def _optuna(p: Proposal) -> Student:
    optimizer = p.made(
        _Optuna, metric=p.metric(), max_bootstrapped_demos=p.demos, max_labeled_demos=0, num_candidate_programs=p.passes(4, most=16),
        num_threads=p.session.threads,
    )  # fmt: skip
    optimizer.shown = p.demos
    trainset = p.examples()
    return p.compiled(optimizer, teacher=p.teacher(), max_demos=2 * p.demos, trainset=trainset, valset=to_examples(p.val))


OPTIMIZERS: dict[str, Callable[[Proposal], Student]] = {
    "labeled": _labeled, "bootstrap": _bootstrap, "bootstrap-search": _bootstrap_search, "knn": _knn, "copro": _copro,
    "mipro": _mipro, "simba": _simba, "gepa": _gepa, "infer-rules": _infer_rules, "ensemble": _ensemble, "optuna": _optuna,
}  # fmt: skip


def least_runs(name: str, val: int, settings: Mapping[str, Any]) -> int:
    """Runs of the program that an optimizer needs for one proposal, with `val` tasks to compare it on; 0 where nothing is known."""
    if name == "gepa":  # the plain program on val, the parent and its child on a minibatch, the child on val
        return 2 * val + 2 * int(settings.get("reflection_minibatch_size") or 3)
    if name == "simba":  # one step: trajectories of a batch, and its candidates on the batch
        candidates = int(settings.get("num_candidates") or 3)
        return (2 * candidates + 1) * int(settings.get("bsize") or 8)
    return {"mipro": 2 * val + 12, "bootstrap-search": 3 * val, "copro": 3 * val, "optuna": val + 8, "infer-rules": 2 * val}.get(name, 0)


def val_share(name: str) -> int:
    """Of the search's calls, the part that one comparison on val may take: one of so many."""
    return 3 if name == "labeled" else 4 if name in ("bootstrap", "knn", "ensemble", "simba") else 8


def propose(name: str, proposal: Proposal) -> Student:
    """The program that the named optimizer makes of the student; the student itself is not changed.

    Args:
        name: one of `OPTIMIZERS`, or the class path of any other DSPy teleprompter, `package.module:Class`.
    Raises:
        ConfigError: no such optimizer.
    """
    session = proposal.session
    session.know(proposal.train + proposal.val)
    name = short_name(name)
    build = OPTIMIZERS.get(name) or (lambda p: _by_path(name, p))
    own = proposal.student
    proposal.student = Student(copy.deepcopy(own.program), session, adapter=own.adapter)
    proposal.student.temperature = own.temperature
    with session.context():
        compiled = build(proposal)
    compiled.temperature = own.temperature
    compiled.adapter = compiled.adapter or own.adapter
    return compiled


def check_optimizer(name: str, settings: Mapping[str, Any] | None = None) -> None:
    """Refuses an optimizer that is not there or cannot work, and settings that it does not take.

    Raises:
        ConfigError: says why, and what to use.
    """
    if (why := refusal(name)) is not None:
        raise ConfigError(f"optimizer {name!r}: {why}")
    short = short_name(name)
    found = _class(short) if short not in OPTIMIZERS and short != "auto" else None
    check_settings(short, settings or {}, found)


def _class(path: str) -> Any:
    module, colon, attribute = path.rpartition(":")
    if not colon:
        raise ConfigError(f"no optimizer is called {path!r}; there are auto, {', '.join(OPTIMIZERS)}, or package.module:Class")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"optimizer {path!r} cannot be imported: {error}") from error


def _by_path(path: str, p: Proposal) -> Student:
    """Any teleprompter: it is given those of our settings that its constructor and `compile` name."""
    found = _class(path)
    offered = {
        "metric": p.metric(), "num_threads": p.session.threads, "prompt_model": p.prompt_lm, "task_model": p.session.lm,
        "seed": p.session.seed, "max_errors": 10**9, "reflection_lm": p.prompt_lm,
    }  # fmt: skip
    optimizer = p.made(found, **_named(found.__init__, offered))
    data: dict[str, Any] = {
        "trainset": p.examples(), "valset": to_examples(p.val), "seed": p.session.seed,
        "eval_kwargs": {"num_threads": p.session.threads, "display_progress": False},
    }  # fmt: skip
    if "teacher" in inspect.signature(optimizer.compile).parameters:
        data["teacher"] = p.teacher()
    return p.compiled(optimizer, **_named(optimizer.compile, data))


def _named(function: Any, offered: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in offered.items() if name in inspect.signature(function).parameters}


def auto_adapters(student: Student) -> list[str | None]:
    """The program's own prompt format first (None is DSPy's default), then the others worth trying."""
    own = student.settings["adapter"]
    return [own, *(name for name in ADAPTERS if name not in (own, "chat"))]
