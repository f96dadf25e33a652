"""Compiled texts of an agent in production: it runs unchanged, and each rollout gets the texts of its version."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.commands.deployed import DeployedTexts
from assay.deployment import save_artifact
from assay.deployment.deployments import Deployments
from assay.deployment.plan import Metric, Plan, Step
from assay.deployment.registry import Registry, write_flag
from assay.errors import DeploymentError, StoreError
from assay.programs.foreign_agent import TextAgent
from assay.traces import Rollout, Store
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.sharing import Sharing
from assay.traces.gateway.upstreams import upstream_of
from rigs.command_line import assay_command, while_serving
from rigs.gateway import until
from rigs.serving import ChatServer, post, served

OWN, NEW = "You answer questions for {customer} briefly.", "Answer {customer} in one short and friendly sentence."
PLAN = Plan(steps=(Step(weight=50, decides=True),), metrics=(Metric(success_gain=0.1),))


def compiled(folder: Path, **options: Any) -> Path:
    """An artifact as a compile of the agent's text writes it."""
    texts = [{"name": "system.md", "text": OWN, "is_value": False}]
    program = TextAgent("agent.py:solve", texts, roles={"system.md": ["system"]}, **options)
    predictor = dict(program.named_predictors())["system.md"]
    predictor.signature = predictor.signature.with_instructions(NEW)
    manifest = {
        "program": "assay.programs.foreign_agent:TextAgent", "agent": "agent.py:solve", "model": "openai/none",
        "settings": {"adapter": None, "parameters": {}}, "texts_before": {},
    }  # fmt: skip
    return save_artifact(folder, program, manifest, splits={}, report="")


def asked(url: str, question: str, before: Any = (), system: str = "For Ann: " + OWN, **headers: str) -> str:
    """What the agent sends for a question, in a conversation; returns the answer."""
    own = {"role": "system", "content": system.replace("{customer}", "Ann")}
    messages = [own, *before, {"role": "user", "content": question}]
    status, answer = post(f"{url}/v1/chat/completions", {"model": "m", "messages": messages}, **headers)
    assert status == 200, answer
    return str(answer["choices"][0]["message"]["content"])


@pytest.fixture
def chats() -> Iterator[ChatServer]:
    """A model that answers with the number of its call."""
    server = ChatServer(lambda body: f"answer {len(server.bodies)}")
    with server.serving():
        yield server


def systems(chats: ChatServer) -> list[str]:
    return [body["messages"][0]["content"] for body in chats.bodies]


def test_each_unit_gets_the_texts_of_its_version_and_keeps_them(own_folder: Path, chats: ChatServer) -> None:
    assay_command("registry", "register", "writer", str(compiled(own_folder / "compiled")))
    with Store() as store:
        Deployments(store.engine).start("writer@2", PLAN)
    own, new = "For Ann: " + OWN.replace("{customer}", "Ann"), "For Ann: " + NEW.replace("{customer}", "Ann")

    def client(started: dict[str, Any]) -> None:
        url = started["url"]
        for at in range(20):
            asked(url, f"question {at}", **{"x-assay-unit": f"user {at}"})
        sent = systems(chats)
        assert set(sent) == {own, new}
        for at in range(20):
            asked(url, f"again {at}", **{"x-assay-unit": f"user {at}"})
        assert systems(chats)[20:] == sent
        question, before = "the start of a talk", []
        answer = asked(url, question)
        with Store() as store:  # a conversation keeps its version after the end of the deployment
            Deployments(store.engine).order("writer", "rollback" if systems(chats)[-1] == new else "promote")
        for turn in range(3):
            before += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            question = f"and then, {turn}?"
            answer = asked(url, question, before)
        assert len(set(systems(chats)[40:])) == 1
        asked(url, "nothing of the text", system="Another system message.")
        assert systems(chats)[-1] == "Another system message."
        assert post(f"{url}/agents/writer", {"inputs": {}})[0] == 404

    flags = ("--registered", "writer", "--port", "0", "--json", "--upstream", chats.url)
    _, done = while_serving("serve", *flags, client=client)
    assert "texts of the agent writer, now writer@1" in done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])["agents"]
    assert sum(count["begun"] for count in counts.values()) == 41
    with Store() as store:
        rollouts = [store.rollout(row.id) for row in store.rollouts(limit=None)]
    for rollout in rollouts:
        sent = rollout.transitions[0].request["body"]["messages"][0]["content"]  # recorded as it was sent
        if sent == "Another system message.":
            assert (rollout.phase, rollout.version) == ("serve", None)
        else:
            arm = {"writer@1": "champion", "writer@2": "candidate"}[rollout.version]
            assert (sent, rollout.arm, rollout.phase) == ((own, new)[arm == "candidate"], arm, "deployed")
            assert rollout.propensity == 0.5


def test_a_version_that_cannot_be_loaded_falls_back_to_the_own_text(own_folder: Path, chats: ChatServer) -> None:
    path = compiled(own_folder / "compiled")
    assay_command("registry", "register", "writer", str(path))
    with Store() as store:
        Deployments(store.engine).start("writer@2", Plan(steps=(Step(weight=99, decides=True),)))
    (path / "program.json").write_text("{}")

    def client(started: dict[str, Any]) -> None:
        asked(started["url"], "Is it open?")

    while_serving(
        "serve", "--registered", "writer", "--port", "0", "--json", "--upstream", chats.url, client=client
    )  # fmt: skip
    assert systems(chats) == ["For Ann: " + OWN.replace("{customer}", "Ann")]
    with Store() as store:
        (rollout,) = store.rollouts()
    assert (rollout.version, rollout.deployment) == ("writer@1", None)


def test_texts_are_deployed_in_live_steps_alone(own_folder: Path) -> None:
    path = compiled(own_folder / "compiled")
    assert assay_command("registry", "register", "writer", str(path)).code == 0
    shown = json.loads(assay_command("registry", "show", "writer", "--json").stdout)
    assert (shown["name"], shown["artifact"]) == ("writer@1", str(path.with_name("compiled-own-texts")))
    (own_folder / "plan.yaml").write_text("steps: [{shadow: true, requests: 9}, {weight: 50, decides: true}]\n")
    assert "shadow" in assay_command("deploy", "start", "writer@2", "--plan", "plan.yaml").stderr
    assert assay_command("deploy", "start", "writer@2").code == 0
    with Store() as store:
        plan = Deployments(store.engine).get("writer").plan
    assert [step.weight for step in plan.steps] == [10, 50, 50, 95]
    with pytest.raises(DeploymentError, match="serve --registered"):
        assay.deployed("writer")
    done = assay_command("serve", "--registered", "writer", "--agent-timeout-s", "5", "--port", "0")
    assert (done.code, "deploy advance" in done.stderr) == (2, True)


def test_texts_that_no_gateway_replaces_are_not_registered(own_folder: Path) -> None:
    path = compiled(own_folder / "copied", delivery="copy")
    done = assay_command("registry", "register", "writer", str(path))
    assert (done.code, "reads itself" in done.stderr) == (2, True)


# -- two gateways on one store, between which the agent's calls alternate


@pytest.fixture
def where(database_url: str, own_folder: Path) -> str:
    path = str(compiled(own_folder / "compiled"))
    assert assay_command("registry", "register", "writer", path, "--store", database_url).code == 0
    with Store(database_url) as store:
        Deployments(store.engine).start("writer@2", PLAN)
    return database_url


@pytest.fixture
def pair(where: str, chats: ChatServer) -> Iterator[tuple[str, str]]:
    with ExitStack() as stack:
        stores = [stack.enter_context(Store(where)) for _ in range(2)]
        gateways = [
            Gateway(
                store, upstream_of("m", base=chats.url), texts={"writer": DeployedTexts(store, "writer", refresh_s=0)}
            )
            for store in stores
        ]  # fmt: skip
        one, two = [stack.enter_context(served(gateway.app())) for gateway in gateways]
        until(lambda: all(gateway.rollouts.shared for gateway in gateways))
        yield one, two


def with_one_text(where: str, chats: ChatServer) -> list[Rollout]:
    """The rollouts. All calls of each were sent, and are recorded, with the text of its version."""
    with Store(where) as store:
        rollouts = [store.rollout(row.id) for row in store.rollouts(limit=None)]
    of_version = {"writer@1": OWN, "writer@2": NEW}
    recorded = list[str]()
    for rollout in rollouts:
        texts = [call.request["body"]["messages"][0]["content"] for call in rollout.transitions]
        own = "For Ann: " + of_version[str(rollout.version)].replace("{customer}", "Ann")
        assert {text for text in texts if text != "Another."} == {own}
        recorded += texts
    assert sorted(recorded) == sorted(systems(chats))
    return rollouts


def test_an_unnamed_conversation_is_one_rollout_with_one_version_at_two_gateways(
    where: str, pair: tuple[str, str], chats: ChatServer
) -> None:
    for talk in range(8):
        question, before = f"the start of talk {talk}", list[dict[str, str]]()
        for turn in range(4):
            answer = asked(pair[turn % 2], question, before)
            before += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            question = f"and then, {turn}?"
    assert [len(rollout.transitions) for rollout in with_one_text(where, chats)] == [4] * 8


def test_a_rollout_keeps_the_version_that_another_gateway_gave_it(
    where: str, pair: tuple[str, str], chats: ChatServer
) -> None:
    names = [{"x-assay-rollout": f"talk {number}"} for number in range(8)]
    for name in names:
        asked(pair[1], "nothing of the text", system="Another.", **name)
        asked(pair[0], "the first with the text", **name)
    with Store(where) as store:
        Deployments(store.engine).order("writer", "promote")
    for name in names:
        asked(pair[1], "after the end of the deployment", **name)
    rollouts = with_one_text(where, chats)
    assert [(len(rollout.transitions), rollout.propensity) for rollout in rollouts] == [(3, 0.5)] * 8


def test_first_calls_of_a_rollout_at_two_gateways_get_the_texts_of_one_version(
    where: str, pair: tuple[str, str], chats: ChatServer
) -> None:
    def call(number: int) -> None:
        unit = {"x-assay-unit": f"user {number}", "x-assay-rollout": f"talk {number // 4}"}
        asked(pair[number % 2], f"question {number}", **unit)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(call, range(32)))
    assert [len(rollout.transitions) for rollout in with_one_text(where, chats)] == [4] * 8


def test_a_rollout_that_got_the_champions_texts_keeps_them_at_another_gateway(
    where: str, pair: tuple[str, str], chats: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise StoreError("the store is away")

    with Store(where) as store:
        write_flag(store.engine, "writer", "percentage", 100)
    with monkeypatch.context() as patched:
        patched.setattr(Registry, "folder_of", away)
        asked(pair[0], "the first", **{"x-assay-rollout": "a talk"})
    asked(pair[1], "the second", **{"x-assay-rollout": "a talk"})
    (rollout,) = with_one_text(where, chats)
    assert (rollout.version, rollout.deployment, len(rollout.transitions)) == ("writer@1", None, 2)


def test_a_call_is_recorded_as_sent_where_another_gateway_ends_its_rollout_meanwhile(
    where: str, pair: tuple[str, str], chats: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(where) as store:
        write_flag(store.engine, "writer", "percentage", 100)
    name = {"x-assay-rollout": "a talk"}
    asked(pair[0], "the first", **name)
    catch_up, calls = Sharing.catch_up, list[Any]()

    async def ended_meanwhile(self: Sharing, call: Any, upstream: Any) -> None:
        calls.append(call)
        if len(calls) == 1:
            await asyncio.to_thread(asked, pair[1], "the last", **name, **{"x-assay-end": "1"})
            while call.rollout_id in self.rollouts.open:
                await asyncio.sleep(0.02)
        await catch_up(self, call, upstream)

    monkeypatch.setattr(Sharing, "catch_up", ended_meanwhile)
    asked(pair[0], "one more", **name)
    (rollout,) = with_one_text(where, chats)
    assert (rollout.version, len(rollout.transitions)) == ("writer@2", 3)
