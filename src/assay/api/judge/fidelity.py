"""Public API for `assay judge fidelity`: audits a simulated user."""

from pathlib import Path
from typing import Any, Unpack

import dspy

from assay.api.judge.session import usage_of
from assay.datasets import load_tasks
from assay.errors import ConfigError, DataError
from assay.evaluation import Progress, default_progress
from assay.judges.quality.fidelity import Interview, fidelity_card, interview
from assay.models.limits import limited, within_limit
from assay.programs import RuleBasedUser, SimulatedUser, UserProgram, load_program
from assay.runs.arguments import resolve_lm
from assay.runs.opening import open_run
from assay.runs.settings import FidelitySettings
from assay.runs.settings.options import FidelityOptions
from assay.sources.trust import trusts
from assay.support.keywords import takes
from assay.support.reprs import ReportDict
from assay.support.scrubbing import error_text
from assay.support.settings import one_of
from assay.traces.recorder import Recorder
from assay.traces.records import Rollout


@takes(FidelitySettings)
@trusts
def audit_user(
    user: str | UserProgram, *, data: str, lm: dspy.LM | None = None, store: str | Path | None = None,
    progress: Progress | None = None, **options: Unpack[FidelityOptions],
) -> dict[str, Any]:  # fmt: skip
    """Audits a simulated user: it talks with an interviewer that follows rules, on each task.

    Args:
        user: `rules`, `model`, `file.py:Class`, or a program (`assay.programs.UserProgram`).
        data: tasks with an input `user`, such as `conversations:?size=40`. Use tasks that are not in the test split.
        options: the fields of `assay.runs.settings.FidelitySettings`.
    Returns:
        The card, see `assay.judges.quality.fidelity.fidelity_card`; `why_failed` with the errors of runs in which the
        user raised; calls, tokens and cost.
    Raises:
        DataError: a task has no `user`, or the user returned something else than a message.
    """
    settings = {name: value for name, value in options.items() if value is not None}
    lm = resolve_lm(lm, settings)
    name = user if isinstance(user, str) else type(user).__name__
    model = {"model": lm.model} if lm is not None else {}
    config = FidelitySettings(user=name, data=data, **{**settings, **model})
    program, tasks = _user_of(user), load_tasks(data)[: config.tasks]
    if lacking := next((task.id for task in tasks if "user" not in task.inputs), None):
        raise DataError(f"task {lacking!r} has no input 'user' with a goal and facts")
    progress = default_progress(progress)
    with open_run(config, lm=lm, progress=progress, store=store) as run:
        runs: list[Interview | None] = []
        problems: list[str] = []
        with run.recorder.active(), dspy.context(lm=run.lm, trace=[]), progress.bar("interview", len(tasks)) as advance:
            for task in tasks:
                try:
                    with limited(config.task_timeout):
                        runs.append(_recorded(run.recorder, program, task, name))
                except DataError:
                    raise
                except (Exception, SystemExit) as error:  # the user's own failure is a figure of its card
                    runs.append(None)
                    problems.append(error_text(error))
                advance(1)
        card = fidelity_card(runs, fail_over=config.fail_over)
        why = list(dict.fromkeys(problems))[:3]
        return ReportDict("Fidelity", {"user": name, **card, "why_failed": why, **usage_of(run.meter)})


def _user_of(user: str | UserProgram) -> UserProgram:
    if not isinstance(user, str):
        if not callable(user):
            raise ConfigError(f"user={user!r} must be callable as user(profile=…, messages=…)")
        return user
    shipped: dict[str, type[RuleBasedUser] | type[SimulatedUser]] = {"rules": RuleBasedUser, "model": SimulatedUser}
    if user not in shipped and ":" not in user and not user.endswith(".py"):
        raise ConfigError(f"user={user!r} {one_of(user, shipped, other='file.py:Class')}")
    program: UserProgram = shipped[user]() if user in shipped else load_program(user)
    return program


def _recorded(recorder: Recorder, user: UserProgram, task: Any, name: str) -> Interview:
    own = Rollout(
        task_id=task.id, task_type=task.task_type, group_id=task.id, source="simulated_user", program=name[:200]
    )
    own.inputs = dict(task.inputs)
    with recorder.rollout(own):
        conversation = within_limit(lambda: interview(user, task), "the interview")
        own.prediction = {"messages": conversation.messages, "ended": conversation.ended}
    return conversation
