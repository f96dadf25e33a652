"""Compiled texts of an agent in production: it runs unchanged, and each rollout gets the texts of its version."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import assay
from assay.deployment import save_artifact
from assay.deployment.deployments import Deployments
from assay.deployment.plan import Metric, Plan, Step
from assay.errors import DeploymentError
from assay.programs.foreign_agent import TextAgent
from assay.traces import Store
from rigs.command_line import assay_command, while_serving
from rigs.serving import ChatServer, post

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
