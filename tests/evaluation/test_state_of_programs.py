"""Each run of a program works on a copy of its own; rows with the same inputs are scored each by their own."""

import copy
import gc
import json
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
from assay.datasets.tasks import TaskIndex
from assay.errors import ProgramError
from assay.evaluation.evaluation import evaluate
from assay.evaluation.session import RecordedProgram, Session
from assay.models import Meter
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


class Desk:
    def __init__(self) -> None:
        self.lock, self.seen = threading.RLock(), list[str]()


class Vector:
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy as np

        return np.zeros(3)


class CopiedWithItsLock(dspy.BaseLM):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(model="own")
        self.lock = threading.Lock()

    def copy(self, **_: Any) -> Any:
        return copy.deepcopy(self)


class BesideLock(Notes):
    def prepare(self) -> None:
        self.seen, self.lock = [], threading.Lock()


class ThroughItsOwnMethod(Notes):
    def prepare(self) -> None:
        self.seen = []
        self.bound, self.function = self.keep, lambda question: self.seen.append(question)

    def keep(self, question: str) -> None:
        self.seen.append(question)

    def note(self, question: str) -> None:
        self.bound(question)
        self.function(question)


class WrappedTool(Notes):
    def prepare(self) -> None:
        self.seen = []

        def logged(tool: Callable[[str], None]) -> Callable[[str], None]:
            return lambda question: tool(question)

        self.tools = [dspy.Tool(logged(lambda question: self.seen.append(question)), name="n", args={"question": {}})]

    def note(self, question: str) -> None:
        self.tools[0](question=question)


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


def function_with_default() -> Callable[..., Any]:
    answer = dspy.Predict("question, notes -> answer")

    def function(question: str, seen: list[str] = []) -> Any:  # noqa: B006
        seen.append(question)
        return answer(question=question, notes=str(seen))

    return function


def noting(*attributes: str, base: type = Notes, **body: Any) -> Callable[[], Any]:
    """Builds a program whose class has this body; values of `attributes` are made anew for each program."""

    def prepare(self: Any) -> None:
        self.seen = []
        for name in attributes:
            setattr(self, name, body[name]())

    return type("Noting", (base,), {"prepare": prepare, **body})


def histories(self: Any) -> list[Any]:
    return [entry["messages"] for owner in (self, self.answer, dspy.settings.lm) for entry in owner.history]


def note_locally(self: Any, question: str) -> None:
    self.seen.last = [*getattr(self.seen, "last", []), question]


AT_DESK = {
    "note": lambda self, question: self.desk.seen.append(question),
    "notes": lambda self: self.desk.seen,
}
COPIED = {
    "list": Notes,
    "dictionary": noting("seen", seen=dict, note=lambda self, question: self.seen.update({question: True})),
    "text": noting("seen", seen=str, note=lambda self, question: setattr(self, "seen", self.seen + question)),
    "nested tuple": noting(
        "seen", seen=lambda: (("questions", []),), note=lambda self, question: self.seen[0][1].append(question)
    ),
    "submodule": noting(
        "inner", inner=lambda: {"first": [Notes()]}, notes=lambda self: self.inner["first"][0].seen,
        note=lambda self, question: self.inner["first"][0].seen.append(question),
    ),
    "demonstrations": noting(
        note=lambda self, question: self.answer.demos.append(dspy.Example(question=question, notes="", answer="?"))
    ),
    "list of the class": noting(
        shared=[], note=lambda self, question: self.shared.append(question), notes=lambda self: self.shared
    ),
    "thread-local": noting("seen", seen=threading.local, note=note_locally, notes=lambda self: self.seen.last),
    "long list": noting("seen", seen=lambda: ["a document"] * 20_000, notes=lambda self: self.seen[20_000:]),
    "histories": noting(note=lambda self, question: None, notes=histories),
    "object with a lock": noting("desk", desk=Desk, **AT_DESK),
    "beside a lock": BesideLock,
    "beside a vector": noting("vector", vector=Vector),
    "beside a model without copies": noting("model", model=CopiedWithItsLock),
    "beside a module": noting("library", library=lambda: queue),
    "without hash": noting(__eq__=lambda self, other: type(other) is type(self)),
    "wrapped tool": WrappedTool,
    "own method": ThroughItsOwnMethod,
    "agent": Executing,
    "function around a module": function_around_module,
    "default argument": function_with_default,
}  # fmt: skip


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


@pytest.mark.parametrize("build", COPIED.values(), ids=COPIED)
def test_no_prompt_shows_another_task(build: Callable[[], Any]) -> None:
    prompts = prompts_of(build())
    assert len(prompts) == len(TASKS)
    assert {tasks_in(prompt) for prompt in prompts} == {1}


class Uncopied:
    def __init__(self) -> None:
        self.questions: list[str] = []

    def __deepcopy__(self, memo: object) -> Any:
        raise TypeError("no copies")


class UncopiedInSlots:
    __slots__ = ("last", "lock")

    def __init__(self) -> None:
        self.last = "none"

    def __deepcopy__(self, memo: object) -> Any:
        raise TypeError("no copies")


class LastInClass(Notes):
    last = ""

    @classmethod
    def keep(cls, question: str) -> None:
        cls.last = question

    def note(self, question: str) -> None:
        self.keep(question)


class LastInNewAttribute(LastInClass):
    """The class inherits `last`; its run sets one of its own."""


def note_by_default(self: Any, question: str, earlier: list[str] = []) -> None:  # noqa: B006
    earlier.append(question)


def database() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    connection.execute("CREATE TABLE seen (question)")
    return connection


@pytest.mark.parametrize(
    ("build", "attribute"),
    [
        (noting(shared=[], note=lambda self, question: type(self).shared.append(question)), "Noting.shared"),
        (LastInClass, "LastInClass.last"),
        (LastInNewAttribute, "LastInNewAttribute.last"),
        (noting(note=note_by_default), "note"),
        (noting("seen", seen=Uncopied, note=lambda self, q: self.seen.questions.append(q)), "seen.questions"),
        (noting("seen", seen=UncopiedInSlots, note=lambda self, q: setattr(self.seen, "last", q)), "seen.last"),
        (noting("seen", seen=queue.Queue, note=lambda self, question: self.seen.put(question)), "seen"),
        (noting("seen", seen=database, note=lambda self, q: self.seen.execute("INSERT INTO seen VALUES (?)", (q,))),
         "seen"),
        (noting("seen", seen=lambda: (number for number in range(9)), note=lambda self, q: next(self.seen)), "seen"),
    ],
)  # fmt: skip
def test_a_change_of_what_cannot_be_copied_is_refused_with_its_name(build: Callable[[], Any], attribute: str) -> None:
    with pytest.raises(ProgramError) as error:
        prompts_of(build(), threads=1)
    assert attribute in str(error.value)


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


def compiled(program: Any, folder: Path, *, tasks: int, **options: Any) -> Any:
    data = [{"question": f"What is number {n}?", "answer": str(n)} for n in range(tasks)]
    return assay.compile(
        program, rubric="exact", data=data, optimizer="labeled", store=folder / "s.db", out=folder / "artifact",
        **options,
    )  # fmt: skip


@pytest.mark.slow
def test_a_compiled_program_has_nothing_of_the_runs(tmp_path: Path) -> None:
    program = Notes()
    report = compiled(program, tmp_path, tasks=24, lm=scripted_lm(numbered))
    best = next(module for _, module in report.program.named_sub_modules(Notes))
    assert program.seen == best.seen == best.history == best.answer.history == []


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
def test_a_program_with_parts_that_cannot_be_copied_is_compiled(tmp_path: Path) -> None:
    def taught(request: Any) -> str:
        return numbered(request) if len(request.messages) > 2 else "[[ ## answer ## ]]\n0\n\n[[ ## completed ## ]]"

    report = compiled(Teaching(), tmp_path, tasks=60, lm=scripted_lm(taught), gate=False, test=False)
    best = report.program
    assert report.to_dict()["winner"] == "labeled"
    assert best.own() is best.answer
    assert best.answer.demos
    assert "kept" not in vars(best)


ROWS = [
    Task(id="a", inputs={"question": "1 + 1?"}, expected={"answer": "2"}),
    Task(id="a-2", inputs={"question": "1 + 1?"}, expected={"answer": "3"}),
    Task(id="a-3", inputs={"question": "1 +  1? "}, expected={"answer": "3"}),
]


def session() -> Session:
    return Session(
        scripted_lm(lambda _: json.dumps({"answer": "2"})),
        Rubric("r", [Criterion(name="right", check=exact)]),
        Recorder(),
        Meter(),
    )


def test_an_evaluation_scores_each_row_by_its_own_expected_output() -> None:
    running = session()
    evaluation = evaluate(RecordedProgram(dspy.Predict("question -> answer"), running), ROWS, running)
    assert evaluation.scores == {"a": 1.0, "a-2": 0.0, "a-3": 0.0}


def test_a_task_is_found_by_its_inputs_in_any_spelling() -> None:
    index = TaskIndex()
    for task in ROWS:
        index.add(task)
    assert index.find({"question": "1 + 1?"}, {"answer": "3"}) == ROWS[1]
    assert index.find({"question": "1 +  1? "}) == ROWS[2]
    assert index.find({"question": "1 + 1?\n"}) in ROWS
    assert index.find({"question": "1 + 2?"}) is None
