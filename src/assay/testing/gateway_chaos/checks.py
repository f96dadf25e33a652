"""What a chaos run must have left: compares the store with what the clients sent and got, and with the server's log. Changes nothing."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.testing.gateway_chaos.clients import Attempt, Management, body_hash
from assay.testing.gateway_chaos.plan import GOOD, Call, marker_of, script_of, spec_of
from assay.testing.gateway_chaos.processes import Process
from assay.traces.records import Rollout, Transition
from assay.traces.store import Store

__all__ = ["Found", "check"]

_YOUNG_S = 1.0  # what a killed gateway may lose
_LATE_S = 1.0  # within which a gateway sees that a client went away
_MARKER = re.compile(r"<c\d{6}>")
_SHOWN = 8


@dataclass
class Found:
    """`problems` by kind, the first few of each; `counts` of all."""

    problems: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    counts: Counter[str] = field(default_factory=Counter)
    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        if len(self.problems[kind]) < _SHOWN:
            self.problems[kind].append(text[:300])


def check(
    store: Store, attempts: Sequence[Attempt], managed: Sequence[Management], gateway: Process, log: Path, seed: int, stats: Mapping[str, Any],
    times: Sequence[tuple[float, str]] = (),
) -> Found:  # fmt: skip
    """Args:
    stats: what `assay traces stats --json` prints.
    times: when which fault began.
    """
    found = Found()
    asked = {str(attempt.call): attempt for attempt in attempts if attempt.asked}
    seen = log.read_text().split()
    rollouts = [store.rollout(rollout.id) for rollout in store.rollouts()]
    stored: dict[str, list[tuple[Rollout, Transition]]] = defaultdict(list)
    for rollout in rollouts:
        for transition in rollout.transitions:
            stored[str(transition.request["body"]["metadata"]["chaos"])].append((rollout, transition))
    _check_calls(found, asked, seen, stored, gateway, times)
    for name, attempt in asked.items():
        for rollout, transition in stored.get(name, ())[:1]:
            for problem in _differences(seed, attempt, rollout, transition):
                found.add("content", f"{name} ({spec_of(seed, attempt.call.conversation)}, {attempt.outcome}): {problem}")
    lost = {str(attempt.call) for attempt in asked.values() if str(attempt.call) not in stored}
    _check_rollouts(found, rollouts, asked, lost, _quiet(asked, gateway, seed), seed)
    _check_managed(found, {rollout.id: rollout for rollout in rollouts}, managed, gateway)
    _check_counts(found, asked, stored, gateway, stats, rollouts)
    return found


def _check_calls(
    found: Found, asked: Mapping[str, Attempt], seen: Sequence[str], stored: Mapping[str, Sequence[Any]], gateway: Process,
    times: Sequence[tuple[float, str]],
) -> None:  # fmt: skip
    reached = Counter(seen)
    for name, attempt in asked.items():
        if attempt.wrong:
            found.add("bytes", f"{name}: {attempt.wrong}")
        if name in stored:
            continue
        if _young(attempt, gateway):
            found.figures["young calls lost"] = found.figures.get("young calls lost", 0) + 1
        elif attempt.outcome in ("reset", "timeout") and not attempt.status and not reached[name]:  # it waited for the store, or met a stop
            found.figures["calls that reached no model"] = found.figures.get("calls that reached no model", 0) + 1
        else:
            after = max((at, fault) for at, fault in [(0.0, "no fault"), *times] if at <= attempt.ended)
            told = f"{attempt.outcome} {attempt.status} of {attempt.ended - attempt.started:.2f} s, ended {attempt.ended - after[0]:.2f} s"
            found.add("lost", f"{name}: {told} after the beginning of {after[1]!r}")
    for name, rows in stored.items():
        if len(rows) > 1:
            found.add("doubled", f"{name} is stored {len(rows)} times")
        if name not in asked:
            found.add("made up", f"{name} is stored and nobody sent it")
    for name, often in reached.items():
        if often > 1:
            found.add("doubled", f"{name} came to the server {often} times")


def _young(attempt: Attempt, gateway: Process) -> bool:
    """Whether a kill may have cost the call: it was in flight, or had ended a moment ago."""
    late = _LATE_S if attempt.outcome != "whole" else 0.0
    return any(attempt.started <= dead and attempt.ended + late > kill - _YOUNG_S for kill, dead in gateway.kills)


def _differences(seed: int, attempt: Attempt, rollout: Rollout, transition: Transition) -> Iterator[str]:
    """How a stored call differs from what was sent and received."""
    script = script_of(seed, attempt.call)
    marker = marker_of(attempt.call.conversation)
    told = json.dumps([transition.request, transition.response, transition.output], ensure_ascii=False)
    if others := set(_MARKER.findall(told)) - {marker}:
        yield f"it holds texts of {others}"
    body = transition.request["body"]
    if transition.request["dialect"] == "gemini":  # what its path says is stored in the body
        body = {key: value for key, value in body.items() if key not in ("model", "stream")}
    if body_hash(body) != attempt.sent:
        yield "the request is not what was sent"
    if attempt.rollout and attempt.rollout != rollout.id:
        yield f"it is in rollout {rollout.id}, and the client was told {attempt.rollout}"
    calls = [(tool.name, tool.arguments) for tool in transition.tools]
    wanted = [(name, json.loads(arguments)) for _, name, arguments in script.calls]
    if script.kind in GOOD and attempt.outcome == "whole" and transition.error is not None:
        yield f"{script.kind}: the client has the whole answer, the store an error: {transition.error}"
    if transition.error is None:
        if script.kind not in GOOD:
            yield f"{script.kind}: it is stored as an answer: {transition.output[:80]!r}"
        elif transition.output != script.text or calls != wanted:
            yield f"{script.kind}: output {transition.output[:80]!r} and {calls}, not {script.text[:80]!r} and {wanted}"
    elif transition.failure is None:
        yield f"{script.kind}: an error without its kind: {transition.error}"
    elif not script.text.startswith(transition.output) and script.kind != "malformed" and transition.output.encode() not in script.data:
        yield f"{script.kind}: the part {transition.output[:80]!r} is not the beginning of {script.text[:80]!r}"


def _check_rollouts(
    found: Found, rollouts: Sequence[Rollout], asked: Mapping[str, Attempt], lost: set[str], quiet: set[int], seed: int
) -> None:  # fmt: skip
    homes: dict[int, set[str]] = defaultdict(set)
    for rollout in rollouts:
        calls = [Call.of(transition.request["body"]["metadata"]["chaos"]) for transition in rollout.transitions]
        conversations = {call.conversation for call in calls}
        for one in conversations:
            homes[one].add(rollout.id)
        if len(conversations) > 1:
            found.add("mixed", f"rollout {rollout.id} has calls of conversations {sorted(conversations)}")
        told = json.dumps([rollout.inputs, rollout.prediction], ensure_ascii=False, default=str)
        if conversations and set(_MARKER.findall(told)) - {marker_of(one) for one in conversations}:
            found.add("mixed", f"rollout {rollout.id} of {sorted(conversations)} has inputs or an answer of {set(_MARKER.findall(told))}")
        turns = [transition.t for transition in rollout.transitions]
        gone = sum(Call.of(name).conversation in conversations for name in lost)
        if turns != list(range(len(turns))) and len(set(range(turns[-1] + 1)) - set(turns)) > gone:
            found.add("holes", f"rollout {rollout.id} of {sorted(conversations)} has turns {turns}")
        order = [asked[str(call)].started for call in calls if str(call) in asked]
        if order != sorted(order):
            found.add("order", f"rollout {rollout.id}: its calls are {[str(call) for call in calls]}")
    for one, ids in homes.items():
        named = spec_of(seed, one).naming in ("header", "path", "token")
        if len(ids) > 1 and (named or one in quiet):
            found.add("split", f"{spec_of(seed, one)} is in {len(ids)} rollouts")
    found.figures["conversations found again that nothing broke"] = len(quiet & homes.keys())


def _quiet(asked: Mapping[str, Attempt], gateway: Process, seed: int) -> set[int]:
    """Conversations that the gateway had to find by themselves and could: while it ran, of a client that did not go away."""
    attempts: dict[int, list[Attempt]] = defaultdict(list)
    for attempt in asked.values():
        attempts[attempt.call.conversation].append(attempt)
    found = set()
    for one, of in attempts.items():
        spec, begun, ended = spec_of(seed, one), min(a.started for a in of), max(a.ended for a in of)
        findable = spec.naming == "trace" or (spec.naming == "found" and spec.dialect != "completions")
        lived = any(life["from"] <= begun and ended <= life["to"] for life in gateway.lives)
        if findable and lived and spec.turns > 1 and all(a.outcome in ("whole", "gateway") for a in of):
            found.add(one)
    return found


def _check_managed(found: Found, rollouts: Mapping[str, Rollout], managed: Sequence[Management], gateway: Process) -> None:
    for one in managed:
        rollout = rollouts.get(one.rollout)
        young = any(one.at - 1 <= kill and one.at > kill - _YOUNG_S for kill, _ in gateway.kills)
        if not young and (rollout is None or (rollout.status, rollout.score) != ("done", one.score)):
            state = None if rollout is None else (rollout.status, rollout.score)
            found.add("rewards", f"rollout {one.rollout} was closed with {one.score} and is {state}")


def _check_counts(
    found: Found, asked: Mapping[str, Attempt], stored: Mapping[str, Sequence[Any]], gateway: Process, stats: Mapping[str, Any],
    rollouts: Sequence[Rollout],
) -> None:  # fmt: skip
    """Each gateway's own counts at its end, the store's, and what the clients know."""
    total = sum(map(len, stored.values()))
    if stats["transitions"] != total or stats["rollouts"] != len(rollouts):
        found.add("counts", f"`traces stats` says {stats['transitions']} calls in {stats['rollouts']} rollouts; there are {total} in {len(rollouts)}")
    if stats["errors"] != sum(rows[0][1].error is not None for rows in stored.values()):
        found.add("counts", f"`traces stats` says {stats['errors']} failed calls")
    if gateway.kills and stats["unrecorded"] is not None:
        found.add("counts", f"a gateway was killed, and `traces stats` says that {stats['unrecorded']} calls were not recorded")
    for number, life in enumerate(gateway.lives):
        if "audit" not in life:
            continue
        audit, begun = life["audit"], gateway.lives[number - 1]["to"] if number else 0.0
        calls = [attempt for attempt in asked.values() if begun < attempt.started < life["to"]]
        own = sum(str(a.call) in stored for a in calls)
        if life["code"] or not audit:
            found.add("counts", f"gateway {number} ended with {life['code']} and said {audit}")
        elif (audit["calls"], audit["stored"], audit["unrecorded"], audit["in_flight"]) != (own, own, 0, 0):
            short = {name: audit[name] for name in ("calls", "stored", "unrecorded", "in_flight", "rows_waiting")}
            found.add("counts", f"gateway {number}, ended by SIGTERM, said {short}; {own} of its calls are stored")
