"""The table of a client: its runs directly and through `assay serve`, their differences, what was recorded."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness import Client, ClientSetup, Run
from tap import Exchange

from assay.datasets.tasks import task_key
from assay.support.sections import prompt_fields
from assay.traces import Rollout, Store, Transition
from assay.traces.store.sealing import store_splits

_HOP = {"date", "connection", "keep-alive", "transfer-encoding", "content-length", "host", "accept-encoding"}
_KEYS = {"authorization", "x-api-key", "api-key", "x-goog-api-key"}
_PER_CALL = {"traceparent", "idempotency-key", "x-stainless-read-timeout"}  # headers that clients make anew


@dataclass
class Row:
    """A line of the table; `problems` say what is wrong."""

    client: str
    mode: str
    works: bool = False
    one_rollout: bool = False
    exact: bool = False
    retries: bool = False
    prediction: bool = False
    trainable: bool = False
    problems: list[str] = field(default_factory=list)

    def check(self, name: str, problems: Sequence[str]) -> None:
        setattr(self, name, not problems)
        self.problems += [f"{self.mode}, {name.replace('_', ' ')}: {problem}" for problem in problems]


def table_of(client: Client, at: ClientSetup) -> tuple[list[Row], dict[str, str]]:
    """One row per mode, without the results of trainers, and the mode of each rollout."""
    rows, modes = [], {}
    for index, mode in enumerate(client.modes):
        row = Row(client.name, mode)
        rows.append(row)
        plain = f"{client.name} in mode {mode}: {client.ask}"
        compared = _compared(client.at(mode), at, row, plain, 1000 * (2 * index + 1))
        again = _retried(client.at(mode), at, row, f"{plain} #once429", 1000 * (2 * index + 2))
        modes |= dict.fromkeys((rollout.id for rollout in (*compared, *again)), mode)
        with Store(at.store) as store:  # exports leave out tasks of the sealed splits, which are drawn at random
            store_splits(
                store,
                {"train": [task_key(task) for rollout in (*compared, *again) for task in _tasks(rollout)]},
            )
    return rows, modes


def _tasks(rollout: Rollout) -> list[dict[str, Any]]:
    """Its inputs, also as the fields of DSPy's prompt."""
    fields = prompt_fields(str(rollout.inputs.get("prompt")))
    return [rollout.inputs, *([fields] if fields else [])]


def _compared(client: Client, at: ClientSetup, row: Row, question: str, number: int) -> list[Rollout]:
    alone = at.run(row.mode, question, number, through=False)
    before = at.counts()
    through = at.run(row.mode, question, number, through=True)
    expected = client.outputs[-1] if client.answer is None else client.answer
    problems = [
        f"{how} it gave {run.reply}"
        for how, run in (("alone", alone), ("behind the gateway", through))
        if run.reply != {"answer": expected}
    ]
    row.check("works", problems + ([f"\n{at.program.complaints()}"] if problems else []))
    rollouts = at.new_rollouts(len(client.outputs))
    calls = len(through.front)
    counted = {name: count - before[name] for name, count in at.counts().items()}
    wanted = {"calls": calls, "stored": calls, "unrecorded": 0, "past": 0}
    row.check(
        "one_rollout",
        [
            f"{len(rollout.transitions)} calls: {[t.output for t in rollout.transitions]}"
            for rollout in rollouts
            if len(rollouts) != 1
        ]
        + ([f"the counts are {counted} and not {wanted}"] if counted != wanted else [])
        + ([] if rollouts else ["no rollout"]),
    )
    recorded = _recorded(client, row.mode, rollouts[0], through.back) if rollouts else ["nothing was recorded"]
    row.check("exact", [*differences(alone, through), *recorded])
    prediction = (
        {"answer": expected if isinstance(expected, str) else json.dumps(expected)}
        if client.prediction is None
        else client.prediction
    )
    predictions = [rollout.prediction for rollout in rollouts]
    row.check("prediction", [] if predictions == [prediction] else [f"{predictions} and not [{prediction}]"])
    return rollouts


def _retried(client: Client, at: ClientSetup, row: Row, question: str, number: int) -> list[Rollout]:
    """The same with a first call that is answered with 429: as many calls, and the same outcome, both ways."""
    alone, through = (at.run(row.mode, question, number, through=way) for way in (False, True))
    problems = (
        []
        if alone.statuses == through.statuses
        else [f"{alone.statuses} alone, {through.statuses} through the gateway"]
    )
    expected = [429, *[200] * (client.retries - 1)]
    if alone.statuses != expected:
        problems.append(f"{alone.statuses} and not {expected}")
    if alone.reply != through.reply:
        problems.append(f"{alone.reply} alone, {through.reply} through the gateway")
    rollouts = at.new_rollouts(len(through.front))
    if len(rollouts) != 1:
        problems.append(f"{len(rollouts)} rollouts")
    row.check("retries", problems + differences(alone, through))
    return rollouts if client.retries > 1 else []


def _recorded(client: Client, mode: str, rollout: Rollout, answers: Sequence[Exchange]) -> list[str]:
    """How what was stored differs from what the scripted model said and the tools gave."""
    streamed = sum(map(_streams, rollout.transitions))
    wanted = client.streamed if client.streamed is not None else len(client.outputs) if "stream" in mode else 0
    pairs = {
        "outputs": ([t.output for t in rollout.transitions], list(client.outputs)),
        "tools": ([(tool.name, tool.arguments, tool.result) for tool in rollout.tools], list(client.tools)),
        "errors": ([t.error for t in rollout.transitions], [None] * len(client.outputs)),
        "streamed calls": (streamed, wanted),
        "whole answers": (
            [(t.response or {}).get("body") for t in rollout.transitions if not _streams(t)],
            [json.loads(answer.response) for answer in answers if not _is_stream(answer)],
        ),
    }
    return [
        f"the {name} are {stored} and not {expected}"
        for name, (stored, expected) in pairs.items()
        if stored != expected
    ]


def _streams(transition: Transition) -> bool:
    return bool(transition.request["body"].get("stream") or transition.request.get("stream"))


def _is_stream(exchange: Exchange) -> bool:
    return dict(exchange.response_headers).get("content-type", "").startswith("text/event-stream")


# -- comparing wires


def differences(alone: Run, through: Run) -> list[str]:
    """How the bytes differ: of two runs as the client saw them, and of both sides of the gateway."""
    return [
        *_differing("alone and behind the gateway", alone.front, through.front, requests=False),
        *_differing("before and behind the gateway", through.front, through.back, requests=True),
        *_asked_alike(alone.front, through.front),
    ]


def _differing(what: str, one: Sequence[Exchange], other: Sequence[Exchange], *, requests: bool) -> list[str]:
    problems = [] if len(one) == len(other) else [f"{what}: {len(one)} and {len(other)} calls"]
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        pairs = {
            "status": (a.status, b.status),
            "response headers": (_headers(a.response_headers), _headers(b.response_headers)),
        }
        pairs["response"] = (a.response, b.response)
        if requests:
            pairs |= {
                "path": (a.path, b.path),
                "request": (a.body, b.body),
                "request headers": (_headers(a.headers), _headers(b.headers)),
            }
        problems += [
            f"{what}, call {at}: {name} {_excerpt(x)} and {_excerpt(y)}" for name, (x, y) in pairs.items() if x != y
        ]
    return problems


def _asked_alike(alone: Sequence[Exchange], through: Sequence[Exchange]) -> list[str]:
    """Requests of both runs: bodies as JSON, and headers except those that differ from request to request."""
    problems = []
    for at, (a, b) in enumerate(zip(alone, through, strict=False)):
        pairs = {"path": (a.path, b.path), "body": (json.loads(a.body), json.loads(b.body))}
        pairs["headers"] = (_headers(a.headers, _PER_CALL), _headers(b.headers, _PER_CALL))
        problems += [
            f"what the client asked, call {at}: {name} {_excerpt(x)} and {_excerpt(y)}"
            for name, (x, y) in pairs.items()
            if x != y
        ]
    return problems


def _headers(headers: Sequence[tuple[str, str]], also: set[str] = frozenset()) -> list[tuple[str, str]]:
    return sorted(
        (name, value) for name, value in headers if name not in _HOP | _KEYS | also and not name.startswith("x-assay-")
    )


def _excerpt(value: Any) -> str:
    return repr(value)[:600]
