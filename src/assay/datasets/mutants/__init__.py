"""Dataset `mutants:`: functions of Python modules with one mutation each, the minimal fix, and tests.

Functions and mutants run only in the sandbox that the caller gives.
"""

from assay.datasets.mutants.jobs import Runner
from assay.datasets.mutants.tasks import mutant_rows

__all__ = ["Runner", "mutant_rows"]
