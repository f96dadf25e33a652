"""Adapters: stored, served by name, required by an artifact, refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from assay.deployment import Artifact
from assay.deployment.artifact import check_pinned
from assay.errors import ArtifactError, ConfigError, ModelError
from assay.models import embedded as engines, get_lm
from assay.models.lora import find_adapter, keep_adapter, list_adapters, with_adapters
from rigs.small_model import WIDTH


def lora(folder: Path, *, hidden: int = 576, inner: int = 1536, rank: int = 2, scale: float = 0.5) -> Path:
    """A small LoRA of one projection of the embedded model, as PEFT would write it."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    name = "base_model.model.model.layers.0.mlp.down_proj"
    a, b = random.normal(size=(rank, inner)), random.normal(size=(hidden, rank)) * scale
    weights = {f"{name}.lora_A.weight": a.astype(np.float32), f"{name}.lora_B.weight": b.astype(np.float32)}
    save_file(weights, str(folder / "adapter_model.safetensors"))
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 4}))
    return folder


def test_adapter_is_stored_served_by_name_and_position_checked(model_name: str, tmp_path: Path) -> None:
    first = keep_adapter("first", lora(tmp_path / "a"), base="smollm2-135m")
    second = keep_adapter("second", lora(tmp_path / "b", scale=0.1), base="smollm2-135m", after=[first])
    assert [adapter.name for adapter in list_adapters()] == ["first", "second"]
    assert with_adapters(f"{model_name}+first+second")[1] == (first, second)
    model = get_lm(f"{model_name}+first+second", cache=None)
    assert model.engine.backend.adapters == (first.sha256, second.sha256)
    for wrong, message in (
        ("+second", r"was trained as embedded/smollm2-135m\+first\+second"),
        ("+second+first", "use that model name"),
        ("+none", "no adapter is called 'none'"),
        ("+../first", "^name="),
        ("+", "^name="),
    ):
        with pytest.raises((ModelError, ConfigError), match=message):
            get_lm(model_name + wrong)
    with pytest.raises(ConfigError, match="there is an adapter 'first'"):
        keep_adapter("first", lora(tmp_path / "c"), base="smollm2-135m")
    second.gguf.write_bytes(b"changed")
    with pytest.raises(ModelError, match="does not match its sha256"):
        find_adapter("second")
    stored = json.loads((first.path / "adapter.json").read_text())
    (first.path / "adapter.json").write_text(json.dumps({**stored, "base_sha256": "0" * 64, "base": "embedded/other"}))
    with pytest.raises(ModelError, match="was trained on embedded/other, not on smollm2-135m"):
        get_lm(f"{model_name}+first")
    for other in (0, 9):
        (first.path / "adapter.json").write_text(json.dumps({**stored, "format": other}))
        with pytest.raises(ModelError, match=f"format {other}"):
            find_adapter("first")


def test_two_merged_models_stay_in_memory_and_others_are_reloaded(small_embedded: str, tmp_path: Path) -> None:
    lms = []
    for number in range(4):
        own = lora(tmp_path / str(number), hidden=WIDTH, inner=2 * WIDTH, scale=0.001 * (1 + number))
        keep_adapter(f"no{number}", own, base="small")
        lms.append(get_lm(f"{small_embedded}+no{number}", cache=None, temperature=0.0, max_tokens=4))
    replies = [lm("Say a word.") for lm in lms]
    merged = [path for path in engines.loaded_models() if path.parent.name == "merged"]
    assert merged == [lm.engine.backend.path for lm in lms[2:]]
    lms[0].engine.backend.path.unlink()
    assert lms[0]("Say a word.") == replies[0]


def test_artifact_requires_the_measured_adapters(model_name: str, tmp_path: Path) -> None:
    first = keep_adapter("first", lora(tmp_path / "a"), base="smollm2-135m")
    plain = get_lm(model_name, cache=None)
    named = get_lm(f"{model_name}+first", cache=None)
    artifact = Artifact(tmp_path / "artifact", None, {"model": f"{model_name}+first", "adapters": [first.sha256]})
    check_pinned(artifact, named)
    check_pinned(artifact, plain)  # another model was asked for
    shutil.rmtree(first.path)
    keep_adapter("first", lora(tmp_path / "b", scale=0.1), base="smollm2-135m")
    with pytest.raises(ArtifactError, match="measure it again"):
        check_pinned(artifact, get_lm(f"{model_name}+first", cache=None))


def test_adapter_that_llama_cpp_cannot_serve_is_not_stored(model_name: str, tmp_path: Path) -> None:
    odd = lora(tmp_path / "odd")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_dora": True}
    (odd / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="not a plain LoRA"):
        keep_adapter("odd", odd, base="smollm2-135m")
    assert list_adapters() == []
    assert not list(Path(".assay/adapters").glob("*"))
