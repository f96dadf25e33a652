"""The rules of the house: who imports whom, what is public, and that imports stay light."""

import ast
import subprocess
import sys
from pathlib import Path

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
RANK = {name: index for index, name in enumerate(FLOORS)} | {"errors": 0, "datasets": 0, "models": 0}


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


def test_the_root_links_lead_to_the_packages() -> None:
    root = SOURCE.parent.parent
    if not (root / "pyproject.toml").is_file():
        return  # an installed copy has no links
    for name in ("programs", "judges", "rubrics", "optimizers"):
        assert (root / name).resolve() == SOURCE / name
