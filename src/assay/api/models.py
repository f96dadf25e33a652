"""Public API for `assay models`: the embedded models and the trained adapters. Does not load a model."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from assay.errors import ModelError
from assay.models import registry
from assay.models.lora.adapters import list_adapters, served_as
from assay.support.keywords import takes


@dataclass(frozen=True)
class ModelEntry:
    """An embedded model. `name` is as in `model=`, `size` in bytes; `path` is None until it is downloaded."""

    name: str
    size: int
    licence: str
    path: str | None


@dataclass(frozen=True)
class AdapterEntry:
    """A trained adapter. `name` is as in `model=`; `sha256` is that of its GGUF file in the folder `path`."""

    name: str
    sha256: str
    path: str


@dataclass(frozen=True)
class ModelListing:
    """The models that need no server.

    Attributes:
        models: the embedded models, downloaded or not.
        adapters: the trained adapters.
    """

    models: tuple[ModelEntry, ...]
    adapters: tuple[AdapterEntry, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "models": [asdict(entry) for entry in self.models],
            "adapters": [asdict(entry) for entry in self.adapters],
        }


@takes()
def list_models() -> ModelListing:
    """The embedded models and the trained adapters, with their files."""
    return ModelListing(
        models=tuple(
            ModelEntry(f"embedded/{model.name}", model.size, model.licence, _path_of(model.name))
            for model in registry.EMBEDDED.values()
        ),
        adapters=tuple(
            AdapterEntry(served_as(adapter), adapter.sha256, str(adapter.path)) for adapter in list_adapters()
        ),
    )


def _path_of(name: str) -> str | None:
    try:
        return str(registry.find_model(name))
    except ModelError:
        return None


@takes()
def pull_model(name: str, *, say: Callable[[str], None] = lambda _: None) -> Path:
    """Downloads an embedded model, unless it is there, and checks its sha256. Returns its file.

    Args:
        name: with or without `embedded/`.
        say: receives a line about each step.
    Raises:
        ModelError: there is no such model, or it cannot be downloaded, or its hash is wrong.
    """
    return registry.pull_model(name, say=say)
