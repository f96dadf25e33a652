"""`assay trust`: list, add, remove."""

from typing import Any

import click

from assay.cli.options import json_option
from assay.cli.shared import print_json
from assay.support.terminal import echo


@click.group("trust")
def command() -> None:
    """Manage which artifacts that others have compiled may run their code, and which project files are read.

    An artifact that you compiled is trusted. One that somebody else compiled, and that holds source files, is loaded
    only once you have trusted its content: with --trust on the command that loads it, or with `assay trust add`. So is
    an assay.toml that is outside of your project, and a file that sends keys or data to another host than the
    provider's.
    """


@command.command("list")
@json_option()
def list_(as_json: bool) -> None:
    """List what is trusted: hash, date, the path at that time, and the files in it that run as code."""
    from dataclasses import asdict

    from assay.sources.trust import entries, trust_file

    trusted = entries()
    if as_json:
        print_json(
            {"file": str(trust_file()), "trusted": [{**asdict(entry), "runs": _code_at(entry)} for entry in trusted]}
        )
        return
    if not trusted:
        echo(f"nothing is trusted yet ({trust_file()})", err=True)
    for entry in trusted:
        echo(f"{entry.sha256[:12]}  {entry.added_at}  {entry.path}")
        code = _code_at(entry)
        for place in code or ():
            echo(f"  runs {entry.path}/{place}")
        if code is None:
            echo("  nothing with this content is at this path any more")


def _code_at(entry: Any) -> list[str] | None:
    """The files of a trusted content that run as code; None if it was moved or changed."""
    from assay.errors import ArtifactError

    try:
        sha256, code = _read(entry.path)
    except (ArtifactError, OSError):
        return None
    return code if sha256 == entry.sha256 else None


def _read(path: str) -> tuple[str, list[str]]:
    """The hash of an artifact or a project file, and the files in it that run as code.

    Raises:
        ArtifactError: there is neither.
    """
    from pathlib import Path

    from assay.runs.project import FILE
    from assay.sources.artifact_files import RUBRIC, code_of, verified
    from assay.sources.trust import hash_of_file

    place = Path(path)
    if place.is_file() and (place.name == FILE or place.suffix.lower() in (".yaml", ".yml")):
        return hash_of_file(place), []
    manifest = verified(place)
    return str(manifest["sha256"]), [*code_of(manifest), *code_of(manifest, RUBRIC)]


@command.command("add")
@click.argument("paths", nargs=-1, required=True, metavar="ARTIFACT_OR_FILE...")
def add(paths: tuple[str, ...]) -> None:
    """Trust the content of artifacts and files (assay.toml, a judge's YAML) as it is now. Nothing of them is run."""
    from assay.sources.trust import add as trust

    for path in paths:
        sha256, code = _read(path)
        trust(sha256, path)
        echo(f"trusted {sha256[:12]}  {path}")
        for place in code:
            echo(f"  runs {path}/{place}")


@command.command("remove")
@click.argument("names", nargs=-1, required=True, metavar="PATH_OR_HASH...")
def remove(names: tuple[str, ...]) -> None:
    """Remove trust, by the path of an artifact or project file (as it is now, or the path in `assay trust list`) or
    the first digits of the hash.

    Trust applies to content: copies are no longer trusted either.
    """
    from assay.sources.trust import remove as distrust

    for name in names:
        for entry in distrust(name, _content_at(name)):
            echo(f"no longer trusted: {entry.sha256[:12]}  {entry.path}")


def _content_at(path: str) -> str | None:
    """The current hash of the artifact or project file at a path; None if there is none."""
    from assay.errors import ArtifactError

    try:
        return _read(path)[0]
    except (ArtifactError, OSError):
        return None
