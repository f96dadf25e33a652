"""Each run of a program works on a copy of its own: no prompt shows another task, and nothing of a run stays."""

import copy
import gc
import queue
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import dspy
import pytest

import assay
from assay.datasets import Task
from assay.errors import ProgramError
from assay.evaluation.evaluation import evaluate
from assay.evaluation.session import RecordedProgram, Session
from assay.models import Meter
from assay.optimizers.prompts.named import to_examples
from assay.programs.wrapping import as_module
from assay.rubrics import Criterion, Rubric
from assay.rubrics.checks import exact
from assay.testing import scripted_lm
from assay.traces import Recorder

TASKS = [
    Task(id=str(n), inputs={"question": f"What is number {n}?"}, expected={"answer": str(n)}, metadata={})
    for n in range(6)
]


class Notes(dspy.Module):
    """Shows the model the questions that it has noted, where a subclass keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = dspy.Predict("question, notes -> answer")
        self.prepare()

    def prepare(self) -> None:
        self.seen: Any = []

    def note(self, question: str) -> None:
        self.seen.append(question)

    def notes(self) -> Any:
        return self.seen

    def forward(self, question: str) -> Any:
        self.note(question)
        return self.answer(question=question, notes=str(self.notes()))


class InDictionary(Notes):
    def prepare(self) -> None:
        self.seen = {}

    def note(self, question: str) -> None:
        self.seen[question] = True


class InText(Notes):
    def prepare(self) -> None:
        self.seen = ""

    def note(self, question: str) -> None:
        self.seen += question


class InNestedTuple(Notes):
    def prepare(self) -> None:
        self.seen = (("questions", []),)

    def note(self, question: str) -> None:
        self.seen[0][1].append(question)


class InSubmodule(Notes):
    def prepare(self) -> None:
        self.seen, self.inner = [], {"first": [Notes()]}

    def note(self, question: str) -> None:
        self.inner["first"][0].seen.append(question)

    def notes(self) -> Any:
        return self.inner["first"][0].seen


class InDemos(Notes):
    def note(self, question: str) -> None:
        self.answer.demos.append(dspy.Example(question=question, notes="", answer="?"))


class InClassThroughSelf(Notes):
    shared: ClassVar[list[str]] = []

    def note(self, question: str) -> None:
        self.shared.append(question)

    def notes(self) -> Any:
        return self.shared


class BesideLock(Notes):
    def prepare(self) -> None:
        self.seen, self.lock = [], threading.Lock()


class Desk:
    def __init__(self) -> None:
        self.lock, self.seen = threading.RLock(), list[str]()


class BesideLockOfObject(Notes):
    desk: ClassVar[type] = Desk

    def prepare(self) -> None:
        self.owner = self.desk()
        self.seen = self.owner.seen


class Slotted:
    __slots__ = ("lock", "seen")

    def __init__(self) -> None:
        self.lock, self.seen = threading.Lock(), list[str]()


class BesideLockInSlots(BesideLockOfObject):
    desk = Slotted


class Vector:
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy as np

        return np.zeros(3)


class InLocal(Notes):
    def prepare(self) -> None:
        self.local = threading.local()

    def note(self, question: str) -> None:
        self.local.seen = [*getattr(self.local, "seen", []), question]

    def notes(self) -> Any:
        return self.local.seen


class BesideVector(Notes):
    def prepare(self) -> None:
        self.seen, self.vector = [], Vector()


class CopiedWithItsLock(dspy.BaseLM):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(model="own")
        self.lock = threading.Lock()

    def copy(self, **_: Any) -> Any:
        return copy.deepcopy(self)


class BesideModule(Notes):
    def prepare(self) -> None:
        self.seen, self.library = [], queue

    def notes(self) -> Any:
        return self.seen if self.library is queue else None


class BesideModelWithoutCopy(Notes):
    def prepare(self) -> None:
        self.seen, self.model = [], CopiedWithItsLock()


class WithoutHash(Notes):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, WithoutHash)


class ThroughItsOwnMethod(Notes):
    def prepare(self) -> None:
        self.seen = []
        self.bound, self.function = self.keep, lambda question: self.seen.append(question)

    def keep(self, question: str) -> None:
        self.seen.append(question)

    def note(self, question: str) -> None:
        self.bound(question)
        self.function(question)


class InLongList(Notes):
    def prepare(self) -> None:
        self.seen = ["a document"] * 20_000

    def notes(self) -> Any:
        return self.seen[20_000:]


class InHistories(Notes):
    def note(self, question: str) -> None:
        pass

    def notes(self) -> Any:
        return [entry["messages"] for owner in (self, self.answer, dspy.settings.lm) for entry in owner.history]


class Executing:
    def __init__(self) -> None:
        self.seen, self.answer = list[str](), dspy.Predict("question, notes -> answer")

    def set_parameters(self, parameters: Any) -> None:
        self.parameters = parameters

    def execute(self, task: Any) -> Any:
        self.seen.append(task["question"])
        return self.answer(question=task["question"], notes=str(self.seen))


def function_around_module() -> Callable[[str], Any]:
    inner = Notes()
    return lambda question: inner(question=question)


class WrappedTool(Notes):
    def prepare(self) -> None:
        self.seen = []

        def logged(tool: Callable[[str], None]) -> Callable[[str], None]:
            return lambda question: tool(question)

        self.tools = [dspy.Tool(logged(lambda question: self.seen.append(question)), name="n", args={"question": {}})]

    def note(self, question: str) -> None:
        self.tools[0](question=question)


def function_with_default() -> Callable[..., Any]:
    answer = dspy.Predict("question, notes -> answer")

    def function(question: str, seen: list[str] = []) -> Any:  # noqa: B006
        seen.append(question)
        return answer(question=question, notes=str(seen))

    return function


def prompts_of(program: Any, *, threads: int = 3) -> list[str]:
    """The prompts of an evaluation of `TASKS`."""
    prompts: list[str] = []

    def script(request: Any) -> str:
        prompts.append(str(request))
        return "[[ ## answer ## ]]\n1\n\n[[ ## completed ## ]]"

    session = Session(
        scripted_lm(script), Rubric("r", [Criterion(name="right", check=exact)]), Recorder(), Meter(), threads=threads
    )
    evaluate(RecordedProgram(as_module(program), session), TASKS, session)
    return prompts


def tasks_in(prompt: str) -> int:
    return sum(task.inputs["question"] in prompt for task in TASKS)


@pytest.mark.parametrize(
    "build",
    [
        Notes, InDictionary, InText, InNestedTuple, InSubmodule, InDemos, InClassThroughSelf, BesideLock,
        BesideLockOfObject, BesideLockInSlots, InLocal, BesideVector, BesideModelWithoutCopy, BesideModule,
        WithoutHash, WrappedTool, ThroughItsOwnMethod, InLongList, InHistories, Executing, function_around_module,
        function_with_default,
    ],
)  # fmt: skip
def test_no_prompt_shows_another_task(build: Callable[[], Any]) -> None:
    prompts = prompts_of(build())
    assert len(prompts) == len(TASKS)
    assert {tasks_in(prompt) for prompt in prompts} == {1}


class InClass(Notes):
    shared: ClassVar[list[str]] = []

    def note(self, question: str) -> None:
        type(self).shared.append(question)


class LastInClass(Notes):
    last = ""

    @classmethod
    def keep(cls, question: str) -> None:
        cls.last = question

    def note(self, question: str) -> None:
        self.keep(question)


class LastInNewAttribute(LastInClass):
    """The class inherits `last`; its run sets one of its own."""


class InDefaultArgument(Notes):
    def note(self, question: str, earlier: list[str] = []) -> None:  # noqa: B006
        earlier.append(question)


class Uncopied:
    def __init__(self) -> None:
        self.questions: list[str] = []

    def __deepcopy__(self, memo: object) -> Any:
        raise TypeError("no copies")


class InUncopied(Notes):
    def prepare(self) -> None:
        self.seen = Uncopied()

    def note(self, question: str) -> None:
        self.seen.questions.append(question)


class UncopiedInSlots:
    __slots__ = ("last", "lock")

    def __init__(self) -> None:
        self.last = "none"

    def __deepcopy__(self, memo: object) -> Any:
        raise TypeError("no copies")


class InUncopiedSlots(Notes):
    def prepare(self) -> None:
        self.seen = UncopiedInSlots()

    def note(self, question: str) -> None:
        self.seen.last = question


class InQueue(Notes):
    def prepare(self) -> None:
        self.seen = queue.Queue[str]()

    def note(self, question: str) -> None:
        self.seen.put(question)


class InDatabase(Notes):
    def prepare(self) -> None:
        self.seen = sqlite3.connect(":memory:", check_same_thread=False)
        self.seen.execute("CREATE TABLE seen (question)")

    def note(self, question: str) -> None:
        self.seen.execute("INSERT INTO seen VALUES (?)", (question,))


class InGenerator(Notes):
    def prepare(self) -> None:
        self.seen = (number for number in range(100))

    def note(self, question: str) -> None:
        next(self.seen)


@pytest.mark.parametrize(
    ("build", "attribute"),
    [
        (InClass, "InClass.shared"), (LastInClass, "LastInClass.last"),
        (LastInNewAttribute, "LastInNewAttribute.last"), (InDefaultArgument, "note"),
        (InUncopied, "seen.questions"), (InUncopiedSlots, "seen.last"), (InQueue, "seen"),
        (InDatabase, "seen"), (InGenerator, "seen"),
    ],
)  # fmt: skip
def test_a_change_of_what_cannot_be_copied_is_refused_with_its_name(build: Callable[[], Any], attribute: str) -> None:
    with pytest.raises(ProgramError) as error:
        prompts_of(build(), threads=1)
    assert attribute in str(error.value)


class WithPool(Notes):
    """Its runs take from a pool at the same time, and give back what they took."""

    def prepare(self) -> None:
        self.pool, self.together = queue.Queue[int](), threading.Barrier(2, timeout=10)
        for number in range(3):
            self.pool.put(number)

    def note(self, question: str) -> None:
        if question in (TASKS[0].inputs["question"], TASKS[1].inputs["question"]):
            number = self.pool.get()
            self.together.wait()
            if question == TASKS[0].inputs["question"]:
                threading.Event().wait(0.2)
            self.pool.put(number)

    def notes(self) -> Any:
        return []


def test_what_another_run_has_taken_from_a_pool_is_no_change() -> None:
    assert len(prompts_of(WithPool(), threads=6)) == len(TASKS)


class Shared:
    """Counts its uses; meant to be one for all runs."""

    def __init__(self) -> None:
        self.uses = 0

    def __deepcopy__(self, memo: object) -> "Shared":
        return self


class WithParts(Notes):
    index: ClassVar[Any] = None

    def prepare(self) -> None:
        self.seen, self.shared, self.lock = [], Shared(), threading.Lock()
        self.database = sqlite3.connect(":memory:", check_same_thread=False)

    def note(self, question: str) -> None:
        if WithParts.index is None:
            WithParts.index = object()
        with self.lock:
            self.shared.uses += int(self.database.execute("SELECT 1").fetchone()[0])


def test_parts_that_are_meant_to_be_shared_are_shared() -> None:
    program = WithParts()
    assert len(prompts_of(program)) == len(TASKS)
    assert program.shared.uses == len(TASKS)


class Arrays(Notes):
    def prepare(self) -> None:
        import numpy as np

        self.seen, self.vectors, self.addresses = [], np.zeros(1_000_000), set[int]()
        self.address = self.vectors.ctypes.data

    def note(self, question: str) -> None:
        assert self.vectors.ctypes.data == self.address


def test_a_large_array_is_not_copied() -> None:
    assert len(prompts_of(Arrays())) == len(TASKS)


class Corpus(Notes):
    """Finds its documents by topic."""

    topics: ClassVar[Any] = {topic: [{"text": "a document", "marks": []} for _ in range(50)] for topic in range(50)}

    def prepare(self) -> None:
        import numpy as np

        self.seen, self.vectors = [], [[0.5] * 300 for _ in range(500)]
        self.own = {topic: [dspy.Example(text="a document") for _ in range(50)] for topic in range(50)}
        self.arrays = [np.zeros(300) for _ in range(500)]
        self.expected = [id(entry) for entry in self.entries()]

    def entries(self) -> list[Any]:
        return [self.topics[3][7], self.own[3][7], self.arrays[7]]

    def note(self, question: str) -> None:
        self.seen.append(question)
        self.vectors[0].append(len(self.seen))
        assert [id(entry) for entry in self.entries()] == self.expected
        assert len(self.vectors[0]) == 301


def test_the_documents_of_a_nested_corpus_are_not_copied() -> None:
    prompts = prompts_of(Corpus())
    assert [tasks_in(prompt) for prompt in prompts] == [1] * len(TASKS)


class Folder:
    """Removes what it made at its end."""

    def __init__(self) -> None:
        self.files = ["file"]

    def __del__(self) -> None:
        self.files.clear()


class WithFinalizers(Notes):
    def prepare(self) -> None:
        import openai

        self.seen, self.folder, self.client = [], Folder(), openai.OpenAI(api_key="none")
        self.client_of_folder = {"client": openai.AsyncOpenAI(api_key="none")}

    def note(self, question: str) -> None:
        self.seen.append(question)
        assert self.folder.files == ["file"]
        assert not self.client.is_closed()


def test_a_finalizer_runs_for_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    ignored: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", ignored.append)
    prompts = prompts_of(WithFinalizers())
    gc.collect()
    assert [tasks_in(prompt) for prompt in prompts] == [1] * len(TASKS)
    assert not ignored


def numbered(request: Any) -> str:
    number = str(request).rpartition("What is number ")[2].partition("?")[0]
    return f"[[ ## answer ## ]]\n{number}\n\n[[ ## completed ## ]]"


def test_an_optimizer_of_dspy_finds_the_predictors_of_a_trace() -> None:
    session = Session(
        scripted_lm(numbered), Rubric("r", [Criterion(name="right", check=exact)]), Recorder(), Meter(), threads=1
    )
    session.register(TASKS)
    recorded = RecordedProgram(InSubmodule(), session)
    examples = to_examples(TASKS)
    with session.context():
        compiled = dspy.BootstrapFewShot(
            metric=session.rubric.metric(tasks=session.tasks), max_bootstrapped_demos=3, max_labeled_demos=0
        ).compile(recorded, trainset=examples)
    demos = compiled.program.answer.demos
    assert [demo.answer for demo in demos] == ["0", "1", "2"]
    assert all(tasks_in(str(demo)) == 1 for demo in demos)


@pytest.mark.slow
def test_a_compiled_program_has_nothing_of_the_runs(tmp_path: Path) -> None:
    program = Notes()
    report = assay.compile(
        program,
        rubric=Rubric("r", [Criterion(name="right", check=exact)]),
        data=[{"question": f"What is number {n}?", "answer": str(n)} for n in range(24)],
        optimizer="labeled",
        lm=scripted_lm(numbered),
        store=tmp_path / "s.db",
        out=tmp_path / "artifact",
    )
    compiled = next(module for _, module in report.program.named_sub_modules(Notes))
    assert program.seen == compiled.seen == compiled.history == compiled.answer.history == []


class Teaching(BesideLock):
    """Has what cannot be copied, and a function around itself."""

    kept: ClassVar[list[str]] = []

    def prepare(self) -> None:
        super().prepare()
        self.own = lambda: self.answer

    def forward(self, question: str) -> Any:
        assert self.own() is self.answer
        return self.answer(question=question, notes="")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["labeled", "bootstrap", "knn"])
def test_a_program_with_parts_that_cannot_be_copied_is_compiled(tmp_path: Path, optimizer: str) -> None:
    def taught(request: Any) -> str:
        return numbered(request) if len(request.messages) > 2 else "[[ ## answer ## ]]\n0\n\n[[ ## completed ## ]]"

    report = assay.compile(
        Teaching(),
        rubric=Rubric("r", [Criterion(name="right", check=exact)]),
        data=[{"question": f"What is number {n}?", "answer": str(n)} for n in range(60)],
        optimizer=optimizer,
        lm=scripted_lm(numbered if optimizer == "bootstrap" else taught),
        store=tmp_path / "s.db",
        out=tmp_path / "artifact",
        gate=False,
        test=False,
    )
    data = report.to_dict()
    assert data["failed"] is None
    if optimizer == "labeled":
        best = report.program
        assert data["winner"] == "labeled"
        assert best.own() is best.answer
        assert best.answer.demos
        assert "kept" not in vars(best)


class Whole(dspy.Module):
    """One service behind all runs, which copies do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def __deepcopy__(self, memo: object) -> "Whole":
        return self

    def forward(self, question: str) -> Any:
        return self.answer(question=question)


def test_a_program_whose_copy_is_itself_runs() -> None:
    lm = scripted_lm(lambda request: "[[ ## answer ## ]]\n5")
    data = [{"question": "q", "answer": "5"}]
    assert assay.evaluate(Whole(), rubric="exact", data=data, split="all", lm=lm).to_dict()["result"]["score"] == 1
