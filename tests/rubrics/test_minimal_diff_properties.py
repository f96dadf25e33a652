"""Changed statements of an edit: invariances as properties."""

import ast
import textwrap

import pytest
from hypothesis import given, settings, strategies as st

from assay.rubrics.code import minimal_diff


class Renamer(ast.NodeTransformer):
    """Renames every variable of the generated functions; attributes, keywords and texts keep the same words."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names

    def generic_visit(self, node: ast.AST) -> ast.AST:
        for name in ("id", "name"):
            if isinstance(value := getattr(node, name, None), str):
                setattr(node, name, self.names.get(value, value))
        if isinstance(node, ast.Nonlocal):
            node.names = [self.names.get(name, name) for name in node.names]
        return super().generic_visit(node)


def renamed(text: str, names: dict[str, str]) -> str:
    return ast.unparse(Renamer(names).visit(ast.parse(text)))


NAMES = ("va", "vb", "vc", "vd")


EXPRESSIONS = st.recursive(
    st.sampled_from([*NAMES, "0", "1", "other", "'va'"]),
    lambda inner: st.one_of(
        st.builds("({} + {})".format, inner, inner),
        st.builds("call({}, va={})".format, inner, inner),
        st.builds("[{} for vd in {} if vd]".format, inner, inner),
        st.builds("({}).va".format, inner),
        st.builds("(lambda p: p + {})".format, inner),
        st.builds("(vb := {})".format, inner),
    ),
    max_leaves=4,
)


def indented(text: str) -> str:
    return textwrap.indent(text, "    ")


def matching(value: str, name: str, body: str) -> str:
    return f"match {value}:\n    case [{name}, *_]:\n{indented(indented(body))}"


SIMPLE = st.one_of(
    st.builds("{} = {}\n".format, st.sampled_from(NAMES), EXPRESSIONS),
    st.builds("{} += {}\n".format, st.sampled_from(NAMES), EXPRESSIONS),
    st.builds("call({})\n".format, EXPRESSIONS),
    st.builds("return {}\n".format, EXPRESSIONS),
)


STATEMENTS = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(
        st.builds(lambda c, a, b: f"if {c}:\n{indented(a)}else:\n{indented(b)}", EXPRESSIONS, inner, inner),
        st.builds(
            lambda n, c, a, b: f"for {n} in {c}:\n{indented(a + b)}", st.sampled_from(NAMES), EXPRESSIONS, inner, inner
        ),
        st.builds(
            lambda a, n, b: f"try:\n{indented(a)}except E as {n}:\n{indented(b)}", inner, st.sampled_from(NAMES), inner
        ),
        st.builds(matching, EXPRESSIONS, st.sampled_from(NAMES), inner),
        st.builds(lambda a: f"def vc(q):\n    nonlocal vb\n{indented(a)}", inner),
    ),
    max_leaves=5,
)


BODIES = st.lists(STATEMENTS, min_size=1, max_size=5).map(
    lambda body: "def f(p):\n    va = vb = vc = vd = p\n" + indented("".join(body))
)


def compiles(text: str) -> bool:
    try:
        compile(text, "f", "exec")
    except SyntaxError:
        return False
    return True


FUNCTION_TEXTS = BODIES.filter(compiles)
RENAMINGS = st.permutations([*NAMES, "wa", "wb"]).map(lambda names: dict(zip(NAMES, names, strict=False)))
PROPERTY = settings(max_examples=40, deadline=None)


@pytest.mark.slow
@PROPERTY
@given(FUNCTION_TEXTS, RENAMINGS)
def test_renamed_locals_are_no_change(text: str, names: dict[str, str]) -> None:
    assert minimal_diff(text, renamed(text, names)).changed == 0


@PROPERTY
@given(FUNCTION_TEXTS, st.data())
def test_formatting_comments_and_docstrings_are_no_change(text: str, data: st.DataObject) -> None:
    lines = ast.unparse(ast.parse(text)).split("\n")
    for at in range(len(lines), 0, -1):
        lines[at - 1] += data.draw(st.sampled_from(["", "  # note", "\n", "\n\n# note"]))
    head, *rest = "\n".join(lines).split("\n", 1)
    noted = "\n".join([head, '    """Text."""', *rest])
    assert minimal_diff(text, noted).changed == 0
    assert minimal_diff(noted, text).changed == 0


@PROPERTY
@given(FUNCTION_TEXTS, SIMPLE, st.integers(0, 4))
@pytest.mark.slow
def test_one_inserted_statement_is_one_change(text: str, statement: str, at: int) -> None:
    tree = ast.parse(text)
    body = tree.body[0].body  # type: ignore[attr-defined]
    before = ast.unparse(tree)
    body.insert(min(1 + at, len(body)), ast.parse(f"print({statement.strip()!r})").body[0])
    assert minimal_diff(before, ast.unparse(tree)).changed == 1
