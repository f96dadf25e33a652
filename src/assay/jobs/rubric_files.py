"""A rubric and everything it names, as files that work from any folder: check files with helpers, judges, jury members.

Installed packages are not copied. The code that the rubric names is imported, which runs it.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from assay.errors import ArtifactError, RubricError
from assay.rubrics.loading import rubric_text
from assay.sources.artifact_files import is_artifact
from assay.sources.files import SourceFiles
from assay.sources.modules import located
from assay.sources.naming import public
from assay.support.yaml_files import read_yaml

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
