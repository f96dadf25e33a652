"""LoRA adapters of embedded models: by name, pinned by hash to their base model and their order.

`embedded/smollm2-135m+warm+better` is the base model with two adapters, in this order. An adapter is stored in
`.assay/adapters/NAME` (`ASSAY_ADAPTERS` moves it): PEFT's files, the same weights as GGUF for llama.cpp, and a
manifest. Trains nothing.
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from assay.errors import ConfigError, ModelError
from assay.models.lora.conversion import write_gguf
from assay.models.registry import FILE_PREFIX, find_model, spec
from assay.support.formats import check_format
from assay.support.job_folders import MARKER
from assay.support.names import check_name, place_in
from assay.support.values import json_text

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
