"""Changed statements of an edit: edits, scope rules against `symtable`, limits, and bad input."""

import ast
import random

import pytest
from hypothesis import given, strategies as st
from steps import calls_in

from assay.errors import RubricError
from assay.rubrics.code import minimal_diff

BASE = '''
import os
import sys

def first(values, limit):
    """The first value above the limit."""
    total = 0
    for value in values:
        if value > limit:
            total += value
            return total
    return total

class Box:
    size = 1

    def grow(self, by):
        self.size += by
        return self.size

    def shrink(self, by):
        self.size -= by
        return self.size
'''


def edited(*pairs: tuple[str, str]) -> str:
    text = BASE
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new, 1)
    return text


# One edit each, with the number of changed statements worked out by hand


@pytest.mark.parametrize(
    ("after", "changed"),
    [
        (BASE, 0),
        (edited(("    total = 0", "    total = 0  # none yet")), 0),
        (edited(('    """The first value above the limit."""\n', "")), 0),
        (f'"""A module."""{BASE}', 0),
        (edited(("total += value", "total += (\n                value\n            )")), 0),
        (edited(("import os\nimport sys", "import sys, os")), 0),
        (edited(("value > limit", "value >= limit")), 1),
        (edited(("            return total\n", "        return total\n")), 1),  # moved out of the `if`
        (edited(("(values, limit)", "(values, bound)"), ("> limit", "> bound")), 1),  # callers see the parameter's name
        (edited(("    return total\n\n", "    else:\n        return total\n\n")), 1),  # moved into an `else`
        (edited(("    total = 0\n", "    start = 0\n    total = start\n")), 2),
        (edited(("        self.size += by\n", "")), 1),
        (edited(("import os\n", "import os\nimport re\n")), 1),
        (edited(("def grow", "def expand")), 1),
        (edited(("class Box:", "class Box(object):")), 1),
    ],
)
def test_changed_statements(after: str, changed: int) -> None:
    result = minimal_diff(BASE, after)
    assert result.changed == result == changed, [str(edit) for edit in result.edits]


def test_a_moved_function_is_one_change() -> None:
    head, grow, shrink = BASE.partition("    def grow")[0], BASE.partition("    def grow")[2], ""
    grow, shrink = grow.split("    def shrink")
    after = f"{head}    def shrink{shrink}\n    def grow{grow}"
    result = minimal_diff(BASE, after)
    assert [edit.kind for edit in result.edits] == ["moved"]
    assert "grow" in result.edits[0].text or "shrink" in result.edits[0].text


def test_a_wrapper_around_a_block_is_one_change() -> None:
    lines = BASE.split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith("    for value"))
    block = [f"    {line}" for line in lines[start : start + 4]]
    assert minimal_diff(BASE, "\n".join([*lines[:start], "    if values:", *block, *lines[start + 4 :]])).changed == 1


# Against a reference


def test_the_fix_itself_is_not_unnecessary_where_a_statement_was_written_beside_it() -> None:
    before, fixed = "def f(x):\n    return x - 1\n", "def f(x):\n    return x + 1\n"
    result = minimal_diff(before, "def f(x):\n    y = 0\n    return x + 1\n", fixed)
    assert [(edit.line, edit.text) for edit in result.unnecessary] == [(2, "y = 0")]
    result = minimal_diff(before, "def f(x):\n    return x + 1\n    return x\n", fixed)
    assert [(edit.line, edit.text) for edit in result.unnecessary] == [(3, "return x")]


def test_unnecessary_edits_are_named_with_line_and_text() -> None:
    fix = edited(("value > limit", "value >= limit"))
    after = edited(("value > limit", "value >= limit"), ("size = 1", "size = 2"), ("        self.size -= by\n", ""))
    result = minimal_diff(BASE, after, fix)
    assert (result.changed, result.needed, result.excess) == (3, 1, 2)
    assert result.grade == pytest.approx(1 / 3)
    assert [(edit.kind, edit.text) for edit in result.unnecessary] == [
        ("changed", "size = 2"),
        ("removed", "self.size -= by"),
    ]
    assert after.split("\n")[result.unnecessary[0].line - 1].strip() == "size = 2"
    assert BASE.split("\n")[result.unnecessary[1].line - 1].strip() == "self.size -= by"
    assert "size = 2" in result.reason


def test_another_fix_of_the_same_size_has_no_excess() -> None:
    result = minimal_diff(
        BASE, edited(("value > limit", "not value <= limit")), edited(("value > limit", "value >= limit"))
    )
    assert (result.excess, result.grade, result.unnecessary) == (0, 1.0, ())
    assert result.nodes > 1  # a larger edit inside the same statement


def test_a_renamed_fix_needs_what_the_fix_needs() -> None:
    fix = edited(("value > limit", "value >= limit"))
    renamed = fix.replace("total", "amount").replace("value ", "item ").replace("value:", "item:")
    renamed = renamed.replace("= value", "= item").replace("+= value", "+= item")
    result = minimal_diff(BASE, renamed, fix)
    assert (result.excess, result.changed) == (0, 1)


def test_an_edit_that_changes_nothing_fixes_nothing() -> None:
    result = minimal_diff(BASE, BASE + "# done\n", edited(("value > limit", "value >= limit")))
    assert (result.excess, result.grade) == (0, 0.0)
    assert "changes nothing" in result.reason


@pytest.mark.parametrize("after", ["", "\n", "# removed\n"])
def test_an_edit_that_leaves_no_statement_fixes_nothing(after: str) -> None:
    for reference in (None, "def f(a):\n    return a - 1\n"):
        result = minimal_diff("def f(a):\n    return a + 1\n", after, reference)
        assert (result.grade, "no statements" in result.reason) == (0.0, True)
    assert minimal_diff("import os\n", after, "").grade == 1.0  # where the fix leaves none either


# Bad input


@pytest.mark.parametrize("after", ["def f(:", "x = '\0'", "(" * 500 + ")" * 500, "x = " + "-" * 5000 + "1", "\ud800"])
def test_an_edit_that_is_not_python_is_the_agents_failure(after: str) -> None:
    result = minimal_diff(BASE, after, BASE)
    assert (result.grade, result.excess > 0) == (0.0, True)
    assert "unusable" in result.reason


@pytest.mark.parametrize(
    ("before", "reference"), [("def f(:", None), ("x = 1", "def f(:"), ("x = " + "-" * 5000 + "1", None)]
)
def test_sources_of_the_task_that_are_not_python_are_refused(before: str, reference: str | None) -> None:
    with pytest.raises(RubricError, match="before" if reference is None else "reference"):
        minimal_diff(before, "x = 1", reference)


# Limits


@pytest.mark.timeout(120)
@pytest.mark.parametrize("text", ["x = 1\n" * 1_700_000, "def f():\n" + "    x = 1\n" * 40_000])
def test_a_huge_edit_ends_soon_with_a_reason(text: str) -> None:
    result = minimal_diff(BASE, text, BASE)
    assert result.grade == 0.0
    assert "at most" in result.reason


def test_a_rewritten_long_function_takes_few_steps() -> None:
    rng = random.Random(0)
    before = "def f(a):\n" + "".join(f"    g({rng.randrange(10**6)})\n" for _ in range(2000))
    after = "def f(a):\n" + "".join(f"    h({rng.randrange(10**6)})\n" for _ in range(2000))
    result = minimal_diff(before, after)
    assert result.changed == 2000
    assert calls_in(lambda: minimal_diff(before, after)) < 3_000_000


def test_a_function_of_hundreds_of_nodes_takes_few_steps() -> None:
    loop = "    for a in b:\n        if a.x(1)[0] > b[a]:\n            c[a] = b[a + {0}].y(c, k={0})\n"
    before = "def f(b, c):\n" + "".join(loop.format(at) for at in range(30))
    assert sum(1 for _ in ast.walk(ast.parse(before))) > 722
    after = before.replace("k=3)", "k=4)").replace("a + 20", "a - 20").replace("for a in b", "for a in c", 1)
    assert minimal_diff(before, after).changed == 3
    assert calls_in(lambda: minimal_diff(before, after)) < 1_000_000


@given(st.permutations(["import os", "import re as r", "from a.b import c", "from . import d", "import a.b"]))
def test_the_order_of_imports_is_no_change(lines: list[str]) -> None:
    assert minimal_diff("\n".join([*sorted(lines), "x = 1"]), "\n".join([*lines, "x = 1"])).changed == 0


def test_the_order_of_imports_of_one_name_is_a_change() -> None:
    assert minimal_diff("import a as x\nimport b as x", "import b as x\nimport a as x").changed > 0
    assert minimal_diff("from a import *\nfrom b import *", "from b import *\nfrom a import *").changed > 0


# Scope rules


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def f():\n    global g\n    g = 1", "def f():\n    global h\n    h = 1"),
        ("def f():\n    return x", "def f():\n    return y"),
        ("def f(a):\n    return a.x", "def f(a):\n    return a.y"),
        ("def f(a):\n    return g(x=a)", "def f(a):\n    return g(y=a)"),
        ("class C:\n    x = 1", "class C:\n    y = 1"),
        ("def f():\n    class C:\n        x = 1", "def f():\n    class C:\n        y = 1"),
        ("def f(m):\n    match m:\n        case P(x=1): pass", "def f(m):\n    match m:\n        case P(y=1): pass"),
        ("def f(a, b):\n    return a", "def f(a, b):\n    return b"),
        ("def f():\n    x = 1\n    return eval('x')", "def f():\n    y = 1\n    return eval('x')"),
        ("def f(x):\n    return [x for x in x]", "def f(x):\n    return [y for y in y]"),
        ("x = 1", "y = 1"),
        ("def f(x=x, /):\n    return x", "def f(y=y, /):\n    return y"),
        ("def f(a):\n    return [0 for a[i] in a]", "def f(a):\n    return [0 for a[j] in a]"),
        ("def f():\n    x = 1\n    class C:\n        x = x", "def f():\n    y = 1\n    class C:\n        y = y"),
        (
            "def f():\n    x = 1\n    def g():\n        x = 2",
            "def f():\n    x = 1\n    def g():\n        nonlocal x\n        x = 2",
        ),
    ],
)
def test_names_that_others_see_are_not_renamed(before: str, after: str) -> None:
    assert minimal_diff(before, after).changed > 0


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def f(a, /):\n    return a", "def f(b, /):\n    return b"),
        ("def f(*a, **k):\n    return a, k", "def f(*b, **l):\n    return b, l"),
        ("def f():\n    import os\n    return os.sep", "def f():\n    import os as o\n    return o.sep"),
        (
            "def f(m):\n    match m:\n        case {'a': x, **r}: return x, r",
            "def f(m):\n    match m:\n        case {'a': y, **s}: return y, s",
        ),
        ("def f(a):\n    if (x := a): return x", "def f(a):\n    if (y := a): return y"),
        ("def f(x):\n    return [x for x in x]", "def f(x):\n    return [y for y in x]"),
        ("v = [x for x in w]", "v = [y for y in w]"),
        (
            "def f():\n    x = 1\n    def g():\n        nonlocal x\n        x = 2",
            "def f():\n    y = 1\n    def g():\n        nonlocal y\n        y = 2",
        ),
        ("def f():\n    a = b = 1\n    return a - b", "def f():\n    b = a = 1\n    return b - a"),
    ],
)
def test_names_that_are_not_visible_outside_are_renamed(before: str, after: str) -> None:
    assert minimal_diff(before, after).changed == 0
