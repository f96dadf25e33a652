"""Two gateways on one store, their clients changing from one to the other with each call: part of `make chaos`.

    python benchmarks/chaos_gateways.py [--store sqlite|postgresql|URL] [--cases named opened unnamed …]
        [--conversations 6] [--turns 10] [--json]

A client sends the turns of its conversation to the gateways in turn, as a load balancer would. Its rollout is named by
a header, opened at one gateway and closed at another, or found by its conversation; `parallel` sends each turn of a
named rollout to both gateways at the same moment, `mixed` has clients of all kinds, `kill` kills one of the gateways
in the middle, after which its clients continue at the other. The server behind the gateways logs each call that it
answers. Prints a row per case; exits with 1 where sent is not stored + unrecorded, where a conversation is not one
rollout with its turns in order, or where a rollout that was opened was not closed with its reward.

After a kill `unrecorded` has the calls that the killed gateway had in flight or had answered within its last second:
stored + unrecorded must be at least what was sent, and at most what the clients sent to the gateways.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from assay.traces import Rollout, Store

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from rigs import module_command
from rigs.gateway_chaos.clients import KEY
from rigs.gateway_chaos.processes import Postgres, Process, gateway_command

CASES = ("named", "opened", "unnamed", "parallel", "mixed", "kill")
KINDS = ("named", "opened", "unnamed")  # of clients
OWNER = {"Authorization": f"Bearer {KEY}"}
LOST_S = 1.0  # a killed gateway loses what ended in its last second


@dataclass(kw_only=True)
class Outcome:
    """The counts of a case.

    Attributes:
        reserved: calls that clients sent to a gateway.
        sent: calls that the server answered.
        stored: calls in the store.
        unrecorded: calls that the gateways counted as not stored; of a killed gateway those that it may have lost.
        rollouts: rollouts in the store.
        problems: what differs from what the clients did.
    """

    case: str
    store: str
    reserved: int = 0
    sent: int = 0
    stored: int = 0
    unrecorded: int = 0
    rollouts: int = 0
    problems: list[str] = field(default_factory=list)


@dataclass
class Client:
    """One conversation. `calls` holds for each call the gateway, the times at which it began and ended, and its text
    where it was answered."""

    name: str
    kind: str
    parallel: bool = False
    rollout_id: str = ""
    calls: list[tuple[int, float, float, str]] = field(default_factory=list)

    async def converse(self, session: aiohttp.ClientSession, gateways: list[Process], turns: int) -> None:
        messages: list[dict[str, Any]] = []
        path, headers = "", dict(OWNER)
        if self.kind == "named":
            headers["x-assay-rollout"] = self.name
        if self.kind == "opened":
            body = {"id": self.name, "inputs": {"question": self.name}}
            async with session.post(f"{gateways[0].url}/assay/rollouts", json=body, headers=OWNER) as reply:
                opened = await reply.json()
            self.rollout_id, path = opened["id"], f"/r/{opened['api_key']}"
        for turn in range(turns):
            messages.append({"role": "user", "content": f"{self.name} turn {turn}"})
            places = range(len(gateways)) if self.parallel else [turn % len(gateways)]
            asked = [self._call(session, gateways, at, path, messages, headers, turn) for at in places]
            answers = await asyncio.gather(*asked)
            messages.append({"role": "assistant", "content": answers[0]})
        if self.kind == "opened":
            last = gateways[turns % len(gateways)]
            last = last if last.alive else next(one for one in gateways if one.alive)
            end = {"reward": 0.5}
            url = f"{last.url}/assay/rollouts/{self.name}/close"
            async with session.post(url, json=end, headers=OWNER) as reply:
                assert reply.status == 200, await reply.text()

    async def _call(
        self, session: aiohttp.ClientSession, gateways: list[Process], at: int, path: str,
        messages: list[dict[str, Any]], headers: dict[str, str], turn: int,
    ) -> str:  # fmt: skip
        """The answer to a turn, from the next gateway that runs where one does not."""
        body = {"model": "m", "messages": messages, "stream": turn % 3 == 2}
        for place in (at + step for step in range(len(gateways))):
            gateway, began, text = gateways[place % len(gateways)], time.time(), ""
            try:
                url = f"{gateway.url}{path}/v1/chat/completions"
                async with session.post(url, json=body, headers=headers) as reply:
                    text = answer_in(await reply.text()) if reply.status == 200 else ""
                    self.rollout_id = self.rollout_id or reply.headers.get("x-assay-rollout", "")
            except (aiohttp.ClientError, OSError):
                pass
            self.calls.append((place % len(gateways), began, time.time(), text))
            if text:
                return text
        raise RuntimeError(f"no gateway answered {messages[-1]['content']!r}")


def answer_in(text: str) -> str:
    """The text of an answer, in one piece or streamed."""
    if not text.startswith("data:"):
        return str(json.loads(text)["choices"][0]["message"]["content"])
    events = [json.loads(line[5:]) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


async def run_case(
    case: str, store: str, folder: Path, *, gateways: int = 2, conversations: int = 6, turns: int = 10
) -> Outcome:
    """Runs one case with `gateways` processes on a store, which must have nothing of an earlier case."""
    log = folder / f"{case}.log"
    server = Process([*module_command("rigs.upstream"), "--log", str(log), "--delay-ms", "20"], folder, "upstream")
    await server.start()
    processes = [Process(gateway_command(server.url, store), folder, f"gateway{n}") for n in range(gateways)]
    before = set(stored(store))
    try:
        for process in processes:
            await process.start()
        kinds = KINDS if case in ("mixed", "kill") else ("named",) if case == "parallel" else (case,)
        clients = [
            Client(f"{case}-{number}", kinds[number % len(kinds)], case == "parallel")
            for number in range(conversations)
        ]
        async with aiohttp.ClientSession() as session:
            talking = [asyncio.create_task(one.converse(session, processes, turns)) for one in clients]
            if case == "kill":
                while sum(len(one.calls) for one in clients) < conversations * turns // 2:
                    await asyncio.sleep(0.01)
                await processes[0].kill()
            await asyncio.gather(*talking)
        audits = [(await process.stop())["audit"] for process in processes if process.alive]
    finally:
        for process in (*processes, server):
            process.end()
    outcome = Outcome(case=case, store=store.partition(":")[0] if ":" in store else "sqlite")
    outcome.unrecorded = sum(audit["unrecorded"] for audit in audits)
    if case == "opened" and (unclosed := sum(audit["unclosed"] for audit in audits)):
        outcome.problems.append(f"{unclosed} rollouts count as never closed")
    outcome.reserved = sum(len(one.calls) for one in clients)
    outcome.sent = len(log.read_text().splitlines()) if log.exists() else 0
    rollouts = {name: rollout for name, rollout in stored(store).items() if name not in before}
    outcome.rollouts, outcome.stored = len(rollouts), sum(len(one.transitions) for one in rollouts.values())
    killed = [process.kills[0][1] for process in processes if process.kills]
    if killed:
        outcome.unrecorded += sum(
            place == 0 and ended > killed[0] - LOST_S for one in clients for place, _, ended, _ in one.calls
        )
    check(outcome, clients, rollouts, killed=bool(killed))
    return outcome


def stored(store: str) -> dict[str, Rollout]:
    with Store(store) as opened:
        return {rollout.id: opened.rollout(rollout.id) for rollout in opened.rollouts()}


def check(outcome: Outcome, clients: list[Client], rollouts: dict[str, Rollout], *, killed: bool) -> None:
    """Adds what is wrong to the outcome."""
    total, say = outcome.stored + outcome.unrecorded, outcome.problems.append
    if killed and not (outcome.sent <= total and outcome.stored <= outcome.reserved):
        say(f"{total} stored or unrecorded of {outcome.sent} sent, {outcome.reserved} reserved")
    if not killed and total != outcome.sent:
        say(f"{total} stored or unrecorded of {outcome.sent} sent")
    if not killed and len(rollouts) != len(clients):
        say(f"{len(rollouts)} rollouts of {len(clients)} conversations")
    for client in clients:
        rollout = rollouts.get(client.rollout_id)
        if rollout is None:
            say(f"{client.name}: no rollout")
            continue
        answered = [text for _, _, _, text in sorted(client.calls, key=lambda call: call[1]) if text]
        texts = [call.output for call in rollout.transitions if call.error is None]
        if killed:  # a call that was stored and not delivered is sent again by its client
            texts = [text for at, text in enumerate(texts) if at == 0 or text != texts[at - 1]]
        expected = [text for text in answered if not killed or text in texts]
        if texts != expected if not client.parallel else sorted(texts) != sorted(expected):
            say(f"{client.name}: turns {texts} instead of {expected}")
        if [call.t for call in rollout.transitions] != list(range(len(rollout.transitions))):
            say(f"{client.name}: turns are numbered {[call.t for call in rollout.transitions]}")
        starts = [call.started_at for call in rollout.transitions]
        if starts != sorted(starts):
            say(f"{client.name}: turns are not in order of time")
        if client.kind == "opened" and (rollout.status, rollout.score) != ("done", 0.5):
            say(f"{client.name}: {rollout.status} with score {rollout.score} after its close")
        if not killed and rollout.prediction != {"answer": answered[-1]} and not client.parallel:
            say(f"{client.name}: the prediction is {rollout.prediction}")


def show(outcomes: list[Outcome]) -> None:
    print("| case | store | reserved | sent | stored | unrecorded | rollouts | problems |")
    print("|---|---|---|---|---|---|---|---|")
    for one in outcomes:
        cells = [one.case, one.store, one.reserved, one.sent, one.stored, one.unrecorded, one.rollouts]
        print(f"| {' | '.join(map(str, cells))} | {len(one.problems) or 'none'} |")
    for one in outcomes:
        for problem in one.problems:
            print(f"{one.case} on {one.store}: {problem}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", nargs="+", default=["sqlite", "postgresql"], help="sqlite, postgresql or a URL")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = {name: getattr(arguments, name) for name in ("gateways", "conversations", "turns")}
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch).chmod(0o755)  # PostgreSQL runs as another user where this one is root
        for kind in arguments.store:
            server = Postgres(Path(scratch)) if kind == "postgresql" else None
            try:
                for case in arguments.cases:
                    folder = Path(scratch) / kind.partition(":")[0] / case
                    folder.mkdir(parents=True)
                    store = server.url if server else str(folder / "s.db") if kind == "sqlite" else kind
                    outcomes.append(asyncio.run(run_case(case, store, folder, **sizes)))
            finally:
                if server is not None:
                    server.end()
    if arguments.json:
        print(json.dumps([asdict(one) for one in outcomes], indent=1))
    else:
        show(outcomes)
    return int(any(one.problems for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
