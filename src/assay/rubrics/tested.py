"""Checks that run the code of a prediction. It runs in a sandbox, which needs the extra `sandbox`.

Tests are fields of the task (inputs, expected outputs or metadata): Python source, or a list of cases
(`assay.programs.sandbox.Suite.parse`). Keep hidden ones in the metadata: programs see the inputs, and demonstrations
show expected outputs. The code is an output field; a Markdown fence around it is removed.
"""

from functools import partial
from typing import Any

from assay.datasets.tasks import Task
from assay.errors import DataError, SandboxError
from assay.rubrics.criteria import Grade, NoGrade, arguments_rule
from assay.rubrics.fields import code_of, value_of
from assay.traces.records import Rollout

__all__ = ["tests_pass"]


def _validate_limits(
    timeout_s: float = 20,
    memory_mb: int = 512,
    isolation: str = "auto",
    test_timeout_s: float | None = None,
    **_: Any,
) -> None:
    from assay.programs.sandbox.isolation import Limits, isolations_of

    Limits(timeout_s=timeout_s, memory_mb=memory_mb)
    isolations_of(isolation)
    if test_timeout_s is not None and not 0 < test_timeout_s <= timeout_s:
        raise ValueError(f"test_timeout_s={test_timeout_s!r} must be above 0 and at most timeout_s={timeout_s!r}")


@arguments_rule(_validate_limits)
def tests_pass(
    task: Task,
    prediction: dict[str, Any],
    rollout: Rollout | None,
    field: str = "code",
    hidden: str = "hidden_tests",
    visible: str = "visible_tests",
    entry_point: str = "entry_point",
    timeout_s: float = 20,
    memory_mb: int = 512,
    isolation: str = "auto",
    test_timeout_s: float | None = None,
) -> Grade:
    """Share of the hidden tests that the code passes, run in a sandbox. The reason names visible tests only.

    Unscored where no sandbox can be started. Whatever the code does in it counts as failed tests.

    Args:
        field: output field with the code.
        hidden: field of the task with the tests that decide the grade.
        visible: field of the task with the tests for the reason; it may be missing.
        entry_point: field of the task with the name of the function for `check(candidate)`.
        timeout_s: for all hidden tests together, and for all visible ones.
        memory_mb: of the code's processes.
        isolation: `bubblewrap`, `landlock`, `none`, or `auto` for the first of the first two that works.
        test_timeout_s: for one test; by default a quarter of `timeout_s`.
    """
    from assay.programs.sandbox import Suite, run_tests

    name = str(value_of(task, entry_point) or "")
    try:
        if (tests := value_of(task, hidden)) is None:
            raise NoGrade(f"task {task.id!r} has no {hidden!r} to test the code with", missing_field=hidden)
        secret = Suite.parse(tests, name)
        visible_suite = Suite.parse(value_of(task, visible), name) if value_of(task, visible) else None
        code = code_of(prediction, field)
        if code is None or not code.strip():
            fields = sorted(map(str, prediction))
            return Grade.of(False, f"The prediction has no code in {field!r}; it has {fields}.")
        run = partial(
            run_tests,
            code,
            timeout_s=timeout_s,
            memory_mb=memory_mb,
            isolation=isolation,
            test_timeout_s=test_timeout_s,
        )
        share = run(secret).share
        if share == 1.0:
            return Grade(value=1.0)
        if visible_suite is None:
            return Grade(value=share, reason="Hidden tests failed. The task has no visible tests.")
        result = run(visible_suite)
    except SandboxError as error:
        raise NoGrade(f"the code cannot be run: {error}") from error
    except DataError as error:
        raise NoGrade(f"task {task.id!r}: {error}") from error
    if result.share == 1.0:
        return Grade(value=share, reason="All visible tests passed, and hidden tests failed.")
    return Grade(value=share, reason=f"Visible tests: {result.feedback()}")


tests_pass.__test__ = False  # pytest takes any function named test… of a module for a test
