"""Made-up calls of a function: from its examples, annotations, defaults, and the literals that it compares with."""

import ast
import copy
import random
from collections.abc import Iterator, Mapping, Sequence

from .functions import Slice

_WORDS = (
    "alpha",
    "Beta",
    "x",
    "two words",
    "a,b;c",
    "",
    "  padded ",
    "UPPER",
    "line one\nline two",
    "12",
    "-3.5",
    "été",
)
_NAMES = {  # what a parameter of this name usually is
    **dict.fromkeys(
        ("n", "k", "i", "j", "width", "size", "count", "num", "year", "month", "day", "hour", "code"), "int"
    ),
    **dict.fromkeys(("s", "text", "string", "name", "line", "path", "p", "pattern", "prefix", "word", "key"), "str"),
    **dict.fromkeys(("a", "seq", "data", "values", "items", "lst", "iterable", "lines", "heap", "words"), "list"),
    **dict.fromkeys(("x", "y", "z", "r", "g", "b", "value"), "float"),
}
_SIMPLE = ("int", "str")
_KINDS = ("str", "int", "list", "float", "bytes", "bool", "dict", "tuple", "None")


def call_expressions(part: Slice, rng: random.Random, count: int) -> list[str]:
    """Call expressions, distinct; those of the docstring first."""
    calls = dict.fromkeys(_examples(part))
    maker = _Values(part, rng)
    for _ in range(4 * count):
        if len(calls) >= count:
            break
        calls[f"{part.name}({', '.join(maker.arguments())})"] = None
    wrapped = (f"list({call})" for call in calls) if part.is_generator else iter(calls)
    return list(wrapped)[:count]


def similar_calls(part: Slice, rng: random.Random, results: Mapping[str, str], count: int) -> list[str]:
    """Calls like those that gave results, with one argument replaced by another value of its type.

    Where every result is None, the call is for its effect on an argument: the calls then give the argument.
    """
    maker, calls = _Values(part, rng), dict.fromkeys(results)
    known = [ast.parse(call, mode="eval").body for call in results]
    for _ in range(4 * count):
        if len(calls) >= count or not known:
            break
        tree = copy.deepcopy(rng.choice(known))
        call = next(node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node) == part.name)
        if not call.args:
            continue
        at = rng.randrange(len(call.args))
        value = ast.literal_eval(call.args[at])
        call.args[at] = ast.parse(maker.value(type(value).__name__), mode="eval").body
        calls[ast.unparse(tree)] = None
    if set(results.values()) == {"None"}:
        return [changed for call in calls if (changed := _effect(call)) is not None]
    return list(calls)


def _effect(call: str) -> str | None:
    """An expression that gives the first argument that a call can change."""
    tree = ast.parse(call, mode="eval").body
    arguments = tree.args if isinstance(tree, ast.Call) else []
    for at, argument in enumerate(arguments):
        if isinstance(argument, ast.List | ast.Dict | ast.Set):
            arguments[at] = ast.NamedExpr(ast.Name("x", ast.Store()), argument)
            return f"[{ast.unparse(tree)}, x][1]"
    return None


def _name(node: ast.Call) -> str:
    return str(getattr(node.func, "id", getattr(node.func, "attr", "")))


def _examples(part: Slice) -> Iterator[str]:
    """Calls in the doctests, if their arguments are literals."""
    for line in (ast.get_docstring(part.node) or "").split("\n"):
        if not line.strip().startswith(">>> "):
            continue
        try:
            tree = ast.parse(line.strip()[4:])
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _name(node) == part.name:
                arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
                if all(map(_is_literal, arguments)):
                    node.func = ast.Name(part.name, ast.Load())
                    yield ast.unparse(node)


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return False
    return True


class _Values:
    """Arguments for one function."""

    def __init__(self, part: Slice, rng: random.Random) -> None:
        self.rng = rng
        arguments = part.node.args
        self.parameters = [*arguments.posonlyargs, *arguments.args]
        self.defaults = [None] * (len(self.parameters) - len(arguments.defaults)) + list(arguments.defaults)
        self.texts = [value for value in part.literals if isinstance(value, str)]
        self.numbers = [value for value in part.literals if isinstance(value, int)]

    def arguments(self) -> list[str]:
        result = []
        for parameter, default in zip(self.parameters, self.defaults, strict=True):
            if default is not None and self.rng.random() < 0.5:
                break
            result.append(self.value(self._kind(parameter, default)))
        return result

    def _kind(self, parameter: ast.arg, default: ast.expr | None) -> str:
        if self.rng.random() < 0.15:
            return self.rng.choice(_KINDS)
        if parameter.annotation is not None:
            named = [kind for kind in _KINDS if kind in ast.unparse(parameter.annotation).lower()]
            if named:
                return self.rng.choice(named)
        if isinstance(default, ast.Constant) and default.value is not None:
            return type(default.value).__name__
        usual = _NAMES.get(parameter.arg) or _NAMES.get(parameter.arg.rstrip("s0123456789"))
        if usual and self.rng.random() < 0.7:
            return usual
        return self.rng.choice(_KINDS[:5])

    def value(self, kind: str, depth: int = 0) -> str:
        """A literal of a kind."""
        rng = self.rng
        if kind == "int":
            near = [rng.choice(self.numbers) + rng.choice((-1, 0, 1))] if self.numbers else []
            return str(rng.choice([*near, rng.randint(-3, 12), rng.randint(0, 100), rng.randint(-1000, 3000)]))
        if kind == "float":
            return repr(rng.choice([0.0, 1.0, 0.5, -1.5, 2.0, round(rng.uniform(-10, 10), 2), round(rng.random(), 2)]))
        if kind == "str":
            return repr(self._text())
        if kind == "bytes":
            return repr(self._text().encode())
        if kind == "bool":
            return str(rng.random() < 0.5)
        if kind in ("list", "tuple") and depth < 2:
            inner = rng.choice(("int", "int", "str", "str", "float", "tuple", "list"))
            items = [self.value(inner, depth + 1) for _ in range(rng.randint(0, 5))]
            if rng.random() < 0.3 and inner in ("int", "float", "str"):
                items.sort(key=ast.literal_eval)
            return (
                f"[{', '.join(items)}]" if kind == "list" else f"({', '.join(items)}{',' if len(items) == 1 else ''})"
            )
        if kind == "dict" and depth < 2:
            keys = dict.fromkeys(self.value("str", 2) for _ in range(rng.randint(0, 3)))
            pairs = [f"{key}: {self.value(rng.choice(_SIMPLE), depth + 1)}" for key in keys]
            return f"{{{', '.join(pairs)}}}"
        return "None" if kind in ("None", "NoneType") else str(rng.randint(0, 9))

    def _text(self) -> str:
        rng, pool = self.rng, [*_WORDS, *self.texts, *self.texts]
        if rng.random() < 0.2:  # lines with an indentation in common, or none
            indent = rng.choice(("", "  ", "    ", "\t"))
            lines = [indent + rng.choice(("", "", " ")) + rng.choice(_WORDS) for _ in range(rng.randint(2, 4))]
            return rng.choice(("\n", "\n", "\n\n")).join(lines) + rng.choice(("", "\n"))
        parts: Sequence[str] = [rng.choice(pool) for _ in range(rng.choice((1, 1, 2, 3)))]
        return rng.choice(("", " ", rng.choice(self.texts) if self.texts else "-")).join(parts)
