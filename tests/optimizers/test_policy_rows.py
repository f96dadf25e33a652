"""The policy gradient: the rows that are trained, and tokens forced by a grammar."""

import math
from collections import Counter
from typing import Any

from assay.optimizers.finetuning.rows import trained_tokens, trajectory_of
from assay.traces import Rollout, Transition


class Letters:
    """A tokenizer of characters."""

    def apply_chat_template(self, messages: Any, **_: Any) -> list[int]:
        return [ord(c) for message in messages for c in f"{message['role']}:{message['content']}\n"]

    def decode(self, ids: list[int]) -> str:
        return "".join("" if token == 0 else chr(token) for token in ids)


def transition(output: str, *, schema: dict[str, Any] | None = None, **more: Any) -> Transition:
    request: dict[str, Any] = {
        "messages": [{"role": "user", "parts": [{"type": "text", "text": "2+2?"}]}],
        "config": {},
    }
    if schema is not None:
        request["config"]["response_format"] = {
            "type": "json_schema",
            "name": "outputs",
            "schema": schema,
        }  # as it is stored
    ids = (*map(ord, output), 0)
    defaults = {
        "t": 0,
        "model": "m",
        "request": request,
        "output": output,
        "token_ids": ids,
        "logprobs": tuple(-0.1 for _ in ids),
    }
    return Transition(**{**defaults, "constrained": schema is not None, **more})


def chosen(call: Transition) -> str:
    pieces = [Letters().decode([token]) for token in call.token_ids or ()]
    return "".join(piece if mine else "·" for piece, mine in zip(pieces, trained_tokens(call, pieces), strict=True))


def test_tokens_forced_by_a_line_grammar_are_not_trained() -> None:
    schema = {"x-assay-lines": True, "properties": {"thought": {}, "action": {}}}
    assert (
        chosen(transition("thought: add them\naction: calculator", schema=schema))
        == "·········add them\n········calculator"
    )


def test_only_the_deciding_tokens_of_grammar_choices_are_trained() -> None:
    fields = {
        "action": {"enum": ["add", "answer"]},
        "sure": {"type": "boolean"},
        "unit": {"const": "km"},
        "n": {"type": "integer"},
        "end": {"enum": ["x", "xy"]},
    }
    text = "action: answer\nsure: true\nunit: km\nn: 12\nend: x"
    schema = {"x-assay-lines": True, "properties": fields}
    assert chosen(transition(text, schema=schema)) == "·" * 9 + "n" + "·" * 11 + "t" + "·" * 16 + "12\n" + "·" * 6
    schema = {
        "properties": {
            "action": {"enum": ["add", "answer"]},
            "sure": {"type": "boolean"},
            "more": {"properties": {"end": {"enum": ["x", "xy"]}}},
        }
    }
    text = '{"action": "answer", "sure": false, "more": {"end": "xy"}}'
    assert chosen(transition(text, schema=schema)) == "·" * 13 + "n" + "·" * 15 + "f" + "·" * 24 + "y" + "·" * 4


def test_tokens_forced_by_a_json_grammar_are_not_trained() -> None:
    schema = {"properties": {"expression": {}, "n": {}}}
    assert (
        chosen(transition('{"expression": "2 + 2", "n": 12}', schema=schema))
        == '················2 + 2"·······12··'[:33]
    )


def test_a_token_of_negligible_probability_is_attributed_to_the_grammar() -> None:
    schema = {"x-assay-lines": True, "properties": {"action": {}}}
    odds = [-0.1] * 8 + [-15.0] + [-0.1] * 3
    assert chosen(transition("action: abc", schema=schema, logprobs=tuple(odds))) == "········" + "·bc"


class Bytes(Letters):
    """A tokenizer of bytes, some of which are halves of letters."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace").replace("\0", "")


def test_multi_token_letters_are_distinguished_from_forced_tokens() -> None:
    schema = {"x-assay-lines": True, "properties": {"city": {}, "sure": {}}}
    text = "city: Ål\nsure: yes"
    ids = (*text.encode(), 0)
    call = transition(text, schema=schema, token_ids=ids, logprobs=tuple(-0.1 for _ in ids))
    rollout = Rollout(id="r", group_id="g", score=1.0, transitions=[call])
    row = trajectory_of(rollout, Bytes(), max_length=64, behaviour=True).rows[0]
    forced = [at for at, trained in enumerate(row.trained) if not trained]
    assert bytes(ids[at] for at in forced).decode() == "city: sure: "


def test_invalid_bytes_do_not_hide_forced_tokens() -> None:
    schema = {"x-assay-lines": True, "properties": {"thought": {}, "action": {}}}
    call = transition("thought: so ÏÃ\naction: answer", schema=schema)  # as the engine wrote it; as the tokenizer does:
    pieces = ["thought", ": ", "so", "\ufffd", "\ufffd", "\n", "action", ": ", "answer"]
    call.logprobs = tuple(-0.1 for _ in pieces)
    assert trained_tokens(call, pieces) == [False, False, True, True, True, True, False, False, True]


def test_rows_contain_the_sampled_tokens_and_untrainable_calls_are_counted() -> None:
    calls = [
        transition("4"), transition("4", cached=True), transition("", error="ServerError"),
        transition("4", token_ids=None),
        transition("4", prompt_tokens=3), transition("4" * 90), transition("4", logprobs=(math.nan, 0.0)),
        transition("4", model="judge"),
    ]  # fmt: skip
    for at, call in enumerate(calls):
        call.t = at
    rollout, excluded = Rollout(id="r", group_id="g", score=1.0, transitions=calls), Counter[str]()
    trajectory = trajectory_of(
        rollout, Letters(), is_policy=lambda call: call.model == "m", max_length=64, behaviour=True, left_out=excluded
    )
    assert [(row.turn, row.completion_ids, row.logprobs) for row in trajectory.rows] == [(0, [52, 0], [-0.1, -0.1])]
    assert trajectory.rewards == [0.0] * 7 + [1.0]
    assert sum(excluded.values()) == 7
    assert len(excluded) == 7
    assert trajectory_of(rollout, Letters(), max_length=64, behaviour=False).rows[0].logprobs is None
