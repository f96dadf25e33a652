"""The settings of commands on the store and on deployments as keywords of their Python functions, for type checkers.

As `options`: each class has the fields of the settings class of the same name, with their types; a test compares them.
"""

from collections.abc import Sequence
from typing import TypedDict


class ServeOptions(TypedDict, total=False):
    """The keywords of `assay.api.serve.serve`, without the keys: settings are stored."""

    model: str | None
    upstream: str | None
    host: str
    port: int
    allow_host: Sequence[str]
    idle_s: float
    max_body_mb: int
    max_connections: int | None
    connection_idle_s: float
    receive_s: float
    upstream_idle_s: float
    loops: str
    agent: Sequence[str]
    agent_rubric: str | None
    judge_model: str | None
    judge_api_base: str | None
    judge_api_key_env: str | None
    judge_thinking: int | str | None
    price: str | None
    agent_timeout_s: float
    replace_lms: bool
    advance_s: float
    otlp: str
    otlp_endpoint: str | None
    otlp_tenants: Sequence[str]
