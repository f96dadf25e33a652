"""Token ids and loss labels of training rows. Does not import torch; tokens without a loss have the label -100."""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

Message = dict[str, Any]
Tokens = dict[str, list[int]]  # `input_ids` and `labels`, of the same length
_NO_LOSS = -100  # index that torch's cross entropy ignores


def has_loss(message: Message) -> bool:
    """Whether a message is trained on: OpenAI's format marks answers without a loss with `weight: 0`."""
    return message.get("weight") != 0


def trained_turns(messages: Sequence[Message]) -> list[int]:
    """Indices of the messages of a whole conversation that are trained on: those of the assistant but the first."""
    return [at for at, message in enumerate(messages) if at and message["role"] == "assistant" and has_loss(message)]


def completion_row(
    prompt: Sequence[Message], completion: Sequence[Message], tools: Sequence[Any], tokenizer: Any
) -> Tokens:
    """Tokens of a prompt and its completion, with labels on the completion.

    As in TRL, the completion begins at the first token that differs from the prompt with its generation prompt.
    """
    ids = _ids([*prompt, *completion], tools, tokenizer)
    start = _common_prefix(_ids(prompt, tools, tokenizer, generate=True), ids)
    return {"input_ids": ids, "labels": [*([_NO_LOSS] * start), *ids[start:]]}


def conversation_rows(messages: Sequence[Message], tools: Sequence[Any], tokenizer: Any) -> Iterator[Tokens]:
    """Tokens of a conversation, with labels on every trained turn, its end-of-turn token included.

    Some chat templates render a turn differently once later messages follow (Qwen3 removes earlier thoughts). Such a
    turn becomes a row of its own, rendered as the model wrote it.
    """
    ids = _ids(messages, tools, tokenizer)
    labels, rewritten = [_NO_LOSS] * len(ids), list[int]()
    for index in trained_turns(messages):
        prefix = _ids(messages[: index + 1], tools, tokenizer)
        if ids[: len(prefix)] != prefix:
            rewritten.append(index)
            continue
        start = _common_prefix(_ids(messages[:index], tools, tokenizer, generate=True), ids)
        labels[start : len(prefix)] = ids[start : len(prefix)]
    if any(label != _NO_LOSS for label in labels):
        yield {"input_ids": ids, "labels": labels}
    for index in rewritten:
        yield completion_row(messages[:index], [messages[index]], tools, tokenizer)


def _ids(messages: Sequence[Message], tools: Sequence[Any], tokenizer: Any, *, generate: bool = False) -> list[int]:
    encoded = tokenizer.apply_chat_template(
        list(messages), tools=list(tools) or None, add_generation_prompt=generate, tokenize=True, return_dict=True
    )
    return list(encoded["input_ids"])


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
