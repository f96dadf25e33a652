"""What an agent gets for a task, how its answer is read, and how it fails. Runs nothing."""

import json
import shlex
from dataclasses import dataclass
from typing import Any

from assay.errors import ConfigError
from assay.support.values import json_text

__all__ = ["AgentFailed", "AgentTask", "RunnerLost", "answer_of_output", "command_of", "named_callable"]

MOST_BYTES = 1 << 20  # of an agent's standard output
TOO_MUCH = f"the agent printed more than {MOST_BYTES >> 20} MiB; its answer is what it prints"


class AgentFailed(RuntimeError):
    """The agent gave no answer: it raised, exited with an error, or printed something that cannot be read."""


class RunnerLost(ConnectionError):
    """The process that ran the agent ended, or its machine no longer sends requests. Never the agent's failure."""


@dataclass(frozen=True, kw_only=True)
class AgentTask:
    """A task as an agent gets it: as a mapping (`to_dict`), and in environment variables (`environment`).

    Attributes:
        id: of the task; its rollouts share it.
        rollout: id of this run.
        base_url: OpenAI's base URL, with `/v1`.
        api_key: valid for this run only.
    """

    id: str
    rollout: str
    inputs: dict[str, Any]
    model: str
    base_url: str
    api_key: str

    def to_dict(self) -> dict[str, Any]:
        """The document on the agent's standard input, and the argument of a callable."""
        return dict(vars(self))

    def to_json(self) -> bytes:
        """`to_dict` as JSON."""
        return json_text(self.to_dict()).encode()

    def environment(self) -> dict[str, str]:
        """Variables that SDKs of OpenAI and Anthropic read, and the same under names of their own."""
        root = self.base_url.removesuffix("/v1")
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": self.api_key,
            "ASSAY_BASE_URL": self.base_url,
            "ASSAY_API_KEY": self.api_key,
            "ASSAY_MODEL": self.model,
            "ASSAY_TASK_ID": self.id,
            "ASSAY_ROLLOUT_ID": self.rollout,
        }


def answer_of_output(output: bytes) -> Any:
    """The answer in what a command printed: the JSON object of its last line, else the whole text.

    Raises:
        AgentFailed: nothing was printed, too much, or not UTF-8.
    """
    if len(output) > MOST_BYTES:
        raise AgentFailed(TOO_MUCH)
    try:
        text = output.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise AgentFailed(f"the agent printed bytes that are not UTF-8: {error}") from None
    if not text:
        raise AgentFailed("the agent exited with 0 and printed nothing; it must print its answer")
    try:
        fields = json.loads(text.splitlines()[-1], parse_constant=_not_json)
    except (ValueError, RecursionError):
        return text
    return fields if isinstance(fields, dict) else text


def _not_json(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def named_callable(agent: str) -> bool:
    """Whether an agent is named as `package.module:CALLABLE` or `path/file.py:CALLABLE`, and not a command."""
    module, colon, attribute = agent.rpartition(":")
    return bool(colon and module) and attribute.replace(".", "_").isidentifier() and not any(map(str.isspace, agent))


def command_of(agent: str) -> list[str]:
    """The words of a command. No shell is used.

    Raises:
        ConfigError: it is empty, or a quote is not closed.
    """
    try:
        words = shlex.split(agent)
    except ValueError as error:
        raise ConfigError(f"agent={agent!r} cannot be read as a command: {error}") from None
    if not words:
        raise ConfigError("agent is empty: give a command, or MODULE:CALLABLE", flag="--agent")
    return words
