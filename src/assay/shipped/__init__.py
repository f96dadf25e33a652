"""Shipped content: the folders `programs`, `rubrics`, `judges` and `optimizers` at the top of the repository.

A wheel has them inside of this package. `assay.shipped.programs.nim.checks` is `programs/nim/checks.py` in both.
"""

from assay.support.package import CONTENT

__path__ = [str(CONTENT)]
