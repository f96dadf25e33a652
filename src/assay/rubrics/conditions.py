"""Conditional criteria (`Criterion.when`): they count only if another criterion passed. Does not grade.

A length penalty on wrong answers ranks short wrong answers above long ones. With group-relative advantages, a group of
only wrong answers (a hard task) then trains the model to think less. With `when: correct` it is a zero-variance group.
"""

import difflib
from collections.abc import Iterable, Sequence

from assay.errors import RubricError
from assay.rubrics.criteria import Criterion
from assay.traces.records import Verdict

__all__ = ["check_conditions", "condition", "no_such_condition"]


def check_conditions(rubric: str, criteria: Sequence[Criterion]) -> dict[str, Criterion]:
    """Validates `when` of all criteria and returns the criteria by name.

    Raises:
        RubricError: `when` names an unknown criterion, a pitfall, a criterion of scope `step` (for a final criterion),
            or is part of a cycle.
    """
    by_name = {c.name: c for c in criteria}
    for c in criteria:
        if not c.when:
            continue
        where = f"rubric {rubric!r}: criterion {c.name!r}: when={c.when!r}"
        gate = by_name.get(c.when)
        if gate is None:
            raise RubricError(f"rubric {rubric!r}: {no_such_condition(c.name, c.when, by_name)}")
        if gate.weight < 0:
            raise RubricError(
                f"{where} is a pitfall (weight {gate.weight:g}), which cannot pass; name a criterion with a weight >= 0"
            )
        if c.scope == "final" and gate.scope == "step":
            raise RubricError(f"{where} has scope 'step'; a final criterion can depend only on a final one")
        _check_cycle(where, c, by_name)
    return by_name


def _check_cycle(where: str, c: Criterion, by_name: dict[str, Criterion]) -> None:
    path, gate = [c.name], by_name.get(c.when)
    while gate is not None and gate.name not in path:
        path.append(gate.name)
        gate = by_name.get(gate.when)
    if gate is not None and gate.name == c.name:
        raise RubricError(f"{where} is part of a cycle ({' -> '.join([*path, c.name])}); remove one of them")


def no_such_condition(name: str, when: str, names: Iterable[str]) -> str:
    """Error message for a `when` that names an unknown criterion, with the closest name."""
    near = difflib.get_close_matches(when, list(names), 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"criterion {name!r}: when={when!r} names no criterion of the rubric; there are {', '.join(names)}.{hint}"


def condition(criterion: Criterion, gate: Criterion, verdict: Verdict) -> Verdict | None:
    """Returns None if the gate passed, otherwise the verdict that replaces the criterion's.

    If the gate is unscored, the criterion is unscored too; otherwise it does not apply.
    """
    if verdict.applies and verdict.grade is not None and gate.passed(verdict.grade):
        return None
    unknown = verdict.applies and verdict.grade is None
    reason = f"counts only where {gate.name} passes, and {gate.name} {'is unscored' if unknown else 'did not'}"
    return Verdict(
        criterion=criterion.name,
        grade=None,
        weight=criterion.weight,
        scope=criterion.scope,
        reason=reason,
        applies=unknown,
    )
