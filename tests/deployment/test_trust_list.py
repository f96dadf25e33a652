"""The list of trusted artifacts: on the command line, unreadable, and files that do not count as code."""

import hashlib
import os
from pathlib import Path

import pytest
from trusted_artifacts import SETTINGS, shipped, trust_list as trust_list, with_source

from assay.deployment import load_artifact, save_artifact
from assay.errors import ArtifactError
from assay.judges import PointwiseJudge
from assay.runs.loading import load_judge
from assay.sources.artifact_files import RUBRIC, code_of
from assay.sources.trust import UntrustedArtifact, entries
from rigs.command_line import assay_command


@pytest.mark.slow
def test_trust_is_added_listed_and_removed_on_the_command_line(own_folder: Path) -> None:
    artifact, mark = with_source(own_folder / "a")
    refused = assay_command(
        "run", str(artifact), "question=?", "--model", "openai/m", "--api-base", "http://127.0.0.1:9/v1"
    )
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
    assay_command(
        "run", str(artifact), "question=?", "--trust", "--model", "openai/m", "--api-base", "http://127.0.0.1:9/v1"
    )
    assert len(entries()) == 1


def test_trust_is_removed_by_the_current_path_of_an_artifact(own_folder: Path) -> None:
    artifact, _ = with_source(own_folder / "a")
    assay_command("trust", "add", str(artifact))
    moved = artifact.rename(own_folder / "moved")
    load_artifact(moved)
    assert "no longer trusted" in assay_command("trust", "remove", str(moved)).stdout
    with pytest.raises(UntrustedArtifact):
        load_artifact(moved)
    assert "is not an artifact: it is a file" in assay_command("trust", "add", str(moved / "manifest.json")).stderr


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
    monkeypatch.setattr("assay.sources.artifact_files.MAX_FILES", 3)
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
