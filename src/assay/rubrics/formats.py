"""Rubrics that were written for other tools: verifiers' criteria files (TOML or JSON), and HealthBench-like points (JSON)."""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.errors import RubricError
from assay.rubrics.criteria import Criterion, JudgeSpec
from assay.rubrics.rubric import Resolver, Rubric
from assay.rubrics.yamlfiles import read_text

__all__ = ["points_rubric", "read_foreign"]

_MOST_PARTS = 16  # of a dotted key in TOML: tomllib's time grows with the square of their number
_TOML_TEXTS = re.compile(  # strings and comments; an unfinished string reaches as far as tomllib looks for its end
    r'''"""(?:\\.|[^\\])*?(?:"""|\Z)"{0,2}|\'{3}.*?(?:\'{3}|\Z)\'{0,2}|"(?:\\.|[^"\\\n])*+"?|\'[^\'\n]*+\'?|\#[^\n]*+''', re.DOTALL
)
_LONG_KEY = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{_MOST_PARTS}}}")


def read_foreign(path: Path, *, resolver: Resolver | None = None) -> Rubric:
    """A rubric from a `.toml` or `.json` file of another tool.

    `criteria` with `name`, `text`, `weight` (at least 0) and `choices`, worst first, are verifiers'; a list of `criterion`
    and `points`, by itself or under `rubrics`, is HealthBench's (arXiv 2505.08775): negative points are pitfalls.

    Raises:
        RubricError: the file is neither, or a criterion breaks a rule; the message says which.
    """
    try:
        text = read_text(path)
        data = _toml(text, path) if path.suffix.lower() == ".toml" else json.loads(text)
    except RubricError:
        raise
    except (ValueError, RecursionError) as error:
        raise RubricError(f"{path}: cannot be read: {error}") from None
    entries = data.get("criteria", data.get("rubrics")) if isinstance(data, dict) else data
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise RubricError(f"{path}: expected a list of criteria, by itself or under 'criteria' or 'rubrics'")
    if "points" in entries[0]:
        return points_rubric(entries, name=path.stem, resolver=resolver, shown=str(path))
    criteria = [_verifiers(entry, f"{path}: criterion {at}") for at, entry in enumerate(entries, 1)]
    try:
        return Rubric(path.stem, criteria, resolver=resolver)
    except RubricError as error:
        raise RubricError(f"{path}: {error}") from None


def _toml(text: str, path: Path) -> Any:
    """What a TOML text says.

    Raises:
        RubricError: a key has more parts than one of a rubric can have.
        ValueError: not TOML.
    """
    bare = _TOML_TEXTS.sub(lambda found: "" if found[0].startswith("#") else "s", text)
    if _LONG_KEY.search(bare):
        raise RubricError(f"{path}: a key has more than {_MOST_PARTS} parts joined by dots; keys of a rubric have one: name, text, weight, choices")
    return tomllib.loads(text)


def _verifiers(entry: Mapping[str, Any], where: str) -> Criterion:
    if unknown := sorted(set(entry) - {"name", "text", "weight", "choices"}):
        raise RubricError(f"{where}: unknown keys {unknown}; verifiers' criteria have name, text, weight and choices")
    if missing := [key for key in ("name", "text") if not isinstance(entry.get(key), str) or not entry[key].strip()]:
        raise RubricError(f"{where}: {', '.join(missing)} must be text")
    choices, weight = entry.get("choices", ["no", "yes"]), entry.get("weight", 1.0)
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise RubricError(f"{where}: choices={choices!r} must be a list of words, worst first")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight >= 0:
        raise RubricError(f"{where}: weight={weight!r} must be a number of at least 0, as verifiers has it")
    try:
        return Criterion(name=_identifier(entry["name"]), weight=float(weight), judge=JudgeSpec(text=entry["text"], scale=tuple(choices)))
    except RubricError as error:
        raise RubricError(f"{where}: {error}") from None


def points_rubric(entries: Sequence[Mapping[str, Any]], *, name: str = "points", resolver: Resolver | None = None, shown: str = "points") -> Rubric:
    """A rubric of criteria with points, as every row of a HealthBench-like dataset carries one of its own.

    Met or not met by a judge; the score is the points of the met ones over all positive points, clipped to [0, 1].

    Args:
        entries: `criterion` (text) and `points` (a number, not 0; negative for what must not happen), others are not read.
    Raises:
        RubricError: an entry without both, or no positive points.
    """
    criteria = []
    for at, entry in enumerate(entries, 1):
        text, points = entry.get("criterion"), entry.get("points")
        if not isinstance(text, str) or not text.strip() or isinstance(points, bool) or not isinstance(points, int | float) or not points:
            raise RubricError(f"{shown}: criterion {at} needs 'criterion' (text) and 'points' (a number, not 0); found {dict(entry)!r}")
        question = f"Is this true of the output? {text.strip()}"
        criteria.append(Criterion(name=f"c{at}", weight=float(points), judge=JudgeSpec(text=question)))
    try:
        return Rubric(name, criteria, resolver=resolver)
    except RubricError as error:
        raise RubricError(f"{shown}: {error}") from None


def _identifier(name: str) -> str:
    """A criterion's name as a word: other tools allow spaces and dashes."""
    word = re.sub(r"\W+", "_", name.strip()).strip("_") or "criterion"
    return f"c_{word}" if word[0].isdigit() else word
