"""Preflight check of a rubric: each final criterion must be decided on one of the first tasks.

Does not run programs: `assay.runs.preflight` does.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from assay.datasets import Task
from assay.errors import ModelError, RubricError
from assay.rubrics import Criterion, NoGrade, Rubric, ScoreResult
from assay.rubrics.calling import call, unfit_arguments
from assay.rubrics.scoring import ScoredRun, fields_of, grade, is_shipped
from assay.traces import Rollout
from assay.traces.records import Verdict

SKIP, SKIP_FLAG = "preflight=False skips this check", "--no-preflight"
_MORE = 20  # further tasks on which a check is tried, with the last answer, before it is refused


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
            lines += [f"Where that is a column of the data, rename it: rename={{{renames}}}"] if hints else []
            lines += [
                f"Name the field in the rubric: {{name: {name}, with: {{field: {f}}}}}" for name, f in named.items()
            ]
            lines += [] if hints else [self._fields()]
            flags = [f"--rename {old}={new}" for old, new in sorted(hints)]
            raise RubricError("\n".join([*lines, SKIP]), flag=", ".join([*flags, SKIP_FLAG]))
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
                f"No model was chosen for the judge, so the program's, {self.default_model}, judges; judge_model names "
                "another. "
                if self.default_model
                else ""
            )
            raise ModelError(
                f"the judge of {name!r} scored none of the outputs that it was shown: {self.missing[name]}. "
                f"{default}Check its model, key and address (judge_model, judge_api_key_env, judge_api_base); {SKIP}",
                flag=f"--judge-model, --judge-api-key-env, --judge-api-base, {SKIP_FLAG}",
            )

    def warnings(self) -> list[str]:
        """A warning if answers share no field with the expected outputs: checks then grade 0 instead of staying
        undecided.
        """
        if any(not task.expected or task.expected.keys() & fields.keys() for task, fields, _ in self.answered):
            return []
        zeros = {v.criterion for v in self._verdicts if v.scope == "final" and v.grade == 0 and v.weight > 0}
        failed = sorted(c.name for c in self.rubric.finals if c.name in zeros and self._reads_expected(c))
        if not failed:
            return []
        task, fields, _ = self.answered[0]
        return [
            f"the tasks expect {sorted(task.expected)}, and the program answers {sorted(fields)}: a check that "
            "compares fields of one name gives 0 "
            f"({', '.join(failed)}). Rename a column of the data, or name the field in the rubric (with: "
            f"{{field: NAME}})"
        ]

    def _reads_expected(self, criterion: Criterion) -> bool:
        """Whether the grade of a check that gave 0 depends on the expected outputs. Judges read no fields by name."""
        task, fields, rollout = self.answered[0]
        return (
            criterion.check is not None
            and grade(criterion, criterion.check, replace(task, expected={}), dict(fields), rollout).grade != 0
        )

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
            f"`expected` where the rollouts are opened or recorded, or use a check that needs none; {SKIP}",
            flag=SKIP_FLAG,
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
