"""The candidates of the prompt search: their parts, their similarity, and the programs built from them."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import eq
from typing import Any

import dspy
import numpy as np

from assay.datasets import Task
from assay.evaluation.evaluation import Evaluation
from assay.evaluation.session import RecordedProgram, acting_parameters
from assay.evaluation.statistics import differences_of, mean_difference
from assay.optimizers.parameters.space import Space
from assay.optimizers.prompts.demonstrations import Demonstration, Run, pool_of, select, with_demos
from assay.optimizers.prompts.thinking import POLICIES
from assay.programs import Agent, ToolAgent, program_version
from assay.programs.budgets import allocates, with_policy
from assay.programs.compose import EnsembleProgram, NearestDemos, ends, without_nearest
from assay.programs.foreign_agent import TextAgent
from assay.programs.isolation import copied

# -- Expected score of each candidate, from few scored tasks of many candidates. Does not call a model.
#
# A score is modelled as the candidate's quality, plus the task's difficulty, plus noise. The quality is a Gaussian
# process over the features of the candidates, so scores of one candidate inform about similar ones. Scores in [0, 1];
# higher is better. Source: Rasmussen and Williams 2006, chapters 2 and 5.


_CONSTANT = 0.3  # deviation of the common level of all candidates
_SCALES = (0.5, 1.0, 2.0)  # factors of the kernel's deviations; the one with the highest likelihood is used
_TASK_SHARE = 0.35  # share of the scores' variance that is due to the task's difficulty
_LEAST_VARIANCE = 0.02  # of a score, so that a candidate with equal scores so far is not taken as certain


@dataclass(frozen=True)
class Score:
    """One scored run: index of the candidate, key of the task, score."""

    candidate: int
    task: str
    score: float


@dataclass(frozen=True)
class Posterior:
    """Mean and covariance of the candidates' qualities: `mean[candidate]`, `covariance[candidate, candidate]`."""

    mean: np.ndarray
    covariance: np.ndarray

    def draws(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """`draws[draw, candidate]`, none above 1: a score cannot be."""
        values, vectors = np.linalg.eigh((self.covariance + self.covariance.T) / 2)
        root = vectors * np.sqrt(np.clip(values, 0.0, None))
        drawn = self.mean + rng.standard_normal((count, len(self.mean))) @ root.T
        return np.asarray(np.minimum(drawn, 1.0))


def posterior(scores: Sequence[Score], kernel: np.ndarray) -> Posterior:
    """The posterior of all candidates in the kernel, those without a score included.

    Args:
        kernel: prior covariance of the candidates' qualities, without their common level.
    """
    from scipy.linalg import cho_factor, cho_solve

    count = len(kernel)
    if not scores:
        return Posterior(np.full(count, 0.5), kernel + _CONSTANT**2)
    candidates = np.array([score.candidate for score in scores])
    tasks = np.unique([score.task for score in scores], return_inverse=True)[1]
    values = np.array([score.score for score in scores])
    center = float(values.mean())
    variance = max(_LEAST_VARIANCE, float(values.var()))
    same_task = (tasks[:, None] == tasks[None, :]) * (_TASK_SHARE * variance)
    noise = np.eye(len(values)) * ((1 - _TASK_SHARE) * variance)
    best: tuple[float, Posterior] | None = None
    for scale in _SCALES:
        prior = kernel * scale**2 + _CONSTANT**2
        factor = cho_factor(prior[np.ix_(candidates, candidates)] + same_task + noise, lower=True)
        solved = cho_solve(factor, values - center)
        likelihood = -0.5 * float((values - center) @ solved) - float(np.log(np.diag(factor[0])).sum())
        if best is None or likelihood > best[0]:
            across = prior[:, candidates]
            best = likelihood, Posterior(center + across @ solved, prior - across @ cho_solve(factor, across.T))
    assert best is not None
    return best[1]


# -- Candidates.


EXISTING = "own"  # the demonstrations that the program already has
NEAREST = "nearest"
_POOL = 500  # demonstrations among which the nearest are searched; all of them are stored in the artifact
_COUNTS = (2, 4, 8, 12, 16, 24, 32, 48, 64)
# Parameter values that are tried besides the program's own; all lie inside `assay.programs.RANGES`.
_VALUES: Mapping[str, Sequence[float]] = {
    "temperature": (0.1, 0.3, 0.7, 1.0),
    "tool_usage_threshold": (0.0, 0.25, 0.5, 0.75),
    "reasoning_depth": (1, 2, 3, 4, 6),
    "max_steps": (2, 4, 10),
    "context_length": (1000, 2000, 4000),
}


@dataclass(frozen=True)
class CandidateSpec:
    """Description of a candidate program; equal specs build equal programs.

    Attributes:
        selection: how demonstrations are chosen; `own` keeps those of the program.
        count: number of demonstrations.
        draw: number of the random draw with the same selection.
        prompt_format: prompt format; None is the program's own.
        instruction: index of the instruction, 0 the program's own.
        parameters: agent parameters that differ from the program's own, by name.
        thinking: name of a thinking policy in `POLICIES`; None is the program's own.
    """

    selection: str = EXISTING
    count: int = 0
    draw: int = 0
    prompt_format: str | None = None
    instruction: int = 0
    parameters: tuple[tuple[str, float], ...] = ()
    thinking: str | None = None

    @property
    def name(self) -> str:
        count = "no new" if self.selection == EXISTING else f"{self.count} {self.selection}"
        drawn = f" (draw {self.draw})" if self.draw else ""
        parts = [
            f"{count} demonstrations{drawn}",
            self.prompt_format or "own format",
            *([f"instruction {self.instruction}"] if self.instruction else []),
            *([self.thinking] if self.thinking else []),
        ]
        return ", ".join([*parts, *(f"{name} {value:g}" for name, value in self.parameters)])


_SAVED = 0.9  # a candidate saves tokens if it needs less than this share of the best one's


@dataclass
class Candidate:
    """A program in the search, with its evaluation on val so far."""

    name: str
    student: RecordedProgram
    evaluation: Evaluation = field(default_factory=Evaluation)
    dropped: str = ""
    spec: CandidateSpec = field(default_factory=CandidateSpec)
    expected: float | None = None  # by the surrogate
    why: Sequence[str] = ()  # its instructions were proposed

    @property
    def mean(self) -> float:
        value = self.evaluation.mean
        return -1.0 if math.isnan(value) else value

    @property
    def prompt_tokens(self) -> float:
        """Mean over its tasks; infinite where nothing is known."""
        counts = [count for count in self.evaluation.prompt_tokens.values() if count > 0]
        return sum(counts) / len(counts) if counts else math.inf

    @cached_property
    def version(self) -> str:
        """Of its program, which does not change after it was built."""
        return program_version(self.student.program, self.student.settings["adapter"])

    def instructions(self) -> dict[str, str]:
        """The instructions of its predictors by their names, without those of programs around it."""
        program = without_nearest(self.student.program)
        return {name: predictor.signature.instructions for name, predictor in program.named_predictors()}

    def summary(self, baseline: "Candidate | None" = None) -> dict[str, Any]:
        """Its entry in reports.

        Args:
            baseline: instructions that it has too are left out.
        """
        score = None if math.isnan(self.evaluation.mean) else self.evaluation.mean
        known = baseline.instructions() if baseline is not None and baseline is not self else {}
        return {
            "name": self.name,
            "val_score": score,
            "expected": self.expected,
            "n": len(self.evaluation),
            **self.evaluation.coverage(),
            "dropped": self.dropped,
            "version": self.version,
            "settings": self.student.settings,
            "instructions": {name: text for name, text in self.instructions().items() if known.get(name) != text},
            "why": list(self.why),
        }


def best_with_fewest_tokens(candidates: Sequence[Candidate], values: Sequence[float], margin: float) -> Candidate:
    """The candidate with the highest value, or a tied one that needs fewer prompt tokens per task.

    A candidate is tied if its value is at most `margin` lower and the paired 95 % t interval of the best one's gain
    over it includes 0. It must save at least a tenth of the tokens: smaller savings are noise, since candidates run on
    different tasks.

    Args:
        values: of each candidate, higher is better; the first of equals is the best.
    """
    best = max(range(len(candidates)), key=lambda i: values[i])
    leader = candidates[best]
    level = [
        c for c, value in zip(candidates, values, strict=True) if value >= values[best] - margin and c is not leader
    ]
    level = [c for c in level if c.prompt_tokens < _SAVED * leader.prompt_tokens]
    level = [c for c in level if not _is_better(leader, c)]
    return min(level, key=lambda c: c.prompt_tokens, default=leader)


def _is_better(leader: Candidate, other: Candidate) -> bool:
    """Selection on val, which no claim rests on: the t interval without the losses that an unseen task may have."""
    _, low, _ = mean_difference(differences_of(other.evaluation.scores, leader.evaluation.scores).tolist())
    return low is not None and low > 0


def with_models_of(program: RecordedProgram, student: RecordedProgram) -> RecordedProgram:
    """The program, whose predictors have the models of the student's, and not those that an optimizer set."""
    models = dict(pair for part in _inside(student.program) for pair in part.named_predictors())
    for part in _inside(program.program):
        for name, predictor in part.named_predictors():
            predictor.lm = models[name].lm if name in models else None
    return program


def _inside(program: dspy.Module) -> list[dspy.Module]:
    """The programs that a program is composed of, or the program itself."""
    if isinstance(program, NearestDemos):
        return _inside(program.program)
    if isinstance(program, EnsembleProgram):
        return [part for member in program.members for part in _inside(member)]
    return [program]


def searched_program(student: RecordedProgram) -> RecordedProgram:
    """What candidates are built from: of a winner with the nearest demonstrations the program inside of it.

    Each call of such a winner sets its own demonstrations, so that those of a candidate around it or in it would never
    be shown. The program inside shows `k` of the winner's demonstrations, drawn at random. Others are returned as they
    are.
    """
    outer = student.program
    if not isinstance(outer, NearestDemos):
        return student
    program = copied(outer.program)
    if isinstance(program, Agent):
        program.agent_parameters, program.prompt_format = outer.agent_parameters, outer.prompt_format
    entries = random.Random(student.session.seed).sample(outer.pool, min(outer.k, len(outer.pool)))
    for name, predictor in program.named_predictors():
        predictor.demos = [dspy.Example(**fields) for entry in entries for fields in ends(entry["demos"].get(name, []))]
    return student.around(program)


@dataclass
class SearchSpace:
    """The space of candidates that can be built from one program.

    Args:
        pool: demonstrations, from labels or from successful runs.
        adapters: prompt formats worth trying, the program's own first.
        most: demonstrations shown at most.
        reasons: why each of the instructions was proposed.
        failures: failed runs on train, from which the texts of an agent are improved.
        train: the tasks that they are improved on.
        threshold: score from which a run is a success.
    """

    student: RecordedProgram
    pool: Sequence[Demonstration]
    prompt_formats: Sequence[str | None]
    most: int
    seed: int
    instructions: list[dict[str, str]] = field(
        default_factory=lambda: [{}]
    )  # by predictor; those left out stay as they are
    reasons: list[tuple[str, ...]] = field(default_factory=lambda: [()])
    failures: Sequence[Run] = ()
    train: Sequence[Task] = ()
    threshold: float = 0.8

    def __post_init__(self) -> None:
        parameters = self.student.settings["parameters"]
        lm_temperature = self.student.session.lm.kwargs.get("temperature")
        acting = acting_parameters(self.student)
        self.program_parameters: dict[str, float] = {name: parameters[name] for name in acting if name in parameters}
        if "temperature" in acting and "temperature" not in self.program_parameters and lm_temperature is not None:
            self.program_parameters["temperature"] = lm_temperature
        self.values = {
            name: [value for value in _VALUES[name] if value != self.program_parameters.get(name)] for name in acting
        }
        thinks = allocates(self.student.program) and not self.student.session.only_own_models
        self.policies = list(POLICIES) if thinks else []
        self._near = pool_of(
            select(self.pool, _POOL, how="stratified", seed=self.seed) if len(self.pool) > _POOL else self.pool
        )
        usable = min(self.most, len(self.pool))
        self.counts = (
            sorted({min(count, usable) for count in (*_COUNTS, usable) if count <= max(usable, 2)}) if usable else []
        )
        self.selections = [NEAREST, "stratified", "representative", "diverse", "random"] if usable else []
        if isinstance(self.student.program, TextAgent):
            self.selections = self.selections[1:]  # no file can hold examples that are chosen for each task

    def first(self) -> list[CandidateSpec]:
        """The first candidates, the most promising first. They cover the space, so that each part is tried early."""
        cold = self._cold()
        specs: list[CandidateSpec] = []
        if self.counts:
            largest, some = self.counts[-1], self.counts[len(self.counts) // 2]
            kinds = [
                (NEAREST, largest),
                ("stratified", largest),
                ("representative", largest),
                (NEAREST, some),
                ("diverse", some),
                ("stratified", some),
            ]
            for place, (how, count) in enumerate(kinds):
                for turn, prompt_format in enumerate(self.prompt_formats[:2]):
                    specs.append(
                        CandidateSpec(
                            how, count, prompt_format=prompt_format, parameters=cold if (place + turn) % 2 == 0 else ()
                        )
                    )
            specs += [
                CandidateSpec(NEAREST, largest, prompt_format=prompt_format, parameters=cold)
                for prompt_format in self.prompt_formats[2:]
            ]
        specs += [CandidateSpec(prompt_format=prompt_format, parameters=cold) for prompt_format in self.prompt_formats]
        if isinstance(self.student.program, ToolAgent) and self.counts:
            eager = _with(cold, "tool_usage_threshold", 0.0)
            specs.append(
                CandidateSpec(NEAREST, self.counts[-1], prompt_format=self.prompt_formats[0], parameters=eager)
            )
        possible = (spec for spec in specs if spec.selection in (EXISTING, *self.selections))
        return list(
            dict.fromkeys(spec for spec in possible if spec != CandidateSpec(prompt_format=self.prompt_formats[0]))
        )

    def _cold(self) -> tuple[tuple[str, float], ...]:
        """A low temperature where the program's own is higher: an answer that is right is seldom improved by chance."""
        low = min(_VALUES["temperature"])
        higher = "temperature" in self.values and self.program_parameters.get("temperature", 1.0) > low
        return (("temperature", low),) if higher else ()

    def mutants(self, parents: Sequence[CandidateSpec], count: int, rng: random.Random) -> list[CandidateSpec]:
        """Candidates that differ from one of the parents in one or two things, and a few that are new throughout."""
        mutants: dict[CandidateSpec, None] = {}
        for attempt in range(4 * count):
            if len(mutants) >= count:
                break
            spec = rng.choice(list(parents)) if attempt % 5 else self._random(rng)
            for _ in range(rng.choice((1, 1, 2))):
                spec = self.changed(spec, rng)
            mutants[spec] = None
        return list(mutants)

    def _random(self, rng: random.Random) -> CandidateSpec:
        spec = CandidateSpec(
            prompt_format=rng.choice(list(self.prompt_formats)), parameters=rng.choice([(), self._cold()])
        )
        return (
            replace(spec, selection=rng.choice(self.selections), count=rng.choice(self.counts)) if self.counts else spec
        )

    def changed(self, spec: CandidateSpec, rng: random.Random) -> CandidateSpec:
        """A copy of `spec` with one randomly chosen part drawn again."""
        kinds = [
            *(["parameters"] if self.values else []),
            *(["prompt_format"] if len(self.prompt_formats) > 1 else []),
            *(["instruction"] * 2 if len(self.instructions) > 1 else []),
        ]
        kinds += ["selection", "count", "draw"] if self.counts else []
        kinds += ["thinking"] if self.policies else []
        if not kinds:
            return spec
        kind = rng.choice(kinds)
        if kind == "prompt_format":
            return replace(spec, prompt_format=rng.choice(list(self.prompt_formats)))
        if kind == "instruction":
            return replace(spec, instruction=rng.randrange(len(self.instructions)))
        if kind == "thinking":
            return replace(spec, thinking=rng.choice([None, *self.policies]))
        if kind == "parameters":
            name = rng.choice([*sorted(self.values), *(["temperature"] if "temperature" in self.values else [])])
            value = rng.choice([None, *self.values[name]])
            return replace(spec, parameters=_with(spec.parameters, name, value))
        if kind == "draw" and spec.selection not in (EXISTING, NEAREST):
            return replace(spec, draw=spec.draw + rng.randint(1, 9))
        if kind == "count" and spec.selection != EXISTING:
            return replace(spec, count=rng.choice(self.counts))
        how = rng.choice(self.selections)
        return replace(
            spec, selection=how, count=spec.count or rng.choice(self.counts), draw=0 if how == NEAREST else spec.draw
        )

    def build(self, spec: CandidateSpec) -> RecordedProgram:
        """The program of a spec."""
        base, program = self.student, copied(self.student.program)
        for name, predictor in program.named_predictors():
            if (text := self.instructions[spec.instruction].get(name)) is not None:
                predictor.signature = predictor.signature.with_instructions(text)
        if spec.thinking is not None:
            program = with_policy(program, POLICIES[spec.thinking])
        if spec.selection == NEAREST:
            program = NearestDemos(program, self._near, k=spec.count)
        elif spec.selection != EXISTING:
            chosen = select(self.pool, spec.count, how=spec.selection, seed=self.seed * 1000 + spec.draw)
            program = with_demos(program, chosen)
        built = base.around(program, prompt_format=spec.prompt_format)
        built.set_parameters(dict(spec.parameters))
        return built

    def kernel(self, specs: Sequence[CandidateSpec]) -> np.ndarray:
        """Prior covariance of the specs' qualities, see `assay.optimizers.prompts.candidates`."""
        of_agent = isinstance(self.student.program, TextAgent)
        return kernel(specs, self.program_parameters, self.instructions if of_agent else ())


def _with(parameters: tuple[tuple[str, float], ...], name: str, value: float | None) -> tuple[tuple[str, float], ...]:
    changed = {**dict(parameters), name: value}
    return tuple(sorted((key, number) for key, number in changed.items() if number is not None))


# prior standard deviations of what each part of a candidate contributes to its score
_DEMONSTRATIONS, _FORMAT, _INSTRUCTION, _PARAMETERS, _INTERACTION, _DRAW = 0.12, 0.08, 0.06, 0.08, 0.05, 0.03
_THINKING = 0.04


def kernel(
    specs: Sequence[CandidateSpec],
    program_parameters: Mapping[str, float],
    instructions: Sequence[Mapping[str, str]] = (),
) -> np.ndarray:
    """Prior covariance of the candidates' mean scores, of shape (specs, specs).

    A sum of terms for demonstrations, format, instruction and parameters, one for their interaction, and one for the
    random choice of the demonstrations. Of an agent, the term for the instruction is a mean over its texts:
    scores of a candidate inform about those that share a text with it.

    Args:
        program_parameters: the program's own parameters, for specs that leave them as they are.
        instructions: of the specs of an agent, by text.
    """
    space = Space(programs=["p"], acting={"p": list(_VALUES)})

    def equal(values: Sequence[Any]) -> np.ndarray:
        return np.array([[float(a == b) for b in values] for a in values])

    counts = np.log2(1 + np.array([spec.count for spec in specs], dtype=float))
    near = np.exp(-0.5 * (counts[:, None] - counts[None, :]) ** 2)
    how = np.array([[_likeness(a.selection, b.selection) for b in specs] for a in specs])
    places = np.array([_places(spec, program_parameters, space) for spec in specs])
    distances = ((places[:, None, :] - places[None, :, :]) / 0.3) ** 2
    similarity = np.exp(-0.5 * distances)
    formats, texts = equal([spec.prompt_format for spec in specs]), equal([spec.instruction for spec in specs])
    demonstrations = how * near
    return np.asarray(
        _DEMONSTRATIONS**2 * demonstrations
        + _FORMAT**2 * formats
        + _INSTRUCTION**2 * (_shared_texts(specs, instructions) if instructions else texts)
        + (_THINKING**2 * equal([spec.thinking for spec in specs]) if any(spec.thinking for spec in specs) else 0.0)
        + _PARAMETERS**2 * similarity.mean(axis=2) * len(program_parameters) ** 0.5
        + _INTERACTION**2 * demonstrations * formats * texts * similarity.prod(axis=2)
        + _DRAW**2 * equal(list(specs))
    )


def _shared_texts(specs: Sequence[CandidateSpec], instructions: Sequence[Mapping[str, str]]) -> np.ndarray:
    """Share of an agent's texts that are the same, of those that have several versions."""
    names = list(dict.fromkeys(name for texts in instructions for name in texts))
    versions = [[instructions[spec.instruction].get(name) for name in names] for spec in specs]
    if not names:
        return np.ones((len(specs), len(specs)))
    return np.array([[sum(map(eq, a, b)) / len(names) for b in versions] for a in versions])


def _places(spec: CandidateSpec, program_parameters: Mapping[str, float], space: Space) -> list[float]:
    """Positions of a spec's parameters in their ranges, in [0, 1]; 0.5 for those that the program does not have."""
    values = {**program_parameters, **dict(spec.parameters)}
    return [space.place(name, values[name]) if name in values else 0.5 for name in _VALUES]


def _likeness(a: str, b: str) -> float:
    """Of two ways to choose demonstrations."""
    if a == b:
        return 1.0
    if EXISTING in (a, b):
        return 0.0
    return 0.4 if NEAREST in (a, b) else 0.8
