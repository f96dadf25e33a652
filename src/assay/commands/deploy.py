"""`assay deploy`: staged rollout of a version in place of another, with rollback."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Le

from assay.commands.groups import InExistingStore, Reported, Trusting
from assay.deployment.settings import Suite, SuiteResult, Traffic, TrafficFields
from assay.errors import ConfigError, DataError, DeploymentError
from assay.jobs.groups import ScoringSettings, StoredJudge
from assay.support.numbers import counted, figure, signed
from assay.support.options import Count, Flag, Positive, Seed, Settings, Share, function_of
from assay.support.report import Report

if TYPE_CHECKING:
    from assay.commands.advancing import Rehearsal
    from assay.deployment.compatibility import Compatibility
    from assay.deployment.deployments import Deployments
    from assay.deployment.plan import Hook, Plan, Watch
    from assay.deployment.registry import Version
    from assay.deployment.simulation import SimulationReport
    from assay.deployment.watching import DeploymentReport
    from assay.traces.store import Store
else:
    Rehearsal = Hook = SimulationReport = DeploymentReport = Any  # so that types can be read without heavy packages

EXPECTED_RUNS = 40  # simulated deployments for the expected number of requests
_RUNS_ELSEWHERE = "the agent runs elsewhere, so that its recorded rollouts cannot be replayed here"
_TOTAL = 300_000  # requests of all of them, enough for the default plan: a longer plan has fewer runs


class Planned(Settings):
    """Plan."""

    plan: Annotated[str | None, Flag(metavar="FILE", path=True)] = None
    """YAML file of the plan; by default shadow, 10 %, 50 % and 95 %, decided by the score."""

    goal: Annotated[float, Ge(0)] | None = None
    """Relative gain that the candidate must reach; 0.1 by default, or that of the plan."""

    def read_plan(self) -> "Plan":
        """The plan in the file, or the default one, with another goal if there is one."""
        from assay.deployment.plan import default_plan, load_plan

        if self.plan is None:
            return default_plan(gain=0.1 if self.goal is None else self.goal)
        plan = load_plan(self.plan)
        if self.goal is None:
            return plan
        metrics = (one if one.success_gain is None else replace(one, success_gain=self.goal) for one in plan.metrics)
        return replace(plan, metrics=tuple(metrics))


class Simulate(TrafficFields, Planned, Reported):
    """Run a plan on simulated traffic with known truth, and count how often it promotes and rolls back.

    Decisions and assignment are those of production. Plan a deployment with it: `effect=0` shows the false promotions
    and rollbacks, `effect=0.25` how many requests a gain of a quarter takes.

    Raises:
        ConfigError: a setting or the plan's file breaks a rule.
    """

    runs: Positive = 500
    """Number of simulated deployments."""

    seed: Seed = 0
    """Seed of the first simulated deployment; the others use the following seeds."""

    def run(self) -> SimulationReport:
        from assay.deployment.simulation import simulate

        traffic = Traffic(base=self.base, effect=self.effect, users=self.users)
        with self.reporter.bar("simulated deployments", self.runs) as advance:
            return simulate(self.read_plan(), traffic, runs=self.runs, seed=self.seed, on_run=advance)


class StartOptions(Planned):
    """Checks."""

    suite_data: Annotated[str | None, Flag(metavar="D", path=True)] = None
    """Tasks of the validation suite that the candidate must pass; by default the suite of the agent."""

    suite_rubric: Annotated[str | None, Flag(metavar="R", path=True)] = None
    """Rubric of the validation suite."""

    suite_threshold: Share = 0.0
    """Mean score on the suite that a candidate must reach."""

    suite_pass_rate: Share = 0.0
    """Share of the suite's tasks that a candidate must pass."""

    replay: Annotated[Count, Le(10_000)] = 3
    """Recorded rollouts of the champion that the candidate runs before the start, to compare its outputs with the
    recorded ones; 0 for none. With `dry_run` also a trial of the shadow step."""

    replay_rubric: Annotated[str | None, Flag(metavar="R", path=True)] = None
    """Rubric that scores these replays; its judges need models of their own."""

    force: bool = False
    """Deploy a candidate that breaks a compatibility check or the validation suite."""

    def check(self) -> None:
        if (self.suite_data is None) != (self.suite_rubric is None):
            raise ConfigError("`suite_data` and `suite_rubric` belong together")
        if self.suite_data is None and (changed := self.changed("suite_threshold", "suite_pass_rate")):
            raise ConfigError("would have no effect without `suite_data`", field=changed[0])
        if self.replay_rubric is not None and not self.replay:
            raise ConfigError("would have no effect with `replay` 0", field="replay_rubric")

    @property
    def suite(self) -> Suite | None:
        """The suite that is named here."""
        if self.suite_data is None or self.suite_rubric is None:
            return None
        return Suite(
            data=self.suite_data, rubric=self.suite_rubric, threshold=self.suite_threshold,
            pass_rate=self.suite_pass_rate,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, repr=False)
class StartReport(Report):
    """What the checks of a candidate showed, and the deployment that was started.

    Attributes:
        deployment: its id; null if the candidate was only checked.
        breaks: what of the champion's interface the candidate breaks.
        changes: what else changes, such as model and prompt format.
        unchecked: what could not be compared, and why.
        replays: recorded rollouts that the candidate ran before the start: `n` of `wanted`, `answered`, `failures`; of
            the recorded outputs (`given`) those that replays lack (`missing`); the mean scores of both and their
            `gain`.
        not_tried: with `dry_run`, what the deployment would do first and was not tried.
        suite: result on the validation suite, with its score, interval and `pass_rate`; null without a suite.
        expected: simulated deployments of a candidate that reaches the goal with a margin, and of an equal one.
    """

    deployment: str | None
    breaks: tuple[str, ...]
    changes: tuple[str, ...]
    unchecked: tuple[str, ...]
    replays: Rehearsal
    not_tried: tuple[str, ...]
    suite: SuiteResult | None
    expected: Mapping[str, SimulationReport]

    def lines(self) -> Iterator[str]:
        yield from (f"breaks {text}" for text in self.breaks)
        yield from (f"changes {text}" for text in self.changes)
        yield from (f"not checked: {text}" for text in self.unchecked)
        if self.replays.n:
            yield _replayed(self.replays)
        if (suite := self.suite) is not None:
            passed = f"{suite.pass_rate:.1%} of {counted(suite.n, 'tasks')} passed"
            yield f"validation suite: {'unscored' if suite.score != suite.score else figure(suite.score)}, {passed}"
        for name, report in self.expected.items():
            steps = ", ".join(f"{count:,.0f}" for count in report.step_requests)
            cut = report.rules.get("requests", 0)
            cut_off = f", {cut} of them cut off undecided because the plan is long" if cut else ""
            yield (
                f"a candidate that is {'better by twice the goal' if name == 'better' else 'as good'}: promoted in "
                f"{report.promoted:.0%}, rolled back in {report.rolled_back:.0%}, after a median of "
                f"{report.requests_median:,.0f} rollouts; by step: {steps} "
                f"({report.runs} simulated deployments{cut_off}; base rate 0.7)"
            )
        yield from (f"not tried: {text}" for text in self.not_tried)
        if self.deployment is not None:
            yield f"started: {self.deployment}; its state: assay deploy status {self.deployment}"
            yield (
                "assay serve --registered takes the next steps by itself; where no gateway serves the agent, "
                f"assay deploy advance {self.deployment} does"
            )


def _replayed(replays: Rehearsal) -> str:
    """One line about the recorded rollouts that the candidate ran."""
    text = f"replayed {replays.n} recorded rollouts: {replays.answered} answered"
    if replays.answered:
        text += ", some without recorded outputs" if replays.missing else ", with all recorded outputs"
    if (gain := replays.gain) is None:
        return f"{text}; not scored"
    scores = f"score {figure(replays.champion)} recorded, {figure(replays.candidate)} replayed"
    return f"{text}; {scores}, difference {signed(gain.mean)} [{signed(gain.low)}, {signed(gain.high)}], n={gain.n}"


class Start(StartOptions, InExistingStore, Trusting, Reported):
    """Roll CANDIDATE (AGENT@NUMBER or AGENT@ALIAS) out in stages in place of the agent's champion.

    The assignment holds for users or conversations: serve the agent with assay serve --registered, or call
    assay.deployed(AGENT) in your process. The next step is taken as soon as the rules of the plan allow it: by assay
    serve --registered itself, otherwise by assay deploy advance.

    Raises:
        DeploymentError: the candidate breaks a check (`force` deploys it anyway), or cannot be deployed now.
    """

    candidate: Annotated[str, Flag(key=False)] = field(kw_only=False)
    """The version."""

    dry_run: Annotated[bool, Flag(key=False)] = False
    """Check the candidate, replay a few recorded rollouts, print the expected requests; start nothing."""

    def run(self) -> StartReport:
        from assay.deployment.deployments import Deployments

        plan = self.read_plan()
        plan = replace(plan, watch=tuple(map(_with_absolute_paths, plan.watch)))
        with self.opened() as store:
            deployments = Deployments(store.engine)
            if deployments.registry.runs_elsewhere(self.candidate):
                plan = self._without_shadow(plan)
            report = self._checked(deployments, plan, store)
            if self.dry_run:
                return report
            started = deployments.start(self.candidate, plan, checks=_kept(report))
            return replace(report, not_tried=(), deployment=started.id)

    def _without_shadow(self, plan: "Plan") -> "Plan":
        """The plan for an agent that runs elsewhere: its recorded rollouts cannot be run again here.

        Raises:
            ConfigError: the plan's file has a shadow step, or `replay_rubric` was given.
        """
        if self.plan is not None and plan.steps[0].shadow:
            raise ConfigError(f"has a shadow step, and {_RUNS_ELSEWHERE}: leave that step out", field="plan")
        if self.replay_rubric is not None:
            raise ConfigError(f"would have no effect: {_RUNS_ELSEWHERE}", field="replay_rubric")
        return replace(plan, steps=tuple(step for step in plan.steps if not step.shadow))

    def _checked(self, deployments: "Deployments", plan: "Plan", store: "Store") -> StartReport:
        from assay.commands.advancing import Rehearsal, rehearse, replay_rubric
        from assay.deployment.artifact import load_artifact
        from assay.deployment.compatibility import compatibility
        from assay.deployment.registry import suite_of

        version = deployments.registry.version(self.candidate)
        champion = deployments.registry.version(version.agent)
        if not self.dry_run:  # before the validation suite is run and paid for
            deployments.check_idle(version.agent)
            if version.number == champion.number:
                raise DeploymentError(f"{version.name} is already the champion")
        if version.note is not None:
            self.reporter.say(f"note: {version.note}")
        folders = [deployments.registry.folder_of(one) for one in (champion, version)]
        measure = replay_rubric(self.replay_rubric)
        checks = compatibility(*(load_artifact(folder) for folder in folders))
        self._refuse_broken(checks.breaks, version, champion)
        if deployments.registry.runs_elsewhere(version.name):
            replays = Rehearsal(wanted=0, missing={}, given={}, failures={}, problem=_RUNS_ELSEWHERE)
        else:
            replays = rehearse(
                deployments, champion, version, count=self.replay, rubric=measure, store=self.store,
                progress=self.progress,
            )  # fmt: skip
        breaks = (*checks.breaks, *replays.breaks, *(() if replays.answered else checks.outputs or ()))
        self._refuse_broken(breaks, version, champion)
        suite = self.suite or suite_of(store.engine, version.agent)
        result = None if suite is None else self._result(suite, str(folders[1]))
        if result is not None and result.missed and not self.force:
            missed = " and ".join(result.missed)
            raise DeploymentError(f"{version.name} {missed}", hint="Fix it, or deploy it anyway with `force`")
        return StartReport(
            deployment=None, breaks=breaks, changes=(*checks.changes, *replays.changes),
            unchecked=_unchecked(checks, replays), replays=replays, not_tried=_not_tried(plan, replays),
            suite=result, expected=expected_requests(plan),
        )  # fmt: skip

    def _refuse_broken(self, breaks: Sequence[str], version: "Version", champion: "Version") -> None:
        if breaks and not self.force:
            raise DeploymentError(
                f"{version.name} breaks what callers of {champion.name} use: {'; '.join(breaks)}",
                hint="Fix it, or deploy it anyway with `force`",
            )

    def _result(self, suite: Suite, folder: str) -> SuiteResult:
        from assay.commands.evaluate import evaluate
        from assay.evaluation.statistics import mean_interval

        report = evaluate(folder, rubric=suite.rubric, data=suite.data, store=self.store, progress=self.progress)
        scores = report.evaluation.scores
        return SuiteResult.of(suite, scores, mean_interval(list(scores.values())))


def _unchecked(checks: "Compatibility", replays: Rehearsal) -> tuple[str, ...]:
    """What is not known of the outputs."""
    reasons = list(replays.unchecked)
    if not replays.answered and checks.outputs is None:
        asked = "no recorded rollout was replayed" if not replays.wanted else "no replay has an answer"
        reasons.append(f"outputs: not compared, because a program without predictors declares none, and {asked}")
    return tuple(reasons)


def _not_tried(plan: "Plan", replays: Rehearsal) -> tuple[str, ...]:
    """The steps that a dry run does not take."""
    shadow, live = plan.steps[0].shadow, [step.label for step in plan.steps if not step.shadow]
    scored = "" if replays.gain is not None else ", unscored"
    of_shadow = (
        f"the shadow step: it replays {plan.steps[0].requests} recorded rollouts, {replays.n} were replayed{scored} "
        "(--replay N --replay-rubric R tries more)"
    )
    missing = shadow and (replays.n < plan.steps[0].requests or replays.gain is None)
    return (*([of_shadow] if missing else []), f"live traffic: the steps {', '.join(live)} are simulated only")


def _kept(report: StartReport) -> dict[str, Any]:
    """The checks, as the first row of the history has them."""
    fields = report.to_dict()
    kept = {name: fields[name] for name in ("suite", "breaks", "changes", "unchecked", "replays")}
    missed = report.suite is not None and bool(report.suite.missed)
    return {**kept, "forced": bool(report.breaks) or missed}


def _with_absolute_paths(watch: "Watch") -> "Watch":
    """The watch with absolute paths, because other processes evaluate it.

    Raises:
        ConfigError: the judge of the watch, or its anchors, cannot be read.
    """
    from assay.jobs.anchors import ANCHORS
    from assay.judges.quality.drift import AnchorSet

    if watch.judge is None:
        return watch
    try:
        AnchorSet.load(Path(watch.judge) / ANCHORS if watch.anchors is None else Path(watch.anchors))
    except DataError as error:
        raise ConfigError(f"the watch of {watch.name} has no anchors to replay: {error}") from None
    return replace(
        watch, judge=str(Path(watch.judge).absolute()), anchors=watch.anchors and str(Path(watch.anchors).absolute())
    )


def expected_requests(plan: "Plan") -> dict[str, SimulationReport]:
    """Simulated deployments of a candidate that is better by twice the goal, and of one that is as good.

    A plan with many requests is simulated in fewer runs, each cut off after 50,000 requests.
    """
    from assay.deployment.simulation import simulate

    goal = max(metric.success_gain or 0.0 for metric in plan.metrics)
    effect = min(2 * max(goal, 0.05), 1 / Traffic.base - 1)
    deciding = next(metric for metric in plan.metrics if metric.success_gain is not None)
    instant = replace(
        plan, steps=tuple(replace(step, hold_s=0.0) for step in plan.steps),
        metrics=(replace(deciding, horizon_s=0.0),), events=(), watch=(),
    )  # fmt: skip
    return {
        name: simulate(instant, Traffic(effect=value), runs=EXPECTED_RUNS, total_requests=_TOTAL)
        for name, value in (("better", effect), ("equal", 0.0))
    }


class OfDeployment(InExistingStore):
    """Store."""

    deployment: Annotated[str, Flag(key=False)] = field(kw_only=False)
    """Id of the deployment or its first characters, or an agent, for its newest one."""


class Now(Settings):
    """Time."""

    now: Annotated[float | None, Flag(key=False, shown=False)] = None
    """Seconds since the epoch; by default the present, by the clock of the store's server."""

    def moment(self, store: "Store") -> float:
        from assay.traces.store.leases import present

        return present(store.engine) if self.now is None else self.now


class DeploymentStatus(OfDeployment, Now):
    """Show where DEPLOYMENT (an id, or an agent) stands, and the decision that its numbers give now."""

    def run(self) -> DeploymentReport:
        from assay.deployment.deployments import Deployments
        from assay.deployment.watching import status_of

        with self.opened() as store:
            return status_of(Deployments(store.engine), self.deployment, self.moment(store))


class Advance(OfDeployment, StoredJudge, Now, Trusting, Reported):
    """Evaluate DEPLOYMENT and take its next step if one is due. It may be called at any time.

    Raises:
        DeploymentError: there is no such deployment.
        ConfigError: a criterion needs a judge and no model is named for it, or a judge's model is named without a
            rubric.
    """

    rubric: Annotated[str | Path | None, Flag(metavar="R", key=False)] = None
    """Rubric that scores rollouts without a score, and those that a shadow step replays."""

    dry_run: Annotated[bool, Flag(key=False)] = False
    """Print the decision; write nothing."""

    hooks: Annotated[Sequence[Hook], Flag(key=False, shown=False)] = ()
    """Called with the decision, in addition to those of the plan."""

    @classmethod
    def of_file(cls, stored: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
        return stored if "rubric" in given else {}

    def check(self) -> None:
        if self.rubric is None and self.judge_model is not None:
            raise ConfigError("would have no effect without `rubric`", field="judge_model")

    def run(self) -> DeploymentReport:
        from assay.commands.advancing import advanced
        from assay.deployment.deployments import Deployments
        from assay.deployment.watching import status_of

        with self.opened() as store:
            deployments = Deployments(store.engine)
            current = deployments.get(self.deployment)
            if self.dry_run:
                return status_of(deployments, current.id, self.moment(store))
            measure = None if self.rubric is None else self._scored(store, current.agent, self.rubric)
            decision = advanced(
                store, current, rubric=measure, hooks=self.hooks, now=self.moment(store), progress=self.progress
            )
            return status_of(deployments, current.id, self.moment(store), decision)

    def _scored(self, store: "Store", agent: str, rubric: str | Path) -> Any:
        """Scores the rollouts of an agent by a rubric. Returns it, for replays."""
        from assay.jobs.loading import load_rubric
        from assay.jobs.rescoring import named_judge, score_stored
        from assay.models import Meter
        from assay.support.options import options_of

        judge: Any = {name: getattr(self, name) for name in options_of(StoredJudge)}
        scores = score_stored(store, rubric, ScoringSettings(**judge), agent=agent, progress=self.progress)
        store.flush()  # the evaluation reads the scores from the database
        for name, gap in scores["undecided"].items():
            self.reporter.say(
                f"{name} was not decided on {gap['n']} of {gap['of']}: {gap['reason']}. Checks that compare expected "
                "outputs need them in the calls of the agent (expected=…)"
            )
        return load_rubric(rubric, judge_model=named_judge(self, Meter()))


@dataclass(frozen=True, kw_only=True, repr=False)
class OrderReport(Report):
    """A deployment after an order.

    Attributes:
        deployment: its id.
        status: paused, running, promoted or rolled_back.
        share: share of the units on the candidate.
    """

    deployment: str
    status: str
    share: float

    def lines(self) -> Iterator[str]:
        yield f"{self.deployment}: {self.status}, {self.share:.0%} on the candidate"


class Order(OfDeployment):
    """Options."""

    ACTION: ClassVar[str]

    reason: Annotated[str, Flag(key=False)] = ""
    """Reason, stored in the history."""

    by: Annotated[str | None, Flag(key=False, shown=False)] = None
    """Who orders it; by default the user of this process."""

    def run(self) -> OrderReport:
        from assay.deployment.deployments import Deployments
        from assay.deployment.watching import order

        with self.opened() as store:
            ordered = order(Deployments(store.engine), self.deployment, self.ACTION, reason=self.reason, by=self.by)
        return OrderReport(deployment=ordered.id, status=ordered.state.status, share=ordered.share)


class Pause(Order):
    """Pause DEPLOYMENT: the share does not change, and no step is taken."""

    ACTION = "pause"


class Resume(Order):
    """Continue a paused DEPLOYMENT."""

    ACTION = "resume"


class Promote(Order):
    """Make the candidate of DEPLOYMENT the champion now."""

    ACTION = "promote"


class Rollback(Order):
    """Roll DEPLOYMENT back to the champion, also after promotion."""

    ACTION = "rollback"


@dataclass(frozen=True, kw_only=True, repr=False)
class HistoryReport(Report):
    """The decisions of a deployment.

    Attributes:
        decisions: oldest first: action, rule, reason, numbers, when and by whom.
    """

    none = "no decision so far"

    decisions: tuple[dict[str, Any], ...]

    def lines(self) -> Iterator[str]:
        for row in self.decisions:
            at = time.strftime("%m-%d %H:%M:%S", time.localtime(row["at"]))
            yield f"{at}  step {row['stage'] + 1}  {row['action']:9} {row['rule']:13} {row['by']}: {row['reason']}"


class History(OfDeployment):
    """List the decisions of DEPLOYMENT, oldest first: when, by whom, which rule, and why."""

    def run(self) -> HistoryReport:
        from assay.deployment.deployments import Deployments

        with self.opened() as store:
            return HistoryReport(decisions=tuple(Deployments(store.engine).history(self.deployment)))


simulate_plan = function_of(Simulate, "simulate_plan")
start_deployment = function_of(Start, "start_deployment")
deployment_status = function_of(DeploymentStatus, "deployment_status")
advance_deployment = function_of(Advance, "advance_deployment")
rollback_deployment = function_of(Rollback, "rollback_deployment")
deployment_history = function_of(History, "deployment_history")
