"""Adapters of embedded models: LoRA weights by name, pinned by hash to their base model and their order.

`embedded/smollm2-135m+warm+better` is the base with two adapters, in this order. An adapter lies in `.assay/adapters/NAME`
(`ASSAY_ADAPTERS` moves it): what PEFT wrote, the same as GGUF for llama.cpp, and a manifest. Trains nothing.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import ConfigError, ModelError
from assay.models.lora import write_gguf
from assay.models.registry import FILE_PREFIX, find_model, spec

__all__ = ["Adapter", "adapter_home", "check_name", "find_adapter", "keep_adapter", "list_adapters", "served_as", "with_adapters"]

FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PEFT = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True)
class Adapter:
    """One adapter. `sha256` is its GGUF file's; `after` are the hashes of those that must come before it, in order."""

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
        """Where it comes from: the report of its training."""
        told: dict[str, Any] = json.loads((self.path / "adapter.json").read_text(encoding="utf-8")).get("made", {})
        return told


def adapter_home() -> Path:
    """Where adapters lie: `$ASSAY_ADAPTERS`, by default `.assay/adapters` in the working folder."""
    return Path(os.environ.get("ASSAY_ADAPTERS") or Path(".assay") / "adapters")


def check_name(name: str) -> str:
    """The name, if it can be an adapter's."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot name an adapter: letters, digits, '.', '_' and '-', beginning with a letter or digit, 64 at most")
    return name


def list_adapters() -> list[Adapter]:
    """All that can be read, by name."""
    found = []
    for folder in sorted(adapter_home().glob("*/adapter.json")):
        try:
            found.append(_read(folder.parent.name))
        except (ConfigError, ModelError):
            continue
    return found


def find_adapter(name: str) -> Adapter:
    """An adapter by name, checked to be what was kept.

    Raises:
        ModelError: there is none of this name, it is of a newer format, or its file was changed.
    """
    adapter = _read(check_name(name))
    if _sha(adapter.gguf) != adapter.sha256:
        raise ModelError(f"{adapter.gguf} is not the file that was kept (sha256 {adapter.sha256[:12]}…): train it again, or restore the file")
    return adapter


def with_adapters(name: str) -> tuple[str, tuple[Adapter, ...]]:
    """The base's name and the adapters of a model's name, `BASE+NAME+…`, each made for this base and in its order.

    Raises:
        ModelError: an adapter is missing, made for another base, or stands after others than it was trained after.
    """
    if name.startswith(FILE_PREFIX):
        return spec(name).name, ()
    base, *names = name.removeprefix("embedded/").split("+")
    model = spec(base)
    found = tuple(find_adapter(one) for one in names)
    for at, adapter in enumerate(found):
        if adapter.base_sha256 != model.sha256:
            raise ModelError(f"the adapter {adapter.name!r} was trained on {adapter.base}, not on {model.name}: its weights mean nothing there")
        before = tuple(one.sha256 for one in found[:at])
        if before != adapter.after:
            raise ModelError(f"the adapter {adapter.name!r} was trained as {served_as(adapter)}, and is nothing elsewhere")
    return model.name, found


def served_as(adapter: Adapter) -> str:
    """The model's name with this adapter and those before it."""
    known = {one.sha256: one.name for one in list_adapters()} if adapter.after else {}
    return "+".join([adapter.base, *(known.get(sha, f"(an adapter {sha[:12]}… that is not here)") for sha in adapter.after), adapter.name])


def keep_adapter(name: str, source: Path, *, base: str, after: Sequence[Adapter] = (), made: Mapping[str, Any] | None = None) -> Adapter:
    """Takes a PEFT folder in under a name, with its GGUF; whole or not at all, and never over another.

    Args:
        base: the embedded model that it was trained on.
        after: adapters that were merged into the base before it was trained.
        made: where it comes from, for its manifest.
    Raises:
        ConfigError: there is an adapter of this name.
    """
    target, model = adapter_home() / check_name(name), spec(base)
    if target.exists():
        raise ConfigError(f"there is an adapter {name!r} in {target}: take another name, or remove that one")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".adapter-") as scratch:
        ready = Path(scratch) / name
        ready.mkdir()
        for file in _PEFT:
            shutil.copyfile(source / file, ready / file)
        write_gguf(ready, find_model(base), ready / "adapter.gguf")
        manifest = {
            "format": FORMAT, "name": name, "base": f"embedded/{model.name}", "base_sha256": model.sha256, "sha256": _sha(ready / "adapter.gguf"),
            "after": [one.sha256 for one in after], "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "made": dict(made or {}),
        }  # fmt: skip
        (ready / "adapter.json").write_text(json.dumps(manifest, indent=1, default=str) + "\n", encoding="utf-8")
        try:
            os.rename(ready, target)
        except OSError as error:
            raise ConfigError(f"an adapter {name!r} came to be meanwhile; this one is lost, take another name") from error
    return _read(name)


def _read(name: str) -> Adapter:
    folder = adapter_home() / name
    try:
        told = json.loads((folder / "adapter.json").read_text(encoding="utf-8"))
        if told["format"] > FORMAT:
            raise ModelError(f"the adapter {name!r} has format {told['format']}, this assay reads up to {FORMAT}: update assay")
        return Adapter(name, folder, told["base"], told["base_sha256"], told["sha256"], tuple(told["after"]))
    except FileNotFoundError:
        there = ", ".join(one.parent.name for one in sorted(adapter_home().glob("*/adapter.json"))) or "none"
        raise ModelError(f"no adapter is called {name!r} in {adapter_home()}; there are: {there}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"the adapter {name!r} cannot be read: {type(error).__name__}: {error}") from error


def _sha(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
