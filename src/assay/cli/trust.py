"""`assay trust`: list, add, remove."""

from typing import Any

import click

from assay.cli.options import json_option
from assay.cli.shared import print_json
from assay.support.terminal import echo

__all__ = ["command"]


@click.group("trust")
def command() -> None:
    """Manage which artifacts that others have compiled may run their code.

    An artifact that you compiled is trusted. One that somebody else compiled, and that holds source files, is loaded
    only once you have trusted its content: with --trust on the command that loads it, or with `assay trust add`.
    """


@command.command("list")
@json_option()
def list_(as_json: bool) -> None:
    """List trusted artifacts: hash, date, the path at that time, and the files in it that run as code."""
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
            echo("  no artifact with this content is at this path any more")


def _code_at(entry: Any) -> list[str] | None:
    """The files of a trusted artifact that run as code; None if it was moved or changed."""
    from pathlib import Path

    from assay.errors import ArtifactError
    from assay.sources.artifact_files import RUBRIC, code_of, verified

    try:
        manifest = verified(Path(entry.path))
    except (ArtifactError, OSError):
        return None
    return [*code_of(manifest), *code_of(manifest, RUBRIC)] if manifest["sha256"] == entry.sha256 else None


@command.command("add")
@click.argument("artifacts", nargs=-1, required=True, metavar="ARTIFACT...")
def add(artifacts: tuple[str, ...]) -> None:
    """Trust the content of artifacts as it is now. Nothing of them is run."""
    from pathlib import Path

    from assay.sources.artifact_files import RUBRIC, code_of, verified
    from assay.sources.trust import add as trust

    for artifact in artifacts:
        manifest = verified(Path(artifact))
        trust(manifest["sha256"], artifact)
        echo(f"trusted {manifest['sha256'][:12]}  {artifact}")
        for place in [*code_of(manifest), *code_of(manifest, RUBRIC)]:
            echo(f"  runs {artifact}/{place}")


@command.command("remove")
@click.argument("names", nargs=-1, required=True, metavar="ARTIFACT_OR_HASH...")
def remove(names: tuple[str, ...]) -> None:
    """Remove trust, by an artifact's folder (as it is now, or the path in `assay trust list`) or the first digits of
    the hash.

    Trust applies to content: copies of the artifact are no longer trusted either.
    """
    from assay.sources.trust import remove as distrust

    for name in names:
        for entry in distrust(name, _content_at(name)):
            echo(f"no longer trusted: {entry.sha256[:12]}  {entry.path}")


def _content_at(path: str) -> str | None:
    """The current hash of the artifact in a folder; None if there is none."""
    from pathlib import Path

    from assay.errors import ArtifactError
    from assay.sources.artifact_files import verified

    try:
        return str(verified(Path(path))["sha256"])
    except (ArtifactError, OSError):
        return None
