"""`assay init`: a project that compiles as it is."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Annotated

from assay.errors import AssayError, ConfigError
from assay.support.options import Flag, Settings, function_of
from assay.support.places import write_whole
from assay.support.report import Report

_FILES = ("program.py", "rubric.yaml", "assay.toml")
_TOPICS = ("the export", "the login", "the calendar", "the search", "the mobile app", "the report")
_MESSAGES = {
    "bug": ("{} crashes when I open it", "since the update {} shows an error", "{} freezes after a minute",
            "{} does not load on my laptop"),
    "billing": ("I was charged twice for {}", "please refund {}", "the invoice for {} is wrong",
                "how do I cancel the payment for {}"),
    "praise": ("I love {}, thank you", "{} works really well", "great job with {}", "{} makes my day easier"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, repr=False)
class NewProject(Report):
    """What `init_project` wrote.

    Attributes:
        folder: the folder, as it was given.
        files: paths of the files.
    """

    folder: str
    files: tuple[Path, ...]

    def lines(self) -> Iterator[str]:
        yield from (f"wrote {path}" for path in self.files)
        yield f"next: {'' if self.folder == '.' else f'cd {self.folder} && '}assay compile"


class Init(Settings):
    """Write a project into DIR (by default the working directory): a program, a rubric, data and assay.toml.

    It compiles as it is: run `assay compile` in it. Nothing is overwritten.

    Raises:
        ConfigError: one of the files is there already, or the folder cannot be written; nothing was written.
    """

    folder: Annotated[str | Path, Flag(metavar="DIR", key=False)] = field(default=".", kw_only=False)
    """Folder, which is made where it is missing."""

    def run(self) -> NewProject:
        place = Path(self.folder)
        texts = {name: (files("assay.commands.templates") / name).read_text(encoding="utf-8") for name in _FILES}
        texts["data.jsonl"] = "".join(json.dumps(row) + "\n" for row in _rows())
        if existing := [name for name in texts if (place / name).exists()]:
            raise ConfigError(
                f"{place / existing[0]} is there already, and nothing is overwritten", hint="Name another folder"
            )
        try:
            place.mkdir(parents=True, exist_ok=True)
            for name, text in texts.items():
                write_whole(place / name, text)
        except (OSError, AssayError) as error:
            for name in texts:
                (place / name).unlink(missing_ok=True)
            raise ConfigError(f"cannot write to {place}: {error}", hint="Name another folder") from error
        return NewProject(folder=str(self.folder), files=tuple(place / name for name in texts))


def _rows() -> list[dict[str, str]]:
    """72 messages with their labels."""
    return [
        {"message": text.format(topic), "label": label}
        for label, texts in _MESSAGES.items()
        for text, topic in product(texts, _TOPICS)
    ]


init_project = function_of(Init, "init_project")
