"""Checks of a chaos run: compares the store with the records of the clients and with the server's log.

Only reads: `run` changes the store afterwards.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.support.values import json_text
from assay.traces.records import Rollout, Transition
from assay.traces.store import Store
from rigs.gateway_chaos.clients import Attempt, Management, body_hash
from rigs.gateway_chaos.plan import GOOD, Call, marker_of, script_of, spec_of
from rigs.gateway_chaos.processes import Process

_YOUNG_S = 1.0  # a killed gateway may lose calls that ended within this time before the kill
_LATE_S = 1.0  # maximum time until the gateway notices that a client has disconnected
_MARKER = re.compile(r"<c\d{6}>")
_EXAMPLES = 8  # problems of each kind in the report


@dataclass
class Findings:
    """Result of the checks: the first `problems` of each kind, the `counts` of all problems, and other figures."""

    problems: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    counts: Counter[str] = field(default_factory=Counter)
    figures: dict[str, Any] = field(default_factory=dict)

    def add(self, kind: str, text: str) -> None:
        self.counts[kind] += 1
        if len(self.problems[kind]) < _EXAMPLES:
            self.problems[kind].append(text[:300])


def check(
    store: Store,
    attempts: Sequence[Attempt],
    managed: Sequence[Management],
    gateway: Process,
    log: Path,
    seed: int,
    stats: Mapping[str, Any],
    times: Sequence[tuple[float, str]] = (),
) -> Findings:
    """Checks the store after a run.

    Args:
        attempts: all calls of the clients.
        managed: rollouts that the clients closed.
        log: log of the model server, one line for each call.
        stats: output of `assay traces stats --json`.
        times: start time and name of each fault.
    """
    findings = Findings()
    accepted = {str(attempt.call): attempt for attempt in attempts if attempt.accepted}
    rollouts = [store.rollout(rollout.id) for rollout in store.rollouts()]
    stored: dict[str, list[tuple[Rollout, Transition]]] = defaultdict(list)
    for rollout in rollouts:
        for transition in rollout.transitions:
            stored[str(transition.request["body"]["metadata"]["chaos"])].append((rollout, transition))
    _check_calls(findings, accepted, log.read_text().split(), stored, gateway, times)
    for name, attempt in accepted.items():
        for rollout, transition in stored.get(name, ())[:1]:
            for problem in _differences(seed, attempt, rollout, transition):
                spec = spec_of(seed, attempt.call.conversation)
                findings.add("content", f"{name} ({spec}, {attempt.outcome}): {problem}")
    lost = accepted.keys() - stored.keys()
    _check_rollouts(findings, rollouts, accepted, lost, _undisturbed(accepted, gateway, seed), seed)
    _check_managed(findings, {rollout.id: rollout for rollout in rollouts}, managed, gateway)
    _check_counts(findings, accepted, stored, gateway, stats, rollouts)
    return findings


def _check_calls(
    findings: Findings,
    accepted: Mapping[str, Attempt],
    logged: Sequence[str],
    stored: Mapping[str, Sequence[Any]],
    gateway: Process,
    times: Sequence[tuple[float, str]],
) -> None:
    """Each accepted call is stored once, except calls that a kill may lose."""
    reached = Counter(logged)
    for name, attempt in accepted.items():
        if attempt.wrong:
            findings.add("bytes", f"{name}: {attempt.wrong}")
        if name in stored:
            continue
        if _may_be_lost(attempt, gateway):
            findings.figures["young calls lost"] = findings.figures.get("young calls lost", 0) + 1
        # the gateway was stopped, or the client gave up, before the call was forwarded
        elif attempt.outcome in ("reset", "timeout") and not attempt.status and not reached[name]:
            key = "calls that reached no model"
            findings.figures[key] = findings.figures.get(key, 0) + 1
        else:
            start, fault = max((at, fault) for at, fault in [(0.0, "no fault"), *times] if at <= attempt.ended)
            duration, since_fault = attempt.ended - attempt.started, attempt.ended - start
            outcome = f"{attempt.outcome} with status {attempt.status} after {duration:.2f} s"
            findings.add("lost", f"{name}: {outcome}, {since_fault:.2f} s after the start of {fault!r}")
    for name, rows in stored.items():
        if len(rows) > 1:
            findings.add("doubled", f"{name} is stored {len(rows)} times")
        if name not in accepted:
            findings.add("made up", f"{name} is stored, but no client sent it")
    for name, count in reached.items():
        if count > 1:
            findings.add("doubled", f"{name} reached the server {count} times")


def _may_be_lost(attempt: Attempt, gateway: Process) -> bool:
    """Whether a kill may have lost the call: it was in flight, or had just ended."""
    late = _LATE_S if attempt.outcome != "whole" else 0.0
    return any(attempt.started <= dead and attempt.ended + late > kill - _YOUNG_S for kill, dead in gateway.kills)


def _differences(seed: int, attempt: Attempt, rollout: Rollout, transition: Transition) -> Iterator[str]:
    """How a stored call differs from what was sent and received."""
    script = script_of(seed, attempt.call)
    marker = marker_of(attempt.call.conversation)
    texts = json.dumps([transition.request, transition.response, transition.output], ensure_ascii=False)
    if others := set(_MARKER.findall(texts)) - {marker}:
        yield f"it contains texts of {others}"
    body = transition.request["body"]
    if transition.request["dialect"] == "gemini":  # model and verb of the path are stored in the body
        body = {key: value for key, value in body.items() if key not in ("model", "stream")}
    if body_hash(body) != attempt.sent:
        yield "the stored request differs from the one that was sent"
    if attempt.rollout and attempt.rollout != rollout.id:
        yield f"it is in rollout {rollout.id}, the response named {attempt.rollout}"
    calls = [(tool.name, tool.arguments) for tool in transition.tools]
    expected = [(name, json.loads(arguments)) for _, name, arguments in script.calls]
    output, text = f"{transition.output[:80]!r}", f"{script.text[:80]!r}"
    if script.kind in GOOD and attempt.outcome == "whole" and transition.error is not None:
        yield f"{script.kind}: the client received the complete response, the store has an error: {transition.error}"
    if transition.error is None:
        if script.kind not in GOOD:
            yield f"{script.kind}: it is stored as a successful call: {output}"
        elif transition.output != script.text or calls != expected:
            yield f"{script.kind}: output {output} and {calls}, expected {text} and {expected}"
    elif transition.failure is None:
        yield f"{script.kind}: an error without failure kind: {transition.error}"
    elif (
        not script.text.startswith(transition.output)
        and script.kind != "malformed"
        and transition.output.encode() not in script.data
    ):
        yield f"{script.kind}: the partial output {output} is not the beginning of {text}"


def _check_rollouts(
    findings: Findings,
    rollouts: Sequence[Rollout],
    accepted: Mapping[str, Attempt],
    lost: set[str],
    undisturbed: set[int],
    seed: int,
) -> None:
    """Each rollout has the calls of one conversation, in order, without gaps; each conversation has one rollout."""
    rollout_ids: dict[int, set[str]] = defaultdict(set)  # by conversation
    for rollout in rollouts:
        calls = [Call.of(transition.request["body"]["metadata"]["chaos"]) for transition in rollout.transitions]
        conversations = {call.conversation for call in calls}
        for conversation in conversations:
            rollout_ids[conversation].add(rollout.id)
        of = f"rollout {rollout.id} of {sorted(conversations)}"
        if len(conversations) > 1:
            findings.add("mixed", f"{of} has calls of several conversations")
        texts = json_text([rollout.inputs, rollout.prediction])
        markers = set(_MARKER.findall(texts))
        if conversations and markers - {marker_of(conversation) for conversation in conversations}:
            findings.add("mixed", f"{of} has inputs or a prediction of {markers}")
        turns = [transition.t for transition in rollout.transitions]
        lost_calls = sum(Call.of(name).conversation in conversations for name in lost)
        if turns != list(range(len(turns))) and len(set(range(turns[-1] + 1)) - set(turns)) > lost_calls:
            findings.add("holes", f"{of} has turns {turns}")
        times = [accepted[str(call)].started for call in calls if str(call) in accepted]
        if times != sorted(times):
            findings.add("order", f"rollout {rollout.id}: its calls are {[str(call) for call in calls]}")
    for conversation, ids in rollout_ids.items():
        spec = spec_of(seed, conversation)
        explicit = spec.naming in ("header", "path", "token")
        if len(ids) > 1 and (explicit or conversation in undisturbed):
            findings.add("split", f"{spec} is in {len(ids)} rollouts")
    findings.figures["conversations found again that nothing broke"] = len(undisturbed & rollout_ids.keys())


def _undisturbed(accepted: Mapping[str, Attempt], gateway: Process, seed: int) -> set[int]:
    """Conversations without explicit rollout that the gateway must recognize as one rollout.

    These are the ones with several turns whose client never disconnected, all within one run of the gateway.
    """
    by_conversation: dict[int, list[Attempt]] = defaultdict(list)
    for attempt in accepted.values():
        by_conversation[attempt.call.conversation].append(attempt)
    undisturbed = set()
    for conversation, attempts in by_conversation.items():
        spec = spec_of(seed, conversation)
        started, ended = min(attempt.started for attempt in attempts), max(attempt.ended for attempt in attempts)
        recognizable = spec.naming == "trace" or (spec.naming == "none" and spec.dialect != "completions")
        one_process = any(life["from"] <= started and ended <= life["to"] for life in gateway.lives)
        connected = all(attempt.outcome in ("whole", "gateway") for attempt in attempts)
        if recognizable and one_process and spec.turns > 1 and connected:
            undisturbed.add(conversation)
    return undisturbed


def _check_managed(
    findings: Findings, rollouts: Mapping[str, Rollout], managed: Sequence[Management], gateway: Process
) -> None:
    """Rollouts that clients closed have their status and score, unless the gateway was killed at that time."""
    for closing in managed:
        rollout = rollouts.get(closing.rollout)
        may_be_lost = any(closing.at - 1 <= kill and closing.at > kill - _YOUNG_S for kill, _ in gateway.kills)
        if not may_be_lost and (rollout is None or (rollout.status, rollout.score) != ("done", closing.score)):
            state = None if rollout is None else (rollout.status, rollout.score)
            findings.add("rewards", f"rollout {closing.rollout} was closed with {closing.score} and is {state}")


def _check_counts(
    findings: Findings,
    accepted: Mapping[str, Attempt],
    stored: Mapping[str, Sequence[Any]],
    gateway: Process,
    stats: Mapping[str, Any],
    rollouts: Sequence[Rollout],
) -> None:
    """The counts of `traces stats` and of each gateway at its end agree with the store and the clients."""
    total = sum(map(len, stored.values()))
    reported = f"{stats['transitions']} calls in {stats['rollouts']} rollouts"
    if stats["transitions"] != total or stats["rollouts"] != len(rollouts):
        findings.add("counts", f"`traces stats` reports {reported}; stored are {total} in {len(rollouts)}")
    if stats["errors"] != sum(rows[0][1].error is not None for rows in stored.values()):
        findings.add("counts", f"`traces stats` reports {stats['errors']} failed calls")
    # calls that a killed gateway lost are unknown, so the count must be null
    if gateway.kills and stats["unrecorded"] is not None:
        findings.add("counts", f"`traces stats` reports {stats['unrecorded']} unrecorded calls after a kill")
    for number, life in enumerate(gateway.lives):
        if "audit" not in life:
            continue
        audit, previous_end = life["audit"], gateway.lives[number - 1]["to"] if number else 0.0
        calls = [name for name, attempt in accepted.items() if previous_end < attempt.started < life["to"]]
        stored_calls = sum(name in stored for name in calls)
        if life["code"] or not audit:
            findings.add("counts", f"gateway {number} exited with {life['code']} and the audit {audit}")
        elif (audit["calls"], audit["stored"], audit["unrecorded"], audit["in_flight"]) != (
            stored_calls,
            stored_calls,
            0,
            0,
        ):
            counts = {name: audit[name] for name in ("calls", "stored", "unrecorded", "in_flight", "rows_waiting")}
            findings.add(
                "counts", f"gateway {number} reports {counts} after SIGTERM; {stored_calls} of its calls are stored"
            )
