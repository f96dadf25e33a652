"""Compares an artifact with itself under another model or another version of DSPy, and cures a loss.

The old side is the artifact with its model, or its recorded rollouts. Both sides run the gate tasks. Only where the new
side is worse, cures are tried, the cheapest first: the old prompt format, other formats, demonstrations collected from
the new model, instructions for the predictors that lose. Each is selected on val, and kept if gate shows that it is
better than the new side so far. Once one is kept, the sealed test decides.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import dspy

from assay.datasets import Task
from assay.deployment import Artifact, load_artifact
from assay.deployment.artifact import check_pinned
from assay.errors import BudgetExceeded, ConfigError, FailureKind
from assay.evaluation.comparison import Comparison, compare, what_would_decide
from assay.evaluation.evaluation import evaluate, recorded_runs
from assay.evaluation.executors import in_threads
from assay.evaluation.session import RecordedProgram, Session
from assay.evaluation.statistics import (
    LEAST_SPREAD,
    Gain,
    SequentialTest,
    differences_of,
    largest_loss,
    paired_gain,
    spread_of,
    tasks_needed,
)
from assay.jobs.job import Job
from assay.models import LanguageModel, Meter, Thinking, get_lm
from assay.models.dspy_seam import prompt_text
from assay.models.lm import has_provider
from assay.models.meter import Usage
from assay.optimizers.budget import ReportPlan, forecast_pair, pair_of, plan_report
from assay.optimizers.prompts.candidates import Candidate, SearchSpace, best_with_fewest_tokens, searched_program
from assay.optimizers.prompts.demonstrations import Demonstration, explore
from assay.optimizers.prompts.proposals import InstructionCheck, propose_instruction
from assay.optimizers.prompts.thinking import tasks_for
from assay.programs import ADAPTERS, make_adapter
from assay.programs.adapters import ambient_format, value_in
from assay.programs.compose import without_nearest
from assay.programs.isolation import copied
from assay.rubrics.scoring import ScoredRun
from assay.support.numbers import counted
from assay.traces.messages.dialects import chat_messages, part_texts
from assay.traces.messages.final_answer import Prompt, asked_outputs
from assay.traces.store.listing import find_rollouts, list_runs

NO_WORSE, WORSE, TOO_FEW = "no worse", "worse", "too few tasks"
OLD_FORMAT, FORMATS, DEMONSTRATIONS, INSTRUCTIONS = (
    "old prompt format", "other prompt formats", "new demonstrations", "new instructions",
)  # fmt: skip
_SIDES = ("old", "new")
_DEMOS = 16  # demonstrations of a predictor at most, as in a compile
_EXPLORED = 12  # successful runs that end the collection of demonstrations
_EXPLORING = 10  # runs for each of them, at most
_PROPOSED = 3  # instructions for each predictor that loses
_MOST_READ = 20  # recorded rollouts in which a call of each predictor is searched


# -- the verdict


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How the new side stands to the old one on the same tasks.

    Attributes:
        verdict: `no worse`: it is shown to lose at most the margin. `worse`: the interval of the gain is below zero,
            and that is not shown. `too few tasks`: neither.
        tasks_needed: tasks that would decide at this mean and spread; None where it is decided, or nothing was paired.
    """

    verdict: str
    tasks_needed: int | None = None


def standing_of(before: Mapping[str, float], after: Mapping[str, float], gain: Gain, *, margin: float) -> Standing:
    """The verdict on two sides by a margin that was declared before.

    Args:
        before, after: scores by task id; NaN where unscored.
        gain: of `after` over `before`, with the interval of the comparison.
        margin: largest loss of mean score, in [0, 1), that counts as no worse.
    """
    loss_high = largest_loss(before, after)
    if gain.low > 0 or loss_high <= margin:
        return Standing(verdict=NO_WORSE)
    if gain.high < 0:
        return Standing(verdict=WORSE)
    if not gain.n:
        return Standing(verdict=TOO_FEW)
    loss = -gain.mean
    counts = [tasks_for({"n": gain.n, "loss": loss, "loss_high": loss_high}, margin)]
    if loss > 0:
        spread = max(LEAST_SPREAD, spread_of(list(differences_of(before, after))))
        counts.append(tasks_needed(loss, spread=spread))
    needed = min(counts)
    return Standing(verdict=TOO_FEW, tasks_needed=max(gain.n + 1, math.ceil(needed)) if math.isfinite(needed) else None)


# -- the sides


class KnownRuns:
    """An executor that runs each program once on a task, and gives that run again where it is asked for later."""

    def __init__(self) -> None:
        self._runs: dict[int, tuple[RecordedProgram, dict[str, ScoredRun]]] = {}  # by the identity of the program

    def of(self, program: RecordedProgram) -> dict[str, ScoredRun]:
        """The runs of a program by task id."""
        return self._runs.setdefault(id(program), (program, {}))[1]

    def __call__(
        self, program: RecordedProgram, tasks: Sequence[Task], session: Session
    ) -> Iterator[tuple[Task, ScoredRun]]:
        known = self.of(program)
        yield from [(task, known[task.id]) for task in tasks if task.id in known]
        for task, run in in_threads(program, [task for task in tasks if task.id not in known], session):
            known[task.id] = run
            yield task, run


def old_side(job: Job, *, recorded: bool) -> RecordedProgram:
    """The artifact as it was measured: with its model, settings and prompt format.

    Args:
        recorded: it is not run; its runs are those of the store, see `recorded_side`.
    Raises:
        ConfigError: its model was an object that no name stands for.
    """
    artifact = load_artifact(_artifact(job).path)
    lm = job.session.lm if recorded else _old_lm(job, artifact)
    session = replace(
        job.session, lm=lm, prompt_lm=None, given_lm=None, measured=None, first_runs=None,
        thinking=Thinking.of(artifact.settings.get("thinking")),
    )  # fmt: skip
    side = RecordedProgram(artifact.program, session, prompt_format=artifact.settings["adapter"])
    side.set_parameters(artifact.settings["parameters"])
    return side


def _artifact(job: Job) -> Artifact:
    assert job.artifact is not None  # the command takes nothing else
    return job.artifact


def _old_lm(job: Job, artifact: Artifact) -> LanguageModel:
    if not has_provider(artifact.model):
        raise ConfigError(
            f"{artifact.path} was made with the model {artifact.model!r}, an object that no name stands for",
            hint="Take its recorded rollouts as the old side: `recorded=True`",
        )
    engine = job.session.lm.recording
    lm = get_lm(
        artifact.model, cache=engine.cache, meter=engine.meter, observers=engine.observers, seed=job.config.seed,
        **artifact.endpoint.client(artifact.model),
    )  # fmt: skip
    check_pinned(artifact, lm)
    return lm


def recorded_side(job: Job, old: RecordedProgram) -> dict[str, ScoredRun]:
    """Recorded runs of the artifact by task id: those of its model and version of DSPy, scored by the job's rubric.

    Raises:
        ConfigError: the store has none of a gate task.
    """
    artifact, wanted = _artifact(job), {task.id for task in job.splits.gate}
    manifest = artifact.manifest
    version, model = manifest["version"], manifest["model"]
    known = recorded_runs(old, job.store, version=version, model=model, runs=_runs_of_old_dspy(job))
    if not wanted & known.keys():
        rubric = job.session.rubric
        raise ConfigError(
            f"the store has no rollout of {artifact.path} on a gate task of this data that was made with DSPy "
            f"{manifest['dspy']} and {manifest['model']}, and scored by the rubric {rubric.name}@{rubric.version}",
            hint=(
                f"Where DSPy {manifest['dspy']} is installed, run assay evaluate {artifact.path} --split gate with "
                "this data, rubric and store, then migrate; or name another `model`, and both sides run now"
            ),
        )
    return known


def _runs_of_old_dspy(job: Job) -> set[str]:
    """Ids of the runs of the store that were made with the artifact's version of DSPy."""
    version = _artifact(job).manifest["dspy"]
    return {run["id"] for run in list_runs(job.store) if run["config"].get("dspy") == version}


# -- prompts


def changed_prompts(job: Job) -> list[dict[str, Any]]:
    """The predictors whose prompts differ from those of the artifact; no model is called.

    Under another version of DSPy a recorded call of each predictor is rendered anew and compared.

    Returns:
        One entry for each predictor whose prompt differs, or where that is unknown: `predictor`, `differs` (True, or
        None) and `reason`.
    """
    artifact = _artifact(job)
    before, now = artifact.prompt_format, format_of(job, job.recorded)
    versions = str(artifact.manifest["dspy"]), dspy.__version__
    predictors = searched_program(job.recorded).program.named_predictors()
    if before != now:
        reason = f"format {now} in place of {before}"
        return [{"predictor": name, "differs": True, "reason": reason} for name, _ in predictors]
    if versions[0] == versions[1]:
        return []
    calls = _recorded_calls(job)
    rows = []
    for name, predictor in predictors:
        same = _renders_same(predictor.signature, now, calls)
        if not same:
            reason = f"DSPy {versions[1]} renders it otherwise than {versions[0]}"
            reason = reason if same is False else "no recorded call of it could be rendered anew"
            rows.append({"predictor": name, "differs": None if same is None else True, "reason": reason})
    return rows


def format_of(job: Job, new: RecordedProgram) -> str:
    """The prompt format of the new side. A program that sets its own one keeps it."""
    artifact, named = _artifact(job), new.settings["adapter"]
    sets_own = named is None and artifact.prompt_format != artifact.manifest.get("default_format")
    return str(named or (artifact.prompt_format if sets_own else ambient_format()))


def _recorded_calls(job: Job) -> list[list[dict[str, Any]]]:
    """Messages of calls of recorded rollouts of the artifact, made with its version of DSPy."""
    runs, version = _runs_of_old_dspy(job), _artifact(job).manifest["version"]
    rows = find_rollouts(job.store, equal={"program_version": version})
    some = list(itertools.islice((row.id for row in rows if row.run_id in runs), _MOST_READ))
    return [chat_messages(call.request) for row in some for call in job.store.rollout(row).transitions]


def _renders_same(signature: Any, prompt_format: str, calls: Sequence[Sequence[dict[str, Any]]]) -> bool | None:
    """Whether a recorded prompt of a predictor is rendered now as it was; None without one that can be read."""
    adapter = make_adapter(prompt_format) if prompt_format in ADAPTERS else dspy.settings.adapter
    for messages in calls:
        texts = [part_texts(message.get("content")) for message in messages]
        sections, fields = Prompt.of(messages).sections, signature.input_fields
        same_fields = sections.keys() == fields.keys() and set(asked_outputs(messages)) == set(signature.output_fields)
        if not same_fields or signature.instructions.split("\n")[0] not in texts[0]:
            continue  # of another predictor
        try:
            inputs = {name: value_in(sections[name], field.annotation) for name, field in fields.items()}
            rendered = prompt_text(adapter.format(signature, [], inputs))
        except Exception:  # a type of DSPy, whose text is not its value
            continue
        return rendered == "\n".join((texts[0], texts[-1]))
    return None


# -- comparison and cures


Candidates = Iterator[tuple[str, RecordedProgram]]


class Migration:
    """A running migration.

    Args:
        old: the old side.
        known: the executor of both sides; it has the runs of an old side that is recorded.
        margin: see `standing_of`.
        threshold: score in (0, 1] from which a run counts as a success to learn from.
        recorded: the old side is not run.
    Attributes:
        new: the new side, with the cures that were kept.
        split: of the comparison that decides: `gate`, or `test` once a cure was kept.
        first: the comparison on gate before any cure.
        result: the comparison that decides.
        cures: what was tried, JSON-ready: see `assay.commands.migrate.MigrateReport`.
        stopped: the cap that ended it early.
    """

    def __init__(
        self, job: Job, old: RecordedProgram, known: KnownRuns, *, margin: float, threshold: float, recorded: bool
    ) -> None:
        self.job, self.session, self.splits, self.decisions = job, job.session, job.splits, job.config.decisions
        self.old, self.new, self.known = old, job.recorded, known
        self.margin, self.threshold, self.recorded = margin, threshold, recorded
        self.split, self.notes, self.cures = "gate", list[str](), list[dict[str, Any]]()
        self.stopped: str | None = None
        self._demonstrations = list[Demonstration]()
        self._gate = self._tasks(self.splits.gate)

    def run(self) -> None:
        """Compares, and cures a loss.

        Raises:
            BudgetExceeded: a cap was reached before any pair was complete.
            ModelError: one of the sides could not be scored at all.
        """
        plan, tasks = self._planned(), len(self._gate)
        self._gate = self._gate[: plan.gate]
        self.first = self.result = self._compared(self._gate, self.decisions.rule(len(self._gate), futility=False))
        if plan.capped and not self.result.ended:
            self.stopped = f"the caps leave {len(self._gate)} of {counted(tasks, 'gate tasks')}"
        cures = {
            OLD_FORMAT: self._in_old_format, FORMATS: self._in_other_formats, DEMONSTRATIONS: self._with_demonstrations,
            INSTRUCTIONS: self._with_instructions,
        }  # fmt: skip
        for number, (cure, candidates) in enumerate(cures.items(), 1):
            if self.stopped or self.standing.verdict != WORSE:
                break
            self._reserve(number)
            self._try(cure, candidates)
        if any(row["kept"] for row in self.cures):
            self._test()

    @property
    def standing(self) -> Standing:
        """By the comparison that decides so far."""
        before, after = self.result.before.scores, self.result.after.scores
        return standing_of(before, after, self.result.gain, margin=self.margin)

    # -- tasks and caps

    def _tasks(self, tasks: Sequence[Task]) -> list[Task]:
        """Those of the tasks on which the old side can be compared."""
        known = self.known.of(self.old)
        return [task for task in tasks if not self.recorded or task.id in known]

    def _planned(self) -> ReportPlan:
        """The gate tasks that the caps allow, whatever cures of an earlier process have spent."""
        meter, pair = self.session.meter, forecast_pair(self.new.program, self.session)
        pair = _times(pair, 0.5) if self.recorded else pair
        before = Meter(meter.caps, {"preflight": meter.of("preflight")})
        return plan_report(self.splits, before, replace(self.decisions, test=False), pair=pair)

    @property
    def _tested(self) -> int:
        """Number of test tasks."""
        return plan_report(self.splits, Meter(), self.decisions, pair=Usage()).test

    def _reserve(self, cures: int) -> None:
        """Keeps the parts of gate, with so many cures, and of test from the search."""
        each = [
            _times(pair_of(side, side, self.session, self.new.program), 0.5)
            for side in (self.first.before, self.first.after)
        ]

        def held(tasks: int, new_runs: int) -> Usage:
            part = _times(each[1], tasks * new_runs)
            part.add(_times(each[0], 0 if self.recorded else tasks))
            return part

        self.session.meter.hold(gate=held(len(self._gate), 1 + cures), test=held(self._tested, 1))

    # -- comparisons

    def _compared(self, tasks: Sequence[Task], rule: SequentialTest | None = None) -> Comparison:
        """The old and the new side."""
        comparison = compare(
            self.old, self.new, tasks, self.old.session, after_session=self.session, split=self.split, names=_SIDES,
            rule=rule,
        )  # fmt: skip
        if comparison.cap is not None:
            self.stopped = str(comparison.cap)
        elif note := comparison.end_of(self.split):
            self.notes.append(note)
        return comparison

    def _test(self) -> None:
        """The sealed test, opened here and only here."""
        self.split, on_gate = "test", self.result
        tasks = self._tasks(self.splits.unseal())[: self._tested]
        try:
            self.result = self._compared(tasks, self.decisions.rule(len(tasks), futility=False))
        except BudgetExceeded as cap:
            self.split, self.stopped, self.result = "gate", str(cap), on_gate

    # -- cures

    def _try(self, cure: str, candidates: Callable[[], Candidates]) -> None:
        """Selects the best candidate of a cure on val, and keeps it if gate shows that it is better."""
        empty = dict.fromkeys(("candidate", "predictors", "val", "gate", "note"))
        row: dict[str, Any] = {"cure": cure, **empty, "kept": False}
        self.cures.append(row)
        tried = [Candidate("without it", self.new)]
        try:
            with self.session.phase("search"):
                tried += [Candidate(name, program) for name, program in candidates()]
                if len(tried) > 1:
                    self.session.progress.say(f"the new side is worse; cure: {cure}")
                for candidate in tried if len(tried) > 1 else ():
                    name = f"val: {candidate.name}"
                    evaluate(candidate.student, self.splits.val, self.session, name=name, into=candidate.evaluation)
        except BudgetExceeded as cap:
            self.stopped = row["note"] = str(cap)
        tried = [each for each in tried if len(each.evaluation) == len(self.splits.val)]
        if len(tried) < 2:
            return
        best = best_with_fewest_tokens(tried, [each.mean for each in tried], -1.0)
        row["val"] = {"before": tried[0].summary()["val_score"], "after": best.summary()["val_score"]}
        if best is tried[0]:
            row["note"] = f"better on val: none of {counted(len(tried) - 1, 'candidates')}"
            return
        row["candidate"] = best.name
        try:
            self._decide(row, best)
        except BudgetExceeded as cap:
            self.stopped = row["note"] = str(cap)

    def _decide(self, row: dict[str, Any], best: Candidate) -> None:
        """Keeps the candidate if the gate shows that it is better than the new side without it."""
        gate = compare(
            self.new, best.student, self._gate, self.session, split="gate", names=("without it", best.name),
            rule=self.decisions.rule(len(self._gate)),
        )  # fmt: skip
        row |= {"gate": gate.gain.to_dict(), "kept": gate.gain.is_gain}
        if gate.undecided("gate") is not None:
            self.stopped = str(gate.cap)
        if not row["kept"]:
            row["note"] = what_would_decide(gate.before, gate.after, "gate")
            return
        self.new = best.student
        old, new = self.known.of(self.old), self.known.of(self.new)
        self.result = self._compared([task for task in self._gate if task.id in old.keys() & new.keys()])

    def _in_old_format(self) -> Candidates:
        old = _artifact(self.job).prompt_format
        if old == format_of(self.job, self.new) or old not in ADAPTERS:
            self.cures[-1]["note"] = "the new side has it" if old in ADAPTERS else f"{old} is the program's own"
            return
        yield old, self.new.around(copied(self.new.program), prompt_format=old)

    def _in_other_formats(self) -> Candidates:
        known = (_artifact(self.job).prompt_format, format_of(self.job, self.new))
        for name in ADAPTERS:
            if name not in known:
                yield name, self.new.around(copied(self.new.program), prompt_format=name)

    def _with_demonstrations(self) -> Candidates:
        """Successful runs of the new side on train; of the old side where there are none."""
        base, sides = searched_program(self.new), [self.new] if self.recorded else [self.new, self.old]
        for side in sides:
            student = searched_program(side)
            self._demonstrations = explore(
                student, self.splits.train, side.session, prompt_formats=[student.settings["adapter"]],
                target=_EXPLORED, max_calls=_EXPLORING * _EXPLORED, threshold=self.threshold,
            ).demonstrations  # fmt: skip
            if self._demonstrations:
                break
        space = SearchSpace(base, self._demonstrations, [base.settings["adapter"]], most=_DEMOS, seed=self.session.seed)
        specs = dict.fromkeys(replace(spec, parameters=()) for spec in space.first() if spec.count)
        if not specs:
            self.cures[-1]["note"] = f"no run on train reached the `threshold` {self.threshold:g}"
        for spec in specs:
            yield spec.name, space.build(spec)

    def _with_instructions(self) -> Candidates:
        """Instructions that are proposed for the predictors that lose."""
        base, losing = searched_program(self.new), self._losing()
        self.cures[-1]["predictors"] = losing
        check = InstructionCheck(base.program, self.session.lm)
        examples = self._demonstrations or [Demonstration.of_label(task, losing) for task in self.splits.train]
        texts = list[Mapping[str, str]]()
        with check.listening(self.session.lm, self.session.prompt_lm):
            for number in range(_PROPOSED * len(losing)):
                proposed = propose_instruction(
                    base, examples, self.session, number=number, instruction_check=check, among=losing
                )
                if proposed is not None and proposed.texts not in texts:
                    texts.append(proposed.texts)
        if not texts:
            self.cures[-1]["note"] = "no proposed instruction could be used"
        for number, text in enumerate(texts, 1):
            program = copied(self.new.program)
            for name, predictor in without_nearest(program).named_predictors():
                if name in text:
                    predictor.signature = predictor.signature.with_instructions(text[name])
            yield f"instruction {number}, of {', '.join(text)}", self.new.around(program)

    def _losing(self) -> list[str]:
        """The predictors with which the new side is better on val if the old model answers them alone. All, if there is
        none or the old model is not run."""
        names = [name for name, _ in without_nearest(self.new.program).named_predictors()]
        if len(names) < 2 or self.recorded:
            return names
        scores, swapped = dict[str, dict[str, float]](), {"": self.new}
        for name in names:
            program = copied(self.new.program)
            dict(without_nearest(program).named_predictors())[name].lm = self.old.session.lm
            swapped[name] = self.new.around(program)
        for name, program in swapped.items():
            title = f"val: {name or 'new'}{' by the old model' if name else ''}"
            scores[name] = evaluate(program, self.splits.val, self.session, name=title).scores
        return [name for name in names if paired_gain(scores[""], scores[name]).mean > 0] or names


def side_report(migration: Migration, *, old: bool) -> dict[str, Any]:
    """The evaluation of a side as a report, with where it ran, and the LM calls whose answers could not be parsed
    (`parse_failures`) or were cut at their limit of tokens (`truncated`)."""
    job, artifact, recorded = migration.job, _artifact(migration.job), old and migration.recorded
    evaluation = migration.result.before if old else migration.result.after
    runs = migration.known.of(migration.old if old else migration.new)
    calls = [call for task in evaluation.results for call in runs[task].rollout.transitions]
    return {
        "model": artifact.manifest["model"] if old else job.session.lm.model,
        "dspy": artifact.manifest["dspy"] if recorded else dspy.__version__,
        "prompt_format": artifact.prompt_format if old else format_of(job, migration.new),
        "recorded": recorded,
        **job.priced(evaluation),
        "parse_failures": sum(call.failure is FailureKind.PARSE for call in calls),
        "truncated": sum((call.response or {}).get("finish_reason") == "length" for call in calls),
    }


def _times(usage: Usage, factor: float) -> Usage:
    """The usage of so many runs."""
    return Usage(
        calls=math.ceil(usage.calls * factor), prompt_tokens=math.ceil(usage.tokens * factor),
        cost_usd=usage.cost_usd * factor,
    )  # fmt: skip
