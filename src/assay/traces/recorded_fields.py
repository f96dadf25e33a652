"""Keywords of `assay.record`, `assay.recorded` and `Recording.call`: fields of a rollout and of an LM call."""

from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, TypedDict, get_args, get_origin, get_type_hints

from assay.errors import ConfigError, FailureKind
from assay.support.names import nearest
from assay.support.options import option_of
from assay.traces.records import Verdict


class RolloutFields(TypedDict, total=False):
    """Fields of `assay.traces.Rollout` that the caller of `assay.record` may set."""

    id: str
    run_id: str
    task_id: str
    task_type: str
    group_id: str
    sample: int
    program: str
    program_version: str
    parameters: dict[str, Any]
    model: str
    adapters: tuple[str, ...]
    seed: int | None
    split: str
    phase: str
    source: str
    inputs: dict[str, Any]
    expected: dict[str, Any]
    metadata: dict[str, Any]
    prediction: dict[str, Any] | None
    status: str
    error: str | None
    failure: FailureKind | None
    score: float | None
    coverage: float | None
    verdicts: list[Verdict]
    human_rating: float | None
    tenant: str | None
    data_subject: str | None
    consent: Any
    started_at: float
    ended_at: float | None
    deployment: str | None
    stage: int | None
    arm: str | None
    propensity: float | None
    unit: str | None
    version: str | None


class CallFields(TypedDict, total=False):
    """Fields of `assay.traces.Transition` that the caller of `Recording.call` may set, and `finish_reason`."""

    finish_reason: str
    weights: str
    adapters: tuple[str, ...]
    error: str | None
    failure: FailureKind | None
    constrained: bool
    cached: bool
    prompt_tokens: int | None
    completion_tokens: int | None
    thinking_tokens: int | None
    shown_tasks: tuple[str, ...]
    token_ids: Sequence[int] | None
    logprobs: Sequence[float] | None
    latency_ms: float
    cost_usd: float | None
    started_at: float
    step_rewards: dict[str, float]
    agent: str


def check_fields(fields: Mapping[str, Any], allowed: type[Any], owner: str, *, arguments: Sequence[str] = ()) -> None:
    """Raises ConfigError if a name is not a key of the TypedDict `allowed`, naming the nearest one, or a text or a
    mapping is none.

    Args:
        owner: what the fields belong to, for the message: `a rollout`.
        arguments: other arguments of the function, which may have been meant too.
    """
    names = list(allowed.__annotations__)
    for name in sorted(set(fields) - set(names)):
        similar = nearest(name, (*arguments, *names))
        hint = f"Did you mean {similar!r}?" if similar else f"It has {', '.join(sorted(names))}."
        raise ConfigError(f"{owner} has no field {name!r}. {hint}")
    for name, kind in get_type_hints(allowed).items():
        members = get_args(kind) if get_origin(kind) is UnionType else (kind,)
        if name in fields and set(members) <= {str, NoneType}:
            option_of(name, kind, "").checked(fields[name])  # its default: empty texts are allowed
        is_mapping = any(get_origin(member) is dict for member in members)
        if is_mapping and not isinstance(fields.get(name), Mapping | None):
            raise ConfigError(f"must be a mapping, not {fields[name]!r}", field=name)
