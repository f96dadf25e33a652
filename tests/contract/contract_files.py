"""The stored contract: one JSON file for each part, compared exactly, written by `--write-contract`."""

import difflib
import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
COMMAND = "make contract"
_WIDTH = 118
_DATA = re.compile(r"[/@. ]|^[0-9a-f-]{12,}$|^\d+$")  # a key of a mapping that is data: a path, an id, a sentence


class Contract:
    """Compares values with the stored ones.

    With `writing`, `write` stores what was checked instead: the file of each part then holds these values only.
    """

    def __init__(self, *, writing: bool) -> None:
        self.writing = writing
        self._checked: dict[str, dict[str, Any]] = {}

    def stored(self, part: str) -> dict[str, Any]:
        """The values of a part by name; those that were checked in this run while writing."""
        if self.writing:
            return self._checked.get(part, {})
        values: dict[str, Any] = json.loads((FOLDER / f"{part}.json").read_text(encoding="utf-8"))
        return values

    def check(self, part: str, name: str, value: Any) -> None:
        """Fails where the value is not the stored one, with the lines that differ."""
        value = json.loads(json.dumps(value))  # tuples are lists
        if self.writing:
            self._checked.setdefault(part, {})[name] = value
            return
        before, now = self.stored(part).get(name), value
        lines = difflib.unified_diff(laid_out(before).splitlines(), laid_out(now).splitlines(), n=0, lineterm="")
        assert before == now, "\n".join([f"{part}.json, {name}: the contract changed. If it has to: {COMMAND}", *lines])

    def write(self) -> None:
        for part, values in self._checked.items():
            (FOLDER / f"{part}.json").write_text(laid_out(values) + "\n", encoding="utf-8")


def laid_out(value: Any, indent: int = 0) -> str:
    """JSON with sorted keys; what fits on a line is on one line, so that a change of one key is a diff of one line."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    if not isinstance(value, dict | list) or (indent and indent + len(text) <= _WIDTH):
        return text
    inner, space = indent + 1, " " * (indent + 1)
    if isinstance(value, dict):
        items = [
            f"{space}{json.dumps(key, ensure_ascii=False)}: {laid_out(value[key], inner)}" for key in sorted(value)
        ]
        return "{\n" + ",\n".join(items) + f"\n{' ' * indent}}}"
    return "[\n" + ",\n".join(space + laid_out(item, inner) for item in value) + f"\n{' ' * indent}]"


def shape(value: Any) -> Any:
    """Keys and types of a JSON value. The items of a list have one shape together, and so have those of a mapping by
    id, path or sentence."""
    if isinstance(value, dict):
        named = {key: shape(item) for key, item in value.items() if not _DATA.search(key)}
        others = [shape(item) for key, item in value.items() if _DATA.search(key)]
        return named | ({"…": _merged(others)} if others else {})
    if isinstance(value, list):
        return [_merged([shape(item) for item in value])] if value else []
    if value is None or isinstance(value, bool):
        return {None: "null"}.get(value, "boolean")
    return "text" if isinstance(value, str) else "number"


def _merged(shapes: list[Any]) -> Any:
    """One shape for several: the keys of all objects, and `number or null` for values of several types."""
    if all(isinstance(item, dict) for item in shapes):
        keys = {key for item in shapes for key in item}
        return {key: _merged([item[key] for item in shapes if key in item]) for key in sorted(keys)}
    if all(isinstance(item, list) for item in shapes):
        items = [inner for item in shapes for inner in item]
        return [_merged(items)] if items else []
    texts = sorted({item if isinstance(item, str) else json.dumps(item, sort_keys=True) for item in shapes})
    return texts[0] if len(texts) == 1 else " or ".join(texts)
