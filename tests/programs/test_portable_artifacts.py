"""Artifacts run in any folder: the files and packages that a program uses from its own folder are in them."""

import os
import pickle
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import dspy
import pytest
from own_programs import RUBRIC, answer, rows, source

import assay
from assay.errors import ArtifactError
from assay.testing import scripted_lm
from assay.traces import Store

PROGRAM = """
import os, sqlite3, sys
from pathlib import Path
import dspy
{top}

class QA(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")
        {built}

    def forward(self, question):
        mark = {mark}
        return dspy.Prediction(answer=mark + self.answer(question=question).answer)
"""


def program(mark: str, *, top: str = "", built: str = "") -> str:
    return PROGRAM.format(mark=mark, top=top, built=built)


def compiled_in(home: Path, files: dict[str, str], name: str, **options: Any) -> Any:
    """A project's program, compiled with its folder as working directory."""
    for place, text in files.items():
        (home / "project" / place).parent.mkdir(parents=True, exist_ok=True)
        (home / "project" / place).write_text(text)
    (home / "r.yaml").write_text(RUBRIC)
    return assay.compile(
        name, rubric=home / "r.yaml", data=options.pop("data", None) or rows(home),
        out=home / options.pop("out", "artifact"), store=home / "a.db", lm=scripted_lm(answer), optimizer="labeled",
        **options,
    )  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "project").mkdir()
    (tmp_path / "far").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path


DATA = {"facts.txt": "F", "data/facts.txt": "F", "data/more/facts.txt": "F"}


@pytest.mark.parametrize(
    ("mark", "parts"),
    [
        ("open('facts.txt').read()", {}),
        ("Path('data/facts.txt').read_text()", {}),
        ("open(Path(__file__).parent / 'data' / 'more' / 'facts.txt').read()", {}),
        ("open('facts.txt').read() if os.path.exists('facts.txt') else 'none'", {}),
        ("open('facts.txt').read() if os.access('facts.txt', os.R_OK) else 'none'", {}),
        ("''.join(open(f'data/{name}').read() for name in os.listdir('data') if name.endswith('.txt'))", {}),
        ("''.join(file.read_text() for file in Path('data').glob('*.txt'))", {}),
        ("open(file='facts.txt').read()", {}),
        ("''.join(open(b'data/' + name).read() for name in os.listdir(path=b'data') if name.endswith(b'.txt'))", {}),
        ("FACTS", {"top": "FACTS = open('facts.txt').read()"}),
        ("self.facts", {"built": "self.facts = Path('data/facts.txt').read_text()"}),
        ("open('facts.txt').read() if question == '?' else ''", {}),
        ('open(f\'data/{"facts" if question == "?" else "other"}.txt\').read()', {}),
        ("sqlite3.connect('facts.db').execute('select name from facts').fetchone()[0]", {}),
        (
            "sqlite3.connect(f'file:{Path(__file__).parent}/facts.db?mode=ro', uri=True)"
            ".execute('select name from facts').fetchone()[0]",
            {},
        ),
    ],
)
def test_files_that_a_program_opens_next_to_itself_are_found_from_any_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch, mark: str, parts: dict[str, str]
) -> None:
    with sqlite3.connect(home / "project" / "facts.db") as database:
        database.execute("create table facts (name)")
        database.execute("insert into facts values ('F')")
    database.close()
    report = compiled_in(home, {"agent.py": program(mark, **parts), **DATA, "data/other.txt": ""}, "agent.py:QA")
    shutil.rmtree(home / "project")
    monkeypatch.chdir(home / "far")
    with dspy.context(lm=scripted_lm(answer)):
        assert assay.load(report.artifact)(question="?").answer == "F4"
    for function in (open, os.stat, os.listdir, os.access):  # which find the files of artifacts now
        assert pickle.loads(pickle.dumps(function)) is function


@pytest.mark.parametrize("before", [False, True])
def test_a_database_that_a_program_writes_is_not_carried(
    home: Path, monkeypatch: pytest.MonkeyPatch, before: bool
) -> None:
    if before:
        sqlite3.connect(home / "project" / "calls.db").close()
        (home / "project" / "calls.db").touch()
    log = "['create table if not exists t (q)', 'insert into t values (1)', 'select count(*) from t']"
    mark = f"[sqlite3.connect('calls.db', isolation_level=None).execute(s) for s in {log}] and 'F'"
    report = compiled_in(home, {"agent.py": program(mark), **DATA}, "agent.py:QA")
    assert [*Path(report.artifact).rglob("calls.db")] == []
    shutil.rmtree(home / "project")
    monkeypatch.chdir(home / "far")
    with dspy.context(lm=scripted_lm(answer)):
        assert assay.load(report.artifact)(question="?").answer == "F4"


COMMON = "MARK = 'F'\n"


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("pkg/agents/qa.py:QA", {"pkg/__init__.py": "", "pkg/agents/__init__.py": "", "pkg/common.py": COMMON}),
        ("pkg/agents/qa.py:QA", {"pkg/common.py": COMMON}),
        ("pkg.agents.qa:QA", {"pkg/common.py": COMMON}),
        ("main.py:QA", {"pkg/lib/common.py": COMMON}),
        ("main.py:QA", {"pkg/lib/__init__.py": "", "pkg/lib/common.py": COMMON}),
        ("src/pkg/qa.py:QA", {"src/pkg/__init__.py": "", "src/pkg/common.py": "from .deep import MARK\n",
                              "src/pkg/deep/__init__.py": "from pkg.deep.er import MARK\n",
                              "src/pkg/deep/er.py": COMMON}),
    ],
)  # fmt: skip
def test_packages_in_packages_are_found_from_any_folder(
    home: Path, monkeypatch: pytest.MonkeyPatch, name: str, files: dict[str, str]
) -> None:
    module = "pkg.lib.common" if "pkg/lib/common.py" in files else "pkg.common"
    place = name.partition(":")[0].removesuffix(".py").replace(".", "/") + ".py"
    report = compiled_in(home, {place: program(f"{module}.MARK", top=f"import {module}"), **files}, name)
    shutil.rmtree(home / "project")
    monkeypatch.chdir(home / "far")
    with dspy.context(lm=scripted_lm(answer)):
        assert assay.load(report.artifact)(question="?").answer == "F4"


OUTSIDE = {
    "a file above the folder": program("(Path(__file__).parent.parent / 'above.txt').read_text()"),
    "a file of the working directory": program("open('above.txt').read()"),
    "a file that is too large": program("open(Path(__file__).parent / 'large.txt').read()[:1]"),
    "a secret": program("open(Path(__file__).parent / '.env').read()"),
    "a file written into the folder": program("str(open(Path(__file__).parent / 'log.txt', 'a').write(''))"),
}


@pytest.mark.parametrize(("what", "cache"), [*((what, True) for what in OUTSIDE), ("a secret", False)])
def test_a_program_whose_artifact_would_not_run_elsewhere_is_refused_before_the_search(
    home: Path, what: str, cache: bool
) -> None:
    files = {"agents/qa.py": OUTSIDE[what], "above.txt": "F", "agents/.env": "F"}
    if what == "a file that is too large":
        (home / "project" / "agents").mkdir()
        (home / "project" / "agents" / "large.txt").write_bytes(b"F" * 51_000_000)
    with pytest.raises(ArtifactError):
        compiled_in(home, files, "agents/qa.py:QA", cache=cache)
    assert not (home / "artifact").exists()
    assert compiled_in(home, files, "agents/qa.py:QA", portable=False).artifact.is_dir()


@pytest.mark.parametrize("preflight", [True, False])
def test_a_file_outside_that_only_a_later_task_reads_is_named_at_the_end(home: Path, preflight: bool) -> None:
    mark = "open('above.txt').read() if question == 'What is 5 + 0?' else ''"  # the second task of val
    files = {"agents/qa.py": program(mark), "above.txt": "F"}
    with pytest.raises(ArtifactError, match="above"):
        compiled_in(home, files, "agents/qa.py:QA", preflight=preflight)
    assert (home / "artifact" / "manifest.json").is_file()


def test_nothing_private_goes_with_a_folder_that_the_code_names(home: Path) -> None:
    names = [".env", "prod.env", "api-key.txt", "OpenAI API Key.txt", "gcp-service-account.json", "id_ecdsa",
             "vault.kdbx", "secrets/prod.json", "access_token.json", ".aws/config"]  # fmt: skip
    files = {"agent.py": program("''", top="FOLDER = 'data'"), "data/facts.txt": "F", "data/keys.txt": "F"}
    (home / "far" / "salaries.txt").write_text("private")
    (home / "project" / "data").mkdir()
    (home / "project" / "data" / "all.txt").symlink_to(home / "far" / "salaries.txt")
    (home / "project" / "data" / "settings.txt").symlink_to("prod.env")
    with Store(home / "project" / "data" / "calls.db"):
        report = compiled_in(home, files | {f"data/{name}": "private" for name in names}, "agent.py:QA")
    assert source(report.artifact) == ["agent.py", "data/facts.txt", "data/keys.txt"]


def test_what_is_compiled_from_an_artifact_carries_all_its_files_on(home: Path) -> None:
    mark = "open(Path(__file__).parent / ('a' + question[-1:] + '.txt')).read() if question == '?' else ''"
    files = {"agent.py": program(mark, top="ARTIFACT_FILES = ['a?.txt', 'b.txt']"), "a?.txt": "F", "b.txt": ""}
    first = compiled_in(home, files, "agent.py:QA").artifact
    for file in (home / "project").iterdir():
        file.unlink()
    assert (
        source(compiled_in(home, {}, str(first), out="second").artifact)
        == source(first)
        == ["a?.txt", "agent.py", "b.txt"]
    )
