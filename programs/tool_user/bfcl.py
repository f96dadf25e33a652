"""Tasks of the Berkeley Function Calling Leaderboard (BFCL v4), read from an installed or unpacked `bfcl-eval`.

The package is not imported: its dependencies are pinned to old versions, and its data are plain files.
"""

import importlib.util
import json
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from assay.datasets.specs import Row, number_of, options_of
from assay.errors import DataError

_NAMED = ("simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance")
_LIVE = ("simple", "multiple", "parallel", "parallel_multiple", "irrelevance")
_ALSO = {"simple": "simple_python"}  # as BFCL up to v3 and its leaderboard call it
CATEGORIES = (*_NAMED, *(f"live_{name}" for name in _LIVE))
_PACKAGE = "bfcl_eval"
_INSTALL = (
    "install it without its old dependencies: pip install --no-deps bfcl-eval; or unpack its wheel into a folder and "
    "name it: bfcl:CATEGORY?path=FOLDER"
)


def rows(spec: str) -> Iterator[Row]:
    """Rows of `bfcl:CATEGORY?size=&seed=&path=`, without its `bfcl:`.

    They have the inputs `question` and `tools`, and the expected `calls` (none for irrelevance). `CATEGORY` is one of
    `CATEGORIES`; `simple` is `simple_python`. `size` rows are drawn with `seed`; without it all come, in the package's
    order. `path` is the folder of an unpacked wheel, its folder `bfcl_eval`, or that one's folder `data`.

    Raises:
        DataError: unknown category, missing package or file, fewer rows than `size`, or a row of another format.
    """
    named, _, query = spec.partition("?")
    options = options_of(query, ("size", "seed", "path"), f"bfcl:{named}")
    size = number_of(options, "size", 0, at_least=1) if "size" in options else None
    category = _ALSO.get(named, named)
    if category not in CATEGORIES:
        raise DataError(
            f"bfcl has no category {category!r}; categories of one turn with a known answer are {', '.join(CATEGORIES)}"
        )
    folder, name = _data(options.get("path", "")), f"BFCL_v4_{category}.json"
    questions = list(_lines(folder / name))
    answers: dict[str, Any] = {}
    if not category.endswith("irrelevance"):
        for where, row in _lines(folder / "possible_answer" / name):
            answers[_field(row, "id", where)] = _field(row, "ground_truth", where)
    if size is not None:
        if size > len(questions):
            raise DataError(f"bfcl:{category} has {len(questions)} tasks, fewer than size={size}")
        questions = random.Random(number_of(options, "seed", 0)).sample(questions, size)
    for where, row in questions:
        task_id = str(_field(row, "id", where))
        if not category.endswith("irrelevance") and task_id not in answers:
            raise DataError(f"{where}: there is no answer for {task_id!r}")
        yield (
            where,
            {
                "id": task_id,
                "inputs": {"question": _question(row, where), "tools": _field(row, "function", where)},
                "expected": {"calls": answers.get(task_id, [])},
                "task_type": category,
            },
        )


def _data(path: str) -> Path:
    """The folder with the questions."""
    if path:
        for folder in (Path(path) / _PACKAGE / "data", Path(path) / "data", Path(path)):
            if list(folder.glob("BFCL_v4_*.json")):
                return folder
        raise DataError(f"{path!r} has no file BFCL_v4_*.json, neither there nor in {_PACKAGE}{os.sep}data")
    spec = importlib.util.find_spec(_PACKAGE)
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    if not places:
        raise DataError(f"bfcl needs the package bfcl-eval, which is not installed: {_INSTALL}")
    return Path(places[0]) / "data"


def _lines(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"no such file: {file}. This version of bfcl-eval has other files; BFCL v4 is needed") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read ({error})") from None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{file}:{number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise DataError(f"{file}:{number}: expected a JSON object, found {type(row).__name__}")
        yield f"{file}:{number}", row


def _field(row: Mapping[str, Any], name: str, where: str) -> Any:
    if name not in row:
        raise DataError(f"{where}: no {name!r}; its fields are {sorted(row)}")
    return row[name]


def _question(row: Mapping[str, Any], where: str) -> str:
    """Text of the only turn: the user's message, or all messages with their roles if there are several."""
    turns = _field(row, "question", where)
    try:
        (messages,) = turns
        texts = [(str(message["role"]), str(message["content"])) for message in messages]
    except (TypeError, KeyError, ValueError):
        raise DataError(f"{where}: question is not one turn of messages with role and content") from None
    if len(texts) == 1:
        return texts[0][1]
    return "\n".join(f"{role}: {content}" for role, content in texts)
