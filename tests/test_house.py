"""Rules of the code base: import order, public names, and light imports."""

import ast
import gc
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import cast

import pytest

import assay
from assay.support.package import CONTENT

SOURCE = Path(assay.__file__).parent
ROOT = Path(__file__).parents[1]
LAYERS = (  # lowest first; packages of one layer may import each other
    ("errors",),
    ("support", "shipped"),
    ("sources",),
    ("datasets", "models"),
    ("traces",),
    ("programs", "rubrics"),
    ("shipped.programs",),
    ("judges",),
    ("evaluation",),
    ("deployment", "reports"),
    ("optimizers",),
    ("jobs",),
    ("commands",),
    ("web",),
    ("cli",),
    ("testing",),
)
RANK = {name: index for index, names in enumerate(LAYERS) for name in names}
FOLDERS = {"assay": SOURCE, "assay.shipped.programs": CONTENT / "programs"}  # of modules
MODULES = {
    ".".join((package, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__"): path
    for package, folder in FOLDERS.items()
    for path in sorted(folder.rglob("*.py"))
}


def rank_of(module: str) -> int:
    """The layer of a module; modules of the shipped programs have one of their own."""
    return RANK["shipped.programs" if module.startswith("assay.shipped.programs.") else module.split(".")[1]]


@pytest.fixture(scope="module", autouse=True)
def no_collections() -> Iterator[None]:
    """Syntax trees have no cycles, and collections took three quarters of the time of reading them."""
    gc.disable()
    yield
    nodes_of.cache_clear()
    gc.enable()


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, read once for all tests of this module."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def _named(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of each import of assay's own modules, at any place in the file."""
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.level:  # in a shipped program, whose folder can be copied
            yield from (
                (f"assay.shipped.programs.{path.parent.name}.{node.module}", alias.name) for alias in node.names
            )
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "assay":
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "assay")


@cache
def _exports(package: str) -> dict[str, str]:
    """Names that a package's `__init__` imports from its modules."""
    return {name: module for module, name in _named(MODULES[package])} if MODULES[package].name == "__init__.py" else {}


@cache
def imports_of(module: str) -> frozenset[str]:
    """Modules that a file imports; a name of a package counts as the module that defines it."""
    modules = set()
    for source, name in _named(MODULES[module]):
        while source in MODULES and name in _exports(source):
            source = _exports(source)[name]
        modules.add(f"{source}.{name}" if f"{source}.{name}" in MODULES else source)
    return frozenset(modules - {"assay"})


def test_every_package_and_module_has_a_layer() -> None:
    layers = {module.split(".")[1] for module in MODULES if module not in ("assay", "assay.__main__")}
    assert layers == set(RANK) - {"shipped.programs"}


def test_no_import_points_up() -> None:
    faces = ("assay", "assay.__main__", "assay.programs")  # `assay.programs` loads the shipped classes on first use
    files = [module for module in MODULES if module not in faces]
    assert [
        f"{module} imports {other}"
        for module in files
        for other in imports_of(module)
        if rank_of(other) > rank_of(module)
    ] == []


def test_no_two_files_import_each_other() -> None:
    files = {module: imports_of(module) for module, path in MODULES.items() if path.name != "__init__.py"}
    try:
        TopologicalSorter(
            {module: [other for other in others if other in files] for module, others in files.items()}
        ).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and not name.endswith("_")


def _defined(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Private names of modules, classes, functions and objects that a file defines."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
        else:
            continue
        if _is_private(name):
            yield name


def _touched(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, name) of each private attribute that a file reads or sets, also by its name in a string.

    Scripts of subprocesses are strings too. `super()._name` extends a class: its name is not touched.
    """
    for node in nodes:
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and len(node.args) > 1 and ast.unparse(node.func).endswith("attr"):
            if isinstance(node.args[1], ast.Constant) and _is_private(str(node.args[1].value)):
                yield node.lineno, str(node.args[1].value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "assay" in node.value:
            yield from (
                (node.lineno, name) for name in re.findall(r"\.(_[a-zA-Z]\w*)", node.value) if _is_private(name)
            )


@cache
def _private_names() -> frozenset[str]:
    defined = {name for path in MODULES.values() for name in _defined(nodes_of(path))}
    return frozenset(defined) - {"_exit"}  # `os._exit`, also a method of ours


def _privately_used(nodes: Collection[ast.AST]) -> list[str]:
    others = _private_names() - set(_defined(nodes))  # a name that the file defines itself is taken for its own
    return [f"{line}: {name}" for line, name in _touched(nodes) if name in others]


def test_tests_examples_and_benchmarks_use_public_names() -> None:
    private, used = [], []
    for path in (path for folder in ("tests", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")):
        for module, name in _named(path):
            if name.startswith("_") or any(part.startswith("_") for part in module.split(".")):
                private.append(f"{path.relative_to(ROOT)}: from {module} import {name}")
        if (
            path != Path(__file__) and path.relative_to(ROOT).as_posix() not in _SEAMS
        ):  # this file has examples as strings
            used += [f"{path.relative_to(ROOT)}:{use}" for use in _privately_used(nodes_of(path))]
    assert (private, sorted(used)) == ([], [])


def test_a_private_name_of_the_package_is_found() -> None:
    for use in ("store._writer.end()", "patch.setattr(store, '_writer', 1)", "s = 'import assay; assay.x._writer'"):
        assert _privately_used(list(ast.walk(ast.parse(use)))) == ["1: _writer"]


_CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time"}


def _elapsed(node: ast.AST) -> bool:
    """Whether an expression subtracts from the reading of a clock."""
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Sub)
        and isinstance(node.left, ast.Call)
        and ast.unparse(node.left.func).rpartition(".")[2] in _CLOCKS
    )


def test_no_test_asserts_on_elapsed_time() -> None:
    """A loaded machine is slow. A hang is found by `pytest.mark.timeout`, quadratic work by `steps.calls_in`."""
    assert [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "tests").rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.Assert) and any(map(_elapsed, ast.walk(node.test)))
    ] == []


def test_no_value_leaves_python_as_its_text() -> None:
    """Values leave through `assay.support.values`: an object's text is not its value."""
    found = [
        f"{path}:{node.lineno}"
        for path in MODULES.values()
        for node in nodes_of(path)
        if isinstance(node, ast.keyword) and node.arg in ("default", "fallback")
        if isinstance(node.value, ast.Name) and node.value.id in ("str", "repr")
    ]
    assert found == []


def test_names_of_test_modules_are_unique() -> None:
    """Modules of one name in two folders without `__init__.py` cannot be imported in one run of pytest."""
    modules = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in modules.items() if count > 1] == []


SCORE = "Rubric('r', [Criterion(name='ok', check=lambda *_: True)]).score({'inputs': {'q': 'a'}}, 'b').value"
STATS = """
import sys
sys.argv = ["assay", "traces", "stats", "--store", "s.db"]
from assay.cli import group
try:
    group()
except SystemExit as end:
    assert not end.code
"""
HELP = """
import sys
sys.argv = ["assay", *{words!r}, "--help"]
from assay.cli import group
try:
    group()
except SystemExit as end:
    assert not end.code
"""
HEAVY = "dspy torch litellm sqlalchemy optuna numpy rich"
LIGHT = {  # code, and the packages that it must not load
    "import": ("import assay", HEAVY),
    "help": (HELP.format(words=[]), f"{HEAVY} ssl email multiprocessing"),
    "help of a command": (HELP.format(words=["compile"]), f"{HEAVY} ssl email multiprocessing"),
    "traces stats": (STATS, HEAVY),
    "store": ("from assay.traces.store import Store", "dspy litellm numpy pydantic"),
    "statistics": ("import assay.commands.compile, assay.judges, assay.cli", "scipy sklearn torch optuna"),
    "page": ("import assay.web.view, assay.web.server", "dspy torch litellm optuna numpy scipy rich"),
    "rubric": (  # for agents written without DSPy
        f"from assay.rubrics import Criterion, Rubric\nassert {SCORE} == 1.0",
        "dspy litellm torch sqlalchemy pydantic numpy scipy sklearn jsonschema yaml orjson aiohttp asyncio",
    ),
}


@pytest.mark.parametrize("name", LIGHT)
def test_heavy_packages_load_where_they_are_used(name: str) -> None:
    from assay.traces.store import Store

    Store("s.db").close()
    code, heavy = LIGHT[name]
    code += "\nimport sys; print('LOADED', *(m for m in sys.modules if '.' not in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {*done.stdout.rpartition("LOADED")[2].split()} & {*heavy.split()} == set()


def test_modules_that_windows_lacks_are_imported_where_they_are_used() -> None:
    lacking = {"fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"}
    inside_the_sandbox = {"assay.programs.sandbox.launcher"}
    at_the_top = {
        module
        for module, path in MODULES.items()
        for node in cast(ast.Module, nodes_of(path)[0]).body
        if isinstance(node, ast.Import) and lacking & {alias.name for alias in node.names}
    }
    assert at_the_top == inside_the_sandbox


def test_shipped_programs_import_only_their_own_folder_and_the_library() -> None:
    """Then a copy of the folder works in a project of a user."""
    own = {module for module in MODULES if module.startswith("assay.shipped.programs.")}
    assert [
        f"{module} imports {other}"
        for module in own
        for other in imports_of(module) & own
        if other.rpartition(".")[0] != module.rpartition(".")[0]
    ] == []


def test_every_shipped_name_has_its_files() -> None:
    from assay.programs.loading import SHIPPED as programs
    from assay.rubrics.loading import SHIPPED as rubrics, SHIPPED_JUDGES as judges

    assert sorted(programs) == sorted(path.parent.name for path in (CONTENT / "programs").glob("*/program.py"))
    assert sorted(programs) == sorted(path.parent.name for path in (CONTENT / "programs").glob("*/README.md"))
    assert sorted(rubrics) == sorted(path.stem for path in (CONTENT / "rubrics").glob("*.yaml"))
    assert sorted(judges) == sorted(path.stem for path in (CONTENT / "judges").glob("*.yaml"))


@pytest.mark.parametrize("file", sorted((CONTENT / "judges").glob("*.yaml")), ids=lambda file: file.stem)
def test_a_shipped_judge_is_found_by_its_name_and_has_a_card(file: Path, tmp_path: Path) -> None:
    from assay.judges.loading import load_judge
    from assay.rubrics.loading import load_rubric

    rubric = tmp_path / "rubric.yaml"
    rubric.write_text(f"name: mine\ncriteria: [{{name: one, judge: {{use: {file.stem}}}}}]\n")
    (criterion,) = load_rubric(rubric).criteria
    assert criterion.judge is not None
    assert load_judge(file.stem).spec == load_judge(file).spec == load_judge(criterion.judge.use).spec
    assert criterion.describe()["judge"]["use"] == file.stem  # no path: it is a part of the rubric's version
    assert f"## `{file.stem}`" in (CONTENT / "judges" / "README.md").read_text()


# Torch and safetensors have no class of their own for these; the words only choose which advice is added to the error.
_WORDS_OF_OTHERS = {("optimizers/finetuning/run_folder.py", "_ran_out_by_text")}
_TEXTS = {"error", "message", "reason"}


def _reads_words(node: ast.AST) -> bool:
    """Whether an expression searches for fixed words in an error, a reason or a message."""
    if (
        isinstance(node, ast.Compare)
        and isinstance(node.ops[0], ast.In | ast.NotIn)
        and isinstance(node.left, ast.Constant)
    ):
        return isinstance(node.left.value, str) and _is_message(node.comparators[0])
    called = node.func if isinstance(node, ast.Call) else None
    return (
        isinstance(called, ast.Attribute)
        and called.attr in ("startswith", "endswith", "find")
        and _is_message(called.value)
    )


def _is_message(node: ast.AST) -> bool:
    if isinstance(node, ast.BoolOp):
        return any(_is_message(value) for value in node.values)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):  # such as `.lower()`
        return _is_message(node.func.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str":
        return any(isinstance(inner, ast.Name) and inner.id in ("error", "exc", "failure") for inner in node.args)
    if isinstance(node, ast.Attribute):
        return node.attr in _TEXTS
    return isinstance(node, ast.Name) and node.id in ("error", "reason")  # `message` is often a chat message, a mapping


def test_code_that_branches_on_messages_is_found() -> None:
    for text in ("'full' in str(error)", "'x' in (run.error or '')", "error.message.lower().startswith('no')"):
        assert any(_reads_words(node) for node in ast.walk(ast.parse(text)))


def test_no_code_branches_on_the_text_of_messages() -> None:
    others = {
        inner
        for file, name in _WORDS_OF_OTHERS
        for node in nodes_of(SOURCE / file)
        if isinstance(node, ast.FunctionDef) and node.name == name
        for inner in ast.walk(node)
    }
    places = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in sorted(SOURCE.rglob("*.py"))
        for node in nodes_of(path)
        if _reads_words(node) and node not in others
    ]
    assert places == []


_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
_COMMAND = re.compile(r"`[^`]*`|\bassay [a-z]+ .*|\bpip install .*")  # commands to type, which have flags


def _text_of(node: ast.AST) -> str:
    """The texts of an expression, without the keyword `flag`, which only the command line prints."""
    if isinstance(node, ast.Call):
        parts = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg != "flag")]
        return " ".join(map(_text_of, parts))
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text_of(part) for part in node.values)
    return " ".join(map(_text_of, ast.iter_child_nodes(node)))


def test_errors_of_the_library_name_arguments_not_flags() -> None:
    """The command line puts its flags in their place (`assay.cli`)."""
    places = [
        f"{path.relative_to(SOURCE)}:{node.lineno}: {flag}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.relative_to(SOURCE).parts[0] not in ("cli.py", "testing")
        if "gateway" not in path.parts  # `assay serve` alone starts it, and its clients read these errors
        for node in nodes_of(path)
        if isinstance(node, ast.Raise) and node.exc is not None
        for flag in _FLAG.findall(_COMMAND.sub("", _text_of(node.exc)))
    ]
    assert places == []


_SEAMS = ("src/assay/models/dspy_seam.py", "tests/stub_dspy35.py", "tests/dspy_internals.py")
_PARTS = r"(?:_vendor|clients|adapters|teleprompt|utils\.(?:callback|parallelizer))"
_INTERNALS = re.compile(
    rf"\bdspy\.{_PARTS}\b(?:\.\w+)*+(?!:[A-Z{{])"  # `dspy.teleprompt:COPRO` is how users name an optimizer
    r"|\bfrom dspy import [^\n]*\b(?:clients|adapters|teleprompt)\b"
    r"|\bfrom dspy\.utils import [^\n]*\b(?:callback|parallelizer)\b"
    r"|_engine_spec\b"
    r"|^ *dspy\.[A-Z]\w*(?:\.\w+)+ = "  # changes of its classes
    r"|(?:set|del)attr\(dspy\.[A-Z]|\bdel dspy\.[A-Z]\w*\.\w",
    re.MULTILINE,
)


INTERNAL_USES = """
import dspy._vendor.lm15
from dspy.clients.execution import execute
x = 'dspy.adapters.types'
dspy.utils.callback.BaseCallback
dspy.Evaluate.__call__ = f
from dspy import adapters as formats
import dspy.utils.parallelizer as p
from dspy.utils import callback
getattr(lm, '_async_engine_spec')
setattr(dspy.Evaluate, '__call__', f)
monkeypatch.setattr(dspy.Module, 'set_lm', f)
del dspy.LM.forward
"""
PUBLIC_USES = """
from dspy import Evaluate
compile(optimizer='dspy.teleprompt:COPRO')
lm = dspy.LM('x'); lm.forward = f
dspy.settings.lm = lm
from dspy.utils.exceptions import LMError
setattr(program, 'lm', lm)
"""


def test_only_the_seam_names_internals_of_dspy() -> None:
    assert [line for line in INTERNAL_USES.split("\n") if line and not _INTERNALS.search(line)] == []
    assert [line for line in PUBLIC_USES.split("\n") if _INTERNALS.search(line)] == []
    folders = ("src", "tests", "benchmarks", "examples", "docs")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")]
    assert [
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in sorted([*paths, ROOT / "README.md"])
        if path != Path(__file__) and path.relative_to(ROOT).as_posix() not in _SEAMS
        for text in _python_of(path)
        for match in _INTERNALS.finditer(text)
    ] == []


def _python_of(path: Path) -> list[str]:
    """The text of a file of Python, or the blocks of Python in a page."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return [text]
    return re.findall(r"^```(?:python|py)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_no_public_function_takes_untyped_options() -> None:
    """But those whose keywords are named by a program, by a provider or by what is recorded."""
    untyped = {
        name
        for name in assay.__all__
        if inspect.isfunction(function := getattr(assay, name))
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.VAR_KEYWORD and "Unpack" not in str(parameter.annotation)
    }
    assert untyped <= {"record", "recorded", "get_lm", "load_judge"}
