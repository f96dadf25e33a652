"""Loads rubrics and judges, including compiled ones, and compiled programs; a rubric with everything that it names.

Loading runs their code; artifacts made by others are loaded only if they are trusted. A rubric of checks alone loads
neither DSPy nor SQLAlchemy. The files of a rubric, which work from any folder, are check files with helpers, judges and
jury members. Installed packages are not copied.
"""

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from assay.deployment.demands import demand_trust_around
from assay.errors import ArtifactError, ConfigError, RubricError
from assay.rubrics import Rubric, load_rubric as read_rubric
from assay.rubrics.criteria import JudgeFields
from assay.rubrics.loading import RubricSource, rubric_text
from assay.rubrics.protocols import Grader, Resolver
from assay.sources.artifact_files import is_artifact
from assay.sources.files import SourceFiles
from assay.sources.modules import located, public
from assay.sources.opened import of_sender
from assay.sources.trust import trusting, trusts
from assay.support.numbers import figure
from assay.support.options import takes
from assay.support.yaml_files import read_yaml

if TYPE_CHECKING:
    import dspy

    from assay.judges import Judge
    from assay.judges.deciding import JudgeVerifier
    from assay.judges.loading import AnyJudge

JUDGE_TEMPERATURE = 0.1


@takes
def load(path: str | Path, *, program: "dspy.Module | None" = None, trust: bool = False) -> "dspy.Module":
    """Loads the compiled program of an artifact, with its adapter and parameters: `assay.load(path)(question=…)`.

    If the artifact has source files, loading runs them.

    Args:
        program: uncompiled instance to load into, for programs that cannot be built from their name; no file of the
            artifact is run then.
        trust: permanently trust an artifact that somebody else compiled; see `docs/explanation/security.md`.
    Raises:
        UntrustedArtifact: it has code that this user has neither compiled nor trusted.
        ArtifactError: it was changed, or has no program.
    """
    from assay.deployment.artifact import load_artifact

    with trusting(trust):
        return load_artifact(path, program=program).runnable()


@takes
def load_rubric(
    source: RubricSource,
    *,
    judge_model: "str | dspy.LM | None" = None,
    own_models: bool | None = None,
    trust: bool = False,
) -> Rubric:
    """Loads a rubric; `judge_model` decides its judge criteria. Runs its check files.

    Args:
        source: a YAML file, a shipped rubric's name, a check, DSPy metric or rubric by name (`exact`, `file.py:NAME`)
            or the object itself.
        judge_model: name of a model, or the model. Without it, a judge whose file names no model cannot score. A DSPy
            metric that calls a model calls this one; without it, the one set in DSPy.
        own_models: compiled judges use the model that they were calibrated with, at its own address, and not
            `judge_model`; by default where no `judge_model` is given.
        trust: permanently trust artifacts that it names and that somebody else compiled; see
            `docs/explanation/security.md`.
    Raises:
        RubricError: the rubric, or something that it names, is invalid.
        UntrustedArtifact: an artifact that it names, or is a part of, has code that this user neither compiled nor
            trusted.
    """
    with trusting(trust):
        return _loaded_rubric(source, judge_model, judge_model is None if own_models is None else own_models)


def _loaded_rubric(source: RubricSource, judge: "str | dspy.LM | None", own_models: bool) -> Rubric:
    if isinstance(source, str | Path):
        demand_trust_around(source)
    if isinstance(judge, str):
        from assay.models import get_lm

        judge = get_lm(judge, temperature=JUDGE_TEMPERATURE)
    if judge is not None and not _is_lm(judge):
        raise ConfigError(f"`judge_model={judge!r}` must be the name of a model or a dspy.LM")
    return with_judges(read_rubric(source), judge, own_models=own_models)


def with_judges(rubric: Rubric, judge: "dspy.LM | None", *, own_models: bool) -> Rubric:
    """A loaded rubric whose criteria are decided by a model; see `load_rubric`."""
    if judge is not None and not own_models and rubric.takes_model:
        rubric = rubric.with_metric_model(judge)
    named = rubric.resolver is not None and not _without_model(rubric.resolver)
    if named or not rubric.needs_judge or (judge is None and not own_models):
        return rubric
    from assay.judges import resolver

    return rubric.with_resolver(resolver(judge, functools.partial(load_judge, own_model=own_models)))


def without_graders(rubric: Rubric) -> Rubric:
    """A loaded rubric for another process, where `with_judges` loads its judges."""
    found = rubric.resolver
    return rubric.with_resolver(None) if found is not None and _without_model(found) else rubric


def _without_model(found: Resolver) -> bool:
    """Whether a rubric was loaded without a model for its judges, so that one named later decides."""
    from assay.judges.deciding import JudgeResolver

    return isinstance(found, JudgeResolver) and found.lm is None


def _is_lm(value: Any) -> bool:
    import dspy

    return isinstance(value, dspy.BaseLM)


@trusts
def load_judge(source: str | Path, *, own_model: bool = True, **spec: Unpack[JudgeFields]) -> "AnyJudge":
    """Loads a compiled judge from its artifact's folder, or any other as `assay.judges.loading.load_judge` does.

    Runs the code of the judge's file or artifact; `trust=True` trusts an artifact that somebody else compiled.

    Args:
        own_model: a compiled judge that names no model uses the one that it was calibrated with, at its own address;
            False: the one configured in DSPy at the call.
    """
    from assay.deployment.artifact import load_artifact
    from assay.judges import Judge
    from assay.judges.loading import load_judge as read_judge
    from assay.models import Thinking
    from assay.models.lm import has_provider
    from assay.sources.artifact_files import is_artifact

    if not isinstance(source, str | Path):
        raise ConfigError(
            f"`source={source!r}` must be a string or Path: a YAML file, an artifact's folder, file.py:NAME or a "
            "question"
        )
    if not isinstance(own_model, bool):
        raise ConfigError(f"own_model={own_model!r} must be True or False")
    source = of_sender(source) if Path(source).is_absolute() else source
    if not is_artifact(source):
        demand_trust_around(source)
        return read_judge(source, find=functools.partial(load_judge, own_model=own_model), **spec)
    if spec:
        raise ConfigError(f"{source} is a compiled judge with its own {', '.join(sorted(spec))}")
    artifact = load_artifact(source)
    judge = artifact.program
    if not isinstance(judge, Judge):
        raise ConfigError(f"{source} is an artifact of {type(judge).__name__}, not of a judge")
    if own_model and judge.model is None and has_provider(artifact.manifest.get("model") or ""):
        judge.model, judge.endpoint = artifact.model, artifact.endpoint
        judge.thinking = Thinking.of(artifact.manifest.get("thinking"))
    judge.loaded_from = str(Path(source).absolute())
    return judge


@takes
def load_verifier(source: "str | Path | Judge", *, lm: "dspy.LM | None" = None, trust: bool = False) -> Grader:
    """Makes a verifier for `assay.programs.Refine` from a judge: a grade in [0, 1] of an answer, recorded apart.

    Args:
        source: a judge, or what `load_judge` loads. A compiled judge must agree with raters: refinement by a verifier
            at chance makes answers worse.
        lm: the judge's model; by default its own, else that of the program.
    Raises:
        ConfigError: the judge compares outputs, has no grades, or its card shows no agreement: on its held-out labels,
            kappa (weighted kappa on an ordered scale) or the lower end of its interval is not above 0.
        UntrustedArtifact: as for `load_judge`.
    """
    with trusting(trust):
        return _verifier(source, lm)


def _verifier(source: "str | Path | Judge", lm: "dspy.LM | None") -> "JudgeVerifier":
    from assay.deployment.artifact import load_artifact
    from assay.judges import Judge
    from assay.judges.deciding import JudgeVerifier

    if lm is not None and not _is_lm(lm):
        raise ConfigError(f"lm={lm!r} must be a dspy.LM, such as assay.get_lm(NAME)")
    judge = source if isinstance(source, Judge) else load_judge(source, own_model=lm is None)
    if not isinstance(judge, Judge) or judge.compares:
        raise ConfigError(f"{source} compares outputs; a verifier is a judge that grades one output")
    if not judge.spec.graded:
        raise ConfigError(
            f"the labels {list(judge.spec.scale)} of {source} have no grades: give the judge a graded scale"
        )
    if judge.loaded_from:
        _require_agreement(judge.loaded_from, load_artifact(judge.loaded_from).manifest)
    return JudgeVerifier(judge, lm)


def _require_agreement(source: str, manifest: Mapping[str, Any]) -> None:
    """Raises `ConfigError` where a compiled judge's card does not show that it agrees with raters."""
    measured = (manifest["result"].get("card") or {}).get("agreement")
    if measured is None:
        raise ConfigError(
            f"{source} has no card: it was not measured on held-out labels. Use the artifact of a compile that ended"
        )
    name = "kappa" if manifest["judge"]["kind"] == "nominal" else "weighted_kappa"
    measure = name.replace("_", " ")
    value, interval = measured[name], (measured["intervals"] or {}).get(name)
    if value is None or value <= 0 or (interval and interval[0] <= 0):
        reached = "undefined" if value is None else figure(value, 2)
        limits = f", 95 % [{figure(interval[0], 2)}, {figure(interval[1], 2)}]" if interval else ""
        raise ConfigError(
            f"the card of {source} shows no agreement with raters ({measure} {reached}{limits}): a verifier at chance "
            "makes answers worse. Compile the judge on more labels or with a better model"
        )


def compiled_parts(judge: str) -> list[str]:
    """The compiled judges within a judge: itself, or those among the members of a jury or cascade, recursively."""
    from assay.judges.loading import members_of
    from assay.sources.artifact_files import is_artifact

    if is_artifact(judge):
        return [judge]
    path = Path(judge)
    if path.suffix.lower() not in (".yaml", ".yml") or not path.is_file():
        return []
    return [part for member in members_of(path) for part in compiled_parts(member)]


_NAMING = ("check", "metric", "use", "first", "second", "members")  # keys whose values name files
_CODE = re.compile(r"[^\s:]+:[A-Za-z_][\w.]*")  # file.py:NAME or package.module:NAME


def portable_rubric(rubric: str | Path) -> dict[str, bytes]:
    """File contents by relative path; the first is the rubric itself: `rubric.yaml` (or `.toml`, `.json`).

    Args:
        rubric: one that was loaded, which asks for the trust that its code needs.
    Raises:
        RubricError: the file cannot be read, or code that it names cannot be imported.
    """
    path = Path(rubric)
    if path.suffix.lower() in (".toml", ".json"):
        return {f"rubric{path.suffix.lower()}": path.read_bytes()}
    text, _, folder = rubric_text(rubric)
    carrier = _Carrier()
    return {"rubric.yaml": carrier.rewritten(text, folder or Path.cwd()).encode(), **carrier.files}


def judge_files(names: Iterable[str]) -> SourceFiles:
    """The files of judges by the names that a loaded rubric has for them: YAML files, artifacts, code, members.

    Raises: as `portable_rubric`.
    """
    carrier = _Carrier()
    for name in names:
        carrier.carried(re.sub(r"(\.ya?ml):\w+$", r"\1", name, flags=re.IGNORECASE), Path.cwd())
    return carrier.sources


class _Carrier:
    """Copies the files that a rubric names, each once, under new names.

    Attributes:
        sources: what was copied, by its path on this machine.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.sources = SourceFiles()
        self._code = SourceFiles()
        self._new: dict[str, str] = {}  # by absolute name

    def rewritten(self, text: str, folder: Path, *, up: str = "") -> str:
        """The text of a YAML file with the new names of what was copied.

        Args:
            folder: folder that its names are relative to.
            up: relative path from the file's new folder to the top.
        """
        for name in sorted(set(_named_files(read_yaml(text, "rubric", RubricError)[0])), key=len, reverse=True):
            if (new := self.carried(name, folder)) is not None:
                written = (up + new).replace("\\", r"\\")
                text = re.sub(rf"(?<![\w./-]){re.escape(name)}(?![\w/-])", written, text)
        return text

    def carried(self, name: str, folder: Path) -> str | None:
        """The new name of something that a file names; None for installed code, what is shipped, or a sentence."""
        place = folder / name if not Path(name).is_absolute() else Path(name)
        if place.suffix.lower() in (".yaml", ".yml") and place.is_file():
            return self._once(place, lambda new: self._yaml(place, new), ".yaml")
        if is_artifact(place):
            return self._once(place, lambda new: self._folder(place, new), "")
        return self._of_code(name, folder) if _CODE.fullmatch(name) else None

    def _once(self, place: Path, copy: Any, suffix: str) -> str:
        key = str(place.resolve())
        if key not in self._new:
            self._new[key] = f"judges/{len(self._new)}-{place.stem}{suffix}"
            copy(self._new[key])
        return self._new[key]

    def _yaml(self, place: Path, new: str) -> None:
        self.sources.origins[place.absolute()] = place.read_bytes()
        self.files[new] = self.rewritten(place.read_text("utf-8"), place.absolute().parent, up="../").encode()

    def _folder(self, place: Path, new: str) -> None:
        for file in sorted(place.rglob("*")):
            if file.is_file() and file.parent.name != "__pycache__":
                content = self.sources.origins[file.absolute()] = file.read_bytes()
                self.files[f"{new}/{file.relative_to(place).as_posix()}"] = content

    def _of_code(self, name: str, folder: Path) -> str | None:
        try:
            module, attribute = located(name, folder=folder)
        except ArtifactError:
            raise
        except Exception as error:
            raise RubricError(f"{name!r} cannot be imported: {type(error).__name__}: {public(str(error))}") from error
        source = SourceFiles()
        if not source.add(name, module.__name__, attribute):
            return None
        self.sources.origins |= source.origins
        self.sources.outside |= source.outside
        key = str(Path(str(module.__file__)).resolve())
        if key not in self._new:
            self._new[key] = f"code/{len(self._new)}"
            self.files |= {f"{self._new[key]}/{place}": content for place, content in source.files.items()}
        return f"{self._new[key]}/{source.names[name]}"


def _named_files(value: Any, key: str = "") -> list[str]:
    """Names in a rubric's or judge's file: under `check`, `metric`, `use`, `first`, `second`, and in `members`."""
    if isinstance(value, dict):
        return [name for inner, item in value.items() for name in _named_files(item, str(inner))]
    if isinstance(value, list):
        return [name for item in value for name in _named_files(item, key)]
    return [value] if isinstance(value, str) and key in _NAMING else []
