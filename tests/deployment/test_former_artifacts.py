"""Artifacts written by earlier versions open and run. Those in `data` were written by the commits named here.

A folder of `data` is never edited: its hashes would no longer fit.
"""

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.sources.artifact_files import hash_of_manifest, hash_of_text
from assay.sources.former_names import MODULES, PROGRAMS
from assay.sources.modules import load_source
from assay.testing import scripted_lm

DATA = Path(__file__).parent / "data"
PROGRAM_FOLDERS = [
    "adapter_argument",  # 41c61ca: super().__init__(parameters, adapter=adapter)
    "adapter_of_nested_agents",  # 41c61ca: a plain module of agents, whose format no manifest sets
    "moved_modules",  # 5d43a72: program and check import modules by the names of then
    "parameters_attribute",  # 04b04e4: self.parameters.max_steps
]


def opened(name: str) -> Path:
    """A copy, as an artifact from another machine."""
    return Path(shutil.copytree(DATA / name, name))


def capital(request: Any) -> str:
    """Answers in the prompt format in which it is asked."""
    return "capital: Paris" if "Reply with: capital: …" in str(request) else '{"capital": "Paris, in JSON"}'


@pytest.mark.parametrize("name", PROGRAM_FOLDERS)
def test_a_former_artifact_runs_in_the_prompt_format_that_it_was_compiled_in(name: str) -> None:
    program = assay.load(opened(name), trust=True)
    lm = scripted_lm(capital)
    with dspy.context(lm=lm):
        prediction = program(country="France")
    assert (prediction.capital, prediction.format) == ("Paris", "lean")
    assert lm.scripted.calls == 1


def test_a_deep_copy_of_a_former_program_has_its_predictors_and_format() -> None:
    program = assay.load(opened("parameters_attribute"), trust=True)
    copy = program.reset_copy()  # calls parameters(), which was the attribute
    assert (copy.adapter, len(copy.parameters())) == ("lean", 1)
    copy.set_parameters({"max_steps": 20})
    lm = scripted_lm(capital)
    with dspy.context(lm=lm):
        copy(country="France")
    assert lm.scripted.calls == 2  # the program divides max_steps by 10


@pytest.mark.parametrize("name", ["adapter_argument", "moved_modules"])
def test_the_rubric_of_a_former_artifact_scores(name: str) -> None:
    rubric = assay.load_rubric(opened(name) / "rubric" / "rubric.yaml", trust=True)
    task = {"inputs": {"country": "France"}, "expected": {"capital": "Paris"}}
    assert rubric.score(task, {"capital": "Paris"}).value == 1.0
    assert rubric.score(task, {"capital": "a city that is far too long"}).value == 0.0


def test_a_former_judge_judges() -> None:  # 5d43a72
    judge = assay.load_judge(opened("judge"), trust=True)
    with dspy.context(lm=scripted_lm(lambda _: {"yes": 0.9, "no": 0.1}, logprobs=True)):
        assert judge(task_input="a letter", output="thank you, dear friend").verdict == "yes"


def with_code(name: str, code: str) -> Path:
    """A former artifact with another first line, and valid hashes."""
    artifact = opened(name)
    source, place = artifact / "source" / "capital.py", artifact / "manifest.json"
    source.write_text(code + source.read_text())
    manifest = json.loads(place.read_text())
    manifest["source"]["files"]["capital.py"] = hash_of_text(source.read_text())
    place.write_text(json.dumps({**manifest, "sha256": hash_of_manifest(manifest)}))
    return artifact


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("from assay.tuning import TuneConfig\n", "assay.tuning.TuneConfig"),
        ("import assay.showing\n", "assay.showing"),
        ("from assay import showing\n", "assay.showing"),
    ],
)
def test_an_import_of_a_removed_module_says_what_to_do(line: str, missing: str) -> None:
    artifact = with_code("adapter_argument", line)
    with pytest.raises(
        assay.AssayError, match=rf"imports {missing}, which assay \S+ does not have\. Use the assay that wrote it"
    ):
        assay.load(artifact, trust=True)


@pytest.mark.parametrize(
    "lines",
    [
        "try:\n    import assay.showing\nexcept ImportError:\n    pass\n",
        "import assay.optimizers\nassay.optimizers.AgentMetrics, assay.evaluation.AgentMetrics\n",
        "import assay.judges.ranking as ranking\nranking.win_rates\n",
        "from importlib import import_module\nimport_module('assay.rubrics.reward').trl_reward\n",
        "from assay.judges.ranking import *\nwin_rates\n",
        "from assay.api import compile, load_rubric\ncompile.__call__, load_rubric.__call__\n",
    ],
)
def test_other_forms_of_former_imports_run(lines: str) -> None:
    assert assay.load(with_code("adapter_argument", lines), trust=True) is not None


def test_a_file_outside_of_an_artifact_must_use_current_names() -> None:
    Path("capital.py").write_text((DATA / "adapter_argument" / "source" / "capital.py").read_text())
    with pytest.raises(TypeError, match="adapter"):
        load_source("capital.py").Capital()
    Path("mine.py").write_text("from assay.rubrics.yamlfiles import MOST_BYTES\n")
    with pytest.raises(ModuleNotFoundError, match="yamlfiles"):
        load_source("mine.py")


def test_every_replacement_exists() -> None:
    for place in {place for places in MODULES.values() for place in places}:
        importlib.import_module(place)
    for today, former in PROGRAMS.items():
        classes = []
        for path in (today, former):
            module, _, name = path.rpartition(".")
            classes.append(getattr(importlib.import_module(module), name))
        assert issubclass(classes[1], classes[0])
