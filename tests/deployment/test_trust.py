"""Untrusted artifacts: only programs are built, and their code runs only if the user trusts it."""

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import dspy
import pytest
from trusted_artifacts import AGENT, SETTINGS, forged, shipped, trust_list as trust_list, with_source

import assay
from assay.commands.run import run
from assay.deployment import load_artifact, save_artifact
from assay.errors import ArtifactError, AssayError, RubricError, unspoken
from assay.programs import load_program
from assay.runs.loading import load_judge
from assay.sources.trust import UntrustedArtifact, entries, is_trusted, trust_file, trusting
from assay.testing import scripted_lm

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
        assay.load_rubric("r.yaml", judge_model=lm).score({"inputs": {"q": "a"}}, "b")
    assert not Path("ran").exists()


@pytest.mark.parametrize("name", ["subprocess:Popen", "os:system", "collections:OrderedDict"])
def test_a_judges_class_is_checked_before_it_is_built(name: str) -> None:
    with pytest.raises(RubricError, match="not a judge"):
        load_judge(name)


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
        assay.load_rubric("r.yaml", judge_model=scripted_lm(lambda r: "")).score(task, "b")
    assert not mark.exists()
    assert assay.load_rubric("r.yaml", judge_model=scripted_lm(lambda r: ""), trust=True).score(task, "b").value == 1.0
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
