"""The dataset `mutants:MODULE_OR_FILE?size=&seed=&isolation=`: functions with one mutation each, to be repaired.

`MODULE_OR_FILE` is a module or package such as `textwrap` or `json`, a file, a folder, or `stdlib` for all modules of
the standard library. Functions, mutants and made-up calls run in the sandbox.
"""

from collections.abc import Iterator

from assay.datasets.mutants import mutant_rows
from assay.datasets.specs import Row, number_of, options_of
from assay.errors import DataError
from assay.programs.sandbox import run
from assay.programs.sandbox.isolation import ISOLATIONS
from assay.support.settings import one_of

__all__ = ["rows"]


def rows(spec: str) -> Iterator[Row]:
    """Rows of `mutants:` and the rest of the spec; fewer than `size` (default 500) if the functions give no more.

    Raises:
        DataError: an unknown option, no such file, or no function that can be tested.
        SandboxError: no sandbox works here; `isolation=none` runs without one.
    """
    name, _, query = spec.partition("?")
    options = options_of(query, ("size", "seed", "isolation"), f"mutants:{name}")
    isolation = options.get("isolation", "auto")
    if isolation not in ("auto", *ISOLATIONS):
        raise DataError(f"mutants: isolation={isolation!r} {one_of(isolation, ('auto', *ISOLATIONS))}")
    return mutant_rows(
        name,
        size=number_of(options, "size", 500, at_least=1),
        seed=number_of(options, "seed", 0),
        run=run,
        isolation=isolation,
    )
