"""Criteria that count only where another one passed (`Criterion.when`). Does not grade.

A length penalty that counts on wrong answers too makes the short ones of an all-wrong group better than the long ones: with an
advantage within the group, hard tasks then teach a model to think less. Under `when: correct` such a group has no spread.
"""

import difflib
from collections.abc import Iterable, Sequence

from assay.errors import RubricError
from assay.rubrics.criteria import Criterion
from assay.traces.records import Verdict

__all__ = ["check_conditions", "condition", "no_such_condition"]


def check_conditions(rubric: str, criteria: Sequence[Criterion]) -> dict[str, Criterion]:
    """The criteria by name.

    Raises:
        RubricError: `when` names no criterion, the criterion itself (also through others), a pitfall, or, for a final
            criterion, one of scope `step`.
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
            raise RubricError(f"{where} is a pitfall (weight {gate.weight:g}), which does not pass; name a criterion with a weight of at least 0")
        if c.scope == "final" and gate.scope == "step":
            raise RubricError(f"{where} is of scope 'step'; a final criterion can wait for a final one only")
        _refuse_circle(where, c, by_name)
    return by_name


def _refuse_circle(where: str, c: Criterion, by_name: dict[str, Criterion]) -> None:
    path, at = [c.name], by_name.get(c.when)
    while at is not None and at.name not in path:
        path.append(at.name)
        at = by_name.get(at.when)
    if at is not None and at.name == c.name:
        raise RubricError(f"{where} waits for itself ({' -> '.join([*path, c.name])}); remove one of them")


def no_such_condition(name: str, when: str, names: Iterable[str]) -> str:
    """That a criterion waits for one that is not there."""
    near = difflib.get_close_matches(when, list(names), 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"criterion {name!r}: when={when!r} names no criterion of the rubric; there are {', '.join(names)}.{hint}"


def condition(criterion: Criterion, gate: Criterion, verdict: Verdict) -> Verdict | None:
    """None where the gate passed; else the verdict that replaces the criterion's.

    Where the gate is unscored so is the criterion: nobody knows whether it counts.
    """
    if verdict.applies and verdict.grade is not None and gate.passed(verdict.grade):
        return None
    unknown = verdict.applies and verdict.grade is None
    reason = f"counts only where {gate.name} passes, and {gate.name} {'is unscored' if unknown else 'did not'}"
    return Verdict(criterion=criterion.name, grade=None, weight=criterion.weight, scope=criterion.scope, reason=reason, applies=unknown)
