"""LoRA weights as PEFT writes them, as a GGUF adapter for llama.cpp. Needs `gguf` and `safetensors`, not torch."""

import json
from pathlib import Path
from typing import Any

from assay.errors import MissingExtra, ModelError

__all__ = ["write_gguf"]

_PERMUTED = {"llama"}  # architectures whose q and k rows llama.cpp keeps in its own order of rotary pairs
_HEADS = {"q_proj": "head_count", "k_proj": "head_count_kv"}


def write_gguf(peft: Path, base: Path, out: Path) -> None:
    """Writes the adapter in the folder `peft` as `out`, for the model in the GGUF file `base`.

    Raises:
        ModelError: it is no plain LoRA, or a module of it is not in the base.
    """
    try:
        import gguf
        import numpy as np
        from safetensors.numpy import load_file
    except ImportError as error:
        raise MissingExtra(str(error.name), "train") from error
    config = json.loads((peft / "adapter_config.json").read_text(encoding="utf-8"))
    if config.get("peft_type") != "LORA" or config.get("use_dora") or config.get("modules_to_save") or config.get("rank_pattern"):
        raise ModelError(f"{peft} is no plain LoRA adapter: llama.cpp serves only those")
    arch, layers, heads = _shape(base)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], layers)
    rank = float(config["r"])
    scale = rank**0.5 if config.get("use_rslora") else 1.0  # llama.cpp divides alpha by the rank
    writer = gguf.GGUFWriter(str(out), arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(config["lora_alpha"]) * scale)
    for key, tensor in sorted(load_file(str(peft / "adapter_model.safetensors")).items()):
        module, part = key.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".lora_", 1)
        name = names.get_name(module)
        if name is None:
            raise ModelError(f"the adapter changes {module}, which {base.name} does not have")
        weights = tensor.astype(np.float32)
        kind = next((kind for kind in _HEADS if module.endswith(kind)), None)
        if arch in _PERMUTED and part == "B" and kind is not None:
            weights = _permuted(weights, heads[_HEADS[kind]])
        writer.add_tensor(f"{name}.weight.lora_{part.lower()}", np.ascontiguousarray(weights))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shape(base: Path) -> tuple[str, int, dict[str, int]]:
    """Architecture, layers and heads of a GGUF model."""
    import gguf

    fields = gguf.GGUFReader(str(base)).fields
    arch = str(fields["general.architecture"].contents())
    heads = {name: int(fields[f"{arch}.attention.{name}"].contents()) for name in ("head_count", "head_count_kv")}
    return arch, int(fields[f"{arch}.block_count"].contents()), heads


def _permuted(weights: Any, heads: int) -> Any:
    """Rows of a projection in llama.cpp's order: rotary pairs beside each other."""
    rows = weights.shape[0]
    return weights.reshape(heads, 2, rows // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)
