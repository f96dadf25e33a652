"""A rule of the public functions: none takes untyped options."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import assay

SOURCE = Path(assay.__file__).parent

# Functions whose keywords are named by somebody else, and why. All others have typed keywords.
OPEN_KEYWORDS = {
    "the inputs of a program or the fields of a prediction, which its author names": (
        "commands/deployed.py: DeployedAgent.__call__",
        "judges/deciding.py: GroupDecider.__call__",
        "judges/deciding.py: JudgeDecider.__call__",
        "judges/deciding.py: JudgeVerifier.__call__",
        "traces/gateway/routes.py: AgentRunner.__call__",
    ),
    "the arguments that a rubric file gives to a check": (
        "rubrics/calling.py: MetricCheck.__call__",
        "rubrics/protocols.py: Grader.__call__",
    ),
    "keywords of DSPy, litellm, pydantic, SQLAlchemy or TRL": (
        "models/lm.py: LanguageModel.copy",
        "models/lm.py: get_lm",
        "optimizers/finetuning/trl_trainer.py: TransitionTrainer.__init__",
        "optimizers/prompts/named.py: Proposal.build",
        "optimizers/prompts/named.py: Proposal.compiled",
        "programs/parameters.py: AgentParameters.__init__",
        "rubrics/checks.py: is_schema",
    ),
    "the variables of a template or of a query, or the fields of an event": (
        "deployment/plan.py: Notifier.notify",
        "reports/files.py: write_report",
        "web/rendering.py: link",
        "web/rendering.py: render",
    ),
    "the arguments of the constructor of a user's program": ("optimizers/prompts/given.py: Student.__init__",),
    "the fields of a settings class, with their new values": ("commands/judging.py: with_names",),
    "the fields of a row, of which the empty ones are left out": ("traces/importers/spans.py: filled",),
    "the fields of a recorded rollout": (
        "commands/deployed.py: LoadedVersion.replay",
        "commands/deployed.py: LoadedVersion.run",
    ),
}


def _with_open_keywords(node: ast.AST, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Names of the public functions with `**name: Any` in a tree, each with this name; none inside of functions."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.ClassDef):
            yield from () if inner.name.startswith("_") else _with_open_keywords(inner, (*path, inner.name))
        elif isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            keywords, is_command = inner.args.kwarg, any("command" in ast.unparse(d) for d in inner.decorator_list)
            is_public = not inner.name.startswith("_") or inner.name in ("__init__", "__call__")
            untyped = keywords is not None and (
                keywords.annotation is None or ast.unparse(keywords.annotation) in ("Any", "object")
            )
            if keywords is not None and untyped and is_public and not is_command:  # click calls a command
                yield (*path, inner.name), keywords.arg
        else:
            yield from _with_open_keywords(inner, path)


def test_no_public_function_takes_options_of_any_type() -> None:
    files = [path for path in sorted(SOURCE.rglob("*.py")) if not path.stem.startswith("_") or path.stem == "__init__"]
    places = [
        f"{path.relative_to(SOURCE)}: {'.'.join(names)}"
        for path in files
        for names, keywords in _with_open_keywords(ast.parse(path.read_text(encoding="utf-8")))
        if keywords != "inputs"  # of a DSPy program
    ]
    assert sorted(places) == sorted(place for known in OPEN_KEYWORDS.values() for place in known)


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("def tune(program, **options: Any): ...", [(("tune",), "options")]),
        ("class Job:\n    async def run(self, **options): ...", [(("Job", "run"), "options")]),
        ("def _tune(**options: Any): ...\nclass _Job:\n    def run(self, **options: Any): ...", []),
        ("@click.command('tune')\ndef tune(**values: Any): ...\ndef typed(**options: Unpack[TuneOptions]): ...", []),
    ],
)
def test_options_of_any_type_are_found(text: str, places: list[Any]) -> None:
    assert list(_with_open_keywords(ast.parse(text))) == places
