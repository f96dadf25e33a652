"""Public API for `assay rubric checks`: the shipped checks with their arguments."""

import inspect
from typing import Any

from assay.rubrics.loading import SHIPPED_CHECKS

_GIVEN = frozenset({"task", "prediction", "rollout"})


def list_checks() -> list[dict[str, Any]]:
    """The checks that a rubric can name, each with its `name`, a `summary` and its `arguments` (`with` in YAML).

    An argument has a `name`, a `type`, whether it is `required`, and its `default`.
    """
    return [
        {
            "name": name,
            "summary": " ".join((inspect.getdoc(check) or "").partition("\n\n")[0].split()),
            "arguments": [
                {
                    "name": parameter.name,
                    "type": inspect.formatannotation(parameter.annotation).replace("collections.abc.", ""),
                    "required": parameter.default is inspect.Parameter.empty,
                    "default": None if parameter.default is inspect.Parameter.empty else parameter.default,
                }
                for parameter in inspect.signature(check).parameters.values()
                if parameter.name not in _GIVEN
            ],
        }
        for name, check in SHIPPED_CHECKS.items()
    ]
