"""What a job sends to the hosts of a Ray cluster: its program, its rubric, and the files that both need.

Does not talk to Ray: `assay.evaluation.executors` does.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import dspy

from assay.deployment import Artifact, load_artifact
from assay.deployment.artifact import built_from, source_of
from assay.errors import ProgramError
from assay.jobs.groups import ProgramJob
from assay.jobs.loading import judge_files
from assay.models.roles import PROVIDER, address_variables, is_embedded, key_variables
from assay.programs import program_state, program_version, restore_program
from assay.programs.loading import BuiltFromTasks
from assay.rubrics import Rubric
from assay.sources.files import SourceFiles
from assay.sources.opened import of_sender
from assay.sources.shipping import Shipment, shipment

_NAMED = 5  # files that a message lists


class Consignment:
    """The program of a job, and the files that it, the rubric's checks and the judges need.

    Args:
        program: as it was loaded.
        name: of the program.
        is_object: whether it is an object of the user's, which the name does not load.
        artifact: that it was loaded from.
        say: tells the user which files are not sent.
    """

    def __init__(
        self, config: ProgramJob, rubric: Rubric, program: dspy.Module, name: str, *,
        is_object: bool, artifact: Artifact | None, say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.config, self.rubric, self.loaded, self.name = config, rubric, program, name
        self.is_object, self.artifact, self._say = is_object, artifact, say
        self._said: set[Path] = set()

    def packed(self, program: dspy.Module) -> Callable[[], dspy.Module]:
        """A function without arguments that returns the program on a host.

        There the program is built from its name and state, so that its constructor opens files and clients of the
        host. A program that this would not reproduce travels as it is.
        """
        if self.is_object or not self._is_rebuilt(program):
            return partial(_itself, program)
        if self.artifact is not None:
            return partial(_of_artifact, str(self.artifact.path.resolve()), program_state(program))
        config = built_from(self.loaded) if isinstance(type(self.loaded), BuiltFromTasks) else {}
        return partial(_of_name, self.name, config, program_state(program))

    def _is_rebuilt(self, program: dspy.Module) -> bool:
        """Whether the state has all that differs between a program and the one that was loaded."""
        try:
            rebuilt = restore_program(self.name, {}, program_state(program), self.loaded)
        except ProgramError:
            return False
        own = [part.lm for part in rebuilt.predictors()]
        return (
            type(rebuilt) is type(program)
            and program_version(rebuilt, None) == program_version(program, None)
            and all(lm is other.lm for lm, other in zip(own, program.predictors(), strict=True))
        )

    def shipment(self, named: Collection[tuple[str, str]]) -> Shipment:
        """The files that are needed on a host.

        Args:
            named: module and name of the classes and functions that are sent by reference.
        Raises:
            ConfigError: they are too large.
        """
        data = Path(self.config.data).resolve() if isinstance(self.config.data, str) else None
        without = [data] if data is not None and data.exists() else []
        sources = [source_of(self.loaded, self.name, data=data), self._judges()]
        for module, attribute in sorted(named):
            source = SourceFiles()
            source.add(f"{module}:{attribute}", module, attribute, without=without)
            sources.append(source)
        together = SourceFiles()
        for source in sources:
            together.origins |= source.origins
            together.outside |= source.outside
            together.private |= source.private
            together.left_out |= source.left_out
            together.links |= source.links
        self._tell(together.left_out)
        if self.artifact is not None:
            folder = self.artifact.path.resolve()
            together.origins.setdefault(folder / "manifest.json", (folder / "manifest.json").read_bytes())
        keys, addresses = self._variables()
        modules = [module for module, _ in named]
        return shipment(together, modules, without=without, variables=keys, addresses=addresses)

    def _tell(self, left_out: Mapping[Path, str]) -> None:
        """Names files that folders lack on the hosts, once."""
        if new := [f"{path} ({why})" for path, why in sorted(left_out.items()) if path not in self._said]:
            self._said.update(left_out)
            more = f" and {len(new) - _NAMED} more" if len(new) > _NAMED else ""
            self._say(f"note: not sent to the hosts, whose folders lack them: {', '.join(new[:_NAMED])}{more}")

    def _judges(self) -> SourceFiles:
        return judge_files(c.judge.use for c in self.rubric.criteria if c.judge is not None and c.judge.use)

    def _variables(self) -> tuple[list[str], list[str]]:
        """Environment variables with the keys of the models, as far as this process has them, and those with their
        addresses. Addresses that are set for other providers count too: the code may make a model later."""
        keys, addresses = dict[str, None](), dict[str, None]()
        for model, address, variable in self._models():
            if variable is not None:
                keys[variable] = None
            if address in (None, "", PROVIDER) and not is_embedded(model):
                addresses |= dict.fromkeys(address_variables(model))
                keys |= dict.fromkeys(key_variables(model) if variable is None else ())
        addresses |= dict.fromkeys(sorted(filter(_is_address, os.environ)))
        return [name for name in keys if os.environ.get(name)], list(addresses)

    def _models(self) -> Iterator[tuple[str, str | None, str | None]]:
        """The models that hosts call: name, address, and variable with the key, as far as they are set."""
        config = self.config
        yield config.model_name, config.api_base, config.api_key_env
        model, address, variable = config.endpoints.get("judge", (None, None, None))
        variable = variable or (None if address else config.api_key_env)
        yield model or config.model_name, address or config.api_base, variable
        for part in self.loaded.predictors():
            if isinstance(lm := part.lm, dspy.LM):
                yield lm.model, lm.kwargs.get("api_base") or lm.kwargs.get("base_url"), None


def _is_address(variable: str) -> bool:
    """Whether the name of a variable is that of a provider's address; others end in `_BASE_URL` too, without a key."""
    provider = variable.removesuffix("_BASE_URL")
    return variable.endswith("_API_BASE") or (provider != variable and f"{provider}_API_KEY" in os.environ)


def _itself(program: dspy.Module) -> dspy.Module:
    return program


def _of_name(name: str, config: dict[str, Any], state: dict[str, Any]) -> dspy.Module:
    return restore_program(name, config, state)


def _of_artifact(path: str, state: dict[str, Any]) -> dspy.Module:
    artifact = load_artifact(of_sender(path))
    return restore_program(artifact.manifest["program"], artifact.manifest["config"], state, artifact.program)
