"""The search of `auto` on the scripted in-context learner."""

from assay.datasets import Task
from assay.evaluation import RecordedProgram, Session
from assay.models import Caps, Meter
from assay.optimizers.prompts.candidates import Candidate, SearchSpace
from assay.optimizers.prompts.demonstrations import Demonstration
from assay.optimizers.prompts.search import AutoSearch
from assay.rubrics import load_rubric
from assay.testing import scripted_lm
from assay.traces import Recorder
from rigs.learner import InContextLearner


def demonstration(task: Task) -> Demonstration:
    return Demonstration(task, (("self", dict(task.inputs), dict(task.expected)),), 1.0)


def searched(
    task: str = "intents", *, calls: int = 150, threads: int = 2, seed: int = 0, sizes: tuple[int, int] = (80, 40)
) -> AutoSearch:
    learner, recorder, meter = InContextLearner(task, seed=seed), Recorder(), Meter(Caps(search_calls=calls))
    tasks = learner.tasks(sum(sizes), seed=1)
    lm = scripted_lm(learner, meter=meter, observers=[recorder.observe]).copy(temperature=0.7)
    session = Session(lm, load_rubric("classify"), recorder, meter, threads=threads, seed=seed)
    program = RecordedProgram(learner.program(), session)
    space = SearchSpace(
        program, [demonstration(t) for t in tasks[: sizes[0]]], [None, "json", "lean"], most=16, seed=seed
    )
    search = AutoSearch(space, Candidate("baseline", program), tasks[sizes[0] :], session)
    with session.context():
        search.run()
    meter.phase = "test"
    return search
