"""The page about JSON output: the keys that the `to_dict` methods of reports write, read from their source."""

import ast
import dataclasses
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

import yaml
from assay.support.report import OBJECT, Report

from reference_text import descriptions, docstring

__all__ = ["json_page"]

HEAD = """# JSON output

With `--json`, standard output is one JSON object. In Python the same object is `report.to_dict()`. Fields that are not
measured are `null`, never 0.

"""
REPORTS = ("Report", "Gain", "Evaluation", "Agreement", "Openings", "AgentMetrics")
METHODS = ("to_dict", "report")
BASES = ("Report", "EndedReport", "JobReport", "ScoredRuns", "SpentReport", "JudgedReport", "TrainingReport")


DESCRIPTIONS = Path(__file__).parent / "json_keys.yaml"


def json_page(source: Path) -> str:
    """One section for each class whose object is written as JSON.

    Raises:
        ValueError: a key has no description in `json_keys.yaml`, or a description no key.
    """
    known = yaml.safe_load(DESCRIPTIONS.read_text(encoding="utf-8"))
    shared, unused = known.pop("shared"), {name: set(keys) for name, keys in known.items()}
    sections = []
    for path, name, methods in _reports(source):
        module = ".".join(("assay", *path.relative_to(source).with_suffix("").parts)).removesuffix(".__init__")
        owner = getattr(importlib.import_module(module), name)
        written = [key for method in methods for key in _keys(owner, method)] if methods else list(_of_report(owner))
        keys = list(dict.fromkeys(written))
        if not keys or getattr(owner, "is_stream", False):  # the object of another class is written, or none
            continue
        own = descriptions(owner) | known.get(name, {})
        if missing := [key for key in keys if key not in own and key not in shared]:
            raise ValueError(f"{DESCRIPTIONS.name} has no description of {name}: {', '.join(missing)}")
        unused.get(name, set()).difference_update(keys)
        lines = "\n".join(f"- `{key}`: {own.get(key, shared.get(key))}" for key in keys)
        sections.append(f"## {name}\n\n`{module}`. {docstring(owner).split(chr(10) + chr(10))[0]}\n\n{lines}\n")
    if left := {name: sorted(keys) for name, keys in unused.items() if keys}:
        raise ValueError(f"{DESCRIPTIONS.name} describes keys that no report has: {left}")
    return HEAD + "\n".join(sections)


def _reports(source: Path) -> Iterator[tuple[Path, str, list[ast.FunctionDef]]]:
    """Each class of a report with the method that writes its keys; without one for a subclass of `Report`."""
    for path in sorted(source.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef) or node.name in BASES:
                continue
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name in METHODS]
            if any(isinstance(base, ast.Name) and base.id in BASES for base in node.bases):
                yield path, node.name, []
            elif node.name.endswith(REPORTS):
                yield from ((path, node.name, [method]) for method in methods)


def _of_report(owner: type) -> Iterator[str]:
    """Keys of a subclass of `Report`: those that its `to_dict` writes, and those of its base where it calls that."""
    for parent in owner.__mro__:
        if parent is Report:
            yield from (item.name for item in dataclasses.fields(owner) if item.metadata != OBJECT)
        elif (method := vars(parent).get("to_dict")) is not None:
            source = textwrap.dedent(inspect.getsource(method))
            definition = ast.parse(source).body[0]
            assert isinstance(definition, ast.FunctionDef)
            yield from _keys(owner, definition)
            if "super()" not in source:
                return


def _dicts(method: ast.FunctionDef) -> Iterator[ast.Dict]:
    return (node for node in ast.walk(method) if isinstance(node, ast.Dict))


def _keys(owner: type, method: ast.FunctionDef) -> Iterator[str]:
    """Keys of the dictionaries that a method writes; of those that `asdict` writes, all fields of the dataclass."""
    nodes = list(ast.walk(method))
    if any(isinstance(node, ast.Name) and node.id == "asdict" for node in nodes):
        yield from (item.name for item in dataclasses.fields(owner))
    dictionaries = list(_dicts(method))
    nested = {id(inner) for node in dictionaries for value in node.values for inner in ast.walk(value)}
    for node in dictionaries:
        if id(node) not in nested:
            yield from _dict_keys(node, "")


def _dict_keys(node: ast.Dict, prefix: str) -> Iterator[str]:
    """The constant keys of a dictionary; those of a dictionary in it as `outer.inner`."""
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant):
            yield f"{prefix}{key.value}"
            inner = value.orelse if isinstance(value, ast.IfExp) else value
            if isinstance(inner, ast.Dict):
                yield from _dict_keys(inner, f"{prefix}{key.value}.")
