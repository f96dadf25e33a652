"""Untrusted artifacts: only programs are built, and their code runs only if the user trusts it."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.api.run import run
from assay.deployment import load_artifact, save_artifact
from assay.errors import ArtifactError, AssayError, RubricError
from assay.judges import PointwiseJudge
from assay.programs import load_program
from assay.runs.loading import load_judge
from assay.sources.artifact_files import RUBRIC, code_of, hash_of_manifest
from assay.sources.trust import UntrustedArtifact, entries, is_trusted, trust_file, trusting
from assay.testing import scripted_lm

AGENT = """
import pathlib
import dspy
pathlib.Path({mark!r}).touch()

class QA(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        return self.answer(question=question)
"""
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
SETTINGS: dict[str, Any] = {"adapter": None, "parameters": {}}


@pytest.fixture(autouse=True)
def trust_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("ASSAY_HOME", raising=False)
    return trust_file()


def forged(artifact: Path, **changes: Any) -> Path:
    """The artifact with other values in its manifest, and valid hashes."""
    place = artifact / "manifest.json"
    manifest = {**json.loads(place.read_text()), **changes}
    place.write_text(json.dumps({**manifest, "sha256": hash_of_manifest(manifest)}))
    return artifact


def shipped(folder: Path, **changes: Any) -> Path:
    """An artifact of a shipped program, which needs no trust."""
    program = load_program("math_qa")
    settings = {"adapter": "json", "parameters": program.agent_parameters.model_dump()}
    written = save_artifact(
        folder, program, {"program": "math_qa", "model": "scripted/model", "settings": settings}, splits={}, report=""
    )
    return forged(written, **changes) if changes else written


def with_source(folder: Path, text: str = AGENT, name: str = "QA", **more: Any) -> tuple[Path, Path]:
    """An artifact of another user, with source, and the file that its code creates when it runs."""
    mark = folder.with_name("ran")
    source = folder.with_name("theirs") / "agent.py"
    source.parent.mkdir()
    source.write_text(text.format(mark=str(mark)))
    manifest = {"program": f"{source}:{name}", "model": "scripted/model", "settings": SETTINGS, **more}
    written = save_artifact(folder, load_program(f"{source}:{name}"), manifest, splits={}, report="")
    mark.unlink()
    trust_file().unlink()
    shutil.rmtree(source.parent)
    return written, mark


def cli(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "assay", *words],
        capture_output=True,
        text=True,
        env={**os.environ},
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("program", "config"),
    [
        ("os:system", {"command": "touch ran"}),
        ("subprocess:Popen", {"args": ["touch", "ran"]}),
        ("shutil:rmtree", {"path": "precious"}),
        ("pip._internal.utils.subprocess:call_subprocess", {"cmd": ["touch", "ran"], "command_desc": "x"}),
        ("assay.sources.artifact_files:os.system", {"command": "touch ran"}),
        ("beside.py:QA", {}),
        ("beside:QA", {}),
        ("../beside.py:QA", {}),
    ],
)
@pytest.mark.parametrize("kind", [None, "judge"])
@pytest.mark.parametrize("trusted", [False, True])
def test_names_of_other_objects_than_programs_are_refused_and_not_called(
    own_folder: Path, program: str, config: dict[str, Any], kind: str | None, trusted: bool
) -> None:
    Path("precious").mkdir()
    Path("beside.py").write_text(AGENT.format(mark="ran"))
    artifact = shipped(own_folder / "a", program=program, config=config, kind=kind)
    sys.path.insert(0, str(own_folder))  # as for `python -m` and scripts
    try:
        with trusting(trusted), pytest.raises(ArtifactError, match=r"it names|nothing else is built"):
            load_artifact(artifact)
    finally:
        sys.path.remove(str(own_folder))
    assert Path("precious").is_dir()
    assert not Path("ran").exists()


def test_a_rubric_whose_judge_is_an_untrusted_artifact_runs_nothing(own_folder: Path) -> None:
    shipped(own_folder / "j", program="os:system", config={"command": "touch ran"}, kind="judge")
    Path("r.yaml").write_text("name: r\ncriteria:\n- {name: good, judge: {use: j}}\n")
    lm = scripted_lm(lambda r: "yes")
    with pytest.raises(AssayError, match="standard library"):
        assay.load_rubric("r.yaml", judge_lm=lm).score({"inputs": {"q": "a"}}, "b")
    assert not Path("ran").exists()


@pytest.mark.parametrize("name", ["subprocess:Popen", "os:system", "collections:OrderedDict"])
def test_a_judges_class_is_checked_before_it_is_built(name: str) -> None:
    with pytest.raises(RubricError, match="not a judge"):
        load_judge(name)


def test_source_of_another_user_does_not_run_until_its_content_is_trusted(own_folder: Path) -> None:
    artifact, mark = with_source(own_folder / "a")
    with pytest.raises(UntrustedArtifact, match=r"source/agent\.py") as refused:
        assay.load(artifact)
    assert "--trust" in refused.value.flag
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
    written = save_artifact(
        own_folder / "a",
        load_program("agent.py:QA"),
        {"program": "agent.py:QA", "settings": SETTINGS},
        splits={},
        report="",
    )
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
        assay.load_rubric("r.yaml", judge_lm=scripted_lm(lambda r: "")).score(task, "b")
    assert not mark.exists()
    assert assay.load_rubric("r.yaml", judge_lm=scripted_lm(lambda r: ""), trust=True).score(task, "b").value == 1.0
    assert is_trusted(json.loads((artifact / "manifest.json").read_text())["sha256"])


def test_a_rubric_inside_an_artifact_needs_the_artifacts_trust(own_folder: Path) -> None:
    code = b"import pathlib\npathlib.Path('ran').touch()\ndef right(task, prediction, rollout): return 1.0\n"
    rubric = {"rubric.yaml": b"name: r\ncriteria:\n- {name: right, check: 'code/c.py:right'}\n", "code/c.py": code}
    manifest = {"program": "math_qa", "settings": {"adapter": "json", "parameters": {}}}
    artifact = save_artifact(own_folder / "a", load_program("math_qa"), manifest, splits={}, report="", rubric=rubric)
    trust_file().unlink()
    load_artifact(artifact)  # the program is a shipped one
    with pytest.raises(UntrustedArtifact, match=r"rubric/code/c\.py"):
        assay.load_rubric(artifact / "rubric" / "rubric.yaml")
    assert not Path("ran").exists()
    assert assay.load_rubric(artifact / "rubric" / "rubric.yaml", trust=True).name == "r"


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
    code = "import pathlib\npathlib.Path('ran').touch()\ndef right(task, prediction, rollout): return 1.0\n"
    text = f"name: r\ncriteria:\n- {{name: right, check: '{check}'}}\n"
    artifact = shipped(own_folder / "a")
    for file in (artifact / "x" / "chk.py", artifact / "chk.py", own_folder / "beside.py"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(code)
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


def test_own_rubrics_and_files_next_to_unrelated_manifests_run_without_trust(own_folder: Path) -> None:
    code = b"def right(task, prediction, rollout): return 1.0\n"
    rubric = {
        "rubric.yaml": b"name: r\ncriteria:\n- {name: right, check: 'code/c.py:right'}\n"
        b"- {name: on, check: 'subprocess:call'}\n",
        "code/c.py": code,
    }
    manifest = {"program": "math_qa", "settings": {"adapter": "json", "parameters": {}}}
    artifact = save_artifact(own_folder / "a", load_program("math_qa"), manifest, splits={}, report="", rubric=rubric)
    assert assay.load_rubric(artifact / "rubric" / "rubric.yaml").name == "r"
    (artifact / "notes.md").write_text("mine")
    load_artifact(artifact)
    only_named = {"rubric.yaml": b"name: r\ncriteria:\n- {name: on, check: 'subprocess:call'}\n"}
    second = save_artifact(own_folder / "b", load_program("math_qa"), manifest, splits={}, report="", rubric=only_named)
    assert assay.load_rubric(second / "rubric" / "rubric.yaml").name == "r"
    Path("manifest.json").write_text(
        json.dumps({"format": 1, "kind": "grpo", "files": {}})
    )  # such as of an export or a web page
    Path("c.py").write_bytes(code)
    Path("r.yaml").write_text("name: mine\ncriteria:\n- {name: right, check: 'c.py:right'}\n")
    assert assay.load_rubric("r.yaml").name == "mine"


def test_an_address_in_another_users_artifact_gets_no_key(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "k")
    artifact = shipped(own_folder / "a", api_base="http://127.0.0.1:9/v1", api_key_env="MY_SECRET", model="openai/m")
    program = assay.load(artifact)  # loads, with the model of the settings
    with pytest.raises(UntrustedArtifact, match=r"MY_SECRET.*127\.0\.0\.1"), dspy.context(lm=None):
        program(question="1+1")
    with pytest.raises(UntrustedArtifact):
        run(artifact, {"question": "1+1"})
    assay.load(artifact, trust=True)
    assert load_artifact(artifact).endpoint.api_base == "http://127.0.0.1:9/v1"


@pytest.mark.slow
def test_trust_is_added_listed_and_removed_on_the_command_line(own_folder: Path) -> None:
    artifact, mark = with_source(own_folder / "a")
    refused = cli("run", str(artifact), "question=?", "--model", "openai/m", "--api-base", "http://127.0.0.1:9/v1")
    assert refused.returncode == 1
    assert "assay trust add" in refused.stderr
    assert not mark.exists()
    assert f"runs {artifact}/source/agent.py" in cli("trust", "add", str(artifact)).stdout
    assert not mark.exists()
    listed = json.loads(cli("trust", "list", "--json").stdout)
    assert [entry["path"] for entry in listed["trusted"]] == [str(artifact)]
    assert listed["trusted"][0]["runs"] == ["source/agent.py"]
    load_artifact(artifact)
    assert mark.exists()
    assert "no longer trusted" in cli("trust", "remove", listed["trusted"][0]["sha256"][:8]).stdout
    with pytest.raises(UntrustedArtifact):
        load_artifact(artifact)
    assert cli("trust", "remove", str(artifact)).returncode == 2
    cli("run", str(artifact), "question=?", "--trust", "--model", "openai/m", "--api-base", "http://127.0.0.1:9/v1")
    assert len(entries()) == 1


def test_trust_is_removed_by_the_current_path_of_an_artifact(own_folder: Path) -> None:
    artifact, _ = with_source(own_folder / "a")
    cli("trust", "add", str(artifact))
    moved = artifact.rename(own_folder / "moved")
    load_artifact(moved)
    assert "no longer trusted" in cli("trust", "remove", str(moved)).stdout
    with pytest.raises(UntrustedArtifact):
        load_artifact(moved)
    assert "is no artifact: it is a file" in cli("trust", "add", str(moved / "manifest.json")).stderr


def test_only_files_that_run_count_as_code_including_the_rubrics_check() -> None:
    manifest = {
        "source": {
            "files": {"agent.py": "1", "words.json": "2", "helper.py": "3"},
            "names": {"theirs.py:QA": "agent.py:QA"},
        },
        "rubric_files": {"rubric.yaml": "4", "code/0/checks.py": "5"},
    }
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
    monkeypatch.setattr("assay.sources.artifact_files._MOST_FILES", 3)
    with pytest.raises(ArtifactError, match="more than 3 files"):
        load_artifact(many)


def test_a_shipped_compiled_judge_needs_no_trust(own_folder: Path) -> None:
    judge = PointwiseJudge("Is it good?")
    manifest = {
        "program": "assay.judges:PointwiseJudge",
        "kind": "judge",
        "model": "scripted/model",
        "settings": SETTINGS,
    }
    written = save_artifact(own_folder / "j", judge, manifest, splits={}, report="")
    assert entries() == []
    assert isinstance(load_judge(written), PointwiseJudge)
