"""The README's commands are run, its Python too, and what the documentation names exists."""

import json
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
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
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


def test_links_to_a_section_name_one_of_its_headings() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for link, anchor in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", page.read_text()):
            target = page.parent / link if link else page
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, f"{page.name}: {link}#{anchor}"


def test_the_mapped_folders_exist() -> None:
    for folder in re.findall(r"^\| `([^`]+)` \|", README, re.MULTILINE):
        assert (ROOT / folder).is_dir(), folder


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "flags"),
    [
        ("rubric_anywhere.py", []),
        ("trl_reward.py", ["--steps", "1", "--generations", "2", "--tokens", "8"]),
        ("parameter_impact_example.py", ["--tasks", "3", "--levels", "2", "--trials", "4", "--ranges", "max_steps=1:4", "temperature=0.1:1"]),
    ],
)
def test_examples_run(embedded: str, own_folder: Path, example: str, flags: list[str]) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "examples" / example), *flags, "--json"], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    if example == "trl_reward.py":
        assert found["steps"] == 1
        assert 0 <= found["log"][0]["reward"] <= 1
    elif example == "parameter_impact_example.py":
        few, many = (effect for effect in found["effects"] if effect["parameter"] == "max_steps")
        assert (few["value"], many["value"]) == (1.0, 4.0)
        assert few["metrics"]["tokens"]["mean"] < many["metrics"]["tokens"]["mean"]
        assert (own_folder / "impact" / "impact.png").exists()
        assert "Each parameter moved alone" in (own_folder / "impact" / "study.html").read_text()
        assert found["study"] is not None
        assert found["before"].keys() == found["after"].keys() == {"score", "tokens_per_task", "parameters"}
    else:
        assert found["plain callable"] == 1.0
        assert len(found["a group, in pairs"]) == 3


def test_the_worked_example_of_step_rewards_returns_1_45() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "examples" / "step_rewards.py"), "--json"], capture_output=True, text=True, timeout=300)
    assert json.loads(done.stdout) == {"rewards": [0.15, 0.15, 0.15, 1.0], "return": 1.45}, done.stderr


@pytest.mark.parametrize(("example", "least"), [("rl_training_example.py", 0.3), ("custom_agent.py", 0.1)])
def test_examples_of_tuning_make_agents_better(own_folder: Path, example: str, least: float) -> None:
    done = subprocess.run([sys.executable, str(ROOT / "examples" / example), "--json"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["after"]["score"] > found["before"]["score"] + least
    assert found["after"].keys() == found["before"].keys()


@pytest.mark.postgres
@pytest.mark.slow
def test_processes_share_a_study_on_postgresql(own_folder: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "distributed_tuning.py"), "--workers", "4", "--trials", "24", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["doubled"] == 0
    assert 24 <= sum(found["states"].values()) <= 27  # others may have begun a last one
    assert set(found["states"]) <= {"COMPLETE", "PRUNED"}


def test_the_judges_in_the_documentation_load(own_folder: Path) -> None:
    from assay.jobs import load_judge

    blocks = [text for text in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "judges.md").read_text(), re.DOTALL) if "criteria:" not in text]
    for name in ("mood", "mood-strong"):
        (own_folder / f"{name}.yaml").write_text(blocks[0])
    for number, text in enumerate(blocks):
        (own_folder / f"{number}.yaml").write_text(text)
        assert load_judge(f"{number}.yaml").labels == ("negative", "neutral", "positive")
    assert len(blocks) == 3
