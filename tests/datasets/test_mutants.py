"""The dataset `mutants:`: slices, mutations, calls, and tasks that the sandbox made."""

import ast
import random
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from assay.datasets import iter_rows, load_tasks, make_task
from assay.errors import DataError
from assay.programs import sandbox
from assay.rubrics.code import find_hacks, minimal_diff
from assay.shipped.programs.code_repair.calls import similar_calls
from assay.shipped.programs.code_repair.functions import module_files, slices
from assay.shipped.programs.code_repair.tasks import Job, outcomes

needs_sandbox = pytest.mark.skipif(bool(sandbox.available("bubblewrap")), reason="bubblewrap does not work here")
TOOLS = textwrap.dedent('''
    import re
    import shutil

    LIMIT = 10
    WORD = re.compile(r"[a-z]+")

    def clip(value: int, low: int = 0):
        """Limits a value.

        >>> clip(3, 1)
        3
        """
        if value < low:
            return low
        if value > LIMIT:
            return LIMIT
        return value

    def words(text: str):
        for word in WORD.findall(text):
            if len(word) > 2:
                yield word

    def push(items: list, value: int):
        """Inserts before the first larger one."""
        at = 0
        while at < len(items) and items[at] <= value:
            at += 1
        items.insert(at, value)

    def clean(path: str):
        if path:
            path = path.strip()
            shutil.rmtree(path)
        return path

    def show(text: str):
        text = clean(text)
        text = text + "!"
        return text

    def secret(name: str):
        name = name + "x"
        name = name + "y"
        return open(name).read()
''')


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text(TOOLS)
    return tmp_path / "tools.py"


@pytest.mark.parametrize("name", ["os", "shutil", "subprocess", "socket", "pathlib", "tempfile", "zipfile"])
def test_no_slice_of_the_standard_library_reaches_files_processes_or_the_network(name: str) -> None:
    names = {"open", "exec", "eval", "__import__", "socket", "subprocess", "shutil", "rmtree", "remove"}
    names |= {"unlink", "system"}
    for module, file in module_files(name):
        for part in slices(file.read_text(), module):
            used = {getattr(node, "id", getattr(node, "attr", "")) for node in ast.walk(ast.parse(part.code))}
            assert not used & names, (part.name, used & names)


def test_calls_for_an_effect_give_the_changed_argument() -> None:
    push = list(slices(TOOLS, "tools"))[2]
    calls = similar_calls(push, random.Random(0), {"push([1, 3], 2)": "None"}, 5)
    assert calls[0] == "[push((x := [1, 3]), 2), x][1]"
    space: dict[str, Any] = {}
    exec(push.code, space)
    assert eval(calls[0], space) == [1, 2, 3]


@pytest.fixture(scope="module")
def rows() -> list[tuple[str, dict[str, Any]]]:
    return list(iter_rows("mutants:textwrap?size=12&seed=3"))


@pytest.mark.slow
@needs_sandbox
def test_the_mutant_fails_and_the_reference_passes(rows: list[tuple[str, dict[str, Any]]]) -> None:
    assert len(rows) == 12
    for where, row in rows[:5]:
        for tests in (row["inputs"]["visible_tests"], row["metadata"]["hidden_tests"]):
            suite = sandbox.Suite.parse(tests)
            limits = {"timeout_s": 20, "memory_mb": 512}
            assert sandbox.run_tests(row["expected"]["reference"], suite, **limits).share == 1.0, where
            assert sandbox.run_tests(row["inputs"]["code"], suite, **limits).share < 1.0, where


@needs_sandbox
@pytest.mark.slow
def test_a_mutant_task_has_its_documented_fields(rows: list[tuple[str, dict[str, Any]]]) -> None:
    for _, row in rows:
        task = make_task(row)
        assert set(task.inputs) == {"function", "code", "visible_tests"}
        assert set(task.expected) == {"reference"}
        assert f"def {task.inputs['function']}(" in task.inputs["code"]
        visible, hidden = task.inputs["visible_tests"], task.metadata["hidden_tests"]
        assert not {call for call, _ in visible} & {call for call, _ in hidden}
        assert (len(visible), len(hidden) >= 2) == (4, True)
        for _, text in [*visible, *hidden]:
            assert repr(ast.literal_eval(text)) == text
        fix = minimal_diff(task.inputs["code"], task.expected["reference"], task.expected["reference"])
        assert (fix.changed, fix.grade) == (1, 1.0)
        assert find_hacks(task.inputs["code"], task.expected["reference"], visible) == []


@needs_sandbox
@pytest.mark.slow
def test_the_seed_decides_the_tasks(tools: Path) -> None:
    def made(seed: int) -> list[Any]:
        return [row for _, row in iter_rows(f"mutants:{tools}?size=6&seed={seed}")]

    assert made(1) == made(1)
    assert made(1) != made(2)


@needs_sandbox
@pytest.mark.slow
def test_files_folders_and_load_tasks(tools: Path) -> None:
    names = Counter(row["inputs"]["function"] for _, row in iter_rows(f"mutants:{tools.parent}?size=9"))
    assert set(names) == {"clip", "words", "push"}
    tasks = load_tasks(f"mutants:{tools}?size=5")
    assert len(tasks) == 5
    assert tasks[0].task_type.startswith("mutants/")


def test_reading_a_spec_does_not_import_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "loud_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "inner.py").write_text(TOOLS)
    monkeypatch.syspath_prepend(tmp_path)
    assert [file.name for _, file in module_files("loud_package")] == ["__init__.py", "inner.py"]
    assert [file.name for _, file in module_files("loud_package.inner")] == ["inner.py"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mutants:", "needs a module"),
        ("mutants:no_such_module", "no module 'no_such_module'"),
        ("mutants:math", "no Python source|no module"),
        ("mutants:no/such/file.py", "no such file"),
        ("mutants:textwrap?sizes=3", "unknown option 'sizes'. Did you mean 'size'"),
        ("mutants:textwrap?size=0", "option size is '0'"),
        ("mutants:textwrap?isolation=some", "isolation='some'"),
        ("mutants:this", "no function to mutate"),
    ],
)
def test_a_wrong_spec_is_refused_with_the_way_out(spec: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(iter_rows(spec))


@needs_sandbox
def test_a_function_that_ends_the_process_loses_only_itself() -> None:
    good = Job(["def f(a):\n    return a + 1\n"], ["f(1)", "f('a')"])
    bad = Job(["import os\ndef f(a):\n    os._exit(0)\n"], ["f(1)"])
    assert outcomes([good, bad, good], "auto") == [[["2", None]], None, [["2", None]]]


@needs_sandbox
def test_a_file_that_is_not_python_is_named_if_alone_and_skipped_among_others(tools: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "broken.py").write_text("def (\n")
    (folder / "latin.py").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match=r"broken\.py cannot be read: invalid .*latin\.py cannot be read: 'utf"):
        list(iter_rows(f"mutants:{folder}?size=2"))
    (folder / "good.py").write_text(tools.read_text())
    assert len(list(iter_rows(f"mutants:{folder}?size=2"))) == 2


def test_a_file_without_testable_functions_is_refused(tmp_path: Path) -> None:
    (tmp_path / "same.py").write_text("def f(a):\n    b = 1\n    b = 1\n    return 0 * b\n")
    with pytest.raises(DataError, match="give other results than the function itself"):
        list(iter_rows(f"mutants:{tmp_path / 'same.py'}?size=5"))
