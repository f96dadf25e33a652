"""Demonstrations: how a teacher's successes are found when the plain program has none, and which of them are shown."""

import copy
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import dspy

from assay.datasets import Task
from assay.errors import BudgetExceeded, ModelError
from assay.optimizers.session import CONTINUES, Session, Student
from assay.programs import ToolAgent
from assay.programs.compose import ends

__all__ = ["Demonstration", "Exploration", "choose", "explore", "shape", "with_demos"]

_BATCH = 4
_ALPHA = 0.1
_COOL, _HOT = 0.1, 1.0  # temperatures of a first and of a further try
_TRIES = 4  # of one task
_COLD = 8  # runs of a variant without a success, after which tasks are tried hot

Steps = tuple[tuple[str, dict[str, Any], dict[str, Any]], ...]
Run = tuple[dspy.Prediction, Steps]


@dataclass(frozen=True)
class Demonstration:
    """One successful run: its task and, in order, what each predictor was given and gave.

    `failures` is how often the task failed before, under `adapter`: what failed at first is what the program gets wrong.
    """

    task: Task
    steps: Steps
    score: float
    failures: int = 0
    adapter: str | None = None


@dataclass
class Variant:
    """One way to run the teacher."""

    student: Student
    settings: dict[str, Any]
    tried: int = 0
    succeeded: int = 0

    @property
    def promise(self) -> float:
        return (self.succeeded + 1) / (self.tried + 2)


@dataclass
class Exploration:
    """What exploring gave. `teacher` is the variant that succeeds most often, None where none ever did."""

    demonstrations: list[Demonstration] = field(default_factory=list)
    teacher: Student | None = None
    variants: list[dict[str, Any]] = field(default_factory=list)

    @property
    def adapter(self) -> str | None:
        return self.teacher.settings["adapter"] if self.teacher is not None else None

    def behind(self, adapter: str | None) -> bool:
        """Whether runs under this adapter succeeded less often than those under the best one (Fisher's exact test, p < 0.1)."""
        from scipy import stats

        table = [[0, 0], [0, 0]]
        for variant in self.variants:
            if variant["adapter"] in (adapter, self.adapter):
                row = table[variant["adapter"] != adapter]
                row[0] += variant["succeeded"]
                row[1] += variant["tried"] - variant["succeeded"]
        return bool(stats.fisher_exact(table, alternative="less").pvalue < _ALPHA)


def teacher_variants(student: Student, adapters: Sequence[str | None]) -> list[Variant]:
    """The program with each adapter, at a low temperature; a tool agent also with the tool made to happen, in one turn."""
    settings: list[tuple[str | None, dict[str, Any]]] = []
    if isinstance(student.program, ToolAgent):
        settings += [(adapter, {"tool_usage_threshold": 0.0, "max_steps": 2}) for adapter in adapters]
        settings += [(adapter, {"tool_usage_threshold": 0.0}) for adapter in adapters]
    else:
        settings += [(adapter, {}) for adapter in adapters]
    variants = []
    for adapter, parameters in settings:
        teacher = Student(copy.deepcopy(student.program), student.session, adapter=adapter)
        teacher.set_parameters({"temperature": _COOL, **parameters})
        variants.append(Variant(teacher, {"adapter": adapter, **parameters}))
    return variants


def explore(
    student: Student,
    tasks: Sequence[Task],
    session: Session,
    *,
    adapters: Sequence[str | None],
    want: int = 12,
    max_calls: float = float("inf"),
    threshold: float = 0.8,
) -> Exploration:
    """Runs variants of the program on training tasks until `want` successes are found, a quarter of them hard (they failed
    before they succeeded), or twice as many where nothing is hard, or `max_calls` are made.

    Variants that succeed are tried more often. So that the successes do not only show what is easy, a run that went
    wrong in its last step alone is corrected by the task's label (`_corrected`), and other tasks that fail come back up to
    three times at a higher temperature; so do all where nothing succeeds.

    Raises:
        ModelError: none of the first runs could be scored: the model's server, or a judge, is at fault.
    """
    variants, found = teacher_variants(student, adapters), dict[str, Demonstration]()
    queue = [(task, 0) for task in tasks]
    random.Random(session.seed).shuffle(queue)
    start = session.meter.asked("search")
    exploration = Exploration()
    with session.progress.bar("explore", want) as advance:
        while queue and not _enough(found.values(), want) and session.meter.asked("search") - start < max_calls:
            untried = [v for v in variants[: len(adapters)] if not v.tried]  # each adapter gets its turn before one is preferred
            variant = untried[0] if untried else max(variants, key=lambda v: v.promise)
            if variant.tried >= 16 and variant.succeeded == 0:
                break
            batch, queue = queue[:_BATCH], queue[_BATCH:]
            try:
                runs = _run_batch(variant, batch, session)
            except BudgetExceeded:
                break
            scored = [prediction for prediction, _ in runs if not math.isnan(prediction._result.value)]
            if not scored and not any(v.tried for v in variants):
                why = runs[0][0]._result.failed or runs[0][0]._result.feedback
                raise ModelError(f"none of the first {len(runs)} runs could be scored: {why}. {CONTINUES}", flag="--resume")
            for (task, attempt), (prediction, steps) in zip(batch, runs, strict=True):
                score = prediction._result.value
                if math.isnan(score):
                    continue  # unscored is neither a success nor a failure
                variant.tried += 1
                if score >= threshold:
                    variant.succeeded += 1
                    found[task.id] = Demonstration(task, steps, score, attempt, variant.student.adapter)
                    advance(1)
                elif (repaired := _corrected(task, steps, prediction, session, threshold)) is not None:
                    found[task.id] = replace(repaired, failures=attempt + 1, adapter=variant.student.adapter)
                    advance(1)
                elif attempt + 1 < _TRIES and (variant.succeeded or variant.tried > _COLD):
                    queue.insert(0, (task, attempt + 1))
    best = max(variants, key=lambda v: v.promise)
    exploration.teacher = best.student if best.succeeded else None
    # what is hard under an adapter that is not used says nothing
    exploration.demonstrations = [d if d.adapter == best.student.adapter else replace(d, failures=0) for d in found.values()]
    exploration.variants = [{**v.settings, "tried": v.tried, "succeeded": v.succeeded} for v in variants]
    return exploration


def _corrected(task: Task, steps: Steps, prediction: dspy.Prediction, session: Session, threshold: float) -> Demonstration | None:
    """The run with the label as its last step's output, where that step was given the label and gave something else.

    What leads to the label must stand in the step's inputs, so that nothing is shown that could only be guessed; and the
    corrected run must be a success by the rubric.
    """
    if not steps or getattr(prediction, "_failed", None):
        return None
    name, given, output = steps[-1]
    labels = {field: value for field, value in task.expected.items() if field in output}
    seen = "\n".join(str(value) for field, value in given.items() if field not in task.inputs)
    if not labels or not all(re.search(rf"(?<![\w.-]){re.escape(str(value))}(?![\w.])", seen) for value in labels.values()):
        return None
    right = dspy.Prediction(**{**dict(prediction.items()), **labels})
    score = session.rubric.score(task, right, prediction._rollout).value
    if not score >= threshold:  # NaN included
        return None
    return Demonstration(task, (*steps[:-1], (name, given, {**output, **labels})), score)


def _enough(found: Collection[Demonstration], want: int) -> bool:
    return len(found) >= want and (sum(d.failures > 0 for d in found) >= want / 4 or len(found) >= 2 * want)


def _run_batch(variant: Variant, batch: Sequence[tuple[Task, int]], session: Session) -> list[Run]:
    from concurrent.futures import ThreadPoolExecutor

    names = {id(predictor): name for name, predictor in variant.student.program.named_predictors()}
    session.know([task for task, _ in batch])

    def one(item: tuple[Task, int]) -> Run:
        task, attempt = item
        student = variant.student
        with session.context(), dspy.context(trace=[]):
            if attempt:
                student = Student(copy.copy(student.program), session, adapter=student.adapter, sample=attempt)
                student.set_parameters({"temperature": _HOT})
            prediction = student(**dict(task.inputs))
            trace = list(dspy.settings.trace)
        steps = tuple((names[id(p)], dict(given), dict(output.items())) for p, given, output in trace if id(p) in names)
        return prediction, steps

    with ThreadPoolExecutor(max_workers=max(1, session.threads)) as pool:
        futures = [pool.submit(one, item) for item in batch]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def shape(text: Any) -> str:
    """The form of a text: digits become 0, letters a; runs of three and more are cut to three."""
    out: list[str] = []
    for char in str(text)[:200]:
        kind = "0" if char.isdigit() else "a" if char.isalpha() else " " if char.isspace() else char
        if out[-3:] != [kind] * 3:
            out.append(kind)
    return "^" + "".join(out) + "$"


def _features(demonstration: Demonstration) -> Counter[str]:
    """Bigrams of the shapes of what the predictors gave, and of the task's type."""
    grams: Counter[str] = Counter({f"type {demonstration.task.task_type}": 2})
    for name, _, output in demonstration.steps:
        for key, value in output.items():
            form = shape(value)
            grams.update(f"{name}.{key} {form[i : i + 2]}" for i in range(len(form) - 1))
    return grams


def _distance(a: Counter[str], b: Counter[str]) -> float:
    """1 minus the weighted Jaccard similarity."""
    union = sum((a | b).values())
    return 1 - sum((a & b).values()) / union if union else 0.0


def choose(pool: Sequence[Demonstration], k: int, *, seed: int, diverse: bool = True) -> list[Demonstration]:
    """`k` of the pool, at random or diverse.

    Diverse: each is the one least like those already chosen (farthest-first, Gonzalez 1985), up to half of them among the
    runs of tasks that failed before they succeeded, then among all.
    """
    rng = random.Random(seed)
    order = rng.sample(list(pool), len(pool))
    if not diverse or len(order) <= k:
        return order[:k]
    features = {id(d): _features(d) for d in order}
    hard = [d for d in order if d.failures]
    chosen = [*hard, *order][:1]
    while len(chosen) < k:
        rest = [d for d in (hard if len(chosen) < k // 2 else order) if d not in chosen] or [d for d in order if d not in chosen]
        chosen.append(max(rest, key=lambda d: min(_distance(features[id(d)], features[id(c)]) for c in chosen)))
    rng.shuffle(chosen)
    return chosen


def with_demos(student: Student, demonstrations: Sequence[Demonstration], *, adapter: str | None) -> Student:
    """A copy of the program that shows these runs. A predictor that was called several times in a run shows the first
    and the last of these calls: how the work begins and how it ends."""
    compiled = Student(copy.deepcopy(student.program), student.session, adapter=adapter)
    compiled.temperature = student.temperature
    shown: Mapping[str, list[dspy.Example]] = defaultdict(list)
    for demonstration in demonstrations:
        calls: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for name, given, output in demonstration.steps:
            calls[name].append({**given, **output})
        for name, runs in calls.items():
            shown[name] += [dspy.Example(augmented=True, **fields) for fields in ends(runs)]
    for name, predictor in compiled.program.named_predictors():
        predictor.demos = list(shown[name])
    return compiled
