"""`assay models`: the embedded models and the trained adapters. Does not load a model."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

from assay.commands.groups import NoJson, Reported
from assay.support.options import Flag, Settings, function_of
from assay.support.report import Report


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


@dataclass(frozen=True, kw_only=True, repr=False)
class ModelListing(Report):
    """The models that need no server.

    Attributes:
        models: the embedded models, downloaded or not.
        adapters: the trained adapters.
    """

    models: tuple[ModelEntry, ...]
    adapters: tuple[AdapterEntry, ...]

    def lines(self) -> Iterator[str]:
        names = [*(model.name for model in self.models), *(adapter.name for adapter in self.adapters)]
        width = max(map(len, names))
        yield f"{'name':{width}}  {'size':>7}  {'licence':12}  file"
        for model in self.models:
            place = model.path or f"not downloaded; run: assay models pull {model.name.removeprefix('embedded/')}"
            size = f"{model.size / 1e6:.0f} MB"
            yield f"{model.name:{width}}  {size:>7}  {model.licence:12}  {place}"
        if self.adapters:
            yield f"\n{'adapter':{width}}  {'sha256':13}  folder"
        yield from (f"{item.name:{width}}  {item.sha256[:12]}…  {item.path}" for item in self.adapters)


class ListModels(Settings):
    """List embedded models and trained adapters, with their files.

    Any other model name is passed to litellm (openai/…, ollama_chat/…).
    """

    def run(self) -> ModelListing:
        from assay.models import registry
        from assay.models.lora import list_adapters, served_as

        models = registry.EMBEDDED.values()
        return ModelListing(
            models=tuple(ModelEntry(f"embedded/{m.name}", m.size, m.licence, _path_of(m.name)) for m in models),
            adapters=tuple(AdapterEntry(served_as(a), a.sha256, str(a.path)) for a in list_adapters()),
        )


def _path_of(name: str) -> str | None:
    from assay.errors import ModelError
    from assay.models import registry

    try:
        return str(registry.find_model(name))
    except ModelError:
        return None


@dataclass(frozen=True, kw_only=True, repr=False)
class PulledModel(Report):
    """The file of an embedded model.

    Attributes:
        name: the model's name, as it was given.
        path: the file.
        sha256: its hash, which was verified.
    """

    name: str
    path: Path
    sha256: str

    def lines(self) -> Iterator[str]:
        yield f"{self.path} (sha256 {self.sha256[:12]}… verified)"


class PullModel(Reported):
    """Download the embedded model NAME, unless it is there, and check its sha256.

    Raises:
        ModelError: there is no such model, or it cannot be downloaded, or its hash is wrong.
    """

    OUTPUT: ClassVar[Any] = NoJson

    name: Annotated[str, Flag(key=False)] = field(kw_only=False)
    """Name, with or without `embedded/`."""

    def run(self) -> PulledModel:
        from assay.models import registry

        path = registry.pull_model(self.name, say=self.reporter.say)
        return PulledModel(name=self.name, path=path, sha256=registry.spec(self.name).sha256)


list_models = function_of(ListModels, "list_models")
pull_model = function_of(PullModel, "pull_model")
