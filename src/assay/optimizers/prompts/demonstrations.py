"""Demonstrations: how a teacher's successes are found when the plain program has none, and which of them are shown."""

import copy
import itertools
import random
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import dspy
import numpy as np

from assay.datasets import Task
from assay.errors import BudgetExceeded, ModelError
from assay.evaluation.executors import in_order
from assay.evaluation.session import CONTINUES, RecordedProgram, Session, acting_parameters
from assay.programs import Agent, ToolAgent
from assay.programs.agent import GUIDE
from assay.programs.compose import Embedding, ends, input_key
from assay.programs.foreign_agent import TextAgent
from assay.programs.isolation import copied
from assay.rubrics.scoring import ScoredRun
from assay.support.values import json_text, value_text
from assay.traces.messages.final_answer import sent_formats

_BATCH = 4
_ALPHA = 0.1
_COOL, _HOT = 0.1, 1.0  # temperatures of a first and of a further try
_TRIES = 4  # of one task
_COLD = 8  # runs of a variant without a success, after which tasks are tried hot

Steps = tuple[tuple[str, dict[str, Any], dict[str, Any]], ...]
Run = tuple[ScoredRun, Steps]


@dataclass(frozen=True)
class Demonstration:
    """One successful run: its task and, in order, what each predictor was given and gave.

    `failures` is how often the task failed before, under `adapter`: what failed at first is what the program gets
    wrong.
    """

    task: Task
    steps: Steps
    score: float
    failures: int = 0
    prompt_format: str | None = None

    @classmethod
    def of_label(cls, task: Task, predictors: Sequence[str]) -> "Demonstration":
        """The expected outputs of a task, as if each of the predictors had given them."""
        return cls(task, tuple((name, dict(task.inputs), dict(task.expected)) for name in predictors), 1.0)


@dataclass
class Variant:
    """One way to run the teacher."""

    student: RecordedProgram
    settings: dict[str, Any]
    guided: bool = False
    tried: int = 0
    succeeded: int = 0

    @property
    def promise(self) -> float:
        return (self.succeeded + 1) / (self.tried + 2)


@dataclass
class Exploration:
    """What exploring gave. `teacher` is the variant that succeeds most often, None where none ever did."""

    demonstrations: list[Demonstration] = field(default_factory=list)
    teacher: RecordedProgram | None = None
    variants: list[dict[str, Any]] = field(default_factory=list)
    overridden: bool = False  # whether the program sets its own prompt format
    failures: list[Run] = field(default_factory=list)  # scored runs without success

    @property
    def prompt_format(self) -> str | None:
        return self.teacher.settings["adapter"] if self.teacher is not None else None

    def behind(self, prompt_format: str | None) -> bool:
        """Whether runs under this prompt format succeeded less often than under the best one.

        By Fisher's exact test, p < 0.1.
        """
        from scipy import stats

        table = [[0, 0], [0, 0]]
        for variant in self.variants:
            if variant["adapter"] in (prompt_format, self.prompt_format):
                row = table[variant["adapter"] != prompt_format]
                row[0] += variant["succeeded"]
                row[1] += variant["tried"] - variant["succeeded"]
        return bool(stats.fisher_exact(table, alternative="less").pvalue < _ALPHA)


def teacher_variants(student: RecordedProgram, prompt_formats: Sequence[str | None]) -> list[Variant]:
    """The program with each prompt format at a low temperature; for a tool agent also with tools forced, in one
    step. An agent that can follow the labels of a task runs so (`Agent.guided`)."""
    kinds: list[dict[str, Any]] = [{}]
    if isinstance(student.program, ToolAgent):
        kinds = [{"tool_usage_threshold": 0.0, "max_steps": 2}, {"tool_usage_threshold": 0.0}]
    variants = []
    for parameters, prompt_format in itertools.product(kinds, prompt_formats):
        teacher = RecordedProgram(copied(student.program), student.session, prompt_format=prompt_format)
        teacher.set_parameters({**_temperature(student, _COOL), **parameters})
        guided = isinstance(student.program, Agent) and student.program.guided
        variants.append(Variant(teacher, {"adapter": prompt_format, **parameters}, guided=guided))
    return variants


def _temperature(student: RecordedProgram, value: float) -> dict[str, float]:
    """A temperature for a program that has one."""
    return {"temperature": value} if "temperature" in acting_parameters(student) else {}


def explore(
    student: RecordedProgram,
    tasks: Sequence[Task],
    session: Session,
    *,
    prompt_formats: Sequence[str | None],
    target: int = 12,
    max_calls: float = float("inf"),
    threshold: float = 0.8,
) -> Exploration:
    """Runs variants of the program on training tasks and collects successful runs as demonstrations.

    Ends when `target` successes are found, a quarter of them hard (failed before they succeeded), or twice as many if
    none is hard, or when `max_calls` were made. Variants that succeed are tried more often. Successes alone would show
    only easy tasks; therefore a run that is wrong in its last step alone is corrected by the task's label
    (`_corrected`), and other failed tasks are repeated up to three times at a higher temperature.

    Raises:
        ModelError: none of the first runs could be scored: the model's server, or a judge, is at fault.
    """
    variants, successes = teacher_variants(student, prompt_formats), dict[str, Demonstration]()
    queue = [(task, 0) for task in tasks]
    random.Random(session.seed).shuffle(queue)
    meter, exploration = session.meter, Exploration()
    start = meter.calls_of("search")
    with session.progress.bar("explore", target) as advance:
        while queue and not _enough(successes.values(), target) and meter.calls_of("search") - start < max_calls:
            # each format once before one is preferred
            untried = [v for v in variants[: len(prompt_formats)] if not v.tried]
            variant = untried[0] if untried else max(variants, key=lambda v: v.promise)
            if variant.tried >= 16 and variant.succeeded == 0:
                break
            batch, queue = queue[:_BATCH], queue[_BATCH:]
            try:
                runs = _run_batch(variant, batch, session)
            except BudgetExceeded:
                break
            first = runs[0][0].scored
            if not any(run.scored.scored for run, _ in runs) and not any(v.tried for v in variants):
                reason = first.failed or first.feedback
                raise ModelError(f"none of the first {len(runs)} runs could be scored: {reason}. {CONTINUES}")
            if not exploration.overridden and _overrides(variant, student, runs):
                exploration.overridden = True
                variants = [v for v in variants if v.settings["adapter"] == student.settings["adapter"]] or [variant]
                queue = [*batch, *queue]
                continue
            for (task, attempt), (run, steps) in zip(batch, runs, strict=True):
                if not run.scored.scored:
                    continue  # unscored is neither a success nor a failure
                success = _success_of(variant, task, attempt, (run, steps), session, threshold)
                if success is None:
                    exploration.failures.append((run, steps))
                if success is not None:
                    successes[task.id] = success
                    advance(1)
                elif attempt + 1 < _TRIES and (variant.succeeded or variant.tried > _COLD):
                    queue.insert(0, (task, attempt + 1))
    best = max(variants, key=lambda v: v.promise)
    exploration.teacher = best.student if best.succeeded else None
    # failures under a prompt format that is not used do not make a task hard
    exploration.demonstrations = [
        d if d.prompt_format == best.student.prompt_format else replace(d, failures=0) for d in successes.values()
    ]
    exploration.variants = [{**v.settings, "tried": v.tried, "succeeded": v.succeeded} for v in variants]
    return exploration


def _overrides(variant: Variant, student: RecordedProgram, runs: Sequence[Run]) -> bool:
    """Whether the program set its own prompt format in all runs of a variant with another one."""
    varied = variant.settings["adapter"]
    calls = [call for run, _ in runs for call in run.rollout.transitions]
    return varied != student.settings["adapter"] and bool(sent := sent_formats(calls)) and varied not in sent


def _success_of(
    variant: Variant, task: Task, attempt: int, tried: Run, session: Session, threshold: float
) -> Demonstration | None:
    """Counts a scored run of a variant; returns its demonstration if it succeeded or could be corrected by the
    label."""
    variant.tried += 1
    run, steps = tried
    score, prompt_format = run.scored.value, variant.student.prompt_format
    if score >= threshold:
        variant.succeeded += 1
        return Demonstration(task, steps, score, attempt, prompt_format)
    repaired = _corrected(task, steps, run, session, threshold)
    return None if repaired is None else replace(repaired, failures=attempt + 1, prompt_format=prompt_format)


def _corrected(task: Task, steps: Steps, run: ScoredRun, session: Session, threshold: float) -> Demonstration | None:
    """The run with its last step's output replaced by the label; None if that is not a valid demonstration.

    The label must occur in the step's inputs, besides those of the task: an output that the inputs do not contain
    teaches the model to guess. The corrected run must also succeed by the rubric.
    """
    if not steps or run.error is not None:
        return None
    name, inputs, output = steps[-1]
    labels = {field: value for field, value in task.expected.items() if field in output}
    inputs_text = "\n".join(value_text(value) for field, value in inputs.items() if field not in task.inputs)
    if not labels or not all(
        re.search(rf"(?<![\w.-]){re.escape(value_text(value))}(?![\w.])", inputs_text) for value in labels.values()
    ):
        return None
    right = dspy.Prediction(**{**dict(run.prediction.items()), **labels})
    score = session.rubric.score(task, right, run.rollout).value
    if not score >= threshold:  # NaN included
        return None
    return Demonstration(task, (*steps[:-1], (name, inputs, {**output, **labels})), score)


def _enough(successes: Collection[Demonstration], target: int) -> bool:
    return len(successes) >= target and (
        sum(d.failures > 0 for d in successes) >= target / 4 or len(successes) >= 2 * target
    )


def _run_batch(variant: Variant, batch: Sequence[tuple[Task, int]], session: Session) -> list[Run]:
    def run_task(item: tuple[Task, int]) -> Run:
        task, attempt = item
        student = variant.student
        guide = {GUIDE: dict(task.expected)} if variant.guided else {}
        with dspy.context(**guide):
            if attempt:
                student = RecordedProgram(
                    copy.copy(student.program), session, prompt_format=student.prompt_format, sample=attempt
                )
                student.set_parameters(_temperature(student, _HOT))
            return _traced(student, task, session)

    return in_order(lambda index: run_task(batch[index]), len(batch), threads=session.threads)


def traced_runs(student: RecordedProgram, tasks: Sequence[Task], session: Session) -> list[Run]:
    """Scored runs of a program with the calls of its predictors."""
    return in_order(lambda index: _traced(student, tasks[index], session), len(tasks), threads=session.threads)


def _traced(student: RecordedProgram, task: Task, session: Session) -> Run:
    names = {id(predictor): name for name, predictor in student.program.named_predictors()}
    with session.context(), dspy.context(trace=[]):
        run = student.run(task)
        trace = list(dspy.settings.trace)
    return run, tuple(
        (names[id(p)], dict(inputs), dict(output.items())) for p, inputs, output in trace if id(p) in names
    )


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


def _diverse(order: Sequence[Demonstration], k: int, rng: random.Random) -> list[Demonstration]:
    """Each is the one least like those already chosen (farthest-first, Gonzalez 1985), up to half of them among the
    runs of tasks that failed before they succeeded, then among all."""
    features = {id(d): _features(d) for d in order}
    hard = [d for d in order if d.failures]
    chosen = [*hard, *order][:1]
    while len(chosen) < k:
        rest = [d for d in (hard if len(chosen) < k // 2 else order) if d not in chosen] or [
            d for d in order if d not in chosen
        ]
        chosen.append(max(rest, key=lambda d: min(_distance(features[id(d)], features[id(c)]) for c in chosen)))
    rng.shuffle(chosen)
    return chosen


def pool_of(demonstrations: Sequence[Demonstration]) -> list[dict[str, Any]]:
    """Demonstrations as the pool of `NearestDemos`."""
    return [
        {"key": input_key(dict(demonstration.task.inputs)), "demos": _calls(demonstration)}
        for demonstration in demonstrations
    ]


def _calls(demonstration: Demonstration) -> dict[str, list[dict[str, Any]]]:
    """What each predictor was given and gave, by its name, in order."""
    calls: dict[str, list[dict[str, Any]]] = {}
    for name, inputs, output in demonstration.steps:
        calls.setdefault(name, []).append({**inputs, **output})
    return calls


def with_demos(program: dspy.Module, demonstrations: Sequence[Demonstration]) -> dspy.Module:
    """A copy of the program that shows these runs. A predictor that was called several times in a run shows the first
    and the last of these calls: how the work begins and how it ends. Of an agent's texts one shows them."""
    compiled, demos = copied(program), defaultdict[str, list[dspy.Example]](list)
    for demonstration in demonstrations:
        for name, calls in _calls(demonstration).items():
            demos[name] += [dspy.Example(augmented=True, **fields) for fields in ends(calls)]
    for name, predictor in compiled.named_predictors():
        shows = not isinstance(compiled, TextAgent) or name == compiled.shows_examples
        predictor.demos = list(demos[name]) if shows else []
    return compiled


# -- Which demonstrations a program shows: at random, stratified by label, representative of the inputs, or diverse in
# form.
#
# Nearest ones are chosen at run time (`assay.programs.compose.NearestDemos`).


SELECTIONS = ("random", "stratified", "representative", "diverse")
_MOST = 400  # demonstrations among which representative ones are searched; the cost is quadratic


def select(pool: Sequence[Demonstration], k: int, *, how: str, seed: int) -> list[Demonstration]:
    """At most `k` of the pool, in the order in which they are shown.

    Args:
        how: one of `SELECTIONS`. `stratified`: the labels in turn, at random among those of a label. `representative`:
            the labels in turn, each time the demonstration that brings the inputs of its label nearest to one that is
            shown (greedy facility location, Nemhauser et al. 1978). `diverse`: unlike each other in the form of their
            outputs.
    """
    if how in ("random", "diverse"):
        rng = random.Random(seed)
        order = rng.sample(list(pool), len(pool))
        return order[:k] if how == "random" or len(order) <= k else _diverse(order, k, rng)
    rng = random.Random(f"{how} {seed}")
    order = rng.sample(list(pool), min(len(pool), _MOST))
    groups: dict[str, list[Demonstration]] = defaultdict(list)
    for demonstration, stratum in zip(order, strata(order), strict=True):
        groups[stratum].append(demonstration)
    if how == "representative":
        groups = {name: _representative(members, k) for name, members in groups.items()}
    names = rng.sample(sorted(groups), len(groups))
    names.sort(key=lambda name: -len(groups[name]))  # with fewer places than labels, the frequent ones
    chosen: list[Demonstration] = []
    for place in range(max(len(members) for members in groups.values())):
        chosen += [groups[name][place] for name in names if place < len(groups[name])]
    chosen = chosen[:k]
    rng.shuffle(chosen)
    return chosen


def strata(pool: Sequence[Demonstration]) -> list[str]:
    """The label of each demonstration where labels repeat, else its type of task."""
    labels = [json_text(dict(d.task.expected), sort_keys=True) for d in pool]
    return labels if 2 * len(Counter(labels)) <= len(labels) else [d.task.task_type for d in pool]


def _representative(members: list[Demonstration], k: int) -> list[Demonstration]:
    keys = [input_key(dict(d.task.inputs)) for d in members]
    vectors = Embedding(keys).vectors(keys)
    likeness = (vectors @ vectors.T).toarray()
    covered, chosen = np.zeros(len(members)), list[int]()
    for _ in range(min(k, len(members))):
        gains = np.maximum(likeness, covered[:, None]).sum(axis=0)
        gains[chosen] = -np.inf
        best = int(gains.argmax())
        chosen.append(best)
        covered = np.maximum(covered, likeness[:, best])
    return [members[i] for i in chosen]
