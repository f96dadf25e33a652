"""Criteria on edits of code: how much of an edit was needed, and whether it games the tests. Does not run code."""

from typing import TYPE_CHECKING

from assay.support.lazy import attach

if TYPE_CHECKING:
    from assay.rubrics.code.checks import RULES, Finding, find_hacks
    from assay.rubrics.code.difference import Edit, MinimalDiff, minimal_diff
else:
    __getattr__, __dir__ = attach(
        __name__,
        {
            "difference": "Edit MinimalDiff minimal_diff",
            "checks": "Finding RULES find_hacks",
        },
    )

__all__ = ["RULES", "Edit", "Finding", "MinimalDiff", "find_hacks", "minimal_diff"]
