"""Messages for arguments of criteria and checks that do not fit: the name, the valid ones and the nearest."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from assay.rubrics.calling import GIVEN, bound, definition_of
from assay.sources.modules import qualified_name
from assay.support.settings import nearest

__all__ = ["named_keywords", "unfit_arguments"]

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
