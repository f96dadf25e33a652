"""Which tasks a prompt shows beside its own: those that its demonstrations, or its instructions, came from.

Demonstrations are matched by content, because DSPy's optimizers rebuild them: by the text of a task's inputs, and by the prompt of an
earlier call that was made for a task, which is what the demonstration of a later step of a program looks like.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = ["OwnTask", "TaskTexts", "message_texts"]

_WORD = re.compile(r"\w+")
_SHORT = 12  # characters under which a text must stand by itself in its line
_CACHED = 20_000  # messages
_REQUEST = "\n\nRespond with"  # where DSPy's formats end the fields of the task at hand, and a demonstration does not have


class TaskTexts:
    """Tasks by the text of their inputs. Time is in proportion to the text that is searched, not to the number of tasks."""

    def __init__(self) -> None:
        self._by_word: dict[str, list[tuple[str, tuple[str, ...]]]] = defaultdict(list)
        self._known: set[str] = set()
        self._asked: dict[int, str] = {}
        self._found: dict[int, frozenset[str]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, content: str, inputs: Mapping[str, Any]) -> None:
        """Makes a task known by its content hash."""
        parts = tuple(dict.fromkeys(text for value in inputs.values() if (text := _plain(_text(value)))))
        words = [word for part in parts for word in _WORD.findall(part)]
        if content in self._known or not words:
            return
        self._known.add(content)
        self._by_word[max(words, key=len)].append((content, parts))
        self._found.clear()

    def asked(self, content: str, messages: Sequence[str]) -> None:
        """Remembers the prompt of a call that was made for a task."""
        if messages and (fields := _fields(messages[-1])):
            self._asked[hash(fields)] = content

    def shown(self, messages: Sequence[str], *, own: str = "") -> tuple[str, ...]:
        """Content hashes of the tasks that the messages show, without the one they are about; sorted."""
        found: set[str] = set()
        for text in messages:
            found |= self.within(text)
        found |= {self._asked[key] for text in messages[:-1] if (key := hash(_fields(text))) in self._asked}
        return tuple(sorted(found - {own}))

    def within(self, text: str) -> frozenset[str]:
        """Content hashes of the tasks whose inputs stand in a text, all of them."""
        key = hash(text)
        known = self._found.get(key)
        if known is None:
            plain = _plain(text)
            candidates = [one for word in set(_WORD.findall(plain)) & self._by_word.keys() for one in self._by_word[word]]
            known = frozenset(content for content, parts in candidates if all(_stands_in(part, plain) for part in parts))
            if len(self._found) >= _CACHED:
                self._found.clear()
            self._found[key] = known
        return known


class OwnTask:
    """Whether a call's prompt demonstrates the very task that the call is about.

    A demonstration is an answered user message before the last one, or DSPy's instructions. What the rollout itself asked and was
    answered before is no demonstration: the calls of a rollout are asked about in their order.
    """

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self._parts = [text for value in inputs.values() if (text := _plain(_text(value)))]
        self._word = max((word for part in self._parts for word in _WORD.findall(part)), key=len, default="")
        self._answers: set[str] = set()  # what the rollout was answered so far

    def possible(self, request_json: str) -> bool:
        """Whether the messages of a request are worth reading: without an assistant's, the task must be there twice."""
        return '"assistant"' in request_json or (bool(self._word) and request_json.count(self._word) > 1)

    def demonstrated(self, messages: Sequence[Mapping[str, Any]], *, instructions: bool) -> bool:
        """Whether these messages demonstrate the task.

        Args:
            instructions: whether system messages count: DSPy puts no task into them, other programs may.
        """
        texts = [message_texts([message])[0] if message.get("content") else "" for message in messages]
        last = max((at for at, message in enumerate(messages) if message.get("role") == "user"), default=0)
        same = hash(_fields(texts[last])) if texts else 0
        for at, (message, text) in enumerate(zip(messages[:last], texts, strict=False)):
            if message.get("role") == "user" and messages[at + 1].get("role") == "assistant":
                if texts[at + 1] not in self._answers and (hash(_fields(text)) == same or self._holds(text)):
                    return True
            elif instructions and message.get("role") == "system" and self._holds(text) and self._holds(texts[last]):
                return True
        return False

    def answered(self, output: str) -> None:
        """Notes an answer of the rollout, to a prompt that did not demonstrate the task."""
        self._answers.add(output)

    def _holds(self, text: str) -> bool:
        return bool(self._word) and self._word in text and all(_stands_in(part, _plain(text)) for part in self._parts)


def message_texts(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """The texts of chat messages, in order."""
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            found.append(content)
        elif isinstance(content, list):
            found.append("\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping)))
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _plain(text: str) -> str:
    return "\n".join(line for raw in text.splitlines() if (line := " ".join(raw.split())))


def _fields(text: str) -> str:
    return _plain(text.partition(_REQUEST)[0])


def _stands_in(part: str, text: str) -> bool:
    if part not in text:
        return False
    if len(part) < _SHORT:
        return re.search(rf"(?m)(?:^|: ?|[\"']){re.escape(part)}(?=[\"',.]|$)", text) is not None
    at = text.find(part)
    while at >= 0:
        end = at + len(part)
        if not (at and text[at - 1].isalnum() and part[0].isalnum()) and not (end < len(text) and text[end].isalnum() and part[-1].isalnum()):
            return True
        at = text.find(part, at + 1)
    return False
