"""Reads rubrics of other tools: verifiers' criteria files (TOML or JSON) and HealthBench-like points (JSON)."""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.errors import RubricError
from assay.rubrics.criteria import Criterion, JudgeSpec
from assay.rubrics.protocols import Resolver
from assay.rubrics.rubric import Rubric
from assay.support.yaml_files import read_text

__all__ = ["points_rubric", "read_foreign"]

_MOST_PARTS = 16  # of a dotted TOML key; tomllib's time is quadratic in their number
_TOML_TEXTS = re.compile(  # strings and comments; an unterminated string extends as far as tomllib would search
    r'''"""(?:\\.|[^\\])*?(?:"""|\Z)"{0,2}|\'{3}.*?(?:\'{3}|\Z)\'{0,2}|"(?:\\.|[^"\\\n])*+"?|\'[^\'\n]*+\'?|\#[^\n]*+''',
    re.DOTALL,
)
_LONG_KEY = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{_MOST_PARTS}}}")


def read_foreign(path: Path, *, resolver: Resolver | None = None) -> Rubric:
    """Reads a rubric from a `.toml` or `.json` file of another tool.

    - verifiers: `criteria` with `name`, `text`, `weight` (>= 0) and `choices`, worst first.
    - HealthBench (arXiv 2505.08775): a list of `criterion` and `points`, at the top level or under `rubrics`. Negative
      points are pitfalls.

    Raises:
        RubricError: the file has neither format, or a criterion is invalid.
    """
    try:
        text = read_text(path, "rubric or judge", RubricError)
        data = _toml(text, path) if path.suffix.lower() == ".toml" else json.loads(text)
    except RubricError:
        raise
    except (ValueError, RecursionError) as error:
        raise RubricError(f"{path}: cannot be read: {error}") from None
    entries = data.get("criteria", data.get("rubrics")) if isinstance(data, dict) else data
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise RubricError(f"{path}: expected a list of criteria, at the top level or under 'criteria' or 'rubrics'")
    if "points" in entries[0]:
        return points_rubric(entries, name=path.stem, resolver=resolver, source=str(path))
    criteria = [_verifiers(entry, f"{path}: criterion {at}") for at, entry in enumerate(entries, 1)]
    try:
        return Rubric(path.stem, criteria, resolver=resolver)
    except RubricError as error:
        raise RubricError(f"{path}: {error}") from None


def _toml(text: str, path: Path) -> Any:
    """Parses TOML.

    Raises:
        RubricError: a dotted key has too many parts.
        ValueError: invalid TOML.
    """
    bare = _TOML_TEXTS.sub(lambda match: "" if match[0].startswith("#") else "s", text)
    if _LONG_KEY.search(bare):
        raise RubricError(
            f"{path}: a key has more than {_MOST_PARTS} dotted parts; "
            "rubric keys have one part: name, text, weight, choices"
        )
    return tomllib.loads(text)


def _verifiers(entry: Mapping[str, Any], where: str) -> Criterion:
    if unknown := sorted(set(entry) - {"name", "text", "weight", "choices"}):
        raise RubricError(f"{where}: unknown keys {unknown}; verifiers' criteria have name, text, weight and choices")
    if missing := [key for key in ("name", "text") if not isinstance(entry.get(key), str) or not entry[key].strip()]:
        raise RubricError(f"{where}: {', '.join(missing)} must be a non-empty string")
    choices, weight = entry.get("choices", ["no", "yes"]), entry.get("weight", 1.0)
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise RubricError(f"{where}: choices={choices!r} must be a list of strings, worst first")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight >= 0:
        raise RubricError(f"{where}: weight={weight!r} must be a number >= 0 in verifiers' format")
    try:
        return Criterion(
            name=_identifier(entry["name"]),
            weight=float(weight),
            judge=JudgeSpec(text=entry["text"], scale=tuple(choices)),
        )
    except RubricError as error:
        raise RubricError(f"{where}: {error}") from None


def points_rubric(
    entries: Sequence[Mapping[str, Any]],
    *,
    name: str = "points",
    resolver: Resolver | None = None,
    source: str = "points",
) -> Rubric:
    """Creates a rubric from criteria with points, as in a row of a HealthBench-like dataset.

    A judge decides whether each criterion is met. The score is the sum of the points met, divided by the sum of all
    positive points, clipped to [0, 1].

    Args:
        entries: mappings with `criterion` (text) and `points` (a number other than 0; negative for a pitfall); other
            keys are ignored.
        source: file or dataset, for error messages.
    Raises:
        RubricError: an entry lacks one of the keys, or no points are positive.
    """
    criteria = []
    for at, entry in enumerate(entries, 1):
        text, points = entry.get("criterion"), entry.get("points")
        if (
            not isinstance(text, str)
            or not text.strip()
            or isinstance(points, bool)
            or not isinstance(points, int | float)
            or not points
        ):
            raise RubricError(
                f"{source}: criterion {at} needs 'criterion' (text) and 'points' (a number != 0), found {dict(entry)!r}"
            )
        question = f"Is this true of the output? {text.strip()}"
        criteria.append(Criterion(name=f"c{at}", weight=float(points), judge=JudgeSpec(text=question)))
    try:
        return Rubric(name, criteria, resolver=resolver)
    except RubricError as error:
        raise RubricError(f"{source}: {error}") from None


def _identifier(name: str) -> str:
    """Converts a name to an identifier; other tools allow spaces and dashes."""
    word = re.sub(r"\W+", "_", name.strip()).strip("_") or "criterion"
    return f"c_{word}" if word[0].isdigit() else word
