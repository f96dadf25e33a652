"""DSPy's optimizers by class name: assay's short names for them, those that are refused, and their settings."""

import inspect
import math
import random
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dspy
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import SchemaError

from assay.datasets import Task
from assay.errors import BudgetExceeded, ConfigError
from assay.evaluation.session import RecordedProgram, Session
from assay.models.dspy_seam import optimizer_class
from assay.optimizers.budget import run_calls
from assay.optimizers.prompts.demonstrations import Exploration, explore
from assay.sources.modules import without_call
from assay.support.names import nearest

# DSPy class -> assay's name. Under that name it gets a threshold, a successful teacher, and sizes that fit the data.
ALIASES = {
    "LabeledFewShot": "labeled",
    "BootstrapFewShot": "bootstrap",
    "BootstrapFewShotWithRandomSearch": "bootstrap-search",
    "KNNFewShot": "knn",
    "COPRO": "copro",
    "MIPROv2": "mipro",
    "SIMBA": "simba",
    "GEPA": "gepa",
    "InferRules": "infer-rules",
    "Ensemble": "ensemble",
    "BootstrapFewShotWithOptuna": "optuna",
}
_OWN = ("knn", "ensemble")  # that use no class of DSPy's
_WEIGHTS = (
    "{name} trains weights, and a compile makes prompts: its artifact would run without them. "
    "Use `assay improve --order {order}`, or in Python dspy.{name} with lm.provider = assay's TRLProvider"
)
_REFUSED = {
    "BootstrapFinetune": _WEIGHTS.format(name="BootstrapFinetune", order="sft"),
    "BetterTogether": _WEIGHTS.format(name="BetterTogether", order="prompts,sft,prompts"),
    "GRPO": _WEIGHTS.format(name="GRPO", order="grpo"),
    "AvatarOptimizer": (
        "AvatarOptimizer rewrites the actor of a dspy.Avatar alone, and counts a task that could not be scored as 0. "
        "Use gepa, mipro or simba: they propose instructions for any program"
    ),
}
_REFUSED_OBJECTS = {  # those that have a name here
    "KNNFewShot": (
        "its program bootstraps at every call from data in memory, which an artifact cannot hold. Use optimizer 'knn': "
        "it stores the demonstrations and chooses the nearest ones"
    ),
    "Ensemble": "it joins programs that are compiled already. Use optimizer 'ensemble', which makes its members",
}
_SET_BY_ASSAY = {
    "metric",
    "trainset",
    "valset",
    "student",
    "teacher",
    "program",
    "prompt_model",
    "task_model",
    "reflection_lm",
    "seed",
    "self",
}


def short_name(name: str) -> str:
    """Our name of a DSPy class that is given by its name or its path in dspy; any other name as it is.

    One with arguments, as `dspy:GEPA(seed=3)`, is an optimizer with these settings and none of ours.
    """
    module, _, attribute = name.rpartition(":")
    return ALIASES.get(attribute, name) if not module or module.split(".")[0] == "dspy" else name


def refusal(name: str) -> str | None:
    """Why an optimizer of DSPy cannot work here; None where it can."""
    module, _, attribute = without_call(name).rpartition(":")
    return _REFUSED.get(attribute) if not module or module.split(".")[0] == "dspy" else None


def refused_object(target: Any) -> str | None:
    """Why a class, or an object, of an optimizer cannot work here; None where it can."""
    refused = {**_REFUSED, **_REFUSED_OBJECTS}
    return next((refused[name] for name in classes_of(target) if name in refused), None)


def classes_of(optimizer: Any) -> list[str]:
    """The names of DSPy's classes that an optimizer is or derives from, given by our name, as a class or an object."""
    if isinstance(optimizer, str):
        return [name for name, short in ALIASES.items() if short == optimizer]
    kinds = (optimizer if isinstance(optimizer, type) else type(optimizer)).__mro__
    return [kind.__name__ for kind in kinds if kind.__module__.split(".")[0] == "dspy"]


def _functions_of(target: Any) -> list[Any]:
    """What takes the settings of an optimizer: constructor and `compile` of a class, one of them otherwise."""
    if isinstance(target, type):
        return [target.__init__, target.compile]  # type: ignore[misc, attr-defined]
    return [target if inspect.isroutine(target) else target.compile]


def parameters_of(target: Any) -> set[str]:
    """Settings that an optimizer takes."""
    names = set[str]()
    for function in _functions_of(target):
        kinds = inspect.signature(function).parameters.values()
        names |= {p.name for p in kinds if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    return names - _SET_BY_ASSAY


def _may_take_others(target: Any) -> bool:
    """Whether an optimizer may take settings that its signatures do not name: a function may return one with its own
    `compile`, and `compile` may have a `**`."""
    function = getattr(target, "compile", None)
    if target is None or function is None:
        return target is not None
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


def check_settings(name: str, settings: Mapping[str, Any], target: Any = None) -> None:
    """Refuses settings that the optimizer does not take, and values that are not of the types that it declares.

    Args:
        target: the class, function or object of an optimizer without a name of ours.
    Raises:
        ConfigError: names them, and those that there are.
    """
    if not settings:
        return
    kinds = [] if name in _OWN else map(optimizer_class, classes_of(name))
    targets = [target] if target is not None else [*kinds]
    accepted = set[str]().union(*map(parameters_of, targets))
    if not _may_take_others(target) and (unknown := sorted(set(settings) - accepted)):
        accepted_text = (
            f"it has {', '.join(sorted(accepted))}" if accepted else "it has none; demos and the caps are its settings"
        )
        hint = f". Did you mean {near!r}?" if (near := nearest(unknown[0], accepted)) else ""
        raise ConfigError(
            f"optimizer_settings: {name} has no setting {', '.join(map(repr, unknown))}; {accepted_text}{hint}"
        )
    for each in targets:
        for setting, value in settings.items():
            if (declared := _mistyped(each, setting, value)) is not None:
                raise ConfigError(f"`optimizer_settings` {setting}={value!r} must be {declared} for {name}")


def _mistyped(target: Any, setting: str, value: Any) -> str | None:
    """The type that an optimizer declares for a setting, or its default has, if the value does not match it.

    None if the value matches, or if neither a type nor a default is known.
    """
    for function in _functions_of(target):
        try:
            declared = typing.get_type_hints(function).get(setting) or _type_of_default(function, setting)
            if declared is None:
                continue
            TypeAdapter(declared, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value, strict=True)
        except ValidationError:
            return inspect.formatannotation(declared).replace("typing.", "")
        except (NameError, TypeError, PydanticUserError, SchemaError):
            continue  # a type that only its own module can resolve, or that pydantic cannot check
    return None


def _type_of_default(function: Any, setting: str) -> type | None:
    parameter = inspect.signature(function).parameters.get(setting)
    return (
        type(parameter.default) if parameter is not None and isinstance(parameter.default, bool | int | float) else None
    )


# -- What a named optimizer receives: program, tasks, metric, and sizes that fit the remaining calls.


@dataclass
class Proposal:
    """The inputs of an optimizer.

    Attributes:
        threshold: score in (0, 1] from which a run is a success.
        demos: most bootstrapped demonstrations of a predictor.
        labels: most demonstrations of a predictor that come from the data.
        settings: the user's arguments of the optimizer; they override assay's.
        cut: the cap that interrupted the optimizer, if any.
        notes: what the report says about the optimizer.
    """

    student: RecordedProgram
    train: list[Task]
    val: list[Task]
    session: Session
    threshold: float = 0.8
    demos: int = 4
    labels: int = 16
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the optimizer, before our own
    cut: BudgetExceeded | None = None  # the cap that ended the optimizer before it was done
    notes: list[str] = field(default_factory=list)

    def build(self, target: Any, **defaults: Any) -> Any:
        """The optimizer, with the user's settings before `defaults`, and these before what it takes of `OFFERED`."""
        return target(**self._arguments(target, OFFERED, defaults))

    def compiled(self, optimizer: Any, **defaults: Any) -> Any:
        """What the optimizer makes of the student, with arguments as in `build`, from `OF_COMPILE`."""
        return optimizer.compile(self.student, **self._arguments(optimizer.compile, OF_COMPILE, defaults))

    def _arguments(
        self, function: Any, offered: "Mapping[str, Callable[[Proposal], Any]]", defaults: dict[str, Any]
    ) -> dict[str, Any]:
        if self.settings.get("auto"):  # the optimizer sets these by itself
            defaults = {name: value for name, value in defaults.items() if name not in _SET_BY_AUTO}
        accepted = taken_by(function)
        shared = {name: value(self) for name, value in offered.items() if name in accepted and name not in defaults}
        return {**shared, **defaults, **{name: value for name, value in self.settings.items() if name in accepted}}

    def runs(self, otherwise: int) -> int:
        """Runs of the program that the remaining calls allow, less a tenth for proposals; `otherwise` without a cap."""
        calls_left = self.session.meter.search_calls_left()
        if not math.isfinite(calls_left):
            return otherwise
        return max(1, int(0.9 * calls_left / max(1.0, sum(run_calls(self.student.program, self.session)))))

    def passes(self, otherwise: int, *, most: int) -> int:
        """Evaluations on all of val that the calls left allow, from 1 to `most`."""
        return (
            otherwise
            if not math.isfinite(self.session.meter.search_calls_left())
            else min(most, max(1, self.runs(0) // max(1, len(self.val))))
        )

    def metric(self, *, feedback: bool = False) -> Any:
        return self.session.rubric.metric(threshold=self.threshold, feedback=feedback, tasks=self.session.tasks)

    def examples(self) -> list[dspy.Example]:
        return to_examples(_shuffled(self.train, self.session.seed))

    def explored(self) -> Exploration:
        """Successes of the program's variants on train, within a third of the calls that are left."""
        session = self.session
        prompt_formats = [self.student.settings["adapter"]]
        calls_left = session.meter.search_calls_left()
        return explore(
            self.student,
            self.train,
            session,
            prompt_formats=prompt_formats,
            max_calls=calls_left / 3,
            threshold=self.threshold,
        )

    def teacher(self) -> RecordedProgram:
        """The variant that succeeds most: with a plain program that never does, there is nothing else to learn from."""
        return self.explored().teacher or self.student

    @property
    def prompt_lm(self) -> Any:
        return self.session.prompt_lm or self.session.lm


# arguments of an optimizer by name, where it has no value of its own
OFFERED: dict[str, Callable[[Proposal], Any]] = {
    "metric": lambda p: p.metric(),
    "num_threads": lambda p: p.session.threads,
    "prompt_model": lambda p: p.prompt_lm,
    "task_model": lambda p: p.session.lm,
    "lm": lambda p: p.session.lm,
    "seed": lambda p: p.session.seed,
    "max_errors": lambda p: 10**9,
    "reflection_lm": lambda p: p.prompt_lm,
}
OF_COMPILE: dict[str, Callable[[Proposal], Any]] = {
    "trainset": Proposal.examples,
    "valset": lambda p: to_examples(p.val),
    "devset": lambda p: to_examples(p.val),
    "metric": lambda p: p.metric(),
    "num_threads": lambda p: p.session.threads,
    "seed": lambda p: p.session.seed,
    "eval_kwargs": lambda p: {"num_threads": p.session.threads, "display_progress": False},
}
_SET_BY_AUTO = ("num_candidates", "max_metric_calls", "num_trials")


def signature_of(function: Any) -> list[inspect.Parameter]:
    """The parameters of a function or class."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # of a class in C
        return []


def taken_by(function: Any) -> set[str]:
    """The names of its parameters."""
    return {parameter.name for parameter in signature_of(function)}


def _shuffled(tasks: Sequence[Task], seed: int) -> list[Task]:
    order = list(tasks)
    random.Random(seed).shuffle(order)  # DSPy draws its demonstrations with a fixed seed of its own
    return order


def to_examples(tasks: Sequence[Task]) -> list[dspy.Example]:
    """Tasks as DSPy examples."""
    return [dspy.Example(**task.inputs, **task.expected).with_inputs(*task.inputs) for task in tasks]
