"""The contract suites: ours meet them, and each fails on an implementation that is broken in a known way."""

import dataclasses
import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import dspy
import pytest
import sqlalchemy as sa

import assay
from assay.datasets import Task
from assay.judges import Judge, ListwiseJudge, PairwiseJudge, PointwiseJudge
from assay.programs import (
    AgentParameters,
    DocumentIndex,
    Environment,
    EnvironmentStep,
    InvalidAction,
    Passage,
    TextRetriever,
    ToolAgent,
)
from assay.rubrics import Criterion, Grade
from assay.testing import AnswerKeyJudge, PairKeyJudge, SyntheticAgent, scripted_lm
from assay.testing.contracts import (
    AgentContract,
    CriterionContract,
    EnvironmentContract,
    JudgeContract,
    ListwiseJudgeContract,
    OptimizerContract,
    PairwiseJudgeContract,
    RetrieverContract,
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


# -- criteria


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


def _sound(task: Any, prediction: Any, rollout: Any) -> Any:
    return max(0.0, 1 - len(str(prediction.get("answer", ""))) / 50)


_NUMBERS = itertools.count(1)
_HOSTILE = "test_hostile_predictions_raise_nothing"


@pytest.mark.parametrize(
    ("check", "fails"),
    [
        (_sound, set()),
        (lambda task, made, rollout: 1 - len(str(made.get("answer", ""))) / 50, {_HOSTILE}),  # below 0
        (lambda task, made, rollout: _sound(task, made, rollout) if made.get("answer") else float("nan"), {_HOSTILE}),
        (lambda task, made, rollout: 1 - min(50, len(made["answer"])) / 50, {_HOSTILE}),  # raises
        (
            lambda task, made, rollout: Grade(value=1 - _sound(task, made, rollout)),
            {"test_the_higher_prediction_gets_the_higher_grade"},
        ),
        (
            lambda task, made, rollout: max(0.0, 1 - len(str(made.pop("answer", ""))) / 50),
            {"test_task_and_prediction_are_not_changed"},
        ),
        (
            lambda task, made, rollout: _sound(task, made, rollout) / next(_NUMBERS),
            {"test_the_same_prediction_gets_the_same_grade"},
        ),
    ],
)
def test_a_broken_check_fails(check: Any, fails: set[str]) -> None:
    assert type("Suite", (_Length,), {"check": staticmethod(check)}).failures().keys() == fails


# -- optimizers


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("labeled", "bootstrap", "knn"),
        *(pytest.param(name, marks=pytest.mark.tutorial) for name in ("auto", "bootstrap-search", "mipro", "simba")),
        *(pytest.param(name, marks=pytest.mark.tutorial) for name in ("gepa", "ensemble", "optuna", "copro")),
        pytest.param("infer-rules", marks=pytest.mark.tutorial),
    ],
)
def test_a_shipped_optimizer_meets_the_contract(name: str) -> None:
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


def _judges_well(request: Any) -> Any:
    """Finds `4` in its inputs, in every prompt format."""
    text = request.messages[-1].text
    inputs = dict(re.findall(r'\b(\w{1,20}): ("(?:[^"\\]|\\.)*")', text))
    first, second = (str(inputs.get(name, "")) == '"4"' for name in ("output_a", "output_b"))
    if "output_a" in text:
        return json.dumps({"verdict": "tie" if first == second else "a" if first else "b"})
    if "outputs" in text:
        lines = re.findall(r"\b([A-Z]): (.*)", text.encode().decode("unicode_escape", "replace"))
        return json.dumps(
            {"grades": [{"id": letter, "grade": "yes" if line.strip(' "') == "4" else "no"} for letter, line in lines]}
        )
    return json.dumps({"verdict": "yes" if '"4"' in text else "no"})


class _Asks:
    def context(self) -> AbstractContextManager[Any]:
        return dspy.context(lm=scripted_lm(_judges_well))


class TestPointwiseJudge(_Asks, JudgeContract):
    def make(self) -> Judge:
        return PointwiseJudge("Is the output right?", reading="text")


class TestPairwiseJudge(_Asks, PairwiseJudgeContract):
    def make(self) -> Judge:
        return PairwiseJudge(reading="text")


class TestListwiseJudge(_Asks, ListwiseJudgeContract):
    def make(self) -> ListwiseJudge:
        return ListwiseJudge(reading="text")


class TestAnswerKeyJudge(JudgeContract):
    def make(self) -> Judge:
        return Keyed()


class TestPairKeyJudge(PairwiseJudgeContract):
    def make(self) -> Judge:
        return PairKeyed()


class Keyed(AnswerKeyJudge):
    def __init__(self) -> None:
        super().__init__("Is it right?", key={"How much is 2 + 2?": "4"})


class PairKeyed(PairKeyJudge):
    def __init__(self) -> None:
        super().__init__(key={"How much is 2 + 2?": "4"})


def stating(**changes: Any) -> type[Keyed]:
    """A judge whose judgements have these values."""

    class Stating(Keyed):
        def judged(self, reading: Any, verdict: Any = None) -> Any:
            judgement = super().judged(reading, verdict)
            for name, value in changes.items():
                setattr(judgement, name, value)
            return judgement

    return Stating


class Backwards(Keyed):
    def read(self, inputs: Mapping[str, Any]) -> Any:
        reading, verdict = super().read(inputs)
        return reading, self.labels[1 - self.labels.index(str(verdict))]


class Raises(Keyed):
    def read(self, inputs: Mapping[str, Any]) -> Any:
        return None, self.labels[-1 if inputs["output"].strip() == "4" else 0]


class Alternates(Keyed):
    count = 0

    def read(self, inputs: Mapping[str, Any]) -> Any:
        Alternates.count += 1
        return None, self.labels[Alternates.count % 2]


class Lenient(Keyed):
    """Gives verdicts on items that it did not receive."""

    def forward(self, **inputs: Any) -> Any:
        return super().forward(**{"task_input": "How much is 2 + 2?", "output": "", **inputs})


class NoConfig(Keyed):
    @property
    def config(self) -> dict[str, Any]:
        return {**super().config, "shows": {"task_input", "output"}}


RANGES = "test_verdict_probabilities_confidence_and_value_are_in_range"


@pytest.mark.parametrize(
    ("kind", "fails"),
    [
        (Keyed, set()),
        (stating(verdict="perhaps"), {RANGES}),
        (stating(value=10.0), {RANGES}),
        (stating(value=float("nan")), {RANGES}),
        (stating(probabilities={"no": 0.25, "yes": 0.25}), {RANGES}),
        (Backwards, {"test_the_better_output_has_no_lower_value"}),
        (Raises, {"test_hostile_inputs_give_a_verdict_or_none"}),
        (Alternates, {"test_the_same_inputs_get_the_same_verdict_and_are_not_changed"}),
        (Lenient, {"test_a_missing_input_is_named"}),
        (NoConfig, {"test_a_judge_built_from_its_config_gives_the_same_verdict"}),
    ],
)
def test_a_broken_judge_fails(kind: Any, fails: set[str]) -> None:
    failures = type("Suite", (JudgeContract,), {"make": lambda self: kind()}).failures()
    assert failures.keys() >= fails
    assert bool(failures) == bool(fails)


def test_a_pairwise_judge_that_prefers_the_first_place_fails() -> None:
    class First(PairKeyed):
        def judged(self, reading: Any, verdict: Any = None) -> Any:
            judgement = super().judged(reading, verdict)
            judgement.verdict, judgement.value, judgement.probabilities = self.labels[0], 0.0, None
            return judgement

    failures = type("Suite", (PairwiseJudgeContract,), {"make": lambda self: First()}).failures()
    assert failures.keys() == {"test_swapped_outputs_swap_the_verdict"}


@pytest.mark.parametrize(
    ("grades", "fails"),
    [
        ({0: 1.0, 2: 2.0}, "test_grades_are_in_range_and_the_ranking_has_their_order"),
        ({0: float("nan")}, "test_grades_are_in_range_and_the_ranking_has_their_order"),
        ({0: 0.1, 2: 0.9}, "test_the_best_output_is_not_graded_below_the_worst"),
        ({0: 0.9, 7: 0.1}, "test_grades_are_in_range_and_the_ranking_has_their_order"),
    ],
)
def test_a_broken_listwise_judge_fails(grades: Any, fails: str) -> None:
    class Fixed(ListwiseJudge):
        def forward(self, **inputs: Any) -> Any:
            return dspy.Prediction(grades=grades, ranking=sorted(grades, key=lambda key: -grades[key]))

    failures = type("Suite", (ListwiseJudgeContract,), {"make": lambda self: Fixed()}).failures()
    assert {fails, "test_fewer_than_two_outputs_are_not_graded"} <= failures.keys()


class Counter(Environment):
    """Counts to three; `one` adds one."""

    def reset(self, task: Task) -> EnvironmentStep:
        self.count = 0
        return self.seen()

    def step(self, action: str) -> EnvironmentStep:
        if self.count >= 3:
            raise InvalidAction("it has ended")
        if action != "one":
            raise InvalidAction("write one")
        self.count += 1
        return self.seen()

    def seen(self) -> EnvironmentStep:
        done = self.count >= 3
        return EnvironmentStep(observation=str(self.count), done=done, actions=() if done else ("one",))


class Remembers(Counter):
    """The second episode begins at one."""

    count = 0

    def reset(self, task: Task) -> EnvironmentStep:
        self.count = min(self.count, 1)
        return self.seen()


class SharedCount(Counter):
    counts: ClassVar[list[int]] = [0]

    def reset(self, task: Task) -> EnvironmentStep:
        self.counts[0] = 0
        return super().reset(task)

    def step(self, action: str) -> EnvironmentStep:
        step = super().step(action)
        self.counts[0] += 1
        return dataclasses.replace(step, observation=str(self.counts[0]))


def counter(**methods: Any) -> type[Counter]:
    """A counter with other methods."""
    return type("Broken", (Counter,), methods)


def slips(self: Counter, action: str) -> EnvironmentStep:
    self.count += action != "one"
    return Counter.step(self, action)


def changes(self: Counter, task: Task) -> EnvironmentStep:
    task.inputs["seed"] = 5  # type: ignore[index]
    return Counter.reset(self, task)


def pays(self: Counter, action: str) -> EnvironmentStep:
    return Counter.step(self, action) if self.count < 3 else EnvironmentStep(observation="", reward=1.0, done=True)


def opaque(self: Counter) -> EnvironmentStep:
    return dataclasses.replace(Counter.seen(self), info={"self": object})


def crashes(self: Counter, action: str) -> EnvironmentStep:
    return Counter.step(self, {"one": "one"}[action])


class Unclosable(Counter):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise RuntimeError("closed before")
        self.closed = True


class _Environments(EnvironmentContract):
    kind: type[Environment] = Counter

    def make(self) -> Environment:
        return self.kind()

    def tasks(self) -> list[Task]:
        return [Task(id="1", inputs={"seed": 1})]


class TestCounter(_Environments):
    pass


@pytest.mark.parametrize(
    ("kind", "fails"),
    [
        (Remembers, {"test_a_task_is_the_same_for_every_rollout"}),
        (SharedCount, {"test_objects_share_no_state"}),
        (counter(seen=lambda self: EnvironmentStep(observation="", actions=("one",))), {"test_episodes_end"}),
        (counter(step=crashes), {"test_hostile_actions_are_refused_or_taken"}),
        (counter(step=slips), {"test_hostile_actions_are_refused_or_taken"}),
        (counter(step=pays), {"test_nothing_is_gained_after_the_end"}),
        (counter(reset=changes), {"test_a_task_is_not_changed"}),
        (counter(seen=opaque), {"test_steps_have_the_right_type"}),
        (Unclosable, {"test_it_can_be_closed_at_any_time"}),
    ],
)
def test_a_broken_environment_fails(kind: type[Environment], fails: set[str]) -> None:
    contract = type("Broken", (_Environments,), {"kind": kind})
    assert fails <= contract.failures().keys()


class TestTextRetriever(RetrieverContract):
    def make(self) -> TextRetriever:
        return TextRetriever(self.documents)


class TestDocumentIndex(RetrieverContract):
    @pytest.fixture(autouse=True, params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
    def _at(self, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        self.url = str(tmp_path / "s.db")
        if request.param == "postgres":
            self.url = request.getfixturevalue("postgres_url")
            engine = sa.create_engine(self.url.replace("postgresql://", "postgresql+psycopg://"))
            metadata.drop_all(engine)
            engine.dispose()
        self.folder = tmp_path / "docs"
        self.folder.mkdir()
        for name, text in self.documents.items():
            (self.folder / name).write_text(text)

    def make(self) -> DocumentIndex:
        assay.index(self.folder, store=self.url)
        return DocumentIndex(self.url)


class _Broken(RetrieverContract):
    """A retriever whose results are changed by `of`."""

    def of(self, passages: list[Passage], query: str, k: int) -> list[Passage]:
        return passages

    def make(self) -> Any:
        suite, inner = self, TextRetriever(self.documents)

        class Changed:
            def search(self, query: str, k: int = 5) -> list[Passage]:
                return suite.of(inner.search(query, k), query, k)

        return Changed()


def changed(of: Callable[[list[Passage], str, int], list[Passage]]) -> type[RetrieverContract]:
    """The suite of a retriever whose results are changed."""
    return type("Changed", (_Broken,), {"of": lambda self, *arguments: of(*arguments)})


def redacted(passages: list[Passage], query: str, k: int) -> list[Passage]:
    return [dataclasses.replace(passage, text=passage.text.replace("Ignore", "")) for passage in passages]


def with_operators(passages: list[Passage], query: str, k: int) -> list[Passage]:
    if '"' in query:
        raise ValueError("unbalanced quote")
    without = query.partition(" NOT ")[2]
    return [passage for passage in passages if not without or without not in passage.text]


def twice(passages: list[Passage], query: str, k: int) -> list[Passage]:
    return [part for p in passages for part in (p, dataclasses.replace(p, id=f"{p.id}2"))][:k]


@pytest.mark.parametrize(
    ("suite", "failed"),
    [
        (_Broken, set()),
        (
            changed(lambda passages, query, k: [*passages, Passage(id="more", text="more")]),
            {"test_passages_are_the_best_k_in_order"},
        ),
        (
            changed(lambda passages, query, k: passages[::-1]),
            {"test_passages_are_the_best_k_in_order", "test_a_question_finds_its_document"},
        ),
        (changed(redacted), {"test_a_question_finds_its_document"}),
        (changed(with_operators), {"test_any_text_is_a_query", "test_operators_are_words"}),
        (changed(twice), {"test_equal_texts_are_one_passage"}),
    ],
)
def test_broken_retrievers_fail_their_contract(suite: type[RetrieverContract], failed: set[str]) -> None:
    assert failed <= suite.failures().keys() if failed else suite.failures() == {}
