"""LoRA adapters of embedded models: by name, pinned by hash to their base model and their order.

`embedded/smollm2-135m+warm+better` is the base model with two adapters, in this order. An adapter is stored in
`.assay/adapters/NAME` (`ASSAY_ADAPTERS` moves it): PEFT's files, the same weights as GGUF for llama.cpp, and a
manifest. Trains nothing.
"""

import functools
import hashlib
import json
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import ConfigError, MissingExtra, ModelError
from assay.models.registry import FILE_PREFIX, find_model, spec
from assay.support.names import check_name, place_in
from assay.support.places import MARKER
from assay.support.values import check_format, json_text

# -- Converts LoRA weights from PEFT's format to GGUF for llama.cpp. Needs `gguf` and `safetensors`, not torch.


_PERMUTED = {"llama"}  # architectures for which llama.cpp reorders the rows of q and k by rotary pairs
_HEADS = {"q_proj": "head_count", "k_proj": "head_count_kv"}


def write_gguf(peft: Path, base: Path, out: Path) -> None:
    """Write the PEFT adapter in folder `peft` as the GGUF file `out`, for the model in the GGUF file `base`.

    Raises:
        ModelError: not a plain LoRA adapter, or it changes a module that the base does not have.
    """
    try:
        import gguf
        import numpy as np
        from safetensors.numpy import load_file
    except ImportError as error:
        raise MissingExtra(str(error.name), "train") from error
    config = json.loads((peft / "adapter_config.json").read_text(encoding="utf-8"))
    if (
        config.get("peft_type") != "LORA"
        or config.get("use_dora")
        or config.get("modules_to_save")
        or config.get("rank_pattern")
    ):
        raise ModelError(f"{peft} is not a plain LoRA adapter: llama.cpp serves only those")
    model = _Base.of(base)
    arch = model.architecture
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[arch], model.layers)
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
            weights = permuted_rows(weights, model.heads[_HEADS[kind]])
        writer.add_tensor(f"{name}.weight.lora_{part.lower()}", np.ascontiguousarray(weights))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_merged(base: Path, adapters: Sequence[Path], out: Path, *, keep: bool = False) -> None:
    """Write the model with the adapters (GGUF files, in order) merged into its weights, as `out`.

    llama.cpp computes adapters separately at every token: on two cores SmolLM2-135M generates 93 tokens per second, 45
    with one adapter, 26 with two. Changed tensors are stored in 8 bits (Q8_0), finer than the 4 bits of the base; the
    others are copied.

    Args:
        keep: keep the base's weights in memory, for callers that merge at every step.
    Raises:
        ModelError: an adapter changes a tensor that the base does not have.
    """
    import gguf
    import numpy as np

    model = _Base.of(base)
    deltas: dict[str, Any] = {}
    for adapter in adapters:
        reader = gguf.GGUFReader(str(adapter))
        alpha = float(reader.fields["adapter.lora.alpha"].contents())
        parts = {tensor.name: tensor.data.astype(np.float32) for tensor in reader.tensors}
        for name in sorted({name.removesuffix(".lora_a") for name in parts if name.endswith(".lora_a")}):
            if name not in model.places:
                raise ModelError(f"{adapter} changes {name}, which {base.name} does not have")
            down, up = parts[f"{name}.lora_a"], parts[f"{name}.lora_b"]
            delta = (alpha / len(down)) * (up @ down)
            deltas[name] = deltas[name] + delta if name in deltas else delta
    kind, changed = gguf.GGMLQuantizationType.Q8_0, dict[str, bytes]()
    for name, delta in deltas.items():
        changed[name] = gguf.quants.quantize(model.weights(name) + delta, kind).tobytes()
    model.write(out, changed, int(kind))
    if not keep:
        model.known.clear()


class _Base:
    """A GGUF model whose tensors can be rewritten. Header and vocabulary are copied as bytes: parsing is slow."""

    def __init__(self, path: Path) -> None:
        import gguf

        reader = gguf.GGUFReader(str(path))
        self.tensors = list(reader.tensors)
        self.places = {tensor.name: tensor for tensor in self.tensors}
        self.alignment = int(reader.alignment)
        fields = reader.fields
        self.architecture = str(fields["general.architecture"].contents())
        self.layers = int(fields[f"{self.architecture}.block_count"].contents())
        names = ("head_count", "head_count_kv")
        self.heads = {name: int(fields[f"{self.architecture}.attention.{name}"].contents()) for name in names}
        with open(path, "rb") as file:
            self.head = file.read(min(int(tensor.field.offset) for tensor in self.tensors))
        self.known: dict[str, Any] = {}

    @staticmethod
    @functools.lru_cache(maxsize=2)
    def of(path: Path) -> "_Base":
        return _Base(path)

    def weights(self, name: str) -> Any:
        """Weights of a tensor as 32-bit floats; cached, because a policy in training reads them at every step."""
        import gguf

        if name not in self.known:
            self.known[name] = gguf.quants.dequantize(self.places[name].data, self.places[name].tensor_type)
        return self.known[name]

    def write(self, out: Path, changed: dict[str, bytes], kind: int) -> None:
        infos, blobs, at = bytearray(), list[bytes](), 0
        for tensor in self.tensors:
            blob = changed.get(tensor.name) or tensor.data.tobytes()
            name = tensor.name.encode()
            infos += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(tensor.shape))
            infos += struct.pack(f"<{len(tensor.shape)}Q", *map(int, tensor.shape))
            infos += struct.pack("<IQ", kind if tensor.name in changed else int(tensor.tensor_type), at)
            blobs.append(blob + bytes(-len(blob) % self.alignment))
            at += len(blobs[-1])
        # Renamed at the end, so that a killed process leaves no incomplete model under the final name.
        scratch = out.with_name(f".{out.name}")
        with open(scratch, "wb") as file:
            file.write(self.head)
            file.write(infos)
            file.write(bytes(-(len(self.head) + len(infos)) % self.alignment))
            file.writelines(blobs)
        scratch.replace(out)


def permuted_rows(weights: Any, heads: int) -> Any:
    """Rows of a projection in llama.cpp's order, with rotary pairs next to each other."""
    rows = weights.shape[0]
    return weights.reshape(heads, 2, rows // heads // 2, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


FORMAT = 1
_PEFT = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True)
class Adapter:
    """One adapter. `sha256` is the hash of its GGUF file; `after` are the hashes of those before it, in order."""

    name: str
    path: Path
    base: str
    base_sha256: str
    sha256: str
    after: tuple[str, ...] = ()

    @property
    def gguf(self) -> Path:
        return self.path / "adapter.gguf"

    @property
    def made(self) -> dict[str, Any]:
        """Report of its training, from the manifest."""
        report: dict[str, Any] = json.loads((self.path / "adapter.json").read_text(encoding="utf-8")).get("made", {})
        return report


def adapter_home() -> Path:
    """Folder of adapters: `$ASSAY_ADAPTERS`, by default `.assay/adapters` in the working directory."""
    return Path(os.environ.get("ASSAY_ADAPTERS") or Path(".assay") / "adapters")


def list_adapters() -> list[Adapter]:
    """All readable adapters, by name."""
    adapters = []
    for folder in sorted(adapter_home().glob("*/adapter.json")):
        try:
            adapters.append(_read(folder.parent.name))
        except (ConfigError, ModelError):  # the other adapters stay usable; `find_adapter` says what is wrong
            continue
    return adapters


def find_adapter(name: str) -> Adapter:
    """An adapter by name, verified by its hash.

    Raises:
        ModelError: no such adapter, a newer format, or its file was changed.
    """
    adapter = _read(check_name(name, plain=True))
    if _sha(adapter.gguf) != adapter.sha256:
        raise ModelError(
            f"{adapter.gguf} does not match its sha256 ({adapter.sha256[:12]}…): train it again, or restore the file"
        )
    return adapter


def with_adapters(name: str) -> tuple[str, tuple[Adapter, ...]]:
    """Base model and adapters of a model's name `BASE+NAME+…`; each adapter must fit the base and its position.

    Raises:
        ModelError: an adapter is missing, was trained on another base, or follows other adapters than in training.
    """
    if name.startswith(FILE_PREFIX):
        return spec(name).name, ()
    base, *names = name.removeprefix("embedded/").split("+")
    model = spec(base)
    adapters = tuple(find_adapter(adapter) for adapter in names)
    for at, adapter in enumerate(adapters):
        if adapter.base_sha256 != model.sha256:
            raise ModelError(
                f"the adapter {adapter.name!r} was trained on {adapter.base}, not on {model.name}: "
                "an adapter fits only the model that it was trained on"
            )
        before = tuple(adapter.sha256 for adapter in adapters[:at])
        if before != adapter.after:
            raise ModelError(f"the adapter {adapter.name!r} was trained as {served_as(adapter)}: use that model name")
    return model.name, adapters


def served_as(adapter: Adapter) -> str:
    """Model name with this adapter and those before it."""
    known = {adapter.sha256: adapter.name for adapter in list_adapters()} if adapter.after else {}
    return "+".join(
        [
            adapter.base,
            *(known.get(sha, f"(a missing adapter {sha[:12]}…)") for sha in adapter.after),
            adapter.name,
        ]
    )


def keep_adapter(
    name: str, source: Path, *, base: str, after: Sequence[Adapter] = (), made: Mapping[str, Any] | None = None
) -> Adapter:
    """Store a PEFT folder as a named adapter, with its GGUF; atomic, and never replaces another adapter.

    Args:
        base: embedded model that it was trained on.
        after: adapters that were merged into the base before its training.
        made: report of its training, for the manifest.
    Raises:
        ConfigError: an adapter of this name exists.
    """
    target, model = place_in(adapter_home(), check_name(name, plain=True)), spec(base)
    if target.exists():
        raise ConfigError(f"there is an adapter {name!r} in {target}: choose another name, or remove that one")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".adapter-") as scratch:
        ready = Path(scratch) / name
        ready.mkdir()
        for file in _PEFT:
            shutil.copyfile(source / file, ready / file)
        write_gguf(ready, find_model(base), ready / "adapter.gguf")
        origin = dict(made or {})
        manifest = {
            "format": FORMAT,
            "name": name,
            "base": f"embedded/{model.name}",
            "base_sha256": model.sha256,
            "sha256": _sha(ready / "adapter.gguf"),
            "after": [adapter.sha256 for adapter in after],
            "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "made": origin,
        }
        (ready / "adapter.json").write_text(json_text(manifest, indent=1) + "\n", encoding="utf-8")
        if training := origin.get("training"):
            (ready / MARKER).write_text(training, encoding="utf-8")  # it may be made again after a kill
        try:
            os.rename(ready, target)  # fails if another process has made the folder in the meantime: none is replaced
        except OSError as error:
            raise ConfigError(
                f"an adapter {name!r} was stored by another process meanwhile; this one is lost. Choose another name"
            ) from error
    return _read(name)


def _read(name: str) -> Adapter:
    folder = adapter_home() / name
    try:
        manifest = json.loads((folder / "adapter.json").read_text(encoding="utf-8"))
        remake = f"remove {folder} and train again"
        check_format(f"the adapter {name!r}", manifest["format"], FORMAT, remake=remake, error=ModelError)
        return Adapter(
            name, folder, manifest["base"], manifest["base_sha256"], manifest["sha256"], tuple(manifest["after"])
        )
    except FileNotFoundError:
        available = ", ".join(file.parent.name for file in sorted(adapter_home().glob("*/adapter.json"))) or "none"
        raise ModelError(f"no adapter is called {name!r} in {adapter_home()}; there are: {available}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"cannot read the adapter {name!r}: {type(error).__name__}: {error}") from error


def _sha(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from error
