"""`assay rubric`: what a rubric can use."""

import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_type_hints

from assay.support.options import Settings, function_of
from assay.support.report import Report

_GIVEN = frozenset({"task", "prediction", "rollout"})


@dataclass(frozen=True, kw_only=True, repr=False)
class CheckListing(Report):
    """The checks that a rubric can name.

    Attributes:
        checks: each with its `name`, a `summary` and its `arguments` (`with` in YAML). An argument has a `name`, a
            `type`, whether it is `required`, and its `default`.
    """

    checks: tuple[dict[str, Any], ...]

    def lines(self) -> Iterator[str]:
        from assay.rubrics.loading import OF_STEPS

        yield "A criterion names a check as `check: NAME`; one of scope step needs `scope: step` too."
        for check in self.checks:
            yield f"{check['name']} ({'step' if check['name'] in OF_STEPS else 'final'}): {check['summary']}"
            for argument in check["arguments"]:
                default = "required" if argument["required"] else f"default {json.dumps(argument['default'])}"
                yield f"    {argument['name']}: {argument['type']}, {default}"


class ListChecks(Settings):
    """List the shipped checks with their arguments, which a criterion sets in `with`."""

    def run(self) -> CheckListing:
        from assay.rubrics.loading import SHIPPED_CHECKS

        return CheckListing(checks=tuple(_described(name, check) for name, check in SHIPPED_CHECKS.items()))


def _described(name: str, check: Any) -> dict[str, Any]:
    called = check if inspect.isfunction(check) else type(check).__call__
    types = get_type_hints(called)  # without bounds
    arguments = [item for item in inspect.signature(check).parameters.values() if item.name not in _GIVEN]
    return {
        "name": name,
        "summary": " ".join((inspect.getdoc(check) or "").partition("\n\n")[0].split()),
        "arguments": [
            {
                "name": item.name,
                "type": inspect.formatannotation(types[item.name]).replace("collections.abc.", ""),
                "required": item.default is item.empty,
                "default": None if item.default is item.empty else item.default,
            }
            for item in arguments
        ],
    }


list_checks = function_of(ListChecks, "list_checks")
