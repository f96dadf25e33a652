"""The rules of the house: who imports whom, what is public, and that imports stay light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import assay

SOURCE = Path(assay.__file__).parent
FLOORS = [
    "errors",
    "datasets",
    "models",
    "traces",
    "rubrics",
    "judges",
    "programs",
    "optimizers",
    "deployment",
    "jobs",
    "anchors",
    "judging",
    "verdicts",
    "tuning",
    "api",
    "cli",
]
LOWEST = ("errors", "scrubbing", "lazy", "reprs", "sourcecode", "sourcefiles", "datasets", "models")
RANK = {name: index for index, name in enumerate(FLOORS)} | dict.fromkeys(LOWEST, 0)


def imports_of(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [f"assay.{alias.name}" for alias in node.names] if node.module == "assay" else [node.module]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [name for name in found if name.startswith("assay.")]


def test_no_import_points_up() -> None:
    wrong = []
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        for name in imports_of(path):
            other = name.split(".")[1]
            if room in RANK and other in RANK and RANK[other] > RANK[room]:
                wrong.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert wrong == []


def test_every_public_name_loads() -> None:
    for name in assay.__all__:
        assert getattr(assay, name) is not None


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print(' '.join(m for m in sys.modules if '.' not in m))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_import_assay_is_light() -> None:
    assert loaded_by("import assay") & {"dspy", "torch", "litellm", "sqlalchemy", "optuna", "numpy", "rich"} == set()


def test_help_is_light() -> None:
    code = "import sys; sys.argv = ['assay', '--help']\nfrom assay.cli.main import group\ntry:\n    group()\nexcept SystemExit:\n    pass"
    assert loaded_by(code) & {"dspy", "torch", "litellm", "sqlalchemy", "optuna", "numpy", "rich"} == set()


def test_a_rubric_needs_neither_dspy_nor_a_database() -> None:
    """An agent written with something else scores itself: a rubric, a check and a score load no heavy package."""
    score = "Rubric('r', [Criterion(name='ok', check=lambda *_: True)]).score({'inputs': {'q': 'a'}}, 'b').value"
    heavy = {"dspy", "litellm", "torch", "sqlalchemy", "pydantic", "numpy", "scipy", "sklearn", "jsonschema", "yaml", "orjson", "aiohttp"}
    assert loaded_by(f"from assay.rubrics import Criterion, Rubric\nassert {score} == 1.0") & heavy == set()


def test_traces_stats_is_light(tmp_path: Path) -> None:
    from assay.traces.store import Store

    Store(tmp_path / "s.db").close()
    code = (
        f"import sys; sys.argv = ['assay', 'traces', 'stats', '--store', {str(tmp_path / 's.db')!r}]\n"
        "from assay.cli.main import group\ntry:\n    group()\nexcept SystemExit as end:\n    assert not end.code"
    )
    assert loaded_by(code) & {"dspy", "torch", "litellm", "sqlalchemy", "optuna", "numpy", "rich", "pydantic"} == set()


def test_the_store_needs_no_dspy() -> None:
    assert loaded_by("from assay.traces.store import Store") & {"dspy", "litellm", "numpy", "pydantic"} == set()


def test_statistics_packages_load_where_they_are_used() -> None:
    assert loaded_by("import assay.api, assay.judges, assay.cli.main") & {"scipy", "sklearn", "torch", "optuna"} == set()


def test_a_lazy_package_offers_exactly_its_public_names() -> None:
    import assay.datasets
    import assay.judges
    import assay.models
    import assay.optimizers
    import assay.programs
    import assay.rubrics
    import assay.traces

    for package in (assay.datasets, assay.judges, assay.models, assay.optimizers, assay.programs, assay.rubrics, assay.traces):
        assert sorted(package.__all__) == dir(package)
        assert all(getattr(package, name) is not None for name in package.__all__)


def test_the_root_links_lead_to_the_packages() -> None:
    root = SOURCE.parent.parent
    if not (root / "pyproject.toml").is_file():
        return  # an installed copy has no links
    for name in ("programs", "judges", "rubrics", "optimizers"):
        assert (root / name).resolve() == SOURCE / name


# Torch and safetensors have no class of their own for these; the words only choose which advice is added to the error.
_WORDS_OF_OTHERS = {("optimizers/weights/work.py", "_ran_out_by_text")}
_TEXTS = {"error", "message", "reason"}


def _reads_words(node: ast.AST) -> bool:
    """Whether an expression looks for fixed words in an error, a reason or a message."""
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn) and isinstance(node.left, ast.Constant):
        return isinstance(node.left.value, str) and _is_message(node.comparators[0])
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in ("startswith", "endswith", "find") and _is_message(called.value)


def _is_message(node: ast.AST) -> bool:
    if isinstance(node, ast.BoolOp):
        return any(_is_message(value) for value in node.values)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):  # `.lower()` and the like
        return _is_message(node.func.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "str":
        return any(isinstance(inner, ast.Name) and inner.id in ("error", "exc", "failure") for inner in node.args)
    if isinstance(node, ast.Attribute):
        return node.attr in _TEXTS
    return isinstance(node, ast.Name) and node.id in ("error", "reason")  # a `message` is often a chat message, which has keys


@pytest.mark.parametrize("text", ["'full' in str(error)", "'x' in (run.error or '')", "error.message.lower().startswith('no')"])
def test_logic_that_reads_messages_is_found(text: str) -> None:
    assert any(_reads_words(node) for node in ast.walk(ast.parse(text)))


def _nodes(path: Path, without: set[str]) -> Iterator[ast.AST]:
    """Nodes of a file, but for those of the functions named."""
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if not (isinstance(node, ast.FunctionDef) and node.name in without):
            yield node
            waiting += ast.iter_child_nodes(node)


def test_no_logic_reads_the_text_of_messages() -> None:
    root = Path(assay.__file__).parent
    found = [
        f"{path.relative_to(root)}:{node.lineno}"
        for path in sorted(root.rglob("*.py"))
        for node in _nodes(path, {name for file, name in _WORDS_OF_OTHERS if file == str(path.relative_to(root))})
        if _reads_words(node)
    ]
    assert found == []
