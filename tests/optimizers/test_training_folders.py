"""The working folder of a training: what an earlier process left is removed, and nothing of others."""

import json
from pathlib import Path

import pytest

from assay.errors import ConfigError
from assay.optimizers.finetuning.run_folder import check_free, remove_training, training_folder, working_folder
from assay.support.places import MARKER

JOB = {"model": "m", "seed": 0}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ASSAY_ADAPTERS", str(tmp_path / "adapters"))
    return tmp_path


@pytest.mark.parametrize("resume", [False, True])
def test_files_of_the_user_in_the_working_folder_are_kept(resume: bool, place: Path) -> None:
    """`ASSAY_ADAPTERS` names a folder of the user's, next to which `training` may be the user's too."""
    folder = place / "training" / "up"
    folder.mkdir(parents=True)
    (folder / "thesis").touch()
    with pytest.raises(ConfigError), working_folder("up", JOB, made_from={}, resume=resume):
        pass
    with pytest.raises(ConfigError):
        check_free("up")
    remove_training("up")
    assert [path.name for path in folder.iterdir()] == ["thesis"]


@pytest.mark.parametrize("name", ["..", "../up", "a/b", "", ".up", "-up", "ü", "a b", "up.", "nul"])
def test_names_that_lead_elsewhere_name_no_training(name: str) -> None:
    for call in (training_folder, check_free, remove_training):
        with pytest.raises(ConfigError):
            call(name)
    with pytest.raises(ConfigError), working_folder(name, JOB, made_from={}, resume=False):
        pass


def test_a_training_begins_again_in_the_folder_of_a_killed_one() -> None:
    with working_folder("up", JOB, made_from={}, resume=False) as work:
        (work / "checkpoints").mkdir()
    with working_folder("up", JOB, made_from={}, resume=False) as work:
        assert sorted(path.name for path in work.iterdir()) == [MARKER, "job.json"]


def test_a_resumed_training_removes_incomplete_checkpoints_and_old_policies() -> None:
    with working_folder("up", JOB, made_from={}, resume=False) as work:
        for name in ("checkpoints/checkpoint-1", "checkpoints/checkpoint-2", "policy-0"):
            (work / name).mkdir(parents=True)
        (work / "checkpoints" / "checkpoint-1" / "trainer_state.json").write_text("{}")
    with working_folder("up", JOB, made_from={}, resume=True) as work:
        assert [path.name for path in (work / "checkpoints").iterdir()] == ["checkpoint-1"]
        assert not (work / "policy-0").exists()
    remove_training("up")
    assert not work.exists()


def test_an_adapter_is_made_again_only_if_this_training_had_kept_it(place: Path) -> None:
    with working_folder("up", JOB, made_from={}, resume=False) as work:
        training = json.loads((work / "job.json").read_text())["training"]
    adapter = place / "adapters" / "up"
    adapter.mkdir(parents=True)
    (adapter / "adapter.json").write_text(json.dumps({"made": {"training": training}}))
    with pytest.raises(ConfigError, match="there is an adapter"), working_folder("up", JOB, made_from={}, resume=True):
        pass
    assert adapter.is_dir(), "without the marker it may be the user's"
    (adapter / MARKER).write_text(training)
    with working_folder("up", JOB, made_from={}, resume=True):
        assert not adapter.exists()
