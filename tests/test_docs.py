"""The commands and snippets of the documentation are run, and what it names exists."""

import functools
import importlib
import json
import os
import re
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from assay.datasets import iter_rows
from assay.errors import DataError
from assay.programs.loading import SHIPPED as PROGRAMS
from assay.rubrics import (
    checks,
    conversations,
    documents,
    environments,
    load_rubric,
    rubric_schema,
    steps,
    tools,
)
from assay.rubrics.code import RULES, checks as code_checks, checks as tested
from assay.rubrics.loading import SHIPPED as RUBRICS, SHIPPED_JUDGES
from assay.shipped.programs.experiment import checks as experiment_checks
from assay.shipped.programs.nim import checks as nim_checks
from assay.shipped.programs.text_to_sql import checks as sql_checks
from assay.shipped.programs.tool_user.bfcl import CATEGORIES
from rigs.command_line import root_command

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


class Page:
    """The blocks of a page that are marked: `<!-- file: NAME -->` is written to a file, `<!-- run -->` is run,
    `background` and `slow` after it."""

    BLOCK = re.compile(r"<!-- (file|run)(?:: ([\w.]+))? -->\n+```(\w+)\n(.*?)```", re.DOTALL)

    def __init__(self, path: Path) -> None:
        self.path, self.blocks = path, self.BLOCK.findall(path.read_text())

    def __repr__(self) -> str:
        return self.path.stem

    @property
    def is_slow(self) -> bool:
        return any(kind == "run" and how == "slow" for kind, how, _, _ in self.blocks)

    def follow(self, *, port: int) -> None:
        """Follows the page in the working directory, with another port than its own, as tests run in parallel."""
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        started = []
        try:
            for kind, how, language, text in self.blocks:
                if kind == "file":
                    Path(how).write_text(text)
                    continue
                text = text.replace("8321", str(port))
                shell = ["bash", "-euo", "pipefail", "-c", text]
                command = shell if language == "sh" else [sys.executable, "-c", text]
                if how == "background":
                    started.append(
                        subprocess.Popen(
                            [*shell[:-1], f"exec {text}"], env=environment, stdout=subprocess.PIPE, text=True
                        )
                    )
                    assert started[-1].stdout is not None
                    started[-1].stdout.readline()  # it says its address once it listens
                    continue
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
                assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        finally:
            for process in started:
                process.terminate()
                process.wait(120)


PAGES = [page for path in sorted((ROOT / "docs").rglob("*.md")) if (page := Page(path)).blocks]


IN_EVERY_RUN = {"rubric-in-pytest", "record-agents", "memory"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=repr(page), marks=[] if repr(page) in IN_EVERY_RUN else pytest.mark.tutorial)
        for page in PAGES
        if not page.is_slow
    ],
)
def test_marked_snippets_run(page: Page, own_folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    page.follow(port=port)


@pytest.mark.tutorial
@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page.is_slow], ids=repr)
def test_slow_tutorials_run(page: Page, embedded: str, own_folder: Path) -> None:
    page.follow(port=0)


@functools.cache
def _reference_pages() -> dict[str, str]:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return dict(importlib.import_module("reference_pages").pages())
    finally:
        sys.path.remove(str(ROOT / "docs"))


def _commands_in(text: str) -> Iterator[list[str]]:
    """Arguments of each `assay` command in the shell blocks and the code of a page."""
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for line in [*lines, *re.findall(r"`(assay [^`\n]+)`", text)]:
        words = re.split(r"\s+", line.split(" # ")[0].strip())
        if "assay" in words and "=" not in words[0]:
            yield words[words.index("assay") + 1 :]


MARKDOWN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_commands_in_the_documentation_exist() -> None:
    unknown = []
    for words in (words for path in MARKDOWN for words in _commands_in(path.read_text())):
        command: click.Command = root_command()
        for word in words:
            inner = command.get_command(click.Context(command), word) if isinstance(command, click.Group) else None
            command = inner or command
        flags = {flag for parameter in command.params for flag in [*parameter.opts, *parameter.secondary_opts]}
        named = {word for word in words if re.fullmatch(r"--?[a-z][\w-]*", word)}
        unknown += [(words, named - flags - {"--help", "--version"})] if named - flags - {"--help", "--version"} else []
    assert unknown == []


def test_the_rubric_in_the_documentation_loads(own_folder: Path) -> None:
    text = re.search(r"```yaml\n(.*?)```", (ROOT / "docs" / "how-to" / "rubrics.md").read_text(), re.DOTALL)
    assert text
    (own_folder / "r.yaml").write_text(text[1])
    assert [c.name for c in load_rubric("r.yaml").criteria] == [
        entry["name"] for entry in yaml.safe_load(text[1])["criteria"]
    ]


@pytest.mark.slow
def test_the_reference_has_every_check_flag_and_key() -> None:
    pages = _reference_pages()
    assert [
        name
        for module in (
            *(checks, code_checks, conversations, documents, environments, steps, tested, tools),
            *(experiment_checks, nim_checks, sql_checks),
        )
        for name in module.__all__
        if f"### {name}\n" not in pages["reference/checks.md"]
    ] == []
    assert "`--optimizer` TEXT | `auto` |" in pages["reference/cli/compile.md"]
    assert "## assay judge audit" in pages["reference/cli/judge.md"]
    keys = [key for model in rubric_schema()["$defs"].values() for key in model["properties"]]
    assert [key for key in keys if f"| `{key}` |" not in pages["reference/rubric-file.md"]] == []
    assert not re.search(
        r"\| *\|$", pages["reference/rubric-file.md"] + pages["reference/judge-file.md"], re.MULTILINE
    )  # every key is described
    assert "- `test`: `baseline`" in pages["reference/json-output.md"]


@pytest.mark.slow
def test_the_reference_has_every_shipped_name_and_spec() -> None:
    page = _reference_pages()["reference/shipped.md"]
    names = [*PROGRAMS, *RUBRICS, *SHIPPED_JUDGES, *RULES, *CATEGORIES]
    names += [criterion.name for rubric in RUBRICS for criterion in load_rubric(rubric).criteria]
    assert [name for name in names if f"`{name}`" not in page] == []
    with pytest.raises(DataError) as kinds:
        list(iter_rows("nothing"))
    assert [kind for kind in re.findall(r"(\w+:)…", str(kinds.value)) if f"| `{kind}" not in page] == []
    specs = ["bfcl:multiple?", "mutants:textwrap?", "tools:given?", "documents:facts?", "conversations:?"]
    for spec in [*specs, "nim:", "experiment:"]:
        with pytest.raises(DataError, match="The options are") as options:
            list(iter_rows(f"{spec}wrong=1"))
        row = next(line for line in page.splitlines() if line.startswith(f"| `{spec.partition(':')[0]}:"))
        names = str(options.value).partition("The options are ")[2].split(", ")
        assert [name for name in names if f"{name}=" not in row] == []


@pytest.mark.slow
def test_the_reference_has_every_contract_suite() -> None:
    from assay.testing import contracts

    text = _reference_pages()["reference/python/assay.testing.contracts.md"]
    assert [name for name in contracts.__all__ if f"assay.testing.contracts.{name}\n" not in text] == []


def test_tables_of_the_reference_show_no_escapes_placeholders_or_private_names() -> None:
    odd = [
        f"{path}: {cell}"
        for path, text in _reference_pages().items()
        if path.startswith("reference/")
        for line in text.splitlines()
        if line.startswith("| ")
        for cell in re.findall(r"`[^`]*`", line)
        if "\\|" in cell or re.search(r"(?<![\w.])_[A-Z]", cell)
    ]
    assert odd == []
    assert "{split}" not in _reference_pages()["reference/settings.md"]


def test_links_of_the_readme_are_not_broken() -> None:
    """`make docs` checks those of the documentation, and their sections."""
    generated = {ROOT / "docs" / path for path in _reference_pages()}
    links = re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists() and (ROOT / link).resolve() not in generated] == []


def test_the_mapped_folders_exist() -> None:
    folders = [
        folder
        for cell in re.findall(r"^\| (`[^|]+`) \|", README, re.MULTILINE)
        for folder in re.findall(r"`([^`]+)`", cell)
    ]
    assert {"src/assay/cli.py", "tests"} <= set(folders)
    assert [folder for folder in folders if not (ROOT / folder).exists()] == []


def test_the_files_that_contributing_names_exist() -> None:
    paths = re.findall(r"`((?:src|tests|docs|benchmarks)/[\w./-]+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_tests_that_results_name_exist() -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    named = [
        (page.name, test)
        for page in (ROOT / "benchmarks" / "results").glob("*.md")
        for test in re.findall(r"`(?:[\w/]+\.py::)?(test_\w+)`", page.read_text())
    ]
    assert len(named) >= 6
    assert [(page, test) for page, test in named if f"def {test}(" not in tests] == []


def example(name: str, *flags: str) -> dict[str, Any]:
    """The JSON of an example."""
    command = [sys.executable, str(ROOT / "examples" / name), *flags, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


IMPACT = "--data arithmetic:terms=2-2&digits=1-1&size=60 --tasks 1 --levels 2 --trials 2 --ranges max_steps=1:4"


@pytest.mark.tutorial
@pytest.mark.model
@pytest.mark.slow
def test_examples_run(embedded: str, own_folder: Path) -> None:
    report = example("rubric_anywhere.py")
    assert report["plain callable"] == 1.0
    assert len(report["a group, in pairs"]) == 3
    report = example("trl_reward.py", "--steps", "1", "--generations", "2", "--tokens", "8")
    assert report["steps"] == 1
    assert 0 <= report["log"][0]["reward"] <= 1
    report = example("parameter_impact_example.py", *IMPACT.split(), "temperature=0.1:0.3")
    few, many = (effect for effect in report["effects"] if effect["parameter"] == "max_steps")
    assert (few["value"], many["value"]) == (1.0, 4.0)
    assert few["metrics"]["tokens"]["mean"] < many["metrics"]["tokens"]["mean"]
    assert "Each parameter moved alone" in (own_folder / "impact" / "study.html").read_text()
    assert report["study"] is not None
    assert report["before"].keys() == report["after"].keys() == {"score", "tokens_per_task", "parameters"}


@pytest.mark.slow
def test_the_worked_example_of_step_rewards_returns_1_45(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["step_rewards.py", "--json"])
    runpy.run_path(str(ROOT / "examples" / "step_rewards.py"), run_name="__main__")
    assert json.loads(capsys.readouterr().out) == {"rewards": [0.15, 0.15, 0.15, 1.0], "return": 1.45}


@pytest.mark.tutorial
@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("rl_training_example.py", 0.3), ("custom_agent.py", 0.1)])
def test_examples_of_tuning_make_agents_better(own_folder: Path, name: str, least: float) -> None:
    report = example(name)
    assert report["after"]["score"] > report["before"]["score"] + least
    assert report["after"].keys() == report["before"].keys()


@pytest.mark.tutorial
@pytest.mark.postgres
@pytest.mark.slow
def test_processes_share_a_study_on_postgresql(own_folder: Path) -> None:
    report = example("distributed_tuning.py", "--workers", "4", "--trials", "24")
    assert report["doubled"] == 0
    assert 24 <= sum(report["states"].values()) <= 27  # others may have begun a last one
    assert set(report["states"]) <= {"COMPLETE", "PRUNED"}


def test_the_judges_in_the_documentation_load(own_folder: Path) -> None:
    from assay.jobs.loading import load_judge

    blocks = [
        text
        for text in re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "how-to" / "judges.md").read_text(), re.DOTALL)
        if "criteria:" not in text
    ]
    for name in ("mood", "mood-strong"):
        (own_folder / f"{name}.yaml").write_text(blocks[0])
    for number, text in enumerate(blocks):
        (own_folder / f"{number}.yaml").write_text(text)
        assert load_judge(f"{number}.yaml").labels == ("negative", "neutral", "positive")
    assert len(blocks) == 3


def test_admonitions_are_rendered_as_boxes() -> None:
    markdown = pytest.importorskip("markdown")
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        html = markdown.markdown(text, extensions=["admonition", "fenced_code"])
        assert html.count('<div class="admonition') == len(re.findall(r"^!!! ", text, re.MULTILINE)), page
