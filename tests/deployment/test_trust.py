"""Untrusted artifacts: only programs are built, and their code runs only if the user trusts it."""

import hashlib
import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import dspy
import pytest
from trusted_artifacts import AGENT, MATH_QA, SETTINGS, forged, shipped, trust_list as trust_list, with_source

import assay
from assay.deployment import FORMAT, load_artifact, save_artifact
from assay.errors import ArtifactError, AssayError, unspoken
from assay.jobs.loading import load_judge
from assay.programs import load_program
from assay.sources.artifact_files import RUBRIC, code_of
from assay.sources.modules import load_source
from assay.sources.trust import UntrustedArtifact, entries, is_trusted, trust_file, trusting
from assay.testing import scripted_lm
from rigs.command_line import assay_command

JUDGE = """
import pathlib
from assay.judges import Judge
pathlib.Path({mark!r}).touch()

class Kind(Judge):
    def __init__(self):
        super().__init__("Is it kind?")

    def read(self, given):
        return None, "yes"
"""


@pytest.mark.parametrize(
    ("program", "config"),
    [
        ("os:system", {"command": "touch ran"}),
        ("subprocess:Popen", {"args": ["touch", "ran"]}),
        ("shutil:rmtree", {"path": "precious"}),
        ("pip._internal.utils.subprocess:call_subprocess", {"cmd": ["touch", "ran"], "command_desc": "x"}),
        ("assay.sources.artifact_files:os.system", {"command": "touch ran"}),
        ("pip.__main__:QA", {}),
        ("beside.py:QA", {}),
        ("beside:QA", {}),
        ("../beside.py:QA", {}),
    ],
)
def test_names_of_other_objects_than_programs_are_refused_and_not_called(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, program: str, config: dict[str, Any]
) -> None:
    Path("precious").mkdir()
    Path("beside.py").write_text(AGENT.format(mark="ran"))
    monkeypatch.syspath_prepend(str(own_folder))  # as for `python -m` and scripts
    artifact = shipped(own_folder / "a", program=program, config=config)
    for kind, trusted in itertools.product((None, "judge"), (False, True)):
        forged(artifact, kind=kind)
        with trusting(trusted), pytest.raises(ArtifactError, match=r"it names|nothing else is built"):
            load_artifact(artifact)
    assert Path("precious").is_dir()
    assert not Path("ran").exists()


def test_a_rubric_whose_judge_is_an_untrusted_artifact_runs_nothing(own_folder: Path) -> None:
    shipped(own_folder / "j", program="os:system", config={"command": "touch ran"}, kind="judge")
    Path("r.yaml").write_text("name: r\ncriteria:\n- {name: good, judge: {use: j}}\n")
    lm = scripted_lm(lambda r: "yes")
    with pytest.raises(AssayError, match="standard library"):
        assay.load_rubric("r.yaml", judge_model=lm).score({"inputs": {"q": "a"}}, "b")
    assert not Path("ran").exists()


def test_source_of_another_user_does_not_run_until_its_content_is_trusted(own_folder: Path) -> None:
    artifact, mark = with_source(own_folder / "a")
    with pytest.raises(UntrustedArtifact, match=r"source/agent\.py") as refused:
        assay.load(artifact)
    assert "`trust=True` then loads it, as does assay trust add" in unspoken(refused.value)
    assert not mark.exists()
    lm = scripted_lm(lambda r: "[[ ## answer ## ]]\n4\n\n[[ ## completed ## ]]")
    with dspy.context(lm=lm, adapter=dspy.ChatAdapter()):
        assert assay.load(artifact, trust=True)(question="?").answer == "4"
        assert mark.exists()
        elsewhere = shutil.copytree(artifact, own_folder / "copied")  # trust belongs to the content, not to the path
        assert assay.load(elsewhere)(question="?").answer == "4"
    sha = hashlib.sha256(b"dspy").hexdigest()
    changed = forged(elsewhere, weights=sha)
    with pytest.raises(UntrustedArtifact):
        assay.load(changed)


def test_the_users_own_artifacts_are_trusted(own_folder: Path) -> None:
    Path("agent.py").write_text(AGENT.format(mark="ran"))
    manifest = {"program": "agent.py:QA", "settings": SETTINGS}
    written = save_artifact(own_folder / "a", load_program("agent.py:QA"), manifest, splits={}, report="")
    assert [entry.path for entry in entries()] == [str(written)]
    load_artifact(written)
    shipped(own_folder / "b")
    assert len(entries()) == 1  # a shipped program needs no trust


def test_loading_into_an_instance_does_not_run_the_artifacts_source(own_folder: Path) -> None:
    artifact, mark = with_source(own_folder / "a")

    class Mine(dspy.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.answer = dspy.Predict("question -> answer")

    assert load_artifact(artifact, program=Mine()).program.answer is not None
    assert not mark.exists()


def test_another_users_judge_in_a_rubric_needs_trust(own_folder: Path) -> None:
    artifact, mark = with_source(own_folder / "j", JUDGE, "Kind", kind="judge")
    Path("r.yaml").write_text("name: r\ncriteria:\n- {name: kind, judge: {use: j}}\n")
    task = {"inputs": {"q": "a"}}
    with pytest.raises(UntrustedArtifact):
        assay.load_rubric("r.yaml", judge_model=scripted_lm(lambda r: "")).score(task, "b")
    assert not mark.exists()
    assert assay.load_rubric("r.yaml", judge_model=scripted_lm(lambda r: ""), trust=True).score(task, "b").value == 1.0
    assert is_trusted(json.loads((artifact / "manifest.json").read_text())["sha256"])


CRITERIA = "- {name: right, check: 'code/c.py:right'}\n- {name: on, check: 'subprocess:call'}\n"
CODE = "import pathlib\npathlib.Path('ran').touch()\ndef right(task, prediction, rollout): return 1.0\n"
CHECKS = {"rubric.yaml": f"name: r\ncriteria:\n{CRITERIA}".encode(), "code/c.py": CODE.encode()}


def test_a_rubric_inside_an_artifact_needs_the_artifacts_trust(own_folder: Path) -> None:
    artifact = save_artifact(own_folder / "a", load_program("math_qa"), MATH_QA, splits={}, report="", rubric=CHECKS)
    rubric = artifact / "rubric" / "rubric.yaml"
    assert assay.load_rubric(rubric).name == "r"  # one's own
    (artifact / "notes.md").write_text("mine")
    load_artifact(artifact)
    Path("ran").unlink()
    trust_file().unlink()
    load_artifact(artifact)  # the program is a shipped one
    with pytest.raises(UntrustedArtifact, match=r"rubric/code/c\.py"):
        assay.load_rubric(rubric)
    assert not Path("ran").exists()
    assert assay.load_rubric(rubric, trust=True).name == "r"


def test_files_next_to_the_manifest_of_something_else_run_without_trust(own_folder: Path) -> None:
    Path("manifest.json").write_text(json.dumps({"format": 1, "kind": "grpo", "files": {}}))  # of an export
    Path("c.py").write_text(CODE)
    Path("r.yaml").write_text("name: mine\ncriteria:\n- {name: right, check: 'c.py:right'}\n")
    assert assay.load_rubric("r.yaml").name == "mine"


@pytest.mark.parametrize(
    ("place", "check"),
    [
        ("rubric/rubric.yaml", "../x/chk.py:right"),  # a file that no hash covers
        ("r.yaml", "chk.py:right"),
        ("r.yaml", "x/chk.py:right"),
        ("rubric/rubric.yaml", "subprocess:call"),
        ("rubric/rubric.yaml", "beside:right"),  # a module of the working directory
    ],
)
def test_code_named_by_a_rubric_in_an_artifact_needs_trust_wherever_it_is(
    own_folder: Path, place: str, check: str
) -> None:
    text = f"name: r\ncriteria:\n- {{name: right, check: '{check}'}}\n"
    artifact = shipped(own_folder / "a")
    for file in (artifact / "x" / "chk.py", artifact / "chk.py", own_folder / "beside.py"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(CODE)
    (artifact / place).parent.mkdir(exist_ok=True)
    (artifact / place).write_text(text)
    if place.startswith("rubric/"):
        forged(artifact, rubric_files={"rubric.yaml": hashlib.sha256(text.encode()).hexdigest()})
    with pytest.raises(ArtifactError):
        assay.load_rubric(artifact / place)
    with pytest.raises(ArtifactError):
        load_judge(f"{artifact / place}:right")
    if check.endswith("chk.py:right"):
        with pytest.raises(ArtifactError, match="not in the artifact's manifest"):
            assay.load_rubric(artifact / place, trust=True)  # trust covers only what the manifest lists
        assert not Path("ran").exists()
    elif place.startswith("rubric/"):
        assert assay.load_rubric(artifact / place, trust=True).name == "r"


@pytest.mark.parametrize("place", ["source/agent.py", "chk.py"])
def test_a_file_of_an_artifact_needs_its_trust_whichever_way_it_is_named(own_folder: Path, place: str) -> None:
    artifact, mark = with_source(own_folder / "a")
    shutil.copy(artifact / "source" / "agent.py", artifact / "chk.py")
    Path("r.yaml").write_text(f"name: r\ncriteria:\n- {{name: right, check: 'a/{place}:QA'}}\n")
    for name in (f"a/{place}:QA", f"a/{place}"):
        with pytest.raises(ArtifactError):
            load_program(name)
    with pytest.raises(ArtifactError):
        assay.load_rubric("r.yaml")
    with pytest.raises(ArtifactError):
        load_judge(f"a/{place}:QA")
    assert not mark.exists()
    if place == "source/agent.py":
        assert assay.load_rubric("r.yaml", trust=True).name == "r"
        load_program(f"a/{place}:QA")
        assert mark.exists()
    else:
        with pytest.raises(ArtifactError, match="not in the artifact's manifest"):
            assay.load_rubric("r.yaml", trust=True)
        assert not mark.exists()


# -- the list of trusted artifacts, and files that do not count as code


@pytest.mark.slow
def test_trust_is_added_listed_and_removed_on_the_command_line(own_folder: Path) -> None:
    artifact, mark = with_source(own_folder / "a")
    command = ["run", str(artifact), "question=?", "--model", "openai/m", "--api-base", "http://127.0.0.1:9/v1"]
    refused = assay_command(*command)
    assert refused.code == 1
    assert "assay trust add" in refused.stderr
    assert not mark.exists()
    assert f"runs {artifact}/source/agent.py" in assay_command("trust", "add", str(artifact)).stdout
    assert not mark.exists()
    listed = assay_command("trust", "list", "--json").report
    assert [entry["path"] for entry in listed["trusted"]] == [str(artifact)]
    assert listed["trusted"][0]["runs"] == ["source/agent.py"]
    load_artifact(artifact)
    assert mark.exists()
    assert "no longer trusted" in assay_command("trust", "remove", listed["trusted"][0]["sha256"][:8]).stdout
    with pytest.raises(UntrustedArtifact):
        load_artifact(artifact)
    assert assay_command("trust", "remove", str(artifact)).code == 2
    assay_command(*command, "--trust")
    assert len(entries()) == 1


def test_only_files_that_run_count_as_code_including_the_rubrics_check() -> None:
    files = {"agent.py": "1", "words.json": "2", "helper.py": "3"}
    source = {"files": files, "names": {"theirs.py:QA": "agent.py:QA"}}
    manifest = {"source": source, "rubric_files": {"rubric.yaml": "4", "code/0/checks.py": "5"}}
    assert code_of(manifest) == ["source/agent.py", "source/helper.py"]
    assert code_of(manifest, RUBRIC) == ["rubric/code/0/checks.py"]
    hidden = {"source": {"files": {"agent.txt": "1"}, "names": {"theirs.py:QA": "agent.txt:QA"}}}
    assert code_of(hidden) == ["source/agent.txt"]  # a file that a name is loaded from runs, whatever its suffix


def test_an_unreadable_list_trusts_nothing(own_folder: Path, trust_list: Path) -> None:
    artifact, _ = with_source(own_folder / "a")
    trust_list.write_text('not JSON\n["sha256"]\n')
    with pytest.raises(UntrustedArtifact):
        load_artifact(artifact)


def test_links_pipes_and_paths_out_of_an_artifact_are_refused(own_folder: Path) -> None:
    Path("secret").write_text("s")
    linked = shipped(own_folder / "linked")
    (linked / "notes.txt").symlink_to(own_folder / "secret")
    with pytest.raises(ArtifactError, match=r"notes\.txt is a link"):
        load_artifact(linked)
    piped = shipped(own_folder / "piped")
    (piped / "program.json").unlink()
    os.mkfifo(piped / "program.json")
    with pytest.raises(ArtifactError, match=r"program\.json is a link or a device"):
        load_artifact(piped)
    sha = hashlib.sha256(b"s").hexdigest()
    leading = shipped(own_folder / "leading", source={"names": {}, "files": {"../../secret": sha}})
    with pytest.raises(ArtifactError, match="is outside of the artifact"):
        load_artifact(leading)


def test_a_manifest_has_a_limit_on_size_and_depth(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = shipped(own_folder / "deep")
    (deep / "manifest.json").write_text("[" * 200_000)
    with pytest.raises(ArtifactError, match="cannot read"):
        load_artifact(deep)
    big = shipped(own_folder / "big")
    os.truncate(big / "manifest.json", 300 * 2**20)  # a sparse file
    with pytest.raises(ArtifactError, match="300 MiB"):
        load_artifact(big)
    many = shipped(own_folder / "many")
    monkeypatch.setattr("assay.sources.artifact_files.MAX_FILES", 3)
    with pytest.raises(ArtifactError, match="more than 3 files"):
        load_artifact(many)


# -- artifacts of another format


TASKS = ("--rubric", "math_qa", "--data", "arithmetic:size=40", "--model", "openai/none", "--store", "s.db")
COMMANDS = [
    ("run", "a", "question=1+1"),
    ("evaluate", "a", *TASKS),
    ("compile", "a", *TASKS),
    ("tune", "a", *TASKS),
    ("collect", "a", *TASKS),
    ("compare", "a", "math_qa", *TASKS),
    ("registry", "register", "agent", "a", "--store", "s.db"),
    ("trust", "add", "a"),
    ("judge", "card", "a"),
]


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("program.json", lambda text: text.replace("calculator", "oracle")),
        ("manifest.json", lambda text: text.replace("scripted/model", "another/model")),
        ("manifest.json", lambda text: text[:1]),
        ("program.json", lambda text: None),
    ],
    ids=["program changed", "manifest changed", "manifest garbled", "program missing"],
)
def test_a_changed_or_incomplete_artifact_is_refused(own_folder: Path, file: str, change: Any) -> None:
    place = shipped(own_folder / "a") / file
    text = place.read_text()
    assert change(text) != text
    if (changed := change(text)) is None:
        place.unlink()
    else:
        place.write_text(changed)
    with pytest.raises(ArtifactError):
        assay.load(own_folder / "a")


def test_an_artifact_of_another_format_is_not_loaded(own_folder: Path) -> None:
    artifact = shipped(own_folder / "a")
    for found in (FORMAT - 1, 0, -1, True, FORMAT + 1):
        forged(artifact, format=found)
        for load in (load_artifact, assay.load, load_judge, lambda path: assay.load(path, trust=True)):
            with pytest.raises(ArtifactError, match=r"(?i)compile again"):
                load(artifact)


def test_code_of_an_artifact_of_another_format_does_not_run(own_folder: Path) -> None:
    artifact, mark = with_source(own_folder / "a", format=FORMAT - 1)
    with pytest.raises(ArtifactError, match=r"(?i)compile again"):
        assay.load(artifact, trust=True)
    with pytest.raises(ArtifactError, match=r"(?i)compile again"), trusting(True):
        load_source(next((artifact / "source").glob("*.py")))
    assert not mark.exists()


def test_each_command_refuses_an_artifact_of_another_format(own_folder: Path) -> None:
    (shipped(own_folder / "a", format=FORMAT - 1) / "card.json").write_text("{}")
    for command in COMMANDS:
        done = assay_command(*command)
        assert (done.code, "compile again" in done.stderr.lower()) == (1, True), (command, done.stderr)
