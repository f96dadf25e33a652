"""Converts rollouts to training rows: one row per LM call, with its sampled tokens. Does not score or train."""

import itertools
import json
import math
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from assay.optimizers.finetuning.settings import PolicySettings
from assay.support.sections import LINES
from assay.traces import Rollout, Transition
from assay.traces.credit import AgentBaselines, Baseline, differs_by_turn, fitted_values, gae, returns, rewards_of
from assay.traces.messages.chaining import requests_of
from assay.traces.messages.dialects import chat_messages, chat_tools
from assay.traces.messages.final_answer import output_schema

_ODD = re.compile(r"[^\x21-\x7e]+")
_HALF = "\ufffd"  # a token that is only part of a character decodes to this
_GRAMMARS_CHOICE = math.log(1e-4)  # below this log-probability a token was forced by the grammar


@dataclass(kw_only=True)
class Row:
    """One LM call as tokens.

    `logprobs` are those of the behaviour policy (None: unknown at this temperature). `trained` is False for tokens that
    a grammar forced.
    """

    turn: int
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float] | None = None
    trained: list[bool] = field(default_factory=list)
    advantage: float = 0.0
    rollout: str = ""


@dataclass(kw_only=True)
class Trajectory:
    """A rollout for credit assignment.

    `rewards[turn]` and `features[turn]` cover all calls; `rows` has only the calls that can be trained on.
    """

    group: str
    rollout: str
    rewards: list[float]
    features: list[dict[str, float]] = field(default_factory=list)
    agents: list[str] = field(default_factory=list)  # name of the agent of each call; empty: one agent
    rows: list[Row] = field(default_factory=list)

    def without_rows(self) -> "Trajectory":
        return replace(self, rows=[])


def trajectory_of(
    rollout: Rollout,
    tokenizer: Any,
    *,
    is_policy: Callable[[Transition], bool] = lambda _: True,
    max_length: int,
    behaviour: bool,
    step_weight: float = 1.0,
    outcome_weight: float = 1.0,
    left_out: Counter[str] | None = None,
) -> Trajectory:
    """Rewards, features and rows of a scored rollout.

    Args:
        tokenizer: of transformers; its prompts must have the lengths that the engine recorded.
        is_policy: whether the policy made a call; others (of another model) get rewards but are not trained on.
        max_length: tokens of prompt and completion; longer calls are left out.
        behaviour: whether the stored log-probabilities are those at the training temperature.
        left_out: counts calls that are left out, by reason.
    Raises:
        Unscored: the rollout has no score.
    """
    left_out = Counter() if left_out is None else left_out
    rewards = rewards_of(rollout, step_weight=step_weight, outcome_weight=outcome_weight)
    trajectory = Trajectory(
        group=rollout.group_id,
        rollout=rollout.id,
        rewards=rewards,
        features=list(_features(rollout)),
        agents=[transition.agent for transition in rollout.transitions],
    )
    for transition, request in zip(rollout.transitions, requests_of(rollout.transitions), strict=True):
        if not is_policy(transition):
            left_out["calls of another model"] += 1
        elif request is None:
            left_out["calls that continue a conversation that is not on record"] += 1
        elif isinstance(row := _row(replace(transition, request=request), tokenizer, max_length, behaviour), Row):
            trajectory.rows.append(row)
        else:
            left_out[row] += 1
    return trajectory


def _row(transition: Transition, tokenizer: Any, max_length: int, behaviour: bool) -> Row | str:
    """The row of the call, or the reason why it has none."""
    if transition.error is not None:
        return "calls that failed"
    if transition.cached:
        return "calls answered from a cache"
    if not transition.token_ids or transition.completion_tokens not in (None, len(transition.token_ids)):
        return "calls whose engine does not report all token ids"
    prompt = _prompt_ids(transition.request, tokenizer)
    if transition.prompt_tokens is not None and len(prompt) != transition.prompt_tokens:
        return "calls whose prompt the engine tokenised in another way"
    if len(prompt) + len(transition.token_ids) > max_length:
        return f"calls of more than {max_length} tokens"
    ids = list(transition.token_ids)
    logprobs = list(transition.logprobs) if behaviour and transition.logprobs else None
    if logprobs is not None and not all(map(math.isfinite, logprobs)):
        return "calls with a log-probability that is not a finite number"
    trained = trained_tokens(transition, _pieces(tokenizer, ids)) if transition.constrained else [True] * len(ids)
    return Row(turn=transition.t, prompt_ids=prompt, completion_ids=ids, logprobs=logprobs, trained=trained)


def _pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text that each token adds. A character made of several tokens belongs to the last of them."""
    alone = [tokenizer.decode([token]) for token in ids]
    if not any(_HALF in piece for piece in alone):
        return alone
    prefixes = ["", *(tokenizer.decode(ids[:end]).rstrip(_HALF) for end in range(1, len(ids) + 1))]
    return [text[len(before) :] for before, text in itertools.pairwise(prefixes)]


def _prompt_ids(request: Mapping[str, Any], tokenizer: Any) -> list[int]:
    tools = chat_tools(request) or None
    return list(
        tokenizer.apply_chat_template(
            chat_messages(request), tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    )


def _features(rollout: Rollout) -> Iterator[dict[str, float]]:
    """Features of the state before each call, for the value function."""
    tools = errors = spent = 0
    for transition in rollout.transitions:
        yield {
            "turn": float(transition.t),
            "prompt_tokens": float(transition.prompt_tokens or 0),
            "spent": float(spent),
            "tools": float(tools),
            "errors": float(errors),
            "answered": float(tools > errors),
            f"type:{rollout.task_type}": 1.0,
        }
        tools += len(transition.tools)
        errors += sum(tool.error is not None for tool in transition.tools)
        spent += transition.completion_tokens or 0


def trained_tokens(transition: Transition, pieces: Sequence[str]) -> list[bool]:
    """Which tokens of a constrained call the model chose itself.

    These are the tokens of the schema's values. Not chosen are names, punctuation and braces, tokens where only one of
    the offered words was left, and tokens that the model gave a probability below 1e-4.

    Args:
        pieces: the text of each token. If they do not add up to the output, all tokens count as chosen.
    Returns:
        One flag per token.
    """
    text = "".join(pieces)
    schema = output_schema(transition.request) or {}
    if not contains_output(text, transition.output):
        return [True] * len(pieces)
    lines = bool(schema.get(LINES))
    spans = list(
        _line_values(text, schema.get("properties", {})) if lines else _json_values(text, _allowed_words(schema))
    )
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
    return [is_chosen and odd >= _GRAMMARS_CHOICE for is_chosen, odd in zip(chosen, odds, strict=True)]


def contains_output(text: str, output: str) -> bool:
    """Whether the text of the tokens contains the output.

    Only visible ASCII characters are compared, since engines and tokenizers render other bytes differently.
    """
    plain, expected = (_ODD.sub("", part) for part in (text, output))
    return expected in plain


_Span = tuple[int, int, Sequence[str]]  # start and end of a value, and the words it must be one of (none: free text)


def _forced(value: str, before: str, words: Sequence[str]) -> bool:
    """Whether a value that began with `before` had to continue as `value`: all remaining words begin with it."""
    remaining = [word for word in words if word.startswith(before)]
    return bool(remaining) and all(word.startswith(value) for word in remaining)


def _offered(schema: Mapping[str, Any]) -> list[Any]:
    """The values that a schema allows; empty for a free value."""
    if "enum" in schema or "const" in schema:
        return list(schema.get("enum", [schema.get("const")]))
    return [True, False] if schema.get("type") == "boolean" else []


def _line_values(text: str, fields: Mapping[str, Any]) -> Iterator[_Span]:
    """Spans of the values in `name: value` lines.

    The model chooses the newline that ends a free value, and the one after the last value, which may be missing.
    """
    marks = list(re.finditer(rf"^({'|'.join(map(re.escape, fields))}): ?", text, re.MULTILINE)) if fields else []
    for mark, following in zip(marks, [*marks[1:], None], strict=False):
        words = [str(word).lower() if isinstance(word, bool) else str(word) for word in _offered(fields[mark[1]])]
        yield (
            mark.end(),
            following.start() if following else len(text),
            [f"{word}\n" for word in words] if following else words,
        )


_PART = re.compile(r'("(?:[^"\\]|\\.)*"?)(\s*:)?|(-?\d[\d.eE+-]*|true|false|null)')


def _json_values(text: str, words: Mapping[str, Sequence[str]]) -> Iterator[_Span]:
    """Spans of the values in JSON: the text of a string with its closing quote, a number, or a word."""
    name = ""
    for part in _PART.finditer(text):
        if part[3]:
            yield *part.span(3), words.get(name, ())
        elif part[2]:
            name = part[1].strip('"')
        else:
            yield part.start(1) + 1, part.end(1), [word[1:] for word in words.get(name, ()) if word.startswith('"')]


def _allowed_words(schema: Any) -> dict[str, list[str]]:
    """Values that a JSON schema allows, as JSON, by property name; empty if properties of the same name differ."""
    allowed: dict[str, list[str]] = {}
    parts = [schema]
    while parts:
        part = parts.pop()
        for name, property_schema in part.get("properties", {}).items() if isinstance(part, dict) else ():
            offered = (
                [json.dumps(value) for value in _offered(property_schema)] if isinstance(property_schema, dict) else []
            )
            allowed[name] = offered if allowed.setdefault(name, offered) == offered else []
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else []
    return allowed


# -- Advantages of LM calls from the rewards of a batch of rollouts, by algorithm. Does not handle tokens.
#
# `reinforce++` has one advantage per token: here each call gets its return, and the trainer normalises the returns over
# the tokens of the batch.


_RIDGES = (1.0, 30.0, 300.0, 3000.0)  # in rows; the first one is used where there are no hidden states
_HIDDEN = "hidden_0"  # feature name of the first dimension of the hidden state


@dataclass
class Credit:
    """Advantages of a batch.

    Attributes:
        advantages: `advantages[rollout][turn]`; rollouts of zero-variance groups are missing.
        groups: number of groups in the batch.
        zero_variance: number of groups whose rollouts all earned the same.
        explained: share of the variance of the returns that the value function of `ppo` explains, at most 1; NaN for
            other algorithms.
    """

    advantages: dict[str, list[float]] = field(default_factory=dict)
    groups: int = 0
    zero_variance: int = 0
    explained: float = math.nan

    def apply_to(self, batch: Sequence[Trajectory], left_out: Counter[str]) -> tuple[list[Row], list[Row]]:
        """Sets the advantages of the batch's rows.

        Args:
            left_out: counts the rollouts of zero-variance groups.
        Returns:
            Rows with an advantage, and rows of zero-variance groups.
        """
        rows, zero_variance = list[Row](), list[Row]()
        for trajectory in batch:
            turns = self.advantages.get(trajectory.rollout)
            if turns is None:
                left_out["rollouts of zero-variance groups"] += 1
                zero_variance += trajectory.rows
                continue
            for row in trajectory.rows:
                row.advantage, row.rollout = turns[row.turn], trajectory.rollout
            rows += trajectory.rows
        return rows, zero_variance


class ValueMemory:
    """Value function of `ppo`, fitted on the rollouts of the last batches: one batch is too small.

    The value is a ridge regression on features of the state (turn, tokens, tools, errors, task type; with a value head
    also the model's hidden state, see `add_hidden`). It is fitted anew at every step. The value of a group is predicted
    from other groups only, so it does not bias the gradient. The ridge is the one of `_RIDGES` that predicts the held
    out groups best.
    """

    def __init__(self) -> None:
        self.batches: deque[list[Trajectory]] = deque(maxlen=8)

    def values(self, batch: Sequence[Trajectory], discount: float) -> list[list[float]]:
        """Values of the batch's calls, `[rollout][turn]`. Adds the batch to the memory."""
        earlier = [trajectory for past in self.batches for trajectory in past]
        names = [f"{index}:{trajectory.group}" for index, past in enumerate(self.batches) for trajectory in past]
        names += [trajectory.group for trajectory in batch]
        every = [*earlier, *batch]
        credited = [returns(trajectory.rewards, discount=discount) for trajectory in every]
        self.batches.append([trajectory.without_rows() for trajectory in batch])
        features, target = (
            [trajectory.features for trajectory in every],
            [value for turns in credited for value in turns],
        )
        ridges = (
            _RIDGES if any(_HIDDEN in turn for trajectory in every for turn in trajectory.features) else _RIDGES[:1]
        )
        fits = [fitted_values(features, credited, names, ridge=ridge) for ridge in ridges]
        return min(fits, key=lambda values: _squared_error(values, target))[len(earlier) :]

    def to_json(self) -> list[list[dict[str, Any]]]:
        return [[asdict(trajectory) for trajectory in batch] for batch in self.batches]  # they have no rows

    def load(self, batches: Sequence[Sequence[dict[str, Any]]]) -> None:
        """Adds the batches that `to_json` returned."""
        self.batches.extend([Trajectory(**fields) for fields in batch] for batch in batches)


def _squared_error(values: Sequence[Sequence[float]], target: Sequence[float]) -> float:
    return math.fsum(
        (value - expected) ** 2 for value, expected in zip([v for turns in values for v in turns], target, strict=True)
    )


def add_hidden(batch: Sequence[Trajectory], hidden_of: Callable[[Sequence[Row]], list[list[float]]]) -> None:
    """Adds the model's last hidden state at the end of each call's prompt to the features of its turn (value head).

    A call without a row gets the mean over the batch.

    Args:
        hidden_of: rows -> `[row][dimension]`.
    """
    rows = [(trajectory, row) for trajectory in batch for row in trajectory.rows]
    if not rows:
        return
    states = np.array(hidden_of([row for _, row in rows]))
    by_turn = {(id(trajectory), row.turn): state for (trajectory, row), state in zip(rows, states, strict=True)}
    mean = states.mean(axis=0)
    for trajectory in batch:
        for turn, features in enumerate(trajectory.features):
            state = by_turn.get((id(trajectory), turn), mean)
            features.update({f"{_HIDDEN[:-1]}{i}": float(value) for i, value in enumerate(state)})


def assign_credit(batch: Sequence[Trajectory], config: PolicySettings, memory: ValueMemory) -> Credit:
    """Advantages of all calls of a batch.

    Sources, by algorithm:
        grpo: return minus the group's mean at the same turn, divided by the standard deviation of the group's episode
            returns (arXiv 2402.03300).
        rloo: return minus the mean of the group's other rollouts, not scaled (arXiv 2402.14740).
        reinforce++: the return; the trainer normalises it over all tokens of the batch (arXiv 2501.03262).
        reinforce++-turn (our variant): return minus the batch's mean at the same turn, divided by the standard
            deviation of the batch's episode returns.
        ppo: generalised advantage estimation over the turns (arXiv 1506.02438), centred and scaled over the batch.
    """
    credited = {
        trajectory.rollout: returns(trajectory.rewards, scheme=config.returns, discount=config.discount)
        for trajectory in batch
    }
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in batch:
        groups[trajectory.group].append(trajectory)
    credit = Credit(groups=len(groups))
    if config.algorithm == "reinforce++":
        differs = len({tuple(turns) for turns in credited.values()}) > 1
        # the KL penalty differs by token, so it is learned from even where all returns are equal
        if differs or config.kl_in_reward:
            credit.advantages = credited
        else:
            credit.zero_variance = len(groups)
    elif config.algorithm == "ppo":
        _generalised(batch, credited, config, memory, credit)
    else:
        _against_baselines(batch, groups, credited, config, credit)
    return credit


def _generalised(
    batch: Sequence[Trajectory],
    credited: dict[str, list[float]],
    config: PolicySettings,
    memory: ValueMemory,
    credit: Credit,
) -> None:
    """Fills in the advantages of `ppo`."""
    values = memory.values(batch, config.discount)
    # equal rewards, unequal values: the differences are errors of the value function, not a signal
    if len({tuple(trajectory.rewards) for trajectory in batch}) < 2:
        credit.zero_variance = credit.groups
        return
    target = np.array([value for trajectory in batch for value in credited[trajectory.rollout]])
    residual = target - np.array([value for turns in values for value in turns])
    credit.explained = 1 - float(residual.var() / target.var()) if target.var() > 0 else math.nan
    raw = {
        trajectory.rollout: gae(trajectory.rewards, turns, discount=config.discount, decay=config.gae_lambda)
        for trajectory, turns in zip(batch, values, strict=True)
    }
    every = np.array([value for rollout in raw.values() for value in rollout])
    mean, width = (float(every.mean()), float(every.std()) + 1e-4) if len(every) else (0.0, 1.0)
    credit.advantages = {name: [(value - mean) / width for value in turns] for name, turns in raw.items()}


def _against_baselines(
    batch: Sequence[Trajectory],
    groups: dict[str, list[Trajectory]],
    credited: dict[str, list[float]],
    config: PolicySettings,
    credit: Credit,
) -> None:
    """Fills in the advantages of `grpo`, `rloo` and `reinforce++-turn`: returns minus a mean."""
    over_batch, rloo = config.algorithm == "reinforce++-turn", config.algorithm == "rloo"
    every_turn = differs_by_turn(config.returns, config.discount)
    for members in [list(batch)] if over_batch else groups.values():
        baseline = AgentBaselines(
            lambda: Baseline(leave_one_out=rloo, scale=config.scale and not rloo, every_turn=every_turn)
        )
        for member in members:
            baseline.add(credited[member.rollout], member.agents)
        if not baseline.has_variance:
            credit.zero_variance += len(groups) if over_batch else 1
            continue
        credit.advantages |= {
            member.rollout: baseline.advantages(credited[member.rollout], member.agents) for member in members
        }
