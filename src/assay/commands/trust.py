"""`assay trust`: which files of others may run their code."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from assay.commands.groups import NoJson
from assay.errors import ArtifactError
from assay.support.options import Flag, Settings, function_of
from assay.support.report import Report

if TYPE_CHECKING:
    from assay.sources.trust import Entry


@dataclass(frozen=True)
class TrustedContent:
    """A trusted content.

    Attributes:
        path: where it was when it was trusted.
        added_at: time, UTC.
        runs: its files that run as code; None if it was moved or changed since.
    """

    sha256: str
    path: str
    added_at: str = ""
    runs: tuple[str, ...] | None = ()

    def lines(self) -> Iterator[str]:
        yield from (f"  runs {self.path}/{place}" for place in self.runs or ())
        if self.runs is None:
            yield "  nothing with this content is at this path any more"


@dataclass(frozen=True, kw_only=True, repr=False)
class TrustListing(Report):
    """What is trusted.

    Attributes:
        file: the file that lists it.
        trusted: the contents, oldest first, each with `sha256`, `path`, `added_at` and `runs`.
    """

    none = "nothing is trusted yet"

    file: str
    trusted: tuple[TrustedContent, ...]

    def lines(self) -> Iterator[str]:
        for entry in self.trusted:
            yield f"{entry.sha256[:12]}  {entry.added_at}  {entry.path}"
            yield from entry.lines()


class ListTrusted(Settings):
    """List what is trusted: hash, date, the path at that time, and the files in it that run as code."""

    def run(self) -> TrustListing:
        from assay.sources.trust import entries, trust_file

        trusted = tuple(TrustedContent(item.sha256, item.path, item.added_at, _code_of(item)) for item in entries())
        return TrustListing(file=str(trust_file()), trusted=trusted)


@dataclass(frozen=True, kw_only=True, repr=False)
class TrustChange(Report):
    """Contents whose trust was added or removed.

    Attributes:
        added: contents that are trusted now.
        removed: contents that are no longer trusted.
    """

    added: tuple[TrustedContent, ...] = ()
    removed: tuple[TrustedContent, ...] = ()

    def lines(self) -> Iterator[str]:
        for entry in self.added:
            yield f"trusted {entry.sha256[:12]}  {entry.path}"
            yield from entry.lines()
        yield from (f"no longer trusted: {entry.sha256[:12]}  {entry.path}" for entry in self.removed)


class AddTrust(Settings):
    """Trust the content of artifacts and files (assay.toml, a judge's YAML) as it is now. Nothing of them is run.

    Raises:
        ArtifactError: there is no artifact or file at a path.
    """

    OUTPUT: ClassVar[Any] = NoJson

    paths: Annotated[Sequence[str | Path], Flag(metavar="ARTIFACT_OR_FILE", key=False)] = field(kw_only=False)
    """Folder of an artifact, or a file."""

    def run(self) -> TrustChange:
        from assay.sources.trust import add

        added = []
        for path in map(str, self.paths):
            content = _content_at(path)
            add(content.sha256, path)
            added.append(content)
        return TrustChange(added=tuple(added))


class RemoveTrust(Settings):
    """Remove trust, by the path of an artifact or project file (as it is now, or the path in `assay trust list`) or
    the first digits of the hash.

    Trust applies to content: copies are no longer trusted either.
    """

    OUTPUT: ClassVar[Any] = NoJson

    names: Annotated[Sequence[str | Path], Flag(metavar="PATH_OR_HASH", key=False)] = field(kw_only=False)
    """Path, or the first digits of a hash."""

    def run(self) -> TrustChange:
        from assay.sources.trust import remove

        entries = [entry for name in map(str, self.names) for entry in remove(name, _hash_at(name))]
        return TrustChange(removed=tuple(TrustedContent(item.sha256, item.path, item.added_at) for item in entries))


def _content_at(path: str) -> TrustedContent:
    """An artifact or a file, with the files in it that run as code.

    Raises:
        ArtifactError: there is neither.
    """
    from assay.jobs.project_file import FILE
    from assay.sources.artifact_files import RUBRIC, code_of, verified
    from assay.sources.trust import hash_of_file

    place = Path(path)
    if place.is_file() and (place.name == FILE or place.suffix.lower() in (".yaml", ".yml")):
        return TrustedContent(hash_of_file(place), path)
    manifest = verified(place)
    return TrustedContent(str(manifest["sha256"]), path, runs=(*code_of(manifest), *code_of(manifest, RUBRIC)))


def _hash_at(path: str) -> str | None:
    """The current hash of the artifact or project file at a path; None if there is none."""
    try:
        return _content_at(path).sha256
    except (ArtifactError, OSError):
        return None


def _code_of(entry: "Entry") -> tuple[str, ...] | None:
    """The files of a trusted content that run as code; None if it was moved or changed."""
    try:
        content = _content_at(entry.path)
    except (ArtifactError, OSError):
        return None
    return content.runs if content.sha256 == entry.sha256 else None


list_trusted = function_of(ListTrusted, "list_trusted")
add_trust = function_of(AddTrust, "add_trust")
remove_trust = function_of(RemoveTrust, "remove_trust")
