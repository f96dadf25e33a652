"""The commands and the code of README.md, with the scripted model in place of the embedded one."""

import contextlib
import re
import shlex
from pathlib import Path

import pytest
from contract_project import Project
from prompt_server import PromptServer

from rigs.command_line import described, leaves

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def joined(text: str) -> str:
    return text.replace("\\\n", " ")


BLOCKS = re.findall(r"<!-- run -->\n```(\w+)\n(.*?)```", README, re.DOTALL)
RUN = [line for kind, text in BLOCKS if kind == "sh" for line in joined(text).splitlines() if line.startswith("assay ")]
CODE = [text for kind, text in BLOCKS if kind == "python"]
NAMED = re.findall(r"`(assay [^`\n]+)`", README)
DEMO = re.findall(r"/assay (compile .*)", joined(MAKEFILE).replace("$(abspath $(BIN))", ""))


@pytest.fixture(scope="module")
def followed(server: PromptServer, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A folder in which the blocks of the README are followed in order."""
    return Project(tmp_path_factory.mktemp("readme"), server.url)


def test_the_readme_has_commands_and_code() -> None:
    assert (len(RUN) >= 4, len(CODE) >= 2, len(NAMED) >= 4, len(DEMO)) == (True, True, True, 1)


@pytest.mark.parametrize("line", RUN)
def test_a_command_of_the_readme_runs(line: str, followed: Project) -> None:
    done = followed.run(*shlex.split(line)[1:])
    assert done.code == 0, done.stderr
    assert done.stdout or done.stderr


@pytest.mark.parametrize("text", CODE, ids=range(len(CODE)))
def test_the_code_of_the_readme_runs(text: str, followed: Project, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.chdir(followed.folder):
        exec(compile(text, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out


@pytest.mark.parametrize("line", [*DEMO, *(line for line in NAMED if line.startswith("assay compile "))])
def test_a_command_that_the_readme_shows_with_its_result_can_be_estimated(line: str, followed: Project) -> None:
    words = shlex.split(line.removeprefix("assay ").replace("=SEED", "=1"))
    done = followed.run(*words, "--model", "openai/m", "--api-base", followed.model_url, "--dry-run")
    assert done.code == 0, done.stderr


def test_every_command_that_the_readme_names_exists() -> None:
    commands = {words: described(command)["options"] for words, command in leaves()}
    for line in NAMED:
        words = shlex.split(line)[1:]
        known = [name for name in commands if name.split()[: len(name.split())] == words[: len(name.split())]]
        groups = [name for name in commands if name.split()[0] == words[0]]
        assert known or groups, line
        options = {part for name in (known or groups) for flags in commands[name] for part in flags.split()}
        assert [word for word in words if word.startswith("--") and word not in options] == []
