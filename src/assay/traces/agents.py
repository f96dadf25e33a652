"""Names of the agents of a rollout, for programs in which several act, such as a planner and a solver.

Does not run agents. A call is recorded with the name that is current when it is made.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import dspy

from assay.traces.records import check_agent_name

_AGENT = "assay_agent"


@contextmanager
def acting_as(name: str) -> Iterator[None]:
    """Inside, LM calls are recorded as those of the agent `name`; the innermost name counts.

    The name is stored in DSPy's settings, which DSPy copies to its worker threads and async tasks. A thread that the
    program starts itself must enter the context again.

    Args:
        name: 1 to 64 characters that can be printed.
    Raises:
        ConfigError: another name.
    """
    with dspy.context(**{_AGENT: check_agent_name(name)}):
        yield


def current_agent() -> str:
    """Name of the agent that acts in this thread or task; "" without one."""
    name = dspy.settings.get(_AGENT)
    return name if isinstance(name, str) else ""
