"""Public API for `assay init`: writes a project that compiles as it is. Overwrites nothing."""

import json
from importlib.resources import files
from itertools import product
from pathlib import Path

from assay.errors import AssayError, ConfigError
from assay.support.keywords import takes
from assay.support.places import write_whole

_FILES = ("program.py", "rubric.yaml", "assay.toml")
_TOPICS = ("the export", "the login", "the calendar", "the search", "the mobile app", "the report")
_MESSAGES = {
    "bug": ("{} crashes when I open it", "since the update {} shows an error", "{} freezes after a minute",
            "{} does not load on my laptop"),
    "billing": ("I was charged twice for {}", "please refund {}", "the invoice for {} is wrong",
                "how do I cancel the payment for {}"),
    "praise": ("I love {}, thank you", "{} works really well", "great job with {}", "{} makes my day easier"),
}  # fmt: skip


@takes()
def init_project(folder: str | Path = ".") -> list[Path]:
    """Writes a program, a rubric, data and `assay.toml` into a folder, which is made where it is missing.

    Returns:
        The files that were written.
    Raises:
        ConfigError: one of the files is there already, or the folder cannot be written; nothing was written.
    """
    place = Path(folder)
    texts = {name: (files("assay.api.templates") / name).read_text(encoding="utf-8") for name in _FILES}
    texts["data.jsonl"] = "".join(json.dumps(row) + "\n" for row in _rows())
    if existing := [name for name in texts if (place / name).exists()]:
        raise ConfigError(f"{place / existing[0]} is there already, and nothing is overwritten: name another folder")
    try:
        place.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            write_whole(place / name, text)
    except (OSError, AssayError) as error:
        for name in texts:
            (place / name).unlink(missing_ok=True)
        raise ConfigError(f"cannot write to {place}: {error}. Name another folder") from error
    return [place / name for name in texts]


def _rows() -> list[dict[str, str]]:
    """72 messages with their labels."""
    return [
        {"message": text.format(topic), "label": label}
        for label, texts in _MESSAGES.items()
        for text, topic in product(texts, _TOPICS)
    ]
