"""Rollouts as what a policy gradient is made of: one row an LM call, with the tokens that were sampled. Scores and trains nothing."""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from assay.models import LINES
from assay.traces import Rollout, Transition
from assay.traces.asked import asked_schema
from assay.traces.chaining import whole_requests
from assay.traces.credit import rewards_of
from assay.traces.dialects import chat_messages, chat_tools

__all__ = ["Row", "Tally", "Trajectory", "spells", "stored_transition", "trained_tokens", "trajectory_of"]

_ODD = re.compile(r"[^\x21-\x7e]+")
_HALF = "\ufffd"  # what a part of a letter decodes to
_GRAMMARS_CHOICE = math.log(1e-4)  # a token under a grammar that the model itself gave less was not its own choice


@dataclass(kw_only=True)
class Row:
    """One LM call as tokens. `logprobs` are of the behaviour policy (None: not known at this temperature); `trained` is False for
    tokens that a grammar forced."""

    turn: int
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float] | None = None
    trained: list[bool] = field(default_factory=list)
    advantage: float = 0.0
    rollout: str = ""


@dataclass
class Tally:
    """What a source of rows has done. `left_out` counts rollouts and calls that were not trained on, by why."""

    rollouts: int = 0
    calls: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    samples: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "rollouts": self.rollouts,
            "calls": self.calls,
            "seconds": dict(self.seconds),
            "left_out": dict(self.left_out),
            "samples": self.samples,
        }

    def take(self, told: Mapping[str, Any]) -> None:
        """Goes on from what `to_dict` told."""
        self.rollouts, self.calls, self.samples = told["rollouts"], told["calls"], told["samples"]
        self.seconds, self.left_out = dict(told["seconds"]), Counter(told["left_out"])

    def spend(self, what: str, seconds: float) -> None:
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds


@dataclass(kw_only=True)
class Trajectory:
    """A rollout for credit assignment: `rewards[turn]` and `features[turn]` of all its calls, rows of those that can be trained on."""

    group: str
    rollout: str
    rewards: list[float]
    features: list[dict[str, float]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def without_rows(self) -> "Trajectory":
        return Trajectory(group=self.group, rollout=self.rollout, rewards=self.rewards, features=self.features)


def trajectory_of(
    rollout: Rollout,
    tokenizer: Any,
    *,
    ours: Callable[[Transition], bool] = lambda _: True,
    max_length: int,
    behaviour: bool,
    step_weight: float = 1.0,
    outcome_weight: float = 1.0,
    left: Counter[str] | None = None,
) -> Trajectory:
    """A scored rollout's rewards, features and rows.

    Args:
        tokenizer: of transformers; its prompts must be as long as the engine said they were.
        ours: which calls the policy made; others (of another model) earn rewards, and are not trained on.
        max_length: tokens of prompt and completion; longer calls are left out.
        behaviour: whether the stored log-probabilities are those at the temperature that is trained at.
        left: counts calls that are left out, by why.
    Raises:
        Unscored: the rollout has no score.
    """
    left = Counter() if left is None else left
    rewards = rewards_of(rollout, step_weight=step_weight, outcome_weight=outcome_weight)
    found = Trajectory(group=rollout.group_id, rollout=rollout.id, rewards=rewards, features=list(_features(rollout)))
    requests = whole_requests([(one.request, (one.response or {}).get("body") or {}) for one in rollout.transitions])
    for transition, request in zip(rollout.transitions, requests, strict=True):
        if not ours(transition):
            left["calls of another model"] += 1
        elif request is None:
            left["calls that continue a conversation that is not on record"] += 1
        elif isinstance(row := _row(replace(transition, request=request), tokenizer, max_length, behaviour), Row):
            found.rows.append(row)
        else:
            left[row] += 1
    return found


def _row(transition: Transition, tokenizer: Any, max_length: int, behaviour: bool) -> Row | str:
    """The call's row, or why it has none."""
    if transition.error is not None:
        return "calls that failed"
    if transition.cached:
        return "calls answered from a cache"
    if not transition.token_ids or transition.completion_tokens not in (None, len(transition.token_ids)):
        return "calls whose engine does not tell all token ids"
    prompt = _prompt_ids(transition.request, tokenizer)
    if transition.prompt_tokens is not None and len(prompt) != transition.prompt_tokens:
        return "calls whose prompt the engine tokenised in another way"
    if len(prompt) + len(transition.token_ids) > max_length:
        return f"calls of more than {max_length} tokens"
    ids = list(transition.token_ids)
    logprobs = list(transition.logprobs) if behaviour and transition.logprobs else None
    if logprobs is not None and not all(map(math.isfinite, logprobs)):
        return "calls with a log-probability that is no finite number"
    trained = trained_tokens(transition, _pieces(tokenizer, ids)) if transition.constrained else [True] * len(ids)
    return Row(turn=transition.t, prompt_ids=prompt, completion_ids=ids, logprobs=logprobs, trained=trained)


def _pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text that each token adds; of a letter that several make up, the last one has it."""
    alone = [tokenizer.decode([token]) for token in ids]
    if not any(_HALF in piece for piece in alone):
        return alone
    whole = ["", *(tokenizer.decode(ids[:end]).rstrip(_HALF) for end in range(1, len(ids) + 1))]
    return [text[len(before) :] for before, text in itertools.pairwise(whole)]


def _prompt_ids(request: Mapping[str, Any], tokenizer: Any) -> list[int]:
    tools = chat_tools(request) or None
    return list(tokenizer.apply_chat_template(chat_messages(request), tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False))


def _features(rollout: Rollout) -> Iterator[dict[str, float]]:
    """What a value is estimated from before each call: where the rollout stands, in numbers."""
    tools = errors = spent = 0
    for transition in rollout.transitions:
        yield {
            "turn": float(transition.t), "prompt_tokens": float(transition.prompt_tokens or 0), "spent": float(spent), "tools": float(tools),
            "errors": float(errors), "answered": float(tools > errors), f"type:{rollout.task_type}": 1.0,
        }  # fmt: skip
        tools += len(transition.tools)
        errors += sum(tool.error is not None for tool in transition.tools)
        spent += transition.completion_tokens or 0


def trained_tokens(transition: Transition, pieces: Sequence[str]) -> list[bool]:
    """Which tokens of a constrained call were the model's to choose: those of the schema's values, not its names, marks and braces, nor what
    alone was left of the words that it offers, nor a token that the model itself held for impossible.

    Args:
        pieces: the text of each token. Where they do not add up to the output, all count as chosen.
    """
    text = "".join(pieces)
    schema = asked_schema(transition.request) or {}
    if not spells(text, transition.output):
        return [True] * len(pieces)
    lines = bool(schema.get(LINES))
    spans = list(_line_values(text, schema.get("properties", {})) if lines else _json_values(text, _words(schema)))
    chosen, at = list[bool](), 0
    for piece in pieces:
        end = at + len(piece)
        inside = any(
            start < end and at < stop and not _forced(text[start : min(end, stop)], text[start : max(at, start)], words)
            if piece else start <= at < stop
            for start, stop, words in spans
        )  # fmt: skip
        chosen.append(inside or (lines and not piece))
        at = end
    odds = transition.logprobs or [0.0] * len(pieces)
    return [mine and odd >= _GRAMMARS_CHOICE for mine, odd in zip(chosen, odds, strict=True)]


def spells(text: str, output: str) -> bool:
    """Whether the text of tokens is an output with what stands around it, by letters of ASCII: engines and tokenizers write bytes that are no
    letters in ways of their own."""
    plain, wanted = (_ODD.sub("", part) for part in (text, output))
    return wanted in plain


_Span = tuple[int, int, Sequence[str]]  # where a value stands, and the words it must be one of (none: it is free)


def _forced(now: str, before: str, words: Sequence[str]) -> bool:
    """Whether a value that read `before` could only go on to read `now`: all words that were left begin so."""
    left = [word for word in words if word.startswith(before)]
    return bool(left) and all(word.startswith(now) for word in left)


def _offered(schema: Mapping[str, Any]) -> list[Any]:
    """The values that a schema offers; none where it is free."""
    if "enum" in schema or "const" in schema:
        return list(schema.get("enum", [schema.get("const")]))
    return [True, False] if schema.get("type") == "boolean" else []


def _line_values(text: str, fields: Mapping[str, Any]) -> Iterator[_Span]:
    """Where the values stand in `name: value` lines. The new line that ends a free value is the model's choice, as is that after the last
    one, which may be left out."""
    marks = list(re.finditer(rf"^({'|'.join(map(re.escape, fields))}): ?", text, re.MULTILINE)) if fields else []
    for mark, following in zip(marks, [*marks[1:], None], strict=False):
        words = [str(word).lower() if isinstance(word, bool) else str(word) for word in _offered(fields[mark[1]])]
        yield mark.end(), following.start() if following else len(text), [f"{word}\n" for word in words] if following else words


_PART = re.compile(r'("(?:[^"\\]|\\.)*"?)(\s*:)?|(-?\d[\d.eE+-]*|true|false|null)')


def _json_values(text: str, words: Mapping[str, Sequence[str]]) -> Iterator[_Span]:
    """Where the values stand in JSON: a string's text with the quote that ends it, a number, a word."""
    name = ""
    for part in _PART.finditer(text):
        if part[3]:
            yield *part.span(3), words.get(name, ())
        elif part[2]:
            name = part[1].strip('"')
        else:
            yield part.start(1) + 1, part.end(1), [word[1:] for word in words.get(name, ()) if word.startswith('"')]


def _words(schema: Any) -> dict[str, list[str]]:
    """What a JSON schema offers, as JSON, by the property's name; nothing where several properties of a name differ."""
    found: dict[str, list[str]] = {}
    parts = [schema]
    while parts:
        part = parts.pop()
        for name, asked in part.get("properties", {}).items() if isinstance(part, dict) else ():
            offered = [json.dumps(value) for value in _offered(asked)] if isinstance(asked, dict) else []
            found[name] = offered if found.setdefault(name, offered) == offered else []
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else []
    return found


def stored_transition(row: Mapping[str, Any]) -> Transition:
    """A line of a transitions export as the transition it was."""
    told = {name: json.loads(row[name]) if isinstance(row[name], str) else row[name] for name in ("input", "token_ids", "logprobs", "adapters")}
    return Transition(
        t=row["t"], model=row["model"], weights=row["weights"], adapters=tuple(told["adapters"] or ()), request=told["input"], output=row["output"],
        constrained=bool(row["constrained"]), cached=bool(row["cached"]), prompt_tokens=row["prompt_tokens"],
        completion_tokens=row["completion_tokens"], token_ids=tuple(told["token_ids"]) if told["token_ids"] else None,
        logprobs=tuple(told["logprobs"]) if told["logprobs"] else None,
    )  # fmt: skip
