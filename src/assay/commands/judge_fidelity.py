"""`assay judge fidelity`: audits a simulated user."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from assay.commands.groups import InStore, Reported, Trusting
from assay.commands.judging import SpentReport, spent_by, with_names
from assay.errors import ConfigError, DataError
from assay.jobs.groups import Budget, Cached, KeyedJob
from assay.models.limits import DEFAULT_S
from assay.support.names import one_of
from assay.support.numbers import counted
from assay.support.options import Flag, Parse, Positive, Seconds, Share, function_of
from assay.support.report import Table

if TYPE_CHECKING:
    from assay.judges.quality.fidelity import Interview
    from assay.programs import UserProgram
    from assay.traces.recorder import Recorder


@dataclass(frozen=True, kw_only=True, repr=False)
class Fidelity(SpentReport):
    """The card of a simulated user.

    Attributes:
        user: its name.
        n: runs in which it did not fail.
        failed: runs in which it raised an error, or exceeded the time limit.
        turns: mean number of messages of a run.
        faults: by fault the share of runs with it, its exact 95 % interval, and an example.
        faithful: share of runs without a fault.
        fail_over: highest share of runs with a fault.
        passed: whether no run failed, and no fault is more frequent.
        why_failed: up to three reasons of failed runs.
    """

    user: str
    n: int
    failed: int
    turns: float | None
    faults: Mapping[str, Any]
    faithful: Mapping[str, Any]
    fail_over: float
    passed: bool
    why_failed: Sequence[str]

    def lines(self) -> Iterator[str | Table]:
        from assay.judges.quality.fidelity import FAULTS

        yield Table(
            title=f"fidelity of the user {self.user}",
            header=("fault", "runs", "95 %", "the user"),
            rows=[
                (
                    name, "–" if fault["share"] is None else f"{fault['share']:.0%}",
                    f"{fault['low']:.0%} to {fault['high']:.0%}", FAULTS.get(name, "made no fault"),
                )
                for name, fault in [*self.faults.items(), ("faithful", self.faithful)]
            ],
        )  # fmt: skip
        for name, fault in self.faults.items():
            if fault["share"] is not None and fault["share"] > self.fail_over:
                yield f"{name}: {' | '.join(fault['example'])}"
        yield from (f"note: the user failed: {reason}" for reason in self.why_failed)
        verdict = "passed" if self.passed else "FAILED"
        counts = f"{counted(self.n, 'runs')}, {self.failed} in which the user failed"
        yield f"{verdict}: at most {self.fail_over:.0%} of the runs with a fault; {counts}; {self.spent}"

    @property
    def failure(self) -> str:
        return "" if self.passed else "the simulated user failed the audit"


def _user(value: Any) -> Any:
    if not (isinstance(value, str | Path) or callable(value)):
        raise ValueError(f"must be callable as user(profile=…, messages=…), or its name, not {value!r}")
    return str(value) if isinstance(value, Path) else value


class AuditUser(Reported, Trusting, InStore, Cached, KeyedJob):
    """Audit the simulated USER of conversations: it talks with an interviewer that follows rules, on each task. Exit
    code 1 if it fails.

    Raises:
        DataError: a task has no `user`, or the user returned something else than a message.
    """

    ROLE: ClassVar[str] = "judge"
    kind: ClassVar[str] = "judge fidelity"

    user: Annotated[Any, Flag(path=True), Parse(_user)] = field(kw_only=False)
    """Simulated user: rules, model, or file.py:Class. In Python also an `assay.programs.UserProgram`."""
    data: Annotated[str, Flag(metavar="D", path=True, key=False, stored=True)]
    """Tasks with an input 'user', such as conversations:?size=40. Use tasks that are not in the test split."""
    model: str | None = None
    """Language model of the user; by default embedded/smollm2-135m."""
    thinking: Budget = None
    """How much the user may think in a call: a number of tokens, minimal, low, medium, high, xhigh, max, off or auto
    (no limit). A model or program that cannot keep it is refused."""
    tasks: Positive = 40
    """Maximum number of tasks."""
    task_timeout: Annotated[Seconds, Flag(metavar="SECONDS", job=False)] = DEFAULT_S
    """Time limit of one interview in seconds. A user that exceeds it has failed."""
    fail_over: Share = 0.05
    """Maximum share of runs with a fault; above it the exit code is 1."""

    def run(self) -> Fidelity:
        import dspy

        from assay.datasets import load_tasks
        from assay.jobs.opening import open_run
        from assay.judges.quality.fidelity import fidelity_card
        from assay.models.limits import limited
        from assay.support.scrubbing import error_text

        name = self.user if isinstance(self.user, str) else type(self.user).__name__
        lm, config = with_names(self, user=name)
        program, tasks = self._program(), load_tasks(self.data)[: self.tasks]
        if lacking := next((task.id for task in tasks if "user" not in task.inputs), None):
            raise DataError(f"task {lacking!r} has no input 'user' with a goal and facts")
        progress = self.reporter
        with open_run(config, lm=lm, progress=progress, store=self.store) as run:
            runs: list[Interview | None] = []
            problems: list[str] = []
            in_run = dspy.context(lm=run.lm, trace=[])
            with run.recorder.active(), in_run, progress.bar("interview", len(tasks)) as advance:
                for task in tasks:
                    try:
                        with limited(self.task_timeout):
                            runs.append(_recorded(run.recorder, program, task, name))
                    except DataError:
                        raise
                    except (Exception, SystemExit) as error:  # the user's own failure is a figure of its card
                        runs.append(None)
                        problems.append(error_text(error))
                    advance(1)
            card = fidelity_card(runs, fail_over=self.fail_over)
            return Fidelity(user=name, **card, why_failed=list(dict.fromkeys(problems))[:3], **spent_by(run))

    def _program(self) -> "UserProgram":
        from assay.programs import RuleBasedUser, SimulatedUser, load_program

        if not isinstance(self.user, str):
            given: UserProgram = self.user
            return given
        shipped: Mapping[str, Any] = {"rules": RuleBasedUser, "model": SimulatedUser}
        if self.user not in shipped and ":" not in self.user and not self.user.endswith(".py"):
            raise ConfigError(f"{self.user!r} {one_of(self.user, shipped, other='file.py:Class')}", field="user")
        program: UserProgram = shipped[self.user]() if self.user in shipped else load_program(self.user)
        return program


def _recorded(recorder: "Recorder", user: "UserProgram", task: Any, name: str) -> "Interview":
    from assay.judges.quality.fidelity import interview
    from assay.models.limits import within_limit
    from assay.traces.records import Rollout

    own = Rollout(
        task_id=task.id, task_type=task.task_type, group_id=task.id, source="simulated_user", program=name[:200]
    )
    own.inputs = dict(task.inputs)
    with recorder.rollout(own):
        conversation = within_limit(lambda: interview(user, task), "the interview")
        own.prediction = {"messages": conversation.messages, "ended": conversation.ended}
    return conversation


audit_user = function_of(AuditUser, "audit_user")
