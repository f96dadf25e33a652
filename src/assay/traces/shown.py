"""Finds the tasks that a prompt contains besides its own, in demonstrations or instructions.

Demonstrations are matched by content, because DSPy's optimizers rebuild them: by the text of a task's inputs, and by
the prompt of an earlier call for a task, because demonstrations of later program steps look like it.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from assay.support.sections import ASKS, fields_in
from assay.support.values import value_text

_WORD = re.compile(r"\w+")
_SHARED = 8  # maximum number of tasks with a common input that still identifies them
_SHORT = 12  # texts with fewer characters match only if they are delimited in their line
_CACHED = 20_000  # messages


@dataclass(eq=False)
class _Part:
    """Text of one input. It is in a prompt if all texts of one of its renderings are."""

    renderings: tuple[tuple[str, ...], ...]
    holders: list[str] = field(default_factory=list)  # tasks that have it, up to _SHARED + 1
    anchored: list["_Wording"] = field(default_factory=list)  # of which it is the rarest part

    @property
    def identifies(self) -> bool:
        """Whether it identifies its tasks without their other inputs."""
        return len(self.holders) <= _SHARED and all(sum(map(len, texts)) >= _SHORT for texts in self.renderings)

    def is_in(self, text: str) -> bool:
        for texts in self.renderings:  # loops instead of generators: this runs for the prompt of every call
            for part in texts:
                if not occurs_in(part, text):
                    break
            else:
                return True
        return False


@dataclass(frozen=True, eq=False)
class _Wording:
    """The inputs of a task as one row spells them."""

    task: str
    parts: frozenset[_Part]


@dataclass(frozen=True)
class _Reading:
    """Tasks found in a text.

    Args:
        complete: Tasks all of whose inputs are in the text.
        identifying: Parts in the text that identify tasks by themselves.
        prompt: Hash of the text's fields, to find a call with the same prompt; None without fields.
    """

    complete: frozenset[str]
    identifying: tuple[_Part, ...]
    prompt: int | None

    def tasks(self, own_renderings: Collection[Any]) -> frozenset[str]:
        """All tasks in the text.

        Args:
            own_renderings: Renderings of the inputs of the text's own task. They identify no other task.
        """
        identifying = [part.holders for part in self.identifying if part.renderings not in own_renderings]
        if not identifying:
            return self.complete
        contents = self.complete.union(holders[0] for holders in identifying if len(holders) == 1)
        return contents.union(*(holders for holders in identifying if contents.isdisjoint(holders)))


class TaskTexts:
    """Index of tasks by the text of their inputs.

    Tasks are looked up by the rarest word of an input, so that search time does not grow with the number of tasks. A
    program may use only some columns of its data. A task is therefore found by all of its inputs, or by one that is
    long enough and shared by few tasks. If several tasks share it and cannot be distinguished, all of them count.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[tuple[str, ...], ...], _Part] = {}
        self._by_word: dict[str, list[_Part]] = defaultdict(list)
        self._in_parts: Counter[str] = Counter()  # number of parts that contain a word
        self._known: dict[str, list[_Wording]] = {}
        self._task_by_prompt: dict[int, str] = {}
        self._read: dict[int, _Reading] = {}

    def __len__(self) -> int:
        return len(self._known)

    def add(self, key: str, inputs: Mapping[str, Any]) -> None:
        """Add a task.

        Args:
            key: Key of the task.
            inputs: Its inputs, in one of their spellings.
        """
        parts = [
            self._part(renderings)
            for renderings in dict.fromkeys(_renderings(value) for value in inputs.values())
            if renderings
        ]
        wording = _Wording(key, frozenset(parts))
        if not parts or any(wording.parts == other.parts for other in self._known.get(key, ())):
            return
        self._known.setdefault(key, []).append(wording)
        for part in parts:
            if len(part.holders) <= _SHARED and key not in part.holders:
                part.holders.append(key)
        min(parts, key=lambda part: (len(part.holders), -len(part.renderings[0][0]))).anchored.append(wording)
        self._read.clear()

    def _part(self, renderings: tuple[tuple[str, ...], ...]) -> _Part:
        part = self._parts.get(renderings)
        if part is None:
            part = self._parts[renderings] = _Part(renderings)
            words = [dict.fromkeys(word for text in texts for word in _WORD.findall(text)) for texts in renderings]
            self._in_parts.update({word for words_of_form in words for word in words_of_form})
            for rarest in {
                min(words_of_form, key=lambda word: (self._in_parts[word], -len(word))) for words_of_form in words
            }:
                self._by_word[rarest].append(part)
        return part

    def record_prompt(self, task: str, messages: Sequence[str]) -> None:
        """Record the prompt of a call for a task."""
        if messages and (key := self._reading(messages[-1]).prompt) is not None:
            self._task_by_prompt[key] = task

    def tasks_in(
        self, messages: Sequence[str], *, own_task: str = "", inputs: Mapping[str, Any] | None = None
    ) -> tuple[str, ...]:
        """Sorted keys of the tasks in the messages, without the call's own task.

        Args:
            own_task: Key of the call's own task. Inputs that other tasks share with it are not matched.
            inputs: Inputs of the own task, if it may not be in this index.
        """
        own_renderings = {part.renderings for wording in self._known.get(own_task, ()) for part in wording.parts}.union(
            _renderings(value) for value in (inputs or {}).values()
        )
        contents: set[str] = set()
        last = len(messages) - 1
        for place, text in enumerate(messages):
            reading = self._reading(text)
            contents |= reading.tasks(own_renderings)
            if place < last and reading.prompt in self._task_by_prompt:
                contents.add(self._task_by_prompt[reading.prompt])
        contents.discard(own_task)
        return tuple(sorted(contents))

    def within(self, text: str) -> frozenset[str]:
        """Keys of the tasks in a text."""
        return self._reading(text).tasks(frozenset())

    def _reading(self, text: str) -> "_Reading":
        key = hash(text)
        reading = self._read.get(key)
        if reading is None:
            fields, request, rest = text.partition(ASKS)
            fields, (rest, words) = _plain(fields), _plain_words(request + rest)
            plain = f"{fields}\n{rest}" if fields and rest else fields or rest
            candidates = {
                part
                for word in words.union(_WORD.findall(fields))
                if word in self._by_word
                for part in self._by_word[word]
            }
            present = {part for part in candidates if part.is_in(plain)}
            complete = frozenset(
                wording.task for part in present for wording in part.anchored if present >= wording.parts
            )
            if len(self._read) >= _CACHED:
                self._read.clear()
            reading = self._read[key] = _Reading(
                complete, tuple(part for part in present if part.identifies), hash(fields) if fields else None
            )
        return reading


class Carried:
    """Tasks of the demonstrations in a program's artifact, found in prompts by the demonstrations' text.

    A demonstration is in a prompt if one of its lines is, or if it has no line that identifies it. The prompt then
    contains the tasks of the demonstration or, if these are unknown, all tasks without a known demonstration.

    Args:
        tasks: Keys of all tasks of the demonstrations.
        demos: Lines and known tasks of each demonstration. None: every prompt may contain all tasks.
    """

    def __init__(
        self, tasks: Iterable[str] = (), demos: Sequence[tuple[Sequence[str], Sequence[str]]] | None = None
    ) -> None:
        self.tasks = frozenset(tasks)
        known = {task for _, demo_tasks in demos or () for task in demo_tasks}
        self._demos = (
            None
            if demos is None
            else [
                (_identifying_lines(lines), frozenset(demo_tasks) or self.tasks - known) for lines, demo_tasks in demos
            ]
        )

    def __deepcopy__(self, memo: object) -> "Carried":
        return self

    def tasks_in(self, messages: Sequence[str]) -> frozenset[str]:
        """Keys of the tasks in the messages."""
        if self._demos is None:
            return self.tasks
        text = _plain("\n".join(messages))
        return frozenset(
            task for lines, tasks in self._demos if not lines or any(line in text for line in lines) for task in tasks
        )


def _identifying_lines(lines: Iterable[str]) -> list[str]:
    """Lines that identify a demonstration: long enough, and the same in JSON as in text."""
    plain = (" ".join(line.split()) for line in lines)
    return [line for line in plain if len(line) >= _SHORT and line.isascii() and not {'"', "\\"} & set(line)]


class OwnTask:
    """Detects prompts that demonstrate the task of their own call. Calls of a rollout must be checked in order.

    A demonstration is an answered user message before the last one, or in DSPy's instructions. Earlier messages of the
    rollout itself are not demonstrations, also if the client rewrites the answers, as smolagents does.

    Args:
        inputs: Inputs of the task.
    """

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self._parts = [
            text
            for value in inputs.values()
            if value is not None and not isinstance(value, bool) and (text := _plain(_text(value)))
        ]
        self._word = max((word for part in self._parts for word in _WORD.findall(part)), key=len, default="")
        self._answers: dict[str, dict[str, str]] = {}  # answers of the rollout so far and their fields
        self._earlier_prompts: set[int] = set()  # hashes of its conversations so far, up to the last user message

    def possible(self, request_json: str) -> bool:
        """Fast check whether a request may demonstrate the task: it has an assistant message, or the task is in it
        twice.
        """
        return '"assistant"' in request_json or (bool(self._word) and request_json.count(self._word) > 1)

    def demonstrated(self, messages: Sequence[Mapping[str, Any]], *, instructions: bool) -> bool:
        """Whether the messages demonstrate the task.

        Args:
            instructions: Whether system messages count. DSPy does not put the task there; other clients may.
        """
        texts = _texts(messages)
        last_user = _last_user_message(messages)
        task_fields = hash(_fields(texts[last_user])) if texts else 0
        for index, (message, text) in enumerate(zip(messages[:last_user], texts, strict=False)):
            if message.get("role") == "user" and messages[index + 1].get("role") == "assistant":
                earlier = self._is_answer(texts[index + 1]) or _beginning(texts, index) in self._earlier_prompts
                if not earlier and (hash(_fields(text)) == task_fields or self._holds(text)):
                    return True
            elif (
                instructions and message.get("role") == "system" and self._holds(text) and self._holds(texts[last_user])
            ):
                return True
        return False

    def answered(self, messages: Sequence[Mapping[str, Any]], output: str) -> None:
        """Record a call of the rollout whose prompt did not demonstrate the task."""
        self._answers[_bare(output)] = _bare_fields(output)
        self._earlier_prompts.add(_beginning(_texts(messages), _last_user_message(messages)))

    def _is_answer(self, text: str) -> bool:
        """Whether a message is an answer of the rollout, or a part of its fields: DSPy takes written tool calls out."""
        if _bare(text) in self._answers:
            return True
        fields = _bare_fields(text)
        return bool(fields) and any(fields.items() <= answer.items() for answer in self._answers.values())

    def _holds(self, text: str) -> bool:
        return bool(self._word) and self._word in text and all(occurs_in(part, _plain(text)) for part in self._parts)


def _texts(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Text of each message; empty without content."""
    return [message_texts([message])[0] if message.get("content") else "" for message in messages]


def _last_user_message(messages: Sequence[Mapping[str, Any]]) -> int:
    return max((at for at, message in enumerate(messages) if message.get("role") == "user"), default=0)


def _bare(text: str) -> str:
    """An answer without what DSPy changes when it writes it into the history of a later call."""
    return "".join(text.split()).removesuffix("[[##completed##]]")


def _bare_fields(answer: str) -> dict[str, str]:
    return {name: _bare(_text(value)) for name, value in fields_in(answer).items()}


def _beginning(texts: Sequence[str], at: int) -> int:
    return hash(tuple(texts[: at + 1]))


def message_texts(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """Texts of chat messages, in order; messages without text are left out."""
    texts = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            texts.append(content)
        elif isinstance(content, list):
            texts.append("\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping)))
    return texts


def _renderings(value: Any) -> tuple[tuple[str, ...], ...]:
    """Forms of an input in a prompt: as JSON, as `str`, or for a list the text of each item.

    None, booleans and texts without words have no forms.
    """
    if value is None or isinstance(value, bool):
        return ()
    forms: list[list[str]] = [[value]] if isinstance(value, str) else [[_text(value)], [str(value)]]
    if isinstance(value, list | tuple):
        forms.append(list(_leaves(value)))
    plain = [tuple(text for text_part in texts if _WORD.search(text := _plain(text_part))) for texts in forms]
    return tuple(dict.fromkeys(texts for texts in plain if texts))


def _leaves(value: Any) -> Iterator[str]:
    for inner in value:
        if isinstance(inner, list | tuple):
            yield from _leaves(inner)
        elif inner is not None and not isinstance(inner, bool):
            yield _text(inner)


def _text(value: Any) -> str:
    return value_text(value)


def _plain(text: str) -> str:
    return "\n".join([line for raw in text.splitlines() if (line := " ".join(raw.split()))])


def _fields(text: str) -> str:
    return _plain(text.partition(ASKS)[0])


@lru_cache(256)
def _plain_words(text: str) -> tuple[str, frozenset[str]]:
    """Normalised text and its words. Cached, because the end of prompts is the same for every task."""
    plain = _plain(text)
    return plain, frozenset(_WORD.findall(plain))


def occurs_in(part: str, text: str) -> bool:
    """Whether a text contains a part as a whole, not inside of a longer word or number."""
    if part not in text:
        return False
    if len(part) < _SHORT:
        return re.search(rf"(?m)(?:^|: ?|[\"']){re.escape(part)}(?=[\"',.]|$)", text) is not None
    at = text.find(part)
    while at >= 0:
        end = at + len(part)
        if not (at and text[at - 1].isalnum() and part[0].isalnum()) and not (
            end < len(text) and text[end].isalnum() and part[-1].isalnum()
        ):
            return True
        at = text.find(part, at + 1)
    return False


def demos_in(state: Any) -> list[Any]:
    """Demonstrations anywhere in a program's state."""
    if isinstance(state, dict):
        demos = [
            demo for name in ("demos", "pool") for demo in state.get(name) or () if isinstance(state.get(name), list)
        ]
        return demos + [
            demo for name, part in state.items() if name not in ("demos", "pool") for demo in demos_in(part)
        ]
    return [demo for part in state for demo in demos_in(part)] if isinstance(state, list) else []
