"""The README's commands are run, its Python too, and what the documentation names exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from assay.rubrics import checks, load_rubric, steps

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.model
@pytest.mark.slow
def test_the_readme_does_what_it_says(embedded: str, own_folder: Path) -> None:
    blocks = re.findall(r"<!-- run -->\n```(sh|python)\n(.*?)```", README, re.DOTALL)
    assert [kind for kind, _ in blocks] == ["sh", "python", "python"]
    bin_folder = Path(sys.executable).parent
    for kind, text in blocks:
        command = ["bash", "-euo", "pipefail", "-c", f"PATH={bin_folder}:$PATH\n{text}"] if kind == "sh" else [sys.executable, "-c", text]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        assert done.stdout


def test_the_rubric_in_the_documentation_loads(own_folder: Path) -> None:
    text = re.search(r"```yaml\n(.*?)```", (ROOT / "docs" / "rubrics.md").read_text(), re.DOTALL)
    assert text
    (own_folder / "r.yaml").write_text(text[1])
    assert [c.name for c in load_rubric("r.yaml").criteria] == [entry["name"] for entry in yaml.safe_load(text[1])["criteria"]]


def test_every_shipped_check_is_documented() -> None:
    text = (ROOT / "docs" / "rubrics.md").read_text()
    assert [name for name in [*checks.__all__, *steps.__all__] if f"`{name}`" not in text] == []


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_mapped_folders_exist() -> None:
    for folder in re.findall(r"^\| `([^`]+)` \|", README, re.MULTILINE):
        assert (ROOT / folder).is_dir(), folder
