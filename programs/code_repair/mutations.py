"""Single mutations of a source: each replaces the text of one expression or statement, and nothing else."""

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

KINDS = (
    "comparison",
    "operator",
    "constant",
    "off_by_one",
    "swapped_arguments",
    "negated_condition",
    "dropped_statement",
    "wrong_variable",
)

_COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">"),
    ast.LtE: ("<", ">="),
    ast.Gt: (">=", "<"),
    ast.GtE: (">", "<="),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
}
_OPERATORS: dict[type[ast.operator], tuple[str, ...]] = {
    ast.Add: ("-",),
    ast.Sub: ("+",),
    ast.Mult: ("//", "+"),
    ast.Div: ("*", "//"),
    ast.FloorDiv: ("*", "/"),
    ast.Mod: ("//",),
    ast.LShift: (">>",),
    ast.RShift: ("<<",),
    ast.BitAnd: ("|",),
    ast.BitOr: ("&",),
    ast.BitXor: ("&",),
}


@dataclass(frozen=True)
class Mutation:
    """One mutated source.

    Args:
        kind: one of `KINDS`.
        line: in the source, from 1.
        old: text that was replaced, `new` what replaced it.
    """

    kind: str
    code: str
    line: int
    old: str
    new: str


def mutations(code: str, rng: random.Random, count: int) -> list[Mutation]:
    """Up to `count` different mutations inside the functions of a source, of all kinds in turn."""
    tree = ast.parse(code)
    places = _places(tree)
    by_kind: dict[str, list[tuple[ast.AST, str]]] = {}
    for node, kind, new in rng.sample(places, len(places)):
        by_kind.setdefault(kind, []).append((node, new))
    result: dict[str, Mutation] = {}
    lines, original = code.encode().split(b"\n"), ast.dump(tree)
    while len(result) < count and by_kind:
        for kind in rng.sample(sorted(by_kind), len(by_kind)):
            node, new = by_kind[kind].pop()
            made = _replaced(lines, node, kind, new, original)
            if made is not None:
                result.setdefault(made.code, made)
            if not by_kind[kind]:
                del by_kind[kind]
    return list(result.values())[:count]


def _places(tree: ast.Module) -> list[tuple[ast.AST, str, str]]:
    """(node, kind, text in its place) for all mutations; a nested function is walked twice and listed once."""
    conditions = {id(node.test) for node in ast.walk(tree) if isinstance(node, ast.If | ast.While | ast.IfExp)}
    result: dict[tuple[int, str, str], tuple[ast.AST, str, str]] = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            names = _variables(function)
            for node in (inner for statement in function.body for inner in ast.walk(statement)):
                for kind, new in _replacements(node, names, negated=id(node) in conditions):
                    result[id(node), kind, new] = (node, kind, new)
    return list(result.values())


def _replaced(lines: list[bytes], node: Any, kind: str, new: str, original: str) -> Mutation | None:
    """None if the result is not valid Python, or the same."""
    first, last, start, end = node.lineno - 1, node.end_lineno - 1, node.col_offset, node.end_col_offset
    old = [*lines[first:last], lines[last][:end]]
    old[0] = old[0][start:]

    def with_text(text: str) -> str:
        parts = [*lines[:first], lines[first][:start] + text.encode() + lines[last][end:], *lines[last + 1 :]]
        return b"\n".join(parts).decode()

    tree = _dump(with_text(new))
    if tree is None or tree == original:
        return None
    text = next(text for text in (*_plainer(new), new) if _dump(with_text(text)) == tree)
    return Mutation(kind, with_text(text), first + 1, b"\n".join(old).decode()[:200], text[:200])


def _dump(code: str) -> str | None:
    try:
        return ast.dump(ast.parse(code))
    except (SyntaxError, ValueError):
        return None


def _plainer(new: str) -> Iterator[str]:
    """The text of an expression with fewer parentheses, which would show where the mutation is."""
    try:
        plain = ast.unparse(ast.parse(new, mode="eval"))
    except SyntaxError:  # a statement
        return
    yield plain
    yield f"({plain})"


def _replacements(node: ast.AST, names: list[str], *, negated: bool) -> Iterator[tuple[str, str]]:
    """(kind, text in place of the node). `negated`: the node is a condition."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        yield from (("comparison", f"{left} {sign} {right}") for sign in _COMPARISONS[type(node.ops[0])])
    elif isinstance(node, ast.BinOp) and not _is_formatting(node):
        left, right = ast.unparse(node.left), ast.unparse(node.right)
        yield from (("operator", f"(({left}) {sign} ({right}))") for sign in _OPERATORS.get(type(node.op), ()))
    elif isinstance(node, ast.BoolOp):
        sign = " or " if isinstance(node.op, ast.And) else " and "
        yield "operator", f"({sign.join(f'({ast.unparse(value)})' for value in node.values)})"
    elif isinstance(node, ast.Constant):
        yield from _constants(node.value)
    elif isinstance(node, ast.Call):
        yield from _calls(node)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        kind = "negated_condition" if isinstance(node.op, ast.Not) else "operator"
        yield kind, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Expr | ast.AugAssign | ast.Continue | ast.Break) and not _is_text(node):
        yield "dropped_statement", "pass"
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names:
        yield "wrong_variable", names[(names.index(node.id) + 1) % len(names)]  # the next one in the alphabet
    if negated and isinstance(node, ast.Name | ast.Call | ast.Compare | ast.BoolOp | ast.Attribute):
        yield "negated_condition", f"not ({ast.unparse(node)})"


def _constants(value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, bool):
        yield "constant", str(not value)
    elif isinstance(value, int) and abs(value) < 10**9:
        yield "off_by_one", str(value + 1)
        yield "off_by_one", f"({value - 1})" if value < 1 else str(value - 1)
    elif isinstance(value, str) and 0 < len(value) <= 8:
        yield "constant", repr(value[:-1])
        yield "constant", repr(value + value[-1])


def _calls(node: ast.Call) -> Iterator[tuple[str, str]]:
    args = [ast.unparse(arg) for arg in node.args]
    keywords = [ast.unparse(keyword) for keyword in node.keywords]
    if not args or any(isinstance(arg, ast.Starred | ast.GeneratorExp) for arg in node.args):
        return
    function = ast.unparse(node.func)
    for at in range(len(args) - 1):
        swapped = [*args[:at], args[at + 1], args[at], *args[at + 2 :], *keywords]
        yield "swapped_arguments", f"{function}({', '.join(swapped)})"
    if function == "range":
        yield "off_by_one", f"range({', '.join([*args[:-1], f'{args[-1]} - 1'])})"
    elif function == "len":
        yield "off_by_one", f"(len({args[0]}) - 1)"


def _variables(function: ast.FunctionDef) -> list[str]:
    """Parameters and assigned names of a function, sorted."""
    names = {argument.arg for argument in [*function.args.posonlyargs, *function.args.args]}
    names |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return sorted(names - {"self", "cls"})


def _is_formatting(node: ast.BinOp) -> bool:
    return (
        isinstance(node.op, ast.Mod)
        and isinstance(node.left, ast.Constant | ast.JoinedStr)
        and not isinstance(getattr(node.left, "value", ""), int | float)
    )


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom)
