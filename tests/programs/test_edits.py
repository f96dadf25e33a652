"""Edits of `code_repair`: how a replacement is read, indented and applied."""

import pytest

from assay.shipped.programs.code_repair.edits import Edit, applied, excerpt, functions_of, replacement_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("return x", "return x"),
        ("    return x\n", "    return x"),
        ("3: return x", "return x"),
        ("  3:     return x", "    return x"),
        ("```python\nreturn x\n```", "return x"),
        ("`return x`", "return x"),
        ("x = {3: 4}", "x = {3: 4}"),
        ("30: x", "30: x"),
    ],
)
def test_a_replacement_is_read_without_its_wrapping(text: str, expected: str) -> None:
    assert replacement_of(text, 3) == expected


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (Edit(2, "return 2"), "def f():\n    return 2\n"),
        (Edit(2, "        return 2"), "def f():\n    return 2\n"),
        (Edit(2, "x = 2\nreturn x"), "def f():\n    x = 2\n    return x\n"),
        (Edit(2, "if 1:\n    return 2\nreturn 3"), "def f():\n    if 1:\n        return 2\n    return 3\n"),
        (
            Edit(2, "if 1:\n        return 2\n    return 3"),
            "def f():\n    if 1:\n        return 2\n    return 3\n",
        ),
        (Edit(2, "if 1:\n    return 2"), "def f():\n    if 1:\n        return 2\n"),
        (Edit(1, "def g():"), "def g():\n    return 1\n"),
        (Edit(2, "return ("), "def f():\n    return (\n"),
    ],
)
def test_an_edit_gets_the_indentation_of_its_line(edit: Edit, expected: str) -> None:
    assert applied("def f():\n    return 1\n", edit) == expected


def test_an_excerpt_offers_lines_with_code() -> None:
    source = '"""Doc."""\n\n# note\ndef f(x):\n    """Doc\n    more."""\n    return x\n'
    assert excerpt(source, 1000).choices == (4, 7)
    assert excerpt(source, 1000).whole
    short = excerpt(source, 30)
    assert short.text == "4: def f(x):\n…\n7:     return x"
    assert excerpt("(", 10).choices == (1,)
    assert excerpt("# only\n", 100).choices == (1, 2)


def test_functions_of_a_source_are_named_with_their_class() -> None:
    source = "import x\nclass A:\n    def f(self):\n        def g(): pass\n\n    @x\n    def h(self): pass\n"
    assert functions_of(source) == {"A.f": [3, 4], "A.h": [6, 7], "module": [1, 2]}
    assert functions_of("def (") == {}
