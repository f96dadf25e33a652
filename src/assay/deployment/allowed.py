"""What an artifact may set without the user's trust: constructor arguments, settings, and parts of its state.

The tables here are the only place that says it. A program, an argument or a value that they do not have needs trust:
it could weaken a sandbox, raise a limit or the number of calls, open a database, or send texts elsewhere. Reads the
JSON of an artifact only; does not import or build anything that it names.
"""

import ast
import datetime
import decimal
import functools
import re
import reprlib
import typing
import uuid
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import dspy
import pydantic
from pydantic import Field

from assay.errors import AssayError
from assay.judges import Cascade, Jury, ListwiseJudge, PairwiseJudge, PointwiseJudge
from assay.models.roles import address_in
from assay.models.thinking import EFFORT_TOKENS, Thinking
from assay.programs.adapters import ADAPTERS
from assay.programs.loading import SHIPPED
from assay.programs.parameters import AgentParameters

# -- Finds constructor arguments in a manifest that would import modules (types of a signature) or name an address.
#
# Reads text only; does not import or build anything.


# Arguments of model clients that set the address of the model.
_PLACE = re.compile(r"(?:.*_)?(?:api_base|base_url|endpoint|region|region_name|location|host|proxy)", re.IGNORECASE)

_BUILTINS = {
    "int",
    "str",
    "float",
    "bool",
    "list",
    "tuple",
    "dict",
    "set",
    "frozenset",
    "complex",
    "bytes",
    "bytearray",
    "NoneType",
}
_SHOWN = 60  # characters of fields in a message
_MOST_FIELDS = 20_000  # characters of one side of a signature

# Imported here, so that a file of the same name cannot replace them.
_HARMLESS = {"typing": typing, "datetime": datetime, "decimal": decimal, "uuid": uuid}


def has_address(model: Any) -> bool:
    """Whether a model's name contains the address of a server, to which some providers' clients send prompts, or the
    path of a model's file.
    """
    return address_in(model) is not None or (isinstance(model, str) and model.lower().startswith("embedded:"))


def places_in(config: Any) -> list[str]:
    """Destinations of prompts or keys in constructor arguments: addresses, and settings that reach model clients."""
    return [
        value if isinstance(value, str) else f"{key}={value!r}"
        for key, value in _values(config)
        if _PLACE.fullmatch(key) or _is_address(value) or (key == "model" and has_address(value))
    ]


def _is_address(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"\w+://\S+", value) is not None


def imported_types(config: Any) -> list[str]:
    """Types of signatures in constructor arguments (`q: module.Name -> a`) for which DSPy would import a module."""
    sides = [
        side for _, value in _values(config) if isinstance(value, str) and "->" in value for side in value.split("->")
    ]
    return [name for side in sides for name in _imported(side)]


def _values(config: Any) -> Iterator[tuple[str, Any]]:
    """Every nested value with its key."""
    waiting: list[tuple[str, Any]] = [("", config)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(str(inner), item) for inner, item in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(key, item) for item in value]
        else:
            yield key, value


def _imported(fields: str) -> list[str]:
    """The types of one side of a signature that are imported or evaluated; empty if DSPy cannot parse it either."""
    if len(fields) > _MOST_FIELDS:
        return [f"{fields[:_SHOWN]}…"]
    try:
        return _types_of(ast.parse(f"def f({fields}): pass"))  # as DSPy reads it
    except (SyntaxError, ValueError):
        return []
    except (RecursionError, MemoryError):
        return [f"{fields[:_SHOWN]}…"]


def _types_of(tree: ast.AST) -> list[str]:
    types: list[str] = []
    waiting = [
        (node.annotation, False) for node in ast.walk(tree) if isinstance(node, ast.arg) and node.annotation is not None
    ]
    while waiting:
        node, chosen = waiting.pop()
        if isinstance(node, ast.Name | ast.Attribute):
            types += [] if _known(ast.unparse(node)) else [ast.unparse(node)]
        elif isinstance(node, ast.Subscript):
            inside = ast.unparse(node.value) in ("Literal", "typing.Literal")
            waiting += [(node.value, False), (node.slice, inside)]
        elif isinstance(node, ast.BinOp | ast.Tuple | ast.List):
            within = chosen and isinstance(node, ast.Tuple)
            waiting += [(part, within) for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
        elif not isinstance(node, ast.Constant) or (isinstance(node.value, str) and not chosen):
            # Field(…), forms that DSPy does not read, and a type in quotes, which pydantic evaluates as code
            types.append(ast.unparse(node))
    return types


def _known(name: str) -> bool:
    """Whether a type is one of Python's own, of `typing` or of DSPy."""
    first, *rest = name.split(".")
    if not rest:
        return name in _BUILTINS or name in typing.__all__
    if any(not part.isidentifier() or part.startswith("_") for part in rest):
        return False
    if first in _HARMLESS:
        return (
            rest[0] in typing.__all__
            if first == "typing"
            else isinstance(getattr(_HARMLESS[first], rest[0], None), type) and len(rest) == 1
        )
    target = functools.reduce(lambda holder, part: getattr(holder, part, None), rest, dspy) if first == "dspy" else None
    return isinstance(target, type) and target.__module__.partition(".")[0] == "dspy"


# -- Allowed.


Table = Mapping[str, Any]  # name -> type with its range, validated strictly: True is not a number, "3" neither

_AT_ONCE = 10  # members of a jury or ensemble, samples of a judge: each is another call


def _signature(text: str) -> str:
    if imported_types(text):
        raise ValueError("a signature with types of its own")
    return text


def _member(judge: dict[str, Any]) -> dict[str, Any]:
    """A member of a jury or cascade. It is not a panel itself, so that the number of calls is limited."""
    name = str(judge.get("program"))
    if set(judge) != {"program", "config"} or _KINDS.get(name) in (Jury, Cascade):
        raise ValueError("a panel within a panel")
    if refused := refused_arguments(name, judge["config"]):
        raise ValueError(refused[0])
    return judge


def _own_question(spec: dict[str, Any]) -> dict[str, Any]:
    if spec.get("use"):
        raise ValueError("a reference to another judge")
    return spec


_Fraction = Annotated[float, Field(ge=0, le=1)]
_Calls = Annotated[int, Field(ge=1, le=_AT_ONCE)]
_Name = Annotated[str, Field(pattern=r"^\w[\w. -]{0,99}$")]
_Member = Annotated[dict[str, Any], pydantic.AfterValidator(_member)]
_Members = Annotated[list[_Member], Field(min_length=1, max_length=_AT_ONCE)]
_SIGNED: Table = {
    "signature": Annotated[str, pydantic.AfterValidator(_signature)],
    "callbacks": Annotated[list[Any], Field(max_length=0)],  # as DSPy keeps None
}
_SANDBOX: Table = {
    "memory_mb": Annotated[int, Field(ge=64, le=512)],
    "isolation": Literal["auto", "bubblewrap"],  # the strictest; `auto` is what the user gets without the artifact
}
_PANEL: Table = {"calibration": dict[str, Any] | None}
# `model` is None: the judge is asked under the model that the user names for judges.
_JUDGE: Table = {
    **_PANEL,
    "spec": Annotated[dict[str, Any], pydantic.AfterValidator(_own_question)],
    "shows": list[str],
    "model": None,
    "reading": str,
    "style": str,
    "reasoning": bool,
    "samples": _Calls,
    "min_mass": _Fraction,
}

_ARGUMENTS: Mapping[Any, Table] = {
    **{kind: {} for kind in SHIPPED},
    "classify": {"labels": list[str]},
    "extract": {"fields": dict[str, str]},
    "code_repair": {**_SANDBOX, "timeout_s": Annotated[float, Field(gt=0, le=10)]},
    "tool_user": {"parallel": bool},
    "answer_from_documents": {"index": _Name, "k": Annotated[int, Field(ge=1, le=20)]},
    "text_to_sql": {
        "rows": Annotated[int, Field(ge=1, le=200)],
        "steps": Annotated[int, Field(ge=1, le=10_000_000)],
        "seconds": Annotated[float, Field(gt=0, le=2)],
        "characters": Annotated[int, Field(ge=1, le=2000)],
    },
    "converse": {"user": Literal["rules", "model"]},
    dspy.Predict: _SIGNED,
    dspy.ChainOfThought: _SIGNED,
    dspy.Flex: _SIGNED,
    PointwiseJudge: _JUDGE,
    PairwiseJudge: _JUDGE,
    ListwiseJudge: {**{name: _JUDGE[name] for name in ("spec", "reading", "model")}, "orders": _Calls, "seed": int},
    Jury: {**_PANEL, "members": _Members, "how": str, "weights": list[float]},
    Cascade: {**_PANEL, "first": _Member, "second": _Member, "least": _Fraction},
}
"""Arguments by class, of shipped programs by name.

The limits of a sandbox and of a query are at most the defaults of the constructor.
"""


def _names(kind: Any) -> list[str]:
    """The names of a class in an artifact: by its module, and by the package that exports it."""
    if isinstance(kind, str):
        return [kind, SHIPPED[kind], f"assay.programs:{SHIPPED[kind].rpartition(':')[2]}"]
    parts = kind.__module__.split(".")
    package = ".".join(parts[: 1 if parts[0] == "dspy" else 2])
    return [f"{module}:{kind.__qualname__}" for module in (kind.__module__, package)]


_KINDS: Mapping[str, Any] = {name: kind for kind in _ARGUMENTS for name in _names(kind)}

_CHECKS: Mapping[str, Table] = {
    "tests_pass": {
        **_SANDBOX,
        "timeout_s": Annotated[float, Field(gt=0, le=20)],
        "test_timeout_s": Annotated[float, Field(gt=0, le=20)] | None,
    }
}
"""`with` arguments of shipped checks that have limits; the other arguments and checks have none."""

_JUDGE_FILE: Table = {"model": None, "samples": _Calls, "orders": _Calls}
"""Keys of a judge's YAML file that decide who is asked, and how often."""

_SETTINGS: Table = {
    "adapter": Literal[(None, *ADAPTERS)],
    "parameters": Annotated[dict[str, Any], pydantic.AfterValidator(AgentParameters.of)],
}

_POLICY: Table = {
    "probe_margin": _Fraction | None,
    "confidence": _Fraction | None,
    "posterior": _Fraction,
    "stable": Annotated[int, Field(ge=2, le=_AT_ONCE)] | None,
    "piece": Annotated[int, Field(ge=32)],  # fewer tokens a piece are more calls
    "samples": _Calls,
}
_NEAREST: Table = {"k": Annotated[int, Field(ge=1, le=32)]}
_PREDICTOR = frozenset(("traces", "train", "demos", "signature", "fields", "lm", "config"))
"""Parts of a predictor's state. `lm` and `config` are never used, see `assay.programs.state`."""
_MOST_THINKING = max(EFFORT_TOKENS.values())


def refused_arguments(program: str, config: Any) -> list[str]:
    """Constructor arguments of an artifact's program that need trust, as `name=value`."""
    if config in ({}, None):
        return []
    kind = _KINDS.get(program)
    if not isinstance(config, Mapping):
        return [f"its arguments {_short(config)}"]
    return list(_refused({} if kind is None else _ARGUMENTS[kind], config))


def refused_with(check: Any, arguments: Any) -> list[str]:
    """Arguments of a shipped check in a rubric's file that need trust."""
    limits = _CHECKS.get(check) if isinstance(check, str) else None
    if limits is None or not isinstance(arguments, Mapping):
        return []
    return list(_refused(limits, {name: value for name, value in arguments.items() if name in limits}))


def refused_judge(entries: Mapping[str, Any]) -> list[str]:
    """Keys of a judge in a YAML file that need trust."""
    return list(_refused(_JUDGE_FILE, {name: value for name, value in entries.items() if name in _JUDGE_FILE}))


def refused_settings(settings: Any) -> list[str]:
    """Settings of an artifact that need trust."""
    if not isinstance(settings, Mapping):
        return [f"settings={_short(settings)}"]
    return [*_refused({**_SETTINGS, "thinking": Any}, settings), *_refused_thinking(settings.get("thinking"))]


def refused_state(state: Any, config: Any = None) -> list[str]:
    """Parts of an artifact's program state that need trust: more calls per task than a program has, or code.

    Args:
        config: the program's constructor arguments.
    """
    refused: list[str] = []
    waiting, calls = [state], 0
    while waiting:
        part = waiting.pop()
        kind = part.get("kind") if isinstance(part, Mapping) else None
        if kind == "nearest":
            waiting.append(part.get("inner"))
            refused += _refused(_NEAREST, {"k": part.get("k")})
        elif kind == "ensemble" and isinstance(part.get("members"), list):
            waiting += part["members"]
        elif kind == "program":
            calls += 1
            refused += _refused_program(part, config)
        else:
            refused.append(f"state={_short(part)}")
    return refused + ([f"{calls} members of an ensemble"] if calls > _AT_ONCE else [])


def _refused_program(state: Mapping[str, Any], config: Any) -> Iterator[str]:
    yield from _refused_thinking(state.get("thinking"))
    policy = state.get("policy")
    yield from _refused(_POLICY, policy) if isinstance(policy, Mapping) else [] if policy is None else ["policy"]
    frozen = state.get("frozen") or {}
    if not isinstance(frozen, Mapping):
        yield f"frozen={_short(frozen)}"
        frozen = {}
    for module in [state.get("state"), *frozen.values()]:
        is_one = isinstance(module, Mapping) and (isinstance(module.get("demos"), list) or "module_src" in module)
        for part in [module] if is_one or not isinstance(module, Mapping) else module.values():
            if not isinstance(part, Mapping):
                yield f"state={_short(part)}"
                continue
            more = {name: value for name, value in part.items() if name not in _PREDICTOR and value is not None}
            if "module_src" in more and _is_unchanged(more["module_src"], config):
                del more["module_src"]
            yield from (f"{name}={_short(value)}" for name, value in more.items())


def _is_unchanged(source: Any, config: Any) -> bool:
    """Whether the code of a `dspy.Flex` is that of its constructor. Other code runs in DSPy's sandbox, but chooses the
    arguments of its predictors, and so the number of calls.
    """
    try:
        return bool(source == dspy.Flex(_signature(config["signature"])).module_src)
    except Exception:  # of an invalid signature; or DSPy has no Flex
        return False


def _refused_thinking(value: Any) -> list[str]:
    try:
        budget = Thinking.of(value)
    except (AssayError, TypeError):
        return [f"thinking={_short(value)}"]
    limit = None if budget is None else budget.limit
    return [f"thinking={limit}"] if limit is not None and limit > _MOST_THINKING else []


def _refused(table: Table, values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        try:
            if name not in table:
                raise ValueError(name)
            pydantic.TypeAdapter(table[name], config=_CONFIG).validate_python(value)
        except (ValueError, AssayError):  # of pydantic too
            yield f"{name}={_short(value)}"


_CONFIG = pydantic.ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)


def _short(value: Any) -> str:
    return reprlib.repr(value)
