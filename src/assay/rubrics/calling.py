"""How a check is called: with the arguments that it names. A DSPy metric as a check."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

from assay.datasets.tasks import OTHER_COLUMNS, UNKNOWN, Task
from assay.errors import RubricError
from assay.sources.modules import qualified_name
from assay.support.awaited import completed
from assay.support.names import nearest
from assay.support.options import option_of

GIVEN = ("task", "prediction", "rollout")  # what a check may take, by name or in this order
_OF_CHECKS = {"task", "rollout"}  # names that parameters of a check have and those of a DSPy metric have not
_OF_METRICS = {"example", "gold", "pred", "trace", "pred_name", "pred_trace"}  # the reverse
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_MARKERS = {OTHER_COLUMNS, UNKNOWN}


def call(check: Callable[..., Any], given: Sequence[Any], arguments: Mapping[str, Any]) -> Any:
    """Calls a check or judge; an async one is awaited.

    Args:
        given: task, prediction and rollout.
        arguments: its `with` arguments.
    """
    try:
        fitting = bound(check, given, arguments)
    except ValueError:  # a builtin without a signature
        return check(*given, **arguments)
    return completed(check(*fitting.args, **fitting.kwargs))


def bound(check: Callable[..., Any], given: Sequence[Any], arguments: Mapping[str, Any]) -> inspect.BoundArguments:
    """The arguments of a call. Parameters named `task`, `prediction` and `rollout` get these, in any order.

    Required parameters with other names get those of the three that no parameter names, in order; so does `*args`.

    Raises:
        TypeError: the arguments do not fit the parameters.
        ValueError: a builtin without a signature.
    """
    signature = inspect.signature(check)
    parameters = [p for p in signature.parameters.values() if p.name not in arguments or p.kind in _SEVERAL]
    by_name = dict(zip(GIVEN, given, strict=True))
    unnamed = [value for name, value in by_name.items() if name not in signature.parameters]
    filled: dict[str, Any] = {}
    for p in parameters:
        if p.name in by_name and p.kind not in _SEVERAL:
            filled[p.name] = by_name[p.name]
        elif p.kind in _POSITIONAL and p.default is p.empty and unnamed:
            filled[p.name] = unnamed.pop(0)
    if not filled and not any(p.kind in _SEVERAL for p in parameters):
        raise TypeError("it takes none of the three")
    several = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    places = _POSITIONAL if several else _POSITIONAL[:1]
    in_order = [filled.pop(p.name) for p in parameters if p.kind in places and p.name in filled]
    return signature.bind(*in_order, *(unnamed if several else ()), **filled, **arguments)


def definition_of(check: Any) -> Any:
    """The function or class in whose source a check is defined."""
    if isinstance(check, MetricCheck):
        return definition_of(check.metric)
    if isinstance(check, functools.partial):
        return definition_of(check.func)
    return check if hasattr(check, "__qualname__") else type(check)


def _parameters(check: Any) -> list[inspect.Parameter]:
    """The parameters of a callable; those of `forward` for a `dspy.Module`, `*args` where none are known."""
    if hasattr(type(check), "forward"):
        check = object.__getattribute__(check, "forward")  # DSPy warns of `check.forward`
    try:
        return list(inspect.signature(check).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]


def as_check(check: Any, *, metric: bool) -> Any:
    """The callable as a check: a DSPy metric becomes a `MetricCheck`, a class an instance of it.

    Args:
        metric: whether it is a metric where the names of its parameters do not tell.
    """
    if not callable(check) or isinstance(check, MetricCheck):
        return check
    if isinstance(check, type):
        if not any("__call__" in vars(kind) for kind in check.__mro__):
            return check
        try:
            return as_check(check(), metric=metric)
        except TypeError as error:
            raise RubricError(
                f"{qualified_name(check)} cannot be built without arguments ({error}): pass an instance"
            ) from error
    names = {parameter.name for parameter in _parameters(check)}
    if names & _OF_CHECKS or names == {"prediction"}:
        return check
    return MetricCheck(check) if metric or names & _OF_METRICS else check


class MetricCheck:
    """A DSPy metric as a check. It is called as `metric(example, prediction)`; further required parameters get None.

    Args:
        lm: the model that it calls; None for the one set in DSPy.
    Raises:
        RubricError: the metric does not take two arguments.
    """

    def __init__(self, metric: Callable[..., Any], lm: Any = None) -> None:
        self.metric, self.lm = metric, lm
        parameters = _parameters(metric)
        places = [p for p in parameters if p.kind in _POSITIONAL]
        several = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        if (len(places) < 2 and not several) or parameters[0].name == "self":  # a method without its object
            raise RubricError(
                f"{qualified_name(definition_of(metric))} takes ({', '.join(p.name for p in parameters)}): a DSPy "
                "metric takes (example, pred, trace=None), a check (task, prediction, rollout) or some of them"
            )
        rest = [p for p in parameters if p not in places[:2] and p.kind is not p.VAR_POSITIONAL]
        self._unused = [p.name for p in rest if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
        self.__signature__ = inspect.Signature(
            [
                *(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in GIVEN),
                *(p if p.kind is p.VAR_KEYWORD else p.replace(kind=p.KEYWORD_ONLY, default=None) for p in rest),
            ]
        )

    def __call__(self, task: Task, prediction: dict[str, Any], rollout: Any, **arguments: Any) -> Any:
        import dspy

        unused = {name: None for name in self._unused if name not in arguments}
        with nullcontext() if self.lm is None else dspy.context(lm=self.lm):
            return completed(self.metric(example_of(task), dspy.Prediction(prediction), **unused, **arguments))


def example_of(task: Task) -> Any:
    """The `dspy.Example` of a task: metadata, inputs and expected outputs, with its inputs."""
    import dspy

    metadata = {name: value for name, value in task.metadata.items() if name not in _MARKERS}
    return dspy.Example({**metadata, **task.inputs, **task.expected}).with_inputs(*task.inputs)


# -- Messages for arguments of criteria and checks that do not fit: the name, the valid ones and the nearest.


Class = TypeVar("Class")


def named_keywords(**elsewhere: str) -> Callable[[type[Class]], type[Class]]:
    """Decorates a class: an unknown keyword is a `TypeError` that names the valid ones and the nearest.

    Args:
        elsewhere: keyword -> field, for the names that fields have in YAML.
    """

    def mark(kind: type[Class]) -> type[Class]:
        plain: Any = kind.__init__
        fields = list(inspect.signature(plain).parameters)[1:]  # without self

        @functools.wraps(plain)
        def init(self: Any, *args: Any, **keywords: Any) -> None:
            for name in keywords.keys() - set(fields):
                if (field := elsewhere.get(name.rstrip("_"))) is not None:
                    hint = f" {name.rstrip('_')!r} is a key of YAML files; in Python it is {field}=…"
                else:
                    hint = f" Did you mean {near!r}?" if (near := nearest(name, fields)) else ""
                raise TypeError(
                    f"{kind.__name__}() got an unexpected keyword {name!r}; it takes {', '.join(fields)}.{hint}"
                )
            plain(self, *args, **keywords)

        kind.__init__ = init  # type: ignore[method-assign]  # the same signature
        return kind

    return mark


def unfit_arguments(check: Callable[..., Any], arguments: Mapping[str, Any], source: str) -> str:
    """Error message for arguments that a check does not accept; empty if they are valid.

    Args:
        source: dotted path of the check in a YAML file; empty if the criterion was made in Python.
    """
    name = source or qualified_name(definition_of(check))
    try:
        signature = inspect.signature(check)
        bound(check, (None, None, None), arguments)
    except TypeError as error:
        accepted = [parameter.name for parameter in _own(signature)]
        if unknown := [key for key in arguments if key not in accepted]:
            hint = f" Did you mean {near!r}?" if (near := nearest(unknown[0], accepted)) else ""
            return f"check {name!r} has no argument {unknown[0]!r}; it has {', '.join(accepted) or 'none'}.{hint}"
        if (missing := _missing(signature, arguments)) is not None:
            way = f"with: {{{missing}: …}}" if source else f"arguments={{{missing!r}: …}}"
            return f"check {name!r} needs the argument {missing!r}; set {way}"
        taken = ", ".join(["task", "prediction", "rollout", *(f"{key}={value!r}" for key, value in arguments.items())])
        return f"check {name!r} is called as check({taken}), and has the parameters {signature}: {error}"
    except ValueError:
        pass  # a builtin without a signature: errors appear when it is called
    try:
        for parameter in _own(signature):
            option = option_of(parameter.name, parameter.annotation, parameter.default)
            value = arguments.get(parameter.name, parameter.default)
            if option.rule and value is not parameter.default:
                option.checked(value)
        getattr(check, "arguments_rule", dict)(**arguments)
    except Exception as error:
        return f"{name!r} with {dict(arguments)!r}: {str(error).splitlines()[0]}"
    return ""


def _own(signature: inspect.Signature) -> list[inspect.Parameter]:
    """The parameters of a check besides task, prediction and rollout."""
    parameters = list(signature.parameters.values())
    named = [parameter for parameter in parameters if parameter.name not in GIVEN]
    return named if len(named) < len(parameters) else named[len(GIVEN) :]


def _missing(signature: inspect.Signature, arguments: Mapping[str, Any]) -> str | None:
    """The first required argument of a check that has no value."""
    return next((p.name for p in _own(signature) if p.default is p.empty and p.name not in arguments), None)
