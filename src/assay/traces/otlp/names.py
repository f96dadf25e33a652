"""Names of attributes in OTLP. The export writes them, and `assay.traces.importers` reads them. Names of metrics are in
`metric_names`; `VERSION` is that of both.

What the GenAI conventions of OpenTelemetry name has their names, so that other tools show it. The rest, with which an
import restores the rollout exactly, has the prefix `assay.`. A change of meaning increases `VERSION`; a newer version
is not imported.
"""

import json
from typing import Any

from assay.support.values import json_text, json_value

__all__ = ["CALL", "ROLLOUT", "SETTINGS", "VERSION", "VERSION_KEY", "Field", "read", "written"]

VERSION = 1
PREFIX, VERSION_KEY = "assay.", "assay.mapping.version"

# conventions
OPERATION, AGENT, CONVERSATION = "gen_ai.operation.name", "gen_ai.agent.name", "gen_ai.conversation.id"
REQUEST_MODEL, RESPONSE_MODEL = "gen_ai.request.model", "gen_ai.response.model"
RESPONSE_ID, FINISH_REASONS = "gen_ai.response.id", "gen_ai.response.finish_reasons"
INPUT_MESSAGES, OUTPUT_MESSAGES = "gen_ai.input.messages", "gen_ai.output.messages"
SYSTEM, TOOLS = "gen_ai.system_instructions", "gen_ai.tool.definitions"
PROMPT_TOKENS, COMPLETION_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
COST = "gen_ai.usage.cost"
TOOL, TOOL_CALL_ID = "gen_ai.tool.name", "gen_ai.tool.call.id"
TOOL_ARGUMENTS, TOOL_RESULT = "gen_ai.tool.call.arguments", "gen_ai.tool.call.result"
EVALUATION, EVALUATION_NAME = "gen_ai.evaluation.result", "gen_ai.evaluation.name"
EVALUATION_VALUE, EVALUATION_LABEL = "gen_ai.evaluation.score.value", "gen_ai.evaluation.score.label"
EVALUATION_REASON = "gen_ai.evaluation.explanation"
USER, TENANT, ERROR = "user.id", "tenant.id", "error.type"
KIND, INPUT, OUTPUT = "openinference.span.kind", "input.value", "output.value"  # OpenInference, for Phoenix
SERVICE, SERVICE_VERSION = "service.name", "service.version"

SETTINGS = {  # `gen_ai.request.` + name -> key of an OpenAI request
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_tokens",
    "seed": "seed",
    "stop_sequences": "stop",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "choice.count": "n",
}

Field = tuple[str, bool]  # name of the attribute, whether its value is JSON

# fields of a rollout, on its root span
ROLLOUT: dict[str, Field] = {
    **{
        name: (f"assay.{name}", False)
        for name in (
            "task_id", "task_type", "group_id", "sample", "program", "program_version", "model", "seed", "split",
            "phase", "source", "status", "failure", "error", "rubric", "score", "coverage", "human_rating", "tenant",
            "data_subject", "consent", "started_at", "ended_at", "deployment", "stage", "arm", "propensity", "unit",
            "version",
        )
    },
    **{name: (f"assay.{name}", True) for name in ("parameters", "adapters", "metadata", "expected", "verdicts")},
    "id": ("assay.rollout.id", False),
}  # fmt: skip
# fields of an LM call; those of `CONTENT` are texts
CALL: dict[str, Field] = {
    **{
        name: (f"assay.{name}", False)
        for name in (
            "t", "model", "weights", "output", "error", "failure", "constrained", "cached", "prompt_tokens",
            "completion_tokens", "thinking_tokens", "latency_ms", "cost_usd", "started_at", "return_", "agent",
        )
    },
    **{
        name: (f"assay.{name}", True)
        for name in ("adapters", "request", "response", "shown_tasks", "token_ids", "logprobs", "step_rewards")
    },
}  # fmt: skip
TURN, ISOLATION = "assay.t", "assay.isolation"  # of a tool: the LM call that asked for it; its sandbox
CONTENT = frozenset(
    {
        "request",
        "response",
        "output",
        "token_ids",
        "logprobs",
        "expected",
        "metadata",
        "verdicts",
        "error",
        "data_subject",
    }
)


def written(record: Any, fields: dict[str, Field], *, content: bool) -> dict[str, Any]:
    """The attributes of a rollout or LM call; None is left out.

    Args:
        content: with texts.
    """
    attributes = {}
    for name, (attribute, is_json) in fields.items():
        value = getattr(record, name)
        if value is None or (name in CONTENT and not content):
            continue
        attributes[attribute] = json_text(value) if is_json else json_value(value)
    return attributes


def read(attributes: dict[str, Any], fields: dict[str, Field]) -> dict[str, Any]:
    """The fields that attributes have, by name.

    Raises:
        ValueError: one of them is not the JSON that `written` writes.
    """
    return {
        name: json.loads(attributes[attribute]) if is_json else attributes[attribute]
        for name, (attribute, is_json) in fields.items()
        if attribute in attributes
    }
