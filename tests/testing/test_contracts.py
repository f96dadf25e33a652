"""The contract suites: ours meet them, and each fails on an implementation that is broken in a known way."""

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import dspy
import pytest
import sqlalchemy as sa

from assay.datasets import Task
from assay.programs import (
    AgentParameters,
    ToolAgent,
)
from assay.rubrics import Criterion, Grade, checks
from assay.testing import SyntheticAgent, scripted_lm
from assay.testing.contracts import (
    AgentContract,
    CriterionContract,
    OptimizerContract,
    StoreContract,
)
from assay.traces import Store
from assay.traces.store.tables import metadata

# -- stores


class TestStore(StoreContract):
    @pytest.fixture(autouse=True, params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
    def _at(self, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        self.url = str(tmp_path / "s.db")
        if request.param == "postgres":
            self.url = request.getfixturevalue("postgres_url")
            engine = sa.create_engine(self.url.replace("postgresql://", "postgresql+psycopg://"))
            metadata.drop_all(engine)
            engine.dispose()

    def make(self) -> Store:
        return Store(self.url)


class _TemporaryStore(StoreContract):
    kind: type[Store] = Store

    def make(self) -> Store:
        if not hasattr(self, "folder"):
            self.folder = tempfile.TemporaryDirectory()
        return self.kind(Path(self.folder.name) / "s.db")


class NanAsZero(Store):
    def put_rollout(self, rollout: Any, **options: Any) -> None:
        super().put_rollout(
            dataclasses.replace(rollout, score=0.0 if rollout.score != rollout.score else rollout.score), **options
        )


class Oldest(Store):
    def rollouts(self, **options: Any) -> Iterator[Any]:
        yield from reversed(list(super().rollouts(**{**options, "limit": None})))


class Forgets(Store):
    def put_transition(self, rollout_id: str, transition: Any, **options: Any) -> None:
        if transition.t != 1:
            super().put_transition(rollout_id, transition, **options)


class AnyRating(Store):
    def rate(self, rollout_id: str, rating: float, **options: Any) -> Any:
        return super().rate(rollout_id, rating if 0 <= rating <= 1 else 0.5, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fails"),
    [
        (Store, set()),
        (NanAsZero, {"test_nan_and_infinity_are_never_numbers"}),
        (Oldest, {"test_the_newest_rollouts_come_first"}),
        (Forgets, {"test_a_rollout_is_read_back_equal"}),
        (AnyRating, {"test_ratings_are_between_0_and_1"}),
    ],
)
def test_a_broken_store_fails(kind: type[Store], fails: set[str]) -> None:
    assert type("Suite", (_TemporaryStore,), {"kind": kind}).failures().keys() == fails


# -- agents


class TestSyntheticAgent(AgentContract):
    def make(self) -> Any:
        return SyntheticAgent(tasks=6)

    def tasks(self) -> Any:
        return SyntheticAgent(tasks=6).tasks


def double(n: int) -> int:
    """Twice a number."""
    return 2 * n


class TestToolAgent(AgentContract):
    def make(self) -> Any:
        arguments = {"double": {"n": (int, dspy.InputField())}}
        return ToolAgent("question -> answer", [double], arguments=arguments)

    def tasks(self) -> Any:
        return [{"question": "Twice 3?"}, {"question": "Twice 4?"}]

    def context(self) -> AbstractContextManager[Any]:
        return dspy.context(lm=scripted_lm(_decides))


def _decides(request: Any) -> str:
    """Answers every field of its form by the first choice, so without a tool."""
    fields = request.config.response_format["schema"]["properties"]
    return json.dumps({name: _first(kind) for name, kind in fields.items()})


def _first(kind: Mapping[str, Any]) -> Any:
    if "enum" in kind:
        return kind["enum"][-1]
    return {"integer": 1, "number": 0.0, "boolean": False}.get(kind.get("type", "string"), "6")


class Careless(SyntheticAgent):
    """Accepts every value."""

    def set_parameters(self, parameters: Mapping[str, Any]) -> None:
        self.parameters = AgentParameters.model_construct(**{**self.parameters.model_dump(), **parameters})


class HalfSet(SyntheticAgent):
    """Has already changed the first parameters when it rejects a later one."""

    def set_parameters(self, parameters: Mapping[str, Any]) -> None:
        for name, value in parameters.items():
            super().set_parameters({name: value})


class Counting(SyntheticAgent):
    """Answers by how often it was called."""

    def execute(self, task: Any) -> Any:
        return super().execute(task), self.executed


class Shared(SyntheticAgent):
    def __deepcopy__(self, memo: Any) -> "Shared":
        return self


class _Agents(AgentContract):
    kind: Any = SyntheticAgent

    def make(self) -> Any:
        return self.kind(tasks=40)

    def tasks(self) -> Any:
        return SyntheticAgent(tasks=40).tasks


@pytest.mark.parametrize(
    ("kind", "fails"),
    [
        (SyntheticAgent, set()),
        (Careless, {"test_wrong_parameters_are_refused_by_name_and_change_nothing"}),
        (HalfSet, {"test_wrong_parameters_are_refused_by_name_and_change_nothing"}),
        (Counting, {"test_the_same_task_gives_the_same_output"}),
        (Shared, {"test_a_copy_behaves_alike_and_has_its_own_parameters"}),
    ],
)
def test_a_broken_agent_fails(kind: Any, fails: set[str]) -> None:
    assert type("Suite", (_Agents,), {"kind": kind}).failures().keys() >= fails
    assert bool(type("Suite", (_Agents,), {"kind": kind}).failures()) == bool(fails)


def _criterion(name: str, task: Mapping[str, Any], higher: Any, lower: Any, **arguments: Any) -> Any:
    return name, Task(id="t", inputs={"question": "?"}, expected=dict(task)), higher, lower, arguments


SHIPPED = [
    _criterion("exact", {"answer": "4"}, "4", "5"),
    _criterion("numeric", {"answer": "4"}, "It is 4", "It is 5"),
    _criterion("regex", {}, "ab12", "ab", pattern=r"[a-z]+\d+"),
    _criterion("contains", {}, "a fox", "a cat", text="fox"),
    _criterion("one_of", {}, "yes", "maybe", values=["yes", "no"]),
    _criterion(
        "json_schema",
        {},
        '{"a": 1}',
        '{"a": "x"}',
        schema={"type": "object", "properties": {"a": {"type": "integer"}}},
        field="answer",
    ),
    _criterion("length", {}, "long " * 50, "short", max_tokens=10),
]


# -- criteria


class TestShippedChecks(CriterionContract):
    @pytest.fixture(autouse=True, params=SHIPPED, ids=lambda case: case[0])
    def _of(self, request: pytest.FixtureRequest) -> None:
        self.name, self.of_task, self.high, self.low, self.arguments = request.param

    def make(self) -> Criterion:
        return Criterion(name=self.name, check=getattr(checks, self.name), arguments=self.arguments)

    def task(self) -> Task:
        return self.of_task

    def higher(self) -> Mapping[str, Any]:
        return {"answer": self.high}

    def lower(self) -> Mapping[str, Any]:
        return {"answer": self.low}


class _Length(CriterionContract):
    check: Any = None
    pickles = False

    def make(self) -> Criterion:
        return Criterion(name="short", check=type(self).__dict__["check"].__func__)

    def task(self) -> Task:
        return Task(id="t", inputs={"question": "?"}, expected={})

    def higher(self) -> Mapping[str, Any]:
        return {"answer": "abc"}

    def lower(self) -> Mapping[str, Any]:
        return {"answer": "a" * 40}


_CALLS: list[int] = []


def _sound(task: Any, prediction: Any, rollout: Any) -> Any:
    return max(0.0, 1 - len(str(prediction.get("answer", ""))) / 50)


def _unbounded(task: Any, prediction: Any, rollout: Any) -> Any:
    return 1 - len(str(prediction.get("answer", ""))) / 50


def _nan(task: Any, prediction: Any, rollout: Any) -> Any:
    return _sound(task, prediction, rollout) if prediction.get("answer") else float("nan")


def _raises(task: Any, prediction: Any, rollout: Any) -> Any:
    return 1 - min(50, len(prediction["answer"])) / 50


def _turned(task: Any, prediction: Any, rollout: Any) -> Any:
    return Grade(value=1 - _sound(task, prediction, rollout))


def _changes(task: Any, prediction: Any, rollout: Any) -> Any:
    return max(0.0, 1 - len(str(prediction.pop("answer", ""))) / 50)


def _varies(task: Any, prediction: Any, rollout: Any) -> Any:
    _CALLS.append(1)
    return _sound(task, prediction, rollout) / len(_CALLS)


@pytest.mark.parametrize(
    ("check", "fails"),
    [
        (_sound, set()),
        (_unbounded, {"test_hostile_predictions_raise_nothing"}),
        (_nan, {"test_hostile_predictions_raise_nothing"}),
        (_raises, {"test_hostile_predictions_raise_nothing"}),
        (_turned, {"test_the_higher_prediction_gets_the_higher_grade"}),
        (_changes, {"test_task_and_prediction_are_not_changed"}),
        (_varies, {"test_the_same_prediction_gets_the_same_grade"}),
    ],
)
def test_a_broken_check_fails(check: Any, fails: set[str]) -> None:
    assert type("Suite", (_Length,), {"check": staticmethod(check)}).failures().keys() == fails


def test_a_check_that_cannot_be_pickled_fails() -> None:
    suite = type(
        "Suite",
        (_Length,),
        {"check": staticmethod(lambda task, prediction, rollout: _sound(task, prediction, rollout)), "pickles": True},
    )
    assert suite.failures().keys() == {"test_it_can_be_pickled"}


# -- optimizers


@pytest.mark.slow
@pytest.mark.parametrize("name", ["labeled", "bootstrap", "knn", "copro", "infer-rules"])
def test_a_shipped_optimizer_meets_the_contract(name: str) -> None:
    assert type("Suite", (OptimizerContract,), {"make": lambda self: name}).failures() == {}


@pytest.mark.tutorial
@pytest.mark.slow
@pytest.mark.parametrize("name", ["auto", "bootstrap-search", "mipro", "simba", "gepa", "ensemble", "optuna"])
def test_a_slow_shipped_optimizer_meets_the_contract(name: str) -> None:
    assert type("Suite", (OptimizerContract,), {"make": lambda self: name}).failures() == {}


BROKEN = """
import itertools
from dspy import LabeledFewShot

class Raises(LabeledFewShot):
    def compile(self, student, *, trainset, sample=True):
        raise RuntimeError("always")

class Varies(LabeledFewShot):
    numbers = itertools.count()
    def compile(self, student, *, trainset, sample=True):
        made = super().compile(student, trainset=trainset, sample=False)
        for predictor in made.predictors():
            predictor.signature = predictor.signature.with_instructions(f"Add two to the number. {next(self.numbers)}")
        return made

class Useless(LabeledFewShot):
    def compile(self, student, *, trainset, sample=True):
        made = student.deepcopy()
        for predictor in made.predictors():
            predictor.signature = predictor.signature.with_instructions("Say something.")
        return made

class Invents(LabeledFewShot):
    def compile(self, student, *, trainset, sample=True):
        student(question="What do you say to number 1000.")
        return super().compile(student, trainset=trainset, sample=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fails"),
    [
        ("Raises", "test_it_proposes_a_better_program_that_is_evaluated_on_every_test_task"),
        ("Useless", "test_it_proposes_a_better_program_that_is_evaluated_on_every_test_task"),
        ("Varies", "test_the_same_seed_gives_the_same_program"),
        ("Invents", "test_the_search_runs_tasks_of_train_and_val_only"),
    ],
)
def test_a_broken_optimizer_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fails: str) -> None:
    (tmp_path / "broken_optimizers.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert fails in type("Suite", (OptimizerContract,), {"make": lambda self: f"broken_optimizers:{name}"}).failures()


# -- the suites themselves


def test_a_suite_without_make_names_the_missing_method() -> None:
    failures = StoreContract.failures()
    assert set(failures.values()) == {"NotImplementedError: StoreContract must override make()"}


@pytest.mark.slow
def test_the_suites_import_no_pytest() -> None:
    import subprocess
    import sys

    code = "import assay.testing.contracts, sys; print('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
