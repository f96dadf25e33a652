"""A model of the hub whose hub cannot be reached: short, and loaded from the cache where that has it."""

import shutil
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from huggingface_hub import constants

from assay.errors import ModelError
from assay.optimizers.finetuning import base as hub
from assay.optimizers.finetuning.base import load_policy, why_unreachable


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy, and a hub that is not turned off."""
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "PAUSE_S", 0.0)


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> str:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    return url


def test_a_model_of_an_absent_hub_is_refused_without_retries(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    with pytest.raises(ModelError, match=rf"{absent} cannot be reached \(ConnectionRefusedError.*cache does not have"):
        load_policy("someone/no-such-model")
    assert sum(pauses) < 1  # its client waits for 23 s for each of several files


def test_a_cached_model_is_loaded_without_the_hub(
    absent: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models--someone--tiny"
    shutil.copytree(tiny_model, repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert load_policy("someone/tiny").model.num_parameters() > 0


def test_a_slow_hub_is_not_an_absent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert why_unreachable("someone/model") == ""
