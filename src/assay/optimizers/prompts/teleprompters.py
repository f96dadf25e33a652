"""DSPy's teleprompters by name, and their sizes under a cap on calls.

They propose programs; `assay.optimizers.prompts.compile` chooses between them.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dspy

from assay.errors import BudgetExceeded, ConfigError
from assay.evaluation.session import RecordedProgram, Session
from assay.models.dspy_seam import moved_parts, optimizer_class
from assay.models.scope import looping_answers_as_text
from assay.optimizers.budget import run_calls
from assay.optimizers.prompts.candidates import with_models_of
from assay.optimizers.prompts.demonstrations import Demonstration, pool_of, select, with_demos
from assay.optimizers.prompts.given import built, check_arguments, compiled_by, kept_configuration, target_of, title_of
from assay.optimizers.prompts.named import (
    Proposal,
    check_settings,
    classes_of,
    parameters_of,
    refusal,
    refused_object,
    short_name,
    to_examples,
)
from assay.programs import ADAPTERS
from assay.programs.compose import EnsembleProgram, NearestDemos
from assay.programs.foreign_agent import TextAgent
from assay.programs.isolation import copied

_CALLS_FOR_XML = 200  # of a search
_FEWEST_VAL = 4  # tasks on which a named optimizer's proposal is compared
_PROPOSING = 0.9  # of the calls left, for runs; the rest is for proposals


def _labeled(p: Proposal) -> RecordedProgram:
    return p.compiled(p.build(dspy.LabeledFewShot, k=p.labels), sample=False)


class _Bootstrap(optimizer_class("BootstrapFewShot")):  # type: ignore[misc]
    """Returns the demonstrations collected so far if a cap ends it; DSPy's loses them."""

    cut: BudgetExceeded | None = None

    def _bootstrap(self, **options: Any) -> None:
        try:
            super()._bootstrap(**options)
        except BudgetExceeded as cap:
            if not any(self.name2traces.values()):
                raise
            self.cut = cap
            self.validation: list[Any] = []


def _bootstrap(p: Proposal) -> RecordedProgram:
    optimizer = p.build(
        _Bootstrap,
        max_bootstrapped_demos=p.demos,
        max_labeled_demos=0,
        max_rounds=2,
    )
    explored = p.explored()
    try:
        compiled = p.compiled(optimizer, teacher=explored.teacher or p.student)
    except BudgetExceeded as cap:
        if not explored.demonstrations:
            raise
        p.cut = cap
        chosen = select(explored.demonstrations, p.demos, how="diverse", seed=p.session.seed)
        return p.student.around(with_demos(p.student.program, chosen), prompt_format=explored.prompt_format)
    p.cut = optimizer.cut
    return compiled


def _bootstrap_search(p: Proposal) -> RecordedProgram:
    optimizer = p.build(
        dspy.BootstrapFewShotWithRandomSearch,
        max_bootstrapped_demos=p.demos,
        max_labeled_demos=p.labels,
        num_candidate_programs=max(1, p.passes(7, most=19) - 3),  # it also tries three others
    )
    return p.compiled(optimizer, teacher=p.teacher())


def _knn(p: Proposal) -> RecordedProgram:
    names = [name for name, _ in p.student.program.named_predictors()]
    demonstrations = p.explored().demonstrations or [Demonstration.of_label(task, names) for task in p.train]
    return RecordedProgram(NearestDemos(copied(p.student.program), pool_of(demonstrations), k=p.demos), p.session)


def _copro(p: Proposal) -> RecordedProgram:
    optimizer = p.build(dspy.COPRO, breadth=3, depth=max(1, p.passes(8, most=12) // 4))
    return p.compiled(optimizer, trainset=to_examples(p.val))


def _mipro(p: Proposal) -> RecordedProgram:
    optimizer = p.build(
        dspy.MIPROv2,
        auto=None,
        num_candidates=3,
        max_bootstrapped_demos=p.demos,
        max_labeled_demos=p.labels,
    )
    teacher = p.teacher()  # its calls leave fewer trials
    return p.compiled(optimizer, teacher=teacher, num_trials=max(1, p.passes(7, most=30) - 1), minibatch=False)


def _simba(p: Proposal) -> RecordedProgram:
    size = min(8, len(p.train))
    step = 7 * size  # runs of one step: three programs are sampled, and up to four candidates tried
    train, steps = p.examples(), 8
    if math.isfinite(p.session.meter.search_calls_left()):  # it ends with up to four programs on all of its train tasks
        runs = p.runs(0)
        train = train[: max(size, runs // 12)]
        steps = min(8, max(1, (runs - 4 * len(train)) // step))
    optimizer = p.build(dspy.SIMBA, bsize=size, num_candidates=3, max_steps=steps, max_demos=p.demos)
    return p.compiled(optimizer, trainset=train)


def _gepa(p: Proposal) -> RecordedProgram:
    optimizer = p.build(
        dspy.GEPA,
        metric=p.metric(feedback=True),
        max_metric_calls=p.runs(max(40, 4 * len(p.val))),
        warn_on_score_mismatch=False,
    )
    return p.compiled(optimizer)


class _InferRules(optimizer_class("InferRules")):  # type: ignore[misc]
    """InferRules that gives each candidate its own signature class.

    DSPy's writes the rules into the signature's class, which all copies of a program share, the baseline included.
    """

    def update_program_instructions(self, predictor: Any, natural_language_rules: str) -> None:
        rules = f"Please adhere to the following rules when making your prediction:\n{natural_language_rules}"
        predictor.signature = predictor.signature.append_instructions(rules)


def _infer_rules(p: Proposal) -> RecordedProgram:
    optimizer = p.build(
        _InferRules,
        metric=p.metric(),
        num_candidates=max(1, p.passes(4, most=11) - 1),
        num_rules=5,
        max_errors=10**9,
        max_bootstrapped_demos=p.demos,
        max_labeled_demos=p.labels,
        teacher_settings={"lm": p.prompt_lm},
    )
    return p.compiled(optimizer, teacher=p.teacher())


def _ensemble(p: Proposal) -> RecordedProgram:
    exploration = p.explored()
    members = [
        with_demos(p.student.program, select(exploration.demonstrations, p.demos, how=how, seed=p.session.seed + i))
        for i, how in enumerate(("diverse", "random", "random"))
    ]
    return RecordedProgram(EnsembleProgram(members), p.session)


class _Optuna(optimizer_class("BootstrapFewShotWithOptuna")):  # type: ignore[misc]
    """BootstrapFewShotWithOptuna with a corrected objective.

    DSPy's shows a single demonstration whatever number is set, and fails on a predictor that no run called.
    """

    demos_per_predictor = 4

    def objective(self, trial: Any) -> float:
        program = self.student.reset_copy()
        for (name, bootstrapped), (_, predictor) in zip(
            self.compiled_teleprompter.named_predictors(), program.named_predictors(), strict=True
        ):
            count = len(bootstrapped.demos)
            drawn = [
                trial.suggest_int(f"{name} demo {slot}", 0, count - 1)
                for slot in range(min(self.demos_per_predictor, count))
            ]
            predictor.demos = [bootstrapped.demos[index] for index in dict.fromkeys(drawn)]
        trial.set_user_attr("program", program)
        return float(dspy.Evaluate(devset=self.valset, metric=self.metric, num_threads=self.num_threads)(program).score)


def _optuna(p: Proposal) -> RecordedProgram:
    optimizer = p.build(
        _Optuna,
        max_bootstrapped_demos=p.demos,
        max_labeled_demos=0,
        num_candidate_programs=p.passes(4, most=16),
    )
    optimizer.demos_per_predictor = p.demos
    return p.compiled(optimizer, teacher=p.teacher(), max_demos=2 * p.demos)


OPTIMIZERS: dict[str, Callable[[Proposal], RecordedProgram]] = {
    "labeled": _labeled,
    "bootstrap": _bootstrap,
    "bootstrap-search": _bootstrap_search,
    "knn": _knn,
    "copro": _copro,
    "mipro": _mipro,
    "simba": _simba,
    "gepa": _gepa,
    "infer-rules": _infer_rules,
    "ensemble": _ensemble,
    "optuna": _optuna,
}


def least_runs(name: str, val: int, settings: Mapping[str, Any]) -> int:
    """Fewest runs of the program that an optimizer needs for one proposal on `val` tasks; 0 if unknown."""
    if name == "gepa":  # the plain program on val, the parent and its child on a minibatch, the child on val
        return 2 * val + 2 * int(settings.get("reflection_minibatch_size") or 3)
    if name == "simba":  # one step: trajectories of a batch, and its candidates on the batch
        candidates = int(settings.get("num_candidates") or 3)
        return (2 * candidates + 1) * int(settings.get("bsize") or 8)
    return {
        "mipro": 2 * val + 12,
        "bootstrap-search": 3 * val,
        "copro": 3 * val,
        "optuna": val + 8,
        "infer-rules": 2 * val,
    }.get(name, 0)


def named_val(name: str, size: int, session: Session, student: RecordedProgram) -> int:
    """Number of val tasks on which a named optimizer's proposal is compared.

    At most 50; fewer under a small cap, so that calls remain for the proposal.
    """
    calls_left = session.meter.search_calls_left()
    if math.isinf(calls_left):
        return min(50, size)
    # one comparison on val may take this part of the search's calls
    divisor = 3 if name == "labeled" else 4 if name in ("bootstrap", "knn", "ensemble", "simba") else 8
    each = max(1.0, sum(run_calls(student.program, session)))
    return min(50, size, max(_FEWEST_VAL, int(calls_left / each / divisor)))


def too_few_calls(
    optimizer: str, settings: Mapping[str, Any], student: RecordedProgram, val: int, session: Session
) -> str | None:
    """A warning if the caps leave a named optimizer too few runs for one proposal; None if they are enough."""
    calls_left, name = session.meter.search_calls_left(), short_name(optimizer)
    if math.isinf(calls_left) or not least_runs(name, 1, {}):
        return None
    tasks = named_val(name, val, session, student)
    minimum_runs = max(least_runs(name, tasks, settings), int(settings.get("max_metric_calls") or 0))
    runs = math.ceil(minimum_runs / _PROPOSING) + 2 * tasks
    needed = math.ceil(runs * max(1.0, sum(run_calls(student.program, session))))
    if needed <= calls_left:
        return None
    return (
        f"the caps leave {int(calls_left)} search calls, too few for one proposal of {name}: it needs about {needed} "
        f"({runs} runs of the program on {tasks} val tasks and its own). "
        f"Raise --max-search-calls to {needed} or more, and --max-calls to twice that, or use auto or bootstrap"
    )


def propose(name: str, proposal: Proposal) -> RecordedProgram:
    """Runs the named optimizer on a copy of the student and returns the program it proposes.

    Args:
        name: one of `OPTIMIZERS`, or any other teleprompter, see `assay.optimizers.prompts.given`.
    Raises:
        ConfigError: no such optimizer.
        OptimizerError: what it returned is not the student with other prompts.
    """
    session = proposal.session
    session.register(proposal.train + proposal.val)
    name = short_name(name)
    configured = dspy.settings.lm
    build = OPTIMIZERS.get(name) or (lambda p: compiled_by(name, p, configured=configured))
    student = proposal.student
    proposal.student = student.around(copied(student.program))
    with (
        kept_configuration(),
        session.context(),
        looping_answers_as_text(),
    ):  # of proposals; runs of the program set it back
        compiled = build(proposal)
    with_models_of(compiled, student)  # DSPy's copies of a program lose them
    compiled.temperature = student.temperature
    compiled.prompt_format = compiled.prompt_format or student.prompt_format
    return compiled


def check_optimizer(name: str, settings: Mapping[str, Any] | None = None) -> None:
    """Refuses unknown or unsupported optimizers, and settings that the optimizer does not take.

    Raises:
        ConfigError: says why, and what to use.
    """
    if (reason := refusal(name)) is not None:
        raise ConfigError(f"optimizer {title_of(name)}: {reason}")
    short = short_name(name)
    target = (
        target_of(short, known=("auto", "light", *OPTIMIZERS)) if short not in OPTIMIZERS and short != "auto" else None
    )
    _check(name, target, settings or {})


def check_made(name: str, proposal: Proposal) -> None:
    """Refuses an optimizer that the function of this name returns, as `check_optimizer` refuses one itself.

    Raises:
        ConfigError: says why; also if the function fails.
    """
    short = short_name(name)
    if short in OPTIMIZERS or short == "auto" or not inspect.isroutine(function := target_of(short)):
        return
    taken = parameters_of(function)
    with proposal.session.context():
        _check(name, built(short, proposal), {k: v for k, v in proposal.settings.items() if k not in taken})


def _check(name: str, target: Any, settings: Mapping[str, Any]) -> None:
    """`target`: the class, function or object of this name; None for one of ours."""
    short = short_name(name)
    if target is not None and (reason := refused_object(target)) is not None:
        raise ConfigError(f"optimizer {title_of(name)}: {reason}")
    _require_parts(name, classes_of(short if target is None else target))
    check_settings(short, settings, target)
    if target is not None:
        check_arguments(short, target, settings)


def _require_parts(name: str, classes: Sequence[str]) -> None:
    """Refuses an optimizer that needs a part of DSPy that has moved."""
    if moved := [str(part) for kind in classes for part in moved_parts(kind)]:
        working = [short for short in OPTIMIZERS if not any(moved_parts(kind) for kind in classes_of(short))]
        raise ConfigError(
            f"optimizer {title_of(name)} cannot run on DSPy {dspy.__version__}, where {', '.join(moved)} is missing or "
            f"takes other arguments; {', '.join(['auto', *working])} can"
        )


def shows_demos(name: str) -> bool:
    """Whether an optimizer adds as many demonstrations as `demos` says. Of an optimizer by class this is unknown."""
    short = short_name(name)
    return short == "auto" or (short in OPTIMIZERS and short not in ("copro", "gepa"))


def writes_instructions(name: str) -> bool:
    """Whether an optimizer asks the reflection model for instructions; True if that is unknown, by class."""
    short = short_name(name)
    return short not in OPTIMIZERS or short in ("copro", "gepa", "infer-rules", "mipro", "simba")


def auto_prompt_formats(student: RecordedProgram, calls_left: float) -> list[str | None]:
    """The program's own prompt format first (None is DSPy's default), then the others worth trying.

    `xml` is tried for programs whose format has marked sections, as DSPy's defaults, where there are calls for it: of
    100 calls it left too few for the other settings of the scripted learner.

    Args:
        calls_left: LM calls that the search may still make.
    """
    default = student.settings["adapter"]
    if isinstance(student.program, TextAgent):
        return [default]  # it writes its messages itself
    left_out = {default, "chat"}
    if default not in (None, "chat") or calls_left < _CALLS_FOR_XML:
        left_out.add("xml")
    return [default, *(name for name in ADAPTERS if name not in left_out)]
