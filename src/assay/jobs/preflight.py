"""Checks before a job: prices are known, the program runs, each judge gives a verdict, the reflection model answers.

Calls are recorded and counted under the phase `preflight`; the job then gets the same answers from the response cache.
Does not import programs or load data: `assay.jobs.job.open_job` has done that before.
"""

import difflib
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import dspy
from dspy.utils.exceptions import AdapterParseError, ContextWindowExceededError, LMError

from assay.datasets import Task
from assay.errors import (
    ConfigError,
    EnvironmentFailed,
    FailureKind,
    LoopStopped,
    ModelError,
    ProgramError,
    ProgramFailed,
    RubricError,
)
from assay.evaluation import RecordedProgram, Session
from assay.evaluation.failures import (
    FirstRuns,
    correction,
    place_of,
    program_traceback,
    refused_address,
    require_answers,
)
from assay.evaluation.metrics import overridden_format, unscored_steps
from assay.evaluation.session import Measured
from assay.jobs.job import Job
from assay.judges import Cascade, Judge, Jury, PointwiseJudge
from assay.judges.base import attempt
from assay.judges.labels import Item
from assay.models import LanguageModel
from assay.models.calls import MODEL_FAILURES, is_refused
from assay.models.hosted import HostedBackend, error_reason
from assay.models.limits import OverTime, limited, within_limit
from assay.models.lm import sibling
from assay.models.scope import refusals_end_at_once, without_answers_of
from assay.optimizers.budget import price_of
from assay.programs.runners import AgentFailed, RunnerLost
from assay.programs.wrapping import is_wrapped
from assay.rubrics import Criterion, NoGrade, Rubric, ScoreResult
from assay.rubrics.calling import call, unfit_arguments
from assay.rubrics.scoring import ScoredRun, fields_of, grade, is_shipped
from assay.traces import Rollout
from assay.traces.messages.final_answer import sent_formats
from assay.traces.records import Verdict

SKIP = "`preflight=False` skips this check"
_MORE = 20  # further tasks on which a check is tried, with the last answer, before it is refused
_OWN_MODELS = (
    "the temperature and the thinking of the model are not varied: the program's own models answered all its calls. To "
    "call the model in their place, set `replace_lms=True`"
)
_SEEN = 8  # tasks that show whose models answer
_TRIES = 3  # tasks that may fail before the job is stopped


def checked(job: Job, tasks: Sequence[Task], *, recorded: RecordedProgram | None = None) -> Measured | None:
    """Runs `preflight` for an opened job, unless its settings turn it off."""
    if not job.config.preflight:
        return None
    model = "" if is_wrapped(job.recorded.program) else f" with {job.session.lm.model}"
    job.session.progress.say(f"preflight{model}: one task, each judge once")
    measured = preflight(job.session, recorded or job.recorded, tasks, max_cost_usd=job.config.max_cost_usd)
    job.session.measured = measured
    job.session.first_runs = FirstRuns()
    return measured


def see_models(job: Job) -> list[str]:
    """Runs val tasks until the job's model answers a call, if the program's own models answered all calls so far.

    The search does not vary settings of the job's model that no call would take.

    Returns:
        A note for the report, if they answer all calls.
    """
    session, tasks = job.session, job.splits.val[:_SEEN]
    unknown = not session.model_calls + session.own_calls and any(p.lm for p in job.recorded.program.predictors())
    with session.phase("preflight"), session.context(), limited(session.task_timeout):
        for task in tasks:
            if session.model_calls or not (session.own_calls or unknown):
                break
            job.recorded.run(task)
            unknown = False
    session.only_own_models = session.own_calls > 0 and session.model_calls == 0
    if not session.only_own_models:
        return []
    session.progress.say(f"note: {_OWN_MODELS}")
    return [_OWN_MODELS]


def require_predictors(job: Job) -> None:
    """Refuses a job whose prompts cannot be compiled because the program has none.

    Raises:
        ProgramError: no module of the program is a `dspy.Predict`, or all of them are in frozen modules.
    """
    program = job.recorded.program
    if not program.predictors():
        frozen = " except in frozen modules" if any(program.named_sub_modules(dspy.Predict)) else ""
        raise ProgramError(
            f"{job.config.program} has no predictors{frozen}, so there is nothing to compile; evaluate it, or tune "
            "it where it is an agent"
        )


def preflight(
    session: Session,
    recorded: RecordedProgram,
    tasks: Sequence[Task],
    *,
    max_cost_usd: float | None = None,
) -> Measured:
    """Runs the program on one task and asks each judge for one verdict; then asks the reflection model, if there is
    one.

    Tries up to three tasks if one fails.

    Args:
        tasks: those that the job runs first, so that it finds the answers in the cache.
        max_cost_usd: the job's cap in dollars, if any.
    Returns:
        Calls, tokens and latency of a run, for an estimate.
    Raises:
        ConfigError: there is a cap in dollars and a model without a known price.
        ProgramFailed: the program raised the same exception at the same place on each task, or answered none of them.
        RubricError: a check decided nothing on any of the tasks.
        ModelError: the program's model answered none of the tasks, a judge scored none of their answers, or the
            reflection model did not answer.
        BudgetExceeded, Cancelled: a cap was reached; the calls made so far are in the store.
    """
    check_prices(session, max_cost_usd)
    first, verdicts = list(tasks[:_TRIES]), _verdicts(session)
    runs, errors = list[ScoredRun](), list[BaseException]()
    with _asking(session), limited(session.task_timeout):
        before = session.meter.usage
        for task in first:
            run = recorded.run(task)
            runs.append(run)
            error = run.error
            if error is not None and not isinstance(error, AdapterParseError | ContextWindowExceededError):
                errors.append(error)
                if is_refused(error) and isinstance(error, LMError):
                    break
                continue
            verdicts.take(task, run)
            if not verdicts.missing:
                break
        if errors and len(errors) == len(runs):
            _stop(errors, recorded)
        if not errors:
            require_answers(runs)
        verdicts.ask(first[0], runs[0].rollout)
        verdicts.require(tasks)
        spent = session.meter.usage
    _say_styles(session)
    sent = sent_formats([call for run in runs for call in run.rollout.transitions])
    steps = unscored_steps(session.rubric.criteria, [len(run.rollout.transitions) for run in runs if not run.error])
    warnings = [*verdicts.warnings(), *overridden_format(recorded.prompt_format, sent), *steps]
    for warning in warnings:
        session.progress.say(f"warning: {warning}")
    ask_reflection(session)
    check_prices(session, max_cost_usd, unpriced=session.meter.usage.unpriced - before.unpriced)
    calls = spent.calls + spent.cached - before.calls - before.cached
    return replace(_measured([run.rollout for run in runs], calls), warnings=tuple(warnings))


def preflight_judges(session: Session, tasks: Sequence[Task], *, max_cost_usd: float | None = None) -> None:
    """`preflight` for a program that cannot run yet: asks each judge about the expected output of the first task.

    Raises:
        ConfigError, ModelError: as in `preflight`.
        BudgetExceeded, Cancelled: a cap was reached.
    """
    check_prices(session, max_cost_usd)
    verdicts, first = _verdicts(session), tasks[0]
    with _asking(session), limited(session.task_timeout):
        verdicts.ask(first, Rollout(task_id=first.id, split=first.split or "", inputs=dict(first.inputs)))
        verdicts.require(tasks)
    _say_styles(session)


@contextmanager
def _asking(session: Session) -> Iterator[None]:
    """A preflight's calls. Answers that stopped it are not cached: the next one sends the requests again."""
    with session.phase("preflight"), session.context(), refusals_end_at_once(), without_answers_of(ModelError):
        yield


def _verdicts(session: Session) -> "Verdicts":
    return Verdicts(session.rubric, default_model=session.lm.model if session.own_models else "")


def preflight_scoring(rubric: Rubric, scored: Iterable[tuple[Task, ScoreResult | None, Rollout]]) -> None:
    """Reads up to three scored rollouts with an answer, until each judge has given a verdict.

    Args:
        scored: lazy: a rollout is scored when it is read, so an unreachable judge ends the job at the first one.
    Raises:
        ModelError: a judge scored none of the answers.
    """
    verdicts = Verdicts(rubric)
    with refusals_end_at_once(), without_answers_of(ModelError):
        for task, result, rollout in scored:
            verdicts.read(task, result, fields_of(rollout.prediction), rollout)
            if not verdicts.silent or len(verdicts.answered) == _TRIES:
                break
        if verdicts.answered:  # else no judge was asked anything
            verdicts.require_judges()


def preflight_judge(
    judge: Judge, items: Sequence[Item], session: Session, *, max_cost_usd: float | None = None
) -> None:
    """Calls each model of a judge once, including those of jury and cascade members; then the reflection model, if any.

    Args:
        items: those that are judged first; up to three are tried.
    Raises:
        ConfigError: there is a cap in dollars and a model without a known price.
        ModelError: a model answered on none of the items.
        BudgetExceeded, Cancelled: a cap was reached; the calls made so far are in the store.
    """
    check_prices(session, max_cost_usd, judge=judge)
    before = session.meter.usage
    with session.phase("preflight"), session.context(), refusals_end_at_once():
        for part in _parts_of(judge):
            _require_answer(part, items[:_TRIES], session)
    _say_styles(session, judge)
    ask_reflection(session)
    check_prices(session, max_cost_usd, unpriced=session.meter.usage.unpriced - before.unpriced)


def _parts_of(judge: Judge) -> list[Judge]:
    """The single judge, or all members of a jury or cascade, recursively."""
    members = (
        judge.members if isinstance(judge, Jury) else [judge.first, judge.second] if isinstance(judge, Cascade) else []
    )
    return [part for member in members for part in _parts_of(member)] or [judge]


def _say_styles(session: Session, *judges: Any) -> None:
    """Says which judges (by default the rubric's) are asked for letters, because the model gives words too little
    probability."""
    asked = judges or [getattr(session.rubric.decider(c.name), "judge", None) for c in session.rubric.finals]
    for part in (part for judge in asked if isinstance(judge, Judge) for part in _parts_of(judge)):
        if isinstance(part, PointwiseJudge) and part.chose_letters:
            session.progress.say(
                f"judge {part.spec.text[:80]!r}: its verdicts are read by letters, because the model gives the words "
                "of the scale little probability"
            )


def _require_answer(judge: Judge, items: Sequence[Item], session: Session) -> None:
    """Raises if every call failed at the model's server. An answer without a verdict passes: compiling may fix it."""
    broken: list[tuple[str, str | None]] = []  # models and the reasons for missing answers
    for item in items:
        rollout = Rollout(
            task_id=item.id[:200], task_type="verdict", program=session.program_name, source="judge",
            model=session.lm.model,
            inputs={name: item.fields.get(name) for name in judge.shows},
        )  # fmt: skip
        with session.recorder.rollout(rollout):
            verdict, reason, kind = _judge_answer(judge, rollout.inputs, session.task_timeout)
            if verdict is None:
                rollout.status, rollout.error, rollout.failure = "error", reason, kind
        if kind is FailureKind.TIMEOUT:
            broken.append((session.lm.model, reason))
            continue
        if any(call.failure not in MODEL_FAILURES for call in rollout.transitions):
            return
        broken += [(call.model, call.error) for call in rollout.transitions]
    if broken:
        model, cause = broken[-1]
        raise ModelError(
            f"{model} did not answer the judge {judge.spec.text[:80]!r}: {cause}. "
            f"Check the model, its key and address (`model`, `api_key_env`, `api_base`); {SKIP}"
        )


def _judge_answer(judge: Judge, inputs: Mapping[str, Any], seconds: float) -> tuple[Any, str, FailureKind]:
    """The answer of a judge, or None with the reason and its kind."""
    try:
        with limited(seconds):
            return *within_limit(lambda: attempt(judge, inputs), "the judge"), FailureKind.JUDGE
    except OverTime as error:
        return None, str(error), FailureKind.TIMEOUT


def check_prices(
    session: Session, max_cost_usd: float | None, *, unpriced: int = 0, judge: Judge | None = None
) -> None:
    """Refuses a cap in dollars if the price of a model is unknown.

    Args:
        unpriced: number of calls so far without a price.
        judge: judge whose models, including those of jury and cascade members, need a price as well.
    Raises:
        ConfigError: names the models.
    """
    if max_cost_usd is None:
        return
    judge_lms = (
        [sibling(session.lm, part.model, part.endpoint) for part in _parts_of(judge) if part.model is not None]
        if judge is not None
        else []
    )
    used = {
        lm.model: lm
        for lm in (session.lm, session.judge_lm if session.rubric.takes_model else None, session.prompt_lm, *judge_lms)
        if lm is not None
    }
    unknown = [name for name, lm in used.items() if price_of(lm) is None and (unpriced or _priced_by_name(lm))]
    if unknown or unpriced:
        raise ConfigError(
            f"`max_cost_usd={max_cost_usd:g}` cannot be kept: no price is known for "
            f"{', '.join(unknown) or 'a model that a judge names'}. "
            "Cap calls or tokens instead (`max_calls`, `max_tokens`)"
        )


def ask_reflection(session: Session) -> None:
    """Asks the model that proposes prompts for one word; does nothing if that is the program's own.

    Raises:
        ModelError: it did not answer.
        BudgetExceeded, Cancelled: a cap was reached.
    """
    lm = session.prompt_lm
    if lm is None:
        return
    with session.phase("preflight"), session.context(), refusals_end_at_once():
        try:
            lm("Reply with one word: ready")
        except LMError as error:
            reason = error_reason(error, "reflection_api_key_env", base="reflection_api_base")
            raise ModelError(
                f"the reflection model {lm.model} did not answer: {reason}. Check its name, key and address "
                f"(`reflection_model`, `reflection_api_key_env`, `reflection_api_base`); {SKIP}"
            ) from error


def _priced_by_name(lm: LanguageModel) -> bool:
    """Whether the price is looked up by model name; a user's own engine reports it with each answer."""
    return isinstance(lm.recording.backend, HostedBackend)


def _stop(errors: Sequence[BaseException], recorded: RecordedProgram) -> None:
    """Raises if all runs failed in the same way; different failures do not show that the program is broken."""
    if all(isinstance(error, LMError) for error in errors):
        failure = f"answered none of the first {len(errors)} tasks" if len(errors) > 1 else "did not answer"
        raise ModelError(f"the model {failure}: {error_reason(errors[-1])}. {SKIP}")
    if all(isinstance(error, LoopStopped) for error in errors):
        raise ModelError(
            f"on each of the first {len(errors)} tasks {errors[-1]}. Name another model, raise the temperature, or "
            f"limit the thinking. {SKIP}"
        )
    places = {place_of(error, recorded.program) for error in errors}
    if len(places) == 1 and not isinstance(errors[0], LMError):
        place, error = places.pop(), errors[0]
        if isinstance(error, EnvironmentFailed):
            cause = f"\n{program_traceback(error.__cause__)}\n" if error.__cause__ is not None else ". "
            raise ProgramFailed(f"{error}{cause}Correct the environment. {SKIP}")
        if isinstance(error, AgentFailed | RunnerLost):  # its traceback is of the code that ran it
            what = "the agent" if isinstance(error, AgentFailed) else "the agent, or the machine that runs it"
            raise ProgramFailed(f"on each of the first {len(errors)} tasks {error}. Correct {what}. {SKIP}")
        reason = str(error).rstrip(".")
        weak = (
            "Where such an exception follows from what a weak model answers, catch it and return an empty answer, "
            "which scores 0. "
            if refused_address(error) is None
            else ""
        )
        raise ProgramFailed(
            f"the program failed on each of the first {len(errors)} tasks with {type(error).__name__} at "
            f"{place.file}:{place.line}: {reason}{correction(error)}. {weak}{SKIP}"
        )


def _measured(runs: Sequence[Rollout], total_calls: int) -> Measured:
    calls = [transition for run in runs for transition in run.transitions]
    ended = [run for run in runs if run.transitions] or list(runs)
    latencies = [call.latency_ms / 1000 for call in calls if call.latency_ms > 0]
    tokens = [
        (call.prompt_tokens or 0) + (call.completion_tokens or 0) for call in calls if call.prompt_tokens is not None
    ]
    return Measured(
        calls=len(calls) / max(1, len(ended)),
        judge_calls=max(0.0, (total_calls - len(calls)) / max(1, len(ended))),
        tokens=statistics.fmean(tokens) if tokens else None,
        latency_s=statistics.median(latencies) if latencies else None,
    )


# -- The rubric: each final criterion must be decided on one of the first tasks.


class Verdicts:
    """The final criteria of a rubric that are still undecided, and why.

    Judges that compare outputs are left out: a preflight has one output per task.

    Args:
        default_model: the program's model, if it judges because no other model was chosen.
    """

    def __init__(self, rubric: Rubric, *, default_model: str = "") -> None:
        self.rubric, self.default_model = rubric, default_model
        self.missing: dict[str, str] = {
            c.name: "" for c in rubric.finals if c.check is not None or not rubric.compares(c.name)
        }
        self.answered: list[tuple[Task, dict[str, Any], Rollout]] = []  # runs with an answer
        self._verdicts: list[Verdict] = []

    def take(self, task: Task, run: ScoredRun) -> None:
        """Reads the verdicts of a run, and asks judges without a verdict separately."""
        self.read(task, run.result, fields_of(run.prediction), run.rollout)

    def read(self, task: Task, result: ScoreResult | None, fields: dict[str, Any], rollout: Rollout) -> None:
        """As `take`, for a score result."""
        if result is None or result.failed is not None:
            return
        self.answered.append((task, fields, rollout))
        checks = {c.name for c in self.rubric.finals if c.check is not None}
        for verdict in result.verdicts:
            if verdict.grade is not None or (not verdict.applies and verdict.criterion in checks):
                self.missing.pop(verdict.criterion, None)
            elif verdict.criterion in checks & self.missing.keys():
                self.missing[verdict.criterion] = self.missing[verdict.criterion] or verdict.reason
        self._verdicts += result.verdicts
        self._ask(*self.answered[-1])

    def ask(self, task: Task, rollout: Rollout) -> None:
        """If no run gave an answer, asks the judges about the expected one."""
        if not self.answered:
            self._ask(task, dict(task.expected) or {"answer": "no answer"}, rollout)

    def require(self, tasks: Sequence[Task]) -> None:
        """Raises if a criterion was decided on no output.

        Args:
            tasks: the job's tasks; an undecided check is tried on some of them with the last answer.
        Raises:
            RubricError: a check decided nothing.
            ModelError: a judge decided nothing.
        """
        checks = [
            c
            for c in self.rubric.finals
            if c.check is not None and self.missing.get(c.name) and not self._decided_elsewhere(c, tasks)
        ]
        if checks:
            named = {c.name: field for c in checks if (field := self._field(c)) is not None}
            hints = {pair for c in checks if c.name not in named and (pair := self._rename(c)) is not None}
            lines = [
                f"criterion {c.name!r} could not be graded on {self._tasks_text()}: {self.missing[c.name]}"
                for c in checks
            ]
            renames = ", ".join(f"{old!r}: {new!r}" for old, new in sorted(hints))
            lines += [f"Where that is a column of the data, rename it: `rename={{{renames}}}`"] if hints else []
            lines += [
                f"Name the field in the rubric: {{name: {name}, with: {{field: {f}}}}}" for name, f in named.items()
            ]
            lines += [] if hints else [self._fields()]
            raise RubricError("\n".join([*lines, SKIP]))
        self.require_judges()

    @property
    def silent(self) -> list[str]:
        """The criteria that their judges have left unscored so far."""
        return sorted({c.name for c in self.rubric.finals if c.judge is not None} & self.missing.keys())

    def require_judges(self) -> None:
        """Raises if a judge scored nothing.

        Raises:
            ModelError: names the judge and its error.
        """
        if self.silent:
            name = self.silent[0]
            default = (
                f"No model was chosen for the judge, so the program's, {self.default_model}, judges; `judge_model` "
                "names another. "
                if self.default_model
                else ""
            )
            raise ModelError(
                f"the judge of {name!r} scored none of the outputs that it was shown: {self.missing[name]}. "
                f"{default}Check its model, key and address (`judge_model`, `judge_api_key_env`, `judge_api_base`); "
                f"{SKIP}"
            )

    def warnings(self) -> list[str]:
        """A warning if answers share no field with the expected outputs: checks then grade 0 instead of staying
        undecided.
        """
        if any(not task.expected or task.expected.keys() & fields.keys() for task, fields, _ in self.answered):
            return []
        zeros = {v.criterion for v in self._verdicts if v.scope == "final" and v.grade == 0 and v.weight > 0}
        failed = sorted(c.name for c in self.rubric.finals if c.name in zeros and self._reads_by_name(c))
        if not failed:
            return []
        task, fields, _ = self.answered[0]
        return [
            f"the tasks expect {sorted(task.expected)}, and the program answers {sorted(fields)}: a check that "
            "compares fields of one name gives 0 "
            f"({', '.join(failed)}). Rename a column of the data, or name the field in the rubric (with: "
            f"{{field: NAME}})"
        ]

    def _reads_by_name(self, criterion: Criterion) -> bool:
        """Whether a check that gave 0 reads the answer by the names of the expected outputs: it accepts one that has
        them. Judges read no fields by name.
        """
        if criterion.check is None:
            return False
        task, fields, rollout = self.answered[0]
        return bool(grade(criterion, criterion.check, task, {**fields, **task.expected}, rollout).grade)

    def _fields(self) -> str:
        """The fields that a check can read."""
        task, fields, _ = self.answered[-1]
        return (
            f"task.inputs has {sorted(task.inputs)}, task.expected {sorted(task.expected)}, and the prediction "
            f"{sorted(fields)}"
        )

    def _tasks_text(self) -> str:
        ids = [repr(task.id) for task, _, _ in self.answered]
        return f"task {ids[0]}" if len(ids) == 1 else f"any of the first {len(ids)} tasks ({', '.join(ids)})"

    def _decided_elsewhere(self, criterion: Criterion, tasks: Sequence[Task]) -> bool:
        _, fields, rollout = self.answered[-1]
        more = tasks[len(self.answered) : len(self.answered) + _MORE]
        return any(grade(criterion, criterion.check, task, dict(fields), rollout).grade is not None for task in more)

    def _field(self, criterion: Criterion) -> str | None:
        """The one field of both answer and expected outputs that a check can grade; None if there is no such field."""
        assert criterion.check is not None
        task, fields, rollout = self.answered[0]
        if unfit_arguments(criterion.check, {**criterion.arguments, "field": ""}, criterion.source):
            return None
        fitting = [
            name
            for name in sorted(task.expected.keys() & fields.keys())
            if grade(
                replace(criterion, arguments={**criterion.arguments, "field": name}),
                criterion.check, task, dict(fields), rollout,
            ).grade is not None
        ]  # fmt: skip
        return fitting[0] if len(fitting) == 1 else None

    def _rename(self, criterion: Criterion) -> tuple[str, str] | None:
        """An expected column and the name under which the check can use it; None if no column fits or several do."""
        task, fields, rollout = self.answered[0]
        missing = _missing_field(criterion, task, fields, rollout)
        if not missing or missing in task.expected:
            return None
        fitting = []
        for column, value in task.expected.items():
            renamed = replace(
                task, expected={missing: value, **{k: v for k, v in task.expected.items() if k != column}}
            )
            if grade(criterion, criterion.check, renamed, dict(fields), rollout).grade is not None:
                fitting.append(column)
        candidates = fitting if len(fitting) == 1 else difflib.get_close_matches(missing, fitting, 1)
        return (candidates[0], missing) if candidates else None

    def _ask(self, task: Task, fields: Mapping[str, Any], rollout: Rollout) -> None:
        for criterion in self.rubric.finals:
            if criterion.name not in self.missing or criterion.judge is None:
                continue
            decide = self.rubric.decider(criterion.name)
            if decide is None:
                self.missing[criterion.name] = "no judge model was given"
                continue
            verdict = grade(criterion, decide, task, dict(fields), rollout)
            if verdict.grade is not None:
                del self.missing[criterion.name]
            else:
                self.missing[criterion.name] = verdict.reason or "no reason was given"


def require_expected(rubric: Rubric, rollouts: Iterable[tuple[Task, Rollout]]) -> None:
    """Raises if a shipped check needs an expected output that no rollout with an answer has.

    Such rollouts stay unscored, whatever judges say of them. Rollouts are read until each check has what it needs.

    Raises:
        RubricError: names the check and the output.
    """
    lacking = {c.name: c for c in rubric.finals if c.check is not None and not c.when and is_shipped(c)}
    fields: dict[str, str] = {}
    for task, rollout in rollouts:
        if rollout.prediction is None:
            continue
        fields = {name: _missing_field(c, task, fields_of(rollout.prediction), rollout) for name, c in lacking.items()}
        lacking = {name: c for name, c in lacking.items() if fields[name] and not task.expected}
        if not lacking:
            return
    for name in lacking if fields else ():
        raise RubricError(
            f"criterion {name!r} needs the expected output {fields[name]!r}, and no rollout has expected outputs. Give "
            f"`expected` where the rollouts are opened or recorded, or use a check that needs none; {SKIP}"
        )


def _missing_field(criterion: Criterion, task: Task, fields: Mapping[str, Any], rollout: Rollout) -> str:
    """The expected field that a check needs: named by a shipped check, or the key that a user's check fails on."""
    assert criterion.check is not None
    try:
        call(criterion.check, (task, dict(fields), rollout), criterion.arguments)
    except NoGrade as error:
        return error.missing_field
    except KeyError as error:
        return str(error.args[0]) if error.args else ""
    except Exception:  # any other failure names no field
        return ""
    return ""
