"""Tokens of rows, with labels where there is a loss. Knows nothing of torch; a prompt's tokens have the label -100."""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

__all__ = ["completion_row", "conversation_rows"]

Message = dict[str, Any]
Tokens = dict[str, list[int]]  # `input_ids` and `labels`, of one length
_NO_LOSS = -100


def completion_row(prompt: Sequence[Message], completion: Sequence[Message], tools: Sequence[Any], tokenizer: Any) -> Tokens:
    """A prompt with its completion, which begins where the tokens differ from those that ask for it, as in TRL."""
    ids = _ids([*prompt, *completion], tools, tokenizer)
    begins = _shared(_ids(prompt, tools, tokenizer, generate=True), ids)
    return {"input_ids": ids, "labels": [*([_NO_LOSS] * begins), *ids[begins:]]}


def conversation_rows(messages: Sequence[Message], tools: Sequence[Any], tokenizer: Any) -> Iterator[Tokens]:
    """A conversation with all turns of the assistant as labels, each with the end of turn that the model must write.

    A turn that the chat template writes in another way once more was said (Qwen3 leaves out earlier thoughts) is a row of its own, as it is
    written when the model says it. An assistant's message that nothing precedes has no loss.
    """
    ids = _ids(messages, tools, tokenizer)
    labels, rewritten = [_NO_LOSS] * len(ids), list[int]()
    for at, message in enumerate(messages):
        if message["role"] != "assistant" or not at:
            continue
        until = _ids(messages[: at + 1], tools, tokenizer)
        if ids[: len(until)] != until:
            rewritten.append(at)
            continue
        begins = _shared(_ids(messages[:at], tools, tokenizer, generate=True), ids)
        labels[begins : len(until)] = ids[begins : len(until)]
    if any(label != _NO_LOSS for label in labels):
        yield {"input_ids": ids, "labels": labels}
    for at in rewritten:
        yield completion_row(messages[:at], [messages[at]], tools, tokenizer)


def _ids(messages: Sequence[Message], tools: Sequence[Any], tokenizer: Any, *, generate: bool = False) -> list[int]:
    found = tokenizer.apply_chat_template(list(messages), tools=list(tools) or None, add_generation_prompt=generate, tokenize=True, return_dict=True)
    return list(found["input_ids"])


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two begin with together."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
