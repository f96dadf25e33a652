"""Artifacts: a folder with the program's state (JSON, no pickle), its source files, a manifest and a report.

Loading an artifact whose program is neither shipped nor installed runs the Python files in its folder `source`. If
somebody else compiled it, this needs the user's trust (`assay.sources.trust`, `assay.deployment.demands`). Only
programs are built from an artifact (`assay.deployment.artifact`).
"""

import functools
import inspect
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import dspy

from assay.deployment.allowed import has_address
from assay.deployment.demands import demand_trust, demands_of_values, named_in, wants_trust
from assay.errors import ArtifactError, ConfigError, NoArtifact, ProgramError
from assay.judges import Judge, ListwiseJudge
from assay.judges.base import rebuilt
from assay.models import LanguageModel, Thinking, get_lm
from assay.models.roles import Endpoint
from assay.programs import ADAPTERS, Agent, AgentParameters, program_state, program_version, restore_program
from assay.programs.adapters import ambient_format
from assay.programs.budgets import set_thinking
from assay.programs.compose import CallSettings, EnsembleProgram, NearestDemos, configured, is_agent
from assay.programs.foreign_agent import TextAgent
from assay.programs.loading import SHIPPED, program_class
from assay.programs.state import constructor_config, missing_arguments
from assay.programs.texts import ChangedFile, patch_of, relative_path
from assay.sources import trust
from assay.sources.artifact_files import (
    FORMAT,
    PATCH,
    RUBRIC,
    SOURCE,
    TEXTS,
    hash_of_files,
    hash_of_manifest,
    hash_of_text,
    read_json,
    verified,
)
from assay.sources.files import FILES, SourceFiles, is_user_file
from assay.sources.modules import qualified_name, relocated
from assay.support.values import json_text, json_value
from assay.traces.places import set_carried
from assay.traces.shown import Carried, demos_in

# -- The tasks that the demonstrations of an artifact's program show, as its manifest names them.


def with_demonstrations(program: dspy.Module, manifest: Mapping[str, Any]) -> dspy.Module:
    """The program of an artifact; the tasks that its demonstrations show are recorded with its calls."""
    set_carried(program, _carried(program, manifest.get("shown") or {}))
    return program


def _carried(program: dspy.Module, entry: Mapping[str, Any]) -> Carried:
    """The tasks that calls of a loaded program may show, with the text that identifies each demonstration."""
    demos, by_demo = demos_in(program_state(program)), entry.get("by_demo")
    if by_demo is None or len(by_demo) != len(demos):  # which demonstration shows which task is not known
        return Carried(entry.get("tasks", ()))
    lines = [readable_text(json_text(demo)).splitlines() for demo in demos]
    return Carried(entry.get("tasks", ()), list(zip(lines, by_demo, strict=True)))


def readable_text(text: str) -> str:
    """The values of JSON text without escapes, one per line."""
    lines: list[str] = []

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            for part in value.values():
                collect(part)
        elif isinstance(value, list):
            for part in value:
                collect(part)
        else:
            lines.append(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))

    collect(json.loads(text))
    return "\n".join(lines)


# -- Checks which objects a program name in an artifact may refer to, before anything is imported or instantiated.
#
# Does not build programs: `assay.programs.restore_program` does.


def check_name(name: str, *, travelling: Collection[str], home: Path) -> None:
    """Refuses names of code that is neither installed nor in the artifact. Imports nothing.

    Args:
        name: of a program or judge, as `package.module:NAME` or `file.py:NAME`.
        travelling: names whose source is in the artifact.
        home: the folder of that source; files below it are the artifact's own.
    Raises:
        ArtifactError: it is neither.
    """
    if name in SHIPPED or name in SHIPPED.values() or name in travelling:
        return
    module, colon, attribute = name.rpartition(":")
    if module.endswith(".py"):
        if Path(module).resolve().is_relative_to(home.resolve()):
            return
        raise ArtifactError(
            f"it names {name!r}, a file outside of it: an artifact runs its own source files and installed packages"
        )
    parts = module.split(".")
    if not colon or not attribute or not all(part.isidentifier() for part in parts):
        raise ArtifactError(f"it names {name!r}, which is neither a shipped program nor package.module:NAME")
    if module == "__main__":  # what the user runs, loaded already
        return
    if parts[0] in sys.stdlib_module_names:
        raise ArtifactError(
            f"it names {name!r} of the standard library: only dspy.Module and BaseAgent classes are built"
        )
    if "__main__" in parts:
        raise ArtifactError(f"it names {name!r}, which is a command: importing it could run it")
    if not _is_installed(parts):
        raise ArtifactError(
            f"it names {name!r}, and {module} is neither an installed package nor in the artifact: "
            "install it, or compile again"
        )


def _is_installed(parts: list[str]) -> bool:
    """Whether Python finds a module in an installed package. Searches for files and imports none of its parents."""
    places: list[str] | None = None
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), places)
        if spec is None:
            return False
        if spec.origin is not None and is_user_file(Path(spec.origin)):
            return False  # a file of the working directory or of the user's own: it would have come with the artifact
        places = list(spec.submodule_search_locations or [])
    return spec is not None and spec.origin is not None


def check_program(name: str, target: Any, *, travels: bool, judge: bool) -> None:
    """Raises unless the target is a program: a `dspy.Module`, or a class of one or of an agent.

    Args:
        target: the object of this name.
        travels: its source is in the artifact, which was trusted; then it may also be a function,
            a method or a partial that is defined there.
        judge: it must be a judge.
    Raises:
        ArtifactError: it is not a program.
    """
    kinds = (Judge, ListwiseJudge) if judge else (dspy.Module,)
    kind = target if isinstance(target, type) else type(target)
    if issubclass(kind, kinds):
        return
    agent = isinstance(target, type) and all(
        callable(getattr(target, part, None)) for part in ("execute", "set_parameters")
    )
    factory = inspect.isfunction(target) or inspect.ismethod(target) or isinstance(target, partial)
    if not judge and (agent or (travels and factory)):
        return
    actual = f"the class {kind.__qualname__}" if isinstance(target, type) else f"a {kind.__name__}"
    expected = "a judge" if judge else "a dspy.Module, or a class of one or of a BaseAgent"
    raise ArtifactError(f"its program {name!r} is {actual}, not {expected}: nothing else is built from an artifact")


# -- Artifact.


@dataclass(frozen=True)
class Artifact:
    """A loaded artifact. `program` is ready to run under any language model; `manifest` says where it comes from."""

    path: Path
    program: dspy.Module
    manifest: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """Prompt format (`adapter`), parameters and thinking. A program that was compiled with the default prompt
        format keeps it where the default is another one now."""
        settings, default = dict(self.manifest["settings"]), self.manifest.get("default_format")
        if settings["adapter"] is None and default in ADAPTERS and default != ambient_format():
            settings["adapter"] = default if self.manifest.get("prompt_format") == default else None
        return settings

    @property
    def prompt_format(self) -> str:
        """Format of the prompts that it sends, also if the program sets it."""
        return str(self.manifest.get("prompt_format") or self.manifest["settings"].get("adapter") or "chat")

    @property
    def model(self) -> str:
        """The model that it was measured with.

        Raises:
            UntrustedArtifact: another user's artifact, and the name contains an address.
        """
        model: str = self.manifest["model"]
        if has_address(model):
            trust.demand(
                self.manifest["sha256"],
                self.path,
                f"sends prompts to the address in its model {model!r}, unless a model is named",
            )
        return model

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint of the model that it was measured with.

        Raises:
            UntrustedArtifact: another user's artifact would decide where prompts or a key are sent.
        """
        address, variable = self.manifest.get("api_base"), self.manifest.get("api_key_env")
        self.model  # noqa: B018 - it may hold an address too
        if address is not None or variable is not None:
            content = f"the key in ${variable}" if variable else "prompts and the provider's key"
            destination = f"to {address}" if address else f"to the provider of {self.manifest['model']}"
            trust.demand(self.manifest["sha256"], self.path, f"sends {content} {destination}, unless a model is named")
        return Endpoint(address, variable)

    def runnable(self, thinking: Thinking | None = None) -> dspy.Module:
        """The program with its compiled settings. Its own model is used if DSPy has none set.

        Args:
            thinking: budget that replaces the compiled one.
        """
        manifest = self.manifest
        if thinking is not None:
            set_thinking(self.program, thinking)

        def measured_lm() -> LanguageModel:  # its address is checked only if no other model is set
            return _measured_lm(str(self.path), self.model, self.endpoint, tuple(manifest.get("adapters") or ()))

        settings = self.settings if thinking is None else {**self.settings, "thinking": thinking}
        return runnable(self.program, settings, measured_lm)


@functools.lru_cache(maxsize=8)
def _measured_lm(path: str, model: str, endpoint: Endpoint, adapters: tuple[str, ...]) -> LanguageModel:
    """The model that an artifact was measured with.

    Raises:
        ArtifactError: it has other adapters now.
        ConfigError: the environment variable with its key is not set.
    """
    lm = get_lm(model, **endpoint.client(model))
    _check_adapters(path, model, list(adapters), lm)
    return lm


def runnable(program: dspy.Module, settings: dict[str, Any], own_lm: Callable[[], Any] | None = None) -> dspy.Module:
    """The program, called with its settings from now on: an Agent has them itself, see `configured` for others."""
    if is_agent(program):
        program.own_lm = own_lm
        return program
    applied = CallSettings(
        prompt_format=settings["adapter"], temperature=settings["parameters"].get("temperature"),
        thinking=Thinking.of(settings.get("thinking")), own_lm=own_lm,
    )  # fmt: skip
    return configured(program, applied)


def save_artifact(
    folder: Path,
    program: dspy.Module,
    manifest: dict[str, Any],
    *,
    splits: dict[str, Any],
    report: str,
    rubric: Mapping[str, bytes] | None = None,
    changed: Sequence[ChangedFile] = (),
    replaces: Path | None = None,
) -> Path:
    """Writes an artifact completely or not at all. If the folder exists, a number is added to the name.

    Args:
        manifest: needs `program` (its name) and `settings` (adapter and parameters).
        rubric: files of the rubric it was measured by, with its checks and judges; see `assay.jobs.loading`.
        changed: files of an agent with its new texts, which are stored with their patch.
        replaces: an artifact that is written anew in its own folder, see `assay.jobs.artifacts.of_earlier_attempt`.
    Raises:
        ArtifactError: the folder cannot be written.
    """
    inner = _inner(program)
    config, source = built_from(inner), source_of(program, str(manifest["program"]), data=_data_of(manifest))
    texts = {
        "program.json": json_text(program_state(program), indent=1),
        "splits.json": json.dumps(splits),
        "report.md": report,
        **({PATCH: patch_of(changed)} if changed else {}),
    }
    entries = {
        "format": FORMAT,
        **manifest,
        "config": config,
        "files": {name: hash_of_text(text) for name, text in texts.items()},
    }
    copied = {f"{SOURCE}/{place}": content for place, content in source.files.items()} if source.names else {}
    if new := {relative_path(file.path).as_posix(): file.after for file in changed}:
        entries["text_files"] = hash_of_files(new)
        copied |= {f"{TEXTS}/{place}": content for place, content in new.items()}
    if source.names:
        entries["source"] = {"names": source.names, "files": hash_of_files(source.files)}
    if rubric:
        entries["rubric_files"] = hash_of_files(rubric)
        copied |= {f"{RUBRIC}/{place}": content for place, content in rubric.items()}
    # the hash is taken of what will be read back
    entries = json_value(entries, placeholders=True)
    entries["sha256"] = hash_of_manifest(entries)
    texts["manifest.json"] = json.dumps(entries, indent=1, ensure_ascii=False)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".artifact-") as scratch:
            ready = Path(scratch) / "artifact"
            ready.mkdir()
            for name, text in texts.items():
                (ready / name).write_text(text, encoding="utf-8")
            for place, content in copied.items():
                target = ready / place
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
            if replaces is not None:
                replaces.rename(Path(scratch) / "replaced")
            written = _place(ready, replaces or folder)
    except OSError as error:
        raise ArtifactError(
            f"cannot write the artifact to {folder}: {error}. Choose another folder with `out=…`"
        ) from error
    state = json.loads(texts["program.json"])
    if wants_trust(entries, state) or any(named_in(place, content) for place, content in (rubric or {}).items()):
        trust.allow(entries["sha256"], written)
    return written


def with_own_texts(path: Path) -> Path:
    """The artifact of an agent with its own texts, in a folder beside one with new texts: the version that those are
    compared with in production. It is written once.

    Raises:
        ArtifactError: `path` is no artifact, or the folder cannot be written.
    """
    manifest, folder = verified(path), path.with_name(f"{path.name}-own-texts")
    if (folder / "manifest.json").is_file() and verified(folder)["config"] == manifest["config"]:
        return folder
    program = TextAgent(**manifest["config"])
    entries = {name: manifest[name] for name in _OF_AGENT if name in manifest}
    entries["version"] = program_version(program, manifest["settings"]["adapter"])
    return save_artifact(folder, program, entries, splits={}, report="The agent's own texts.\n")


_OF_AGENT = (
    "assay", "dspy", "program", "agent", "texts_before", "settings", "prompt_format", "default_format", "model",
    "api_base", "api_key_env", "weights", "adapters",
)  # fmt: skip


def built_from(inner: dspy.Module) -> dict[str, Any]:
    """The arguments of the constructor, if the name of the program is that of a class."""
    if isinstance(inner, Agent | Judge):
        return dict(inner.config)
    module, attribute = getattr(inner, "_assay_origin", (type(inner).__module__, type(inner).__qualname__))
    return (
        constructor_config(inner) if (module, attribute) == (type(inner).__module__, type(inner).__qualname__) else {}
    )


def source_of(program: dspy.Module, name: str, *, data: Path | None = None) -> SourceFiles:
    """The files of a program, and of the judges inside it, whose code is the user's own.

    Args:
        name: by which it is loaded.
        data: the file of the tasks, which is not copied although the program reads it.
    """
    source, inner, without = SourceFiles(), _inner(program), [data] if data is not None else []
    source.add(
        name, *getattr(inner, "_assay_origin", (type(inner).__module__, type(inner).__qualname__)), without=without
    )
    for part in {
        type(part) for _, part in program.named_sub_modules() if isinstance(part, Judge) and part is not inner
    }:
        source.add(qualified_name(part), part.__module__, part.__qualname__, without=without)
    return source


def _inner(program: dspy.Module) -> dspy.Module:
    while isinstance(program, NearestDemos | EnsembleProgram):
        program = program.program if isinstance(program, NearestDemos) else program.members[0]
    return program


def _data_of(manifest: Mapping[str, Any]) -> Path | None:
    spec = (manifest.get("data") or {}).get("spec")
    return Path(spec).resolve() if isinstance(spec, str) else None


def check_place(folder: Path) -> None:
    """Raises `NoArtifact` if `save_artifact` could not write there. Call it before a run."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=folder.parent, prefix=".artifact-").cleanup()
    except OSError as error:
        raise NoArtifact(
            f"cannot write the artifact to {folder}: {error}. Choose another folder with `out=…`"
        ) from error


def _place(ready: Path, folder: Path) -> Path:
    for number in range(1, 10_000):
        target = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            os.mkdir(target)  # of several processes only one gets the name
        except FileExistsError:
            continue
        for file in ready.iterdir():
            shutil.move(file, target / file.name)
        return target
    raise OSError(f"{folder} and its numbered variants exist already")


def loaded_again(path: Path, program: dspy.Module) -> tuple[Artifact, str | None]:
    """Loads an artifact that was just written, as another process would.

    Returns:
        The artifact; and a note if it can only be loaded into an instance of the program.

    Raises:
        ArtifactError: it cannot be loaded; the folder is kept.
    """
    try:
        return load_artifact(path), None
    except (ArtifactError, ProgramError) as error:
        reason = str(error)
    inner = _inner(program)
    try:
        artifact = load_artifact(path, program=inner)
    except (ArtifactError, ProgramError) as error:
        raise ArtifactError(f"the artifact was written and cannot be loaded again: {error}") from error
    note = f"the artifact can only be loaded into an instance of the program, assay.load(path, program=…): {reason}"
    return artifact, note


def needs_instance(program: dspy.Module, source: SourceFiles) -> bool:
    """Whether an artifact of a program is loaded into an instance only: its code is not a file's, or its constructor
    takes arguments that cannot be stored."""
    return not source.names or bool(missing_arguments(_inner(program)))


def check_pinned(artifact: Artifact, lm: LanguageModel) -> None:
    """Raises `ArtifactError` if the artifact's model now has other adapters than it was measured with."""
    _check_adapters(artifact.path, artifact.manifest["model"], list(artifact.manifest.get("adapters") or ()), lm)


def _check_adapters(path: str | Path, model: str, expected: list[str], lm: LanguageModel) -> None:
    present = list(lm.recording.backend.adapters)
    if model == lm.recording.model and expected != present:
        before, after = (", ".join(sha[:12] + "…" for sha in hashes) or "none" for hashes in (expected, present))
        raise ArtifactError(
            f"{path} was measured with the adapters {before}, and {model} has {after} now: measure it again"
        )


def with_model_of(artifact: str | Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with the artifact's model and its address filled in if they name no model."""
    loaded = load_artifact(artifact)
    settings = {**options, "model": loaded.model}
    if options.get("api_base") is None:
        settings |= {
            "api_base": loaded.endpoint.api_base,
            "api_key_env": options.get("api_key_env") or loaded.endpoint.api_key_env,
        }
    if options.get("thinking") is None and "thinking" in loaded.manifest:  # of a judge
        settings["thinking"] = loaded.manifest["thinking"]
    return settings


def load_artifact(path: str | Path, *, program: dspy.Module | None = None) -> Artifact:
    """Checks all files of an artifact and loads it, into `program` if it cannot be built from its name alone.

    Raises:
        ArtifactError: there is no artifact, it has another format, a file is missing or was changed, its name is not
            that of a program, or the program cannot be built here.
        UntrustedArtifact: it holds code that somebody else wrote and the user has not trusted; see
            `assay.sources.trust`.
    """
    if not isinstance(path, str | Path):
        raise ConfigError(f"path={path!r} must be a string or Path: the folder of an artifact")
    folder = Path(path)
    manifest = verified(folder)
    state = read_json(folder / "program.json", folder)
    if program is None:
        demand_trust(folder, manifest)
    if wants_trust(manifest, state):
        trust.remember(manifest["sha256"], folder)  # an artifact without code can still name an address
    try:
        program = with_demonstrations(_built(folder, manifest, state, program), manifest)
        settings = manifest["settings"]
        if is_agent(program):
            program.agent_parameters, program.prompt_format = (
                AgentParameters.of(settings["parameters"]),
                settings["adapter"],
            )
    except ProgramError as error:
        if program is not None:
            raise
        raise ProgramError(
            f"{folder}: {error}. If the program reads a file, list it in {FILES} of its module; "
            "a program that takes arguments which are not JSON (tools, clients) is loaded into an instance: "
            "assay.load(path, program=MyProgram(…))"
        ) from error
    except trust.UntrustedArtifact:
        raise
    except ArtifactError as error:
        raise ArtifactError(f"{folder}: {error}") from None
    except Exception as error:
        raise ArtifactError(f"{folder}: the program cannot be rebuilt: {type(error).__name__}: {error}") from error
    return Artifact(folder, program, manifest)


def _built(folder: Path, manifest: dict[str, Any], state: dict[str, Any], program: dspy.Module | None) -> dspy.Module:
    """The program of a manifest: built from its name, or its state loaded into `program`.

    Raises:
        ArtifactError: the name is not that of a program.
        ProgramError: the program cannot be built.
        UntrustedArtifact: a value in it needs trust.
    """
    home = (folder / SOURCE).resolve()
    places = (
        {}
        if program is not None
        else {name: f"{home}/{place}" for name, place in ((manifest.get("source") or {}).get("names") or {}).items()}
    )

    def check(name: str) -> None:
        check_name(name, travelling=places.keys(), home=home)

    with relocated(places, check=check):
        target = None if program is not None else _target(manifest, travels=manifest["program"] in places, check=check)
        for demand in demands_of_values(manifest, state, builds=program is None):
            trust.demand(manifest["sha256"], folder, demand)
        if target is not None and manifest.get("kind") == "judge":
            program = rebuilt(target if isinstance(target, type) else type(target), manifest["config"])
        return restore_program(manifest["program"], manifest["config"], state, program)


def _target(manifest: dict[str, Any], *, travels: bool, check: Callable[[str], None]) -> Any:
    """The class, instance or function that a manifest names as its program. Raises `ArtifactError` for others."""
    name = str(manifest["program"])
    check(name)
    target = program_class(name)
    check_program(name, target, travels=travels, judge=manifest.get("kind") == "judge")
    return target
