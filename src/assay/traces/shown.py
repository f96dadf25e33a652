"""Which tasks a prompt shows beside its own: those that its demonstrations, or its instructions, came from.

Demonstrations are matched by content, because DSPy's optimizers rebuild them: by the text of a task's inputs, and by the prompt of an
earlier call that was made for a task, which is what the demonstration of a later step of a program looks like.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

__all__ = ["Carried", "OwnTask", "TaskTexts", "message_texts"]

_WORD = re.compile(r"\w+")
_SHORT = 12  # characters under which a text must stand by itself in its line
_CACHED = 20_000  # messages
_REQUEST = "\n\nRespond with"  # where DSPy's formats end the fields of the task at hand, and a demonstration does not have


class TaskTexts:
    """Tasks by the text of their inputs, found by the rarest of its words: the time to search a text does not grow with the number of tasks."""

    def __init__(self) -> None:
        self._by_word: dict[str, list[tuple[str, tuple[str, ...]]]] = defaultdict(list)
        self._in_tasks: Counter[str] = Counter()  # tasks that a word is in
        self._known: set[str] = set()
        self._asked: dict[int, str] = {}
        self._read: dict[int, tuple[frozenset[str], int | None]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, content: str, inputs: Mapping[str, Any]) -> None:
        """Makes a task known by its content hash."""
        if content in self._known:
            return
        parts = tuple(dict.fromkeys(text for value in inputs.values() if (text := _plain(_text(value)))))
        words = dict.fromkeys(word for part in parts for word in _WORD.findall(part))
        if not words:
            return
        self._known.add(content)
        self._in_tasks.update(words.keys())
        rarest = min(words, key=lambda word: (self._in_tasks[word], -len(word)))  # tasks of one form differ in a word or two
        self._by_word[rarest].append((content, parts))
        self._read.clear()

    def asked(self, content: str, messages: Sequence[str]) -> None:
        """Remembers the prompt of a call that was made for a task."""
        if messages and (key := self._reading(messages[-1])[1]) is not None:
            self._asked[key] = content

    def shown(self, messages: Sequence[str], *, own: str = "") -> tuple[str, ...]:
        """Content hashes of the tasks that the messages show, without the one they are about; sorted."""
        found: set[str] = set()
        last = len(messages) - 1
        for place, text in enumerate(messages):
            within, key = self._reading(text)
            found |= within
            if place < last and key in self._asked:
                found.add(self._asked[key])
        found.discard(own)
        return tuple(sorted(found))

    def within(self, text: str) -> frozenset[str]:
        """Content hashes of the tasks whose inputs stand in a text, all of them."""
        return self._reading(text)[0]

    def _reading(self, text: str) -> tuple[frozenset[str], int | None]:
        """What `within` gives, and by which a prompt like this text is known; None where it has no fields."""
        key = hash(text)
        known = self._read.get(key)
        if known is None:
            fields, request, rest = text.partition(_REQUEST)
            fields, (rest, words) = _plain(fields), _plain_words(request + rest)
            plain = f"{fields}\n{rest}" if fields and rest else fields or rest
            candidates = [one for word in words.union(_WORD.findall(fields)) if word in self._by_word for one in self._by_word[word]]
            within = frozenset(content for content, parts in candidates if all(_stands_in(part, plain) for part in parts))
            if len(self._read) >= _CACHED:
                self._read.clear()
            known = self._read[key] = (within, hash(fields) if fields else None)
        return known


class Carried:
    """Tasks that a program's own demonstrations show, found in prompts by the demonstrations' text.

    A demonstration counts as shown where a line of it is in the prompt, or where it has no line by which it could be told. It then
    shows the tasks that it is known to come from, or, where that is not known, all that no other demonstration comes from.

    Args:
        tasks: content hashes of all tasks that may be shown.
        demos: by demonstration: its lines, and the tasks that it is known to show. Without any, every prompt may show all tasks.
    """

    def __init__(self, tasks: Iterable[str] = (), demos: Sequence[tuple[Sequence[str], Sequence[str]]] | None = None) -> None:
        self.tasks = frozenset(tasks)
        known = {task for _, shown in demos or () for task in shown}
        self._demos = None if demos is None else [(_told_by(lines), frozenset(shown) or self.tasks - known) for lines, shown in demos]

    def shown(self, messages: Sequence[str]) -> frozenset[str]:
        """Content hashes of the tasks that messages show."""
        if self._demos is None:
            return self.tasks
        text = _plain("\n".join(messages))
        return frozenset(task for lines, tasks in self._demos if not lines or any(line in text for line in lines) for task in tasks)


def _told_by(lines: Iterable[str]) -> list[str]:
    """Lines that are long enough to tell a demonstration, and the same in JSON as in text."""
    plain = (" ".join(line.split()) for line in lines)
    return [line for line in plain if len(line) >= _SHORT and line.isascii() and not {'"', "\\"} & set(line)]


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
    return "\n".join([line for raw in text.splitlines() if (line := " ".join(raw.split()))])


def _fields(text: str) -> str:
    return _plain(text.partition(_REQUEST)[0])


@lru_cache(256)
def _plain_words(text: str) -> tuple[str, frozenset[str]]:
    """A text in its plain form, with its words: how prompts end is the same for every task."""
    plain = _plain(text)
    return plain, frozenset(_WORD.findall(plain))


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
