"""Calls of a compiled program record the tasks that its demonstrations show, whichever way it runs."""

import json
import threading
from pathlib import Path
from typing import Any

import dspy
import pytest
from aiohttp import web

import assay
from assay.commands.advancing import replay
from assay.datasets.splits import split_of
from assay.datasets.tasks import task_key
from assay.deployment import save_artifact
from assay.deployment.deployments import Deployments
from assay.deployment.plan import Metric, Plan, Step
from assay.programs import load_program
from assay.rubrics import Criterion, Rubric
from assay.testing import scripted_lm
from assay.traces import Recorder, Rollout, Store
from assay.traces.export.settings import Gates, Selection
from assay.traces.store.sealing import DEFAULT_SALT
from rigs.serving import chat_completion, served

RUBRIC = Rubric("any", [Criterion(name="any", weight=1, check=lambda task, prediction, rollout: True)])
PLAN = Plan(steps=(Step(shadow=True, requests=2), Step(weight=50, decides=True)), metrics=(Metric(success_gain=0.1),))
PROGRAM = """
import threading
import dspy

class One(dspy.Module):
    def __init__(self):
        super().__init__()
        self.ask = dspy.Predict("question -> answer")

    def forward(self, question):
        if "thread" not in question:
            return self.ask(question=question)
        answers = []
        lm = dspy.settings.lm
        def work():
            with dspy.context(lm=lm):
                answers.append(self.ask(question=question))
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return answers[0]
"""


def question(at: int) -> str:
    return f"Where does customer {at} of the shop live?"


def task(at: int) -> str:
    return task_key({"question": question(at)})


def learnable(text: str) -> str:
    """The text with a number, such that its task is in the train split of a store with the default salt."""
    texts = (f"{text} {at}" for at in range(100))
    return next(text for text in texts if split_of(task_key({"question": text}), DEFAULT_SALT)[0] == "train")


async def _answer(request: web.Request) -> web.Response:
    body = await request.json()
    asked = str(body["messages"][-1])
    right = len(body["messages"]) > 2 or any(f"customer {at} " in asked for at in (1, 2, 4, 5, 7))
    return chat_completion(body["model"], json.dumps({"answer": "7" if right else "8"}))


def model() -> web.Application:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", _answer)
    return app


def compiled(folder: Path, address: str) -> Path:
    """An artifact that demonstrates tasks of the tenants north (even numbers) and south."""
    (folder / "p.py").write_text(PROGRAM)
    rows = [
        {
            "inputs": {"question": question(at)}, "expected": {"answer": "7"},
            "split": "train" if at < 8 else "val" if at < 12 else "gate" if at < 14 else "test",
            "metadata": {"tenant": ("north", "south")[at % 2]},
        }
        for at in range(16)
    ]  # fmt: skip
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: 'assay.rubrics.checks:exact'}\n")
    made = assay.compile(
        "p.py:One", rubric="r.yaml", data="d.jsonl", optimizer="labeled", model="openai/m", api_base=f"{address}/v1",
        out="two", preflight=False, gate=False, prompt_format="json",
    )  # fmt: skip
    assert made.artifact is not None
    return made.artifact


def plain(folder: Path, address: str) -> Path:
    name = f"{folder}/p.py:One"
    settings = {"adapter": "json", "parameters": {}}
    manifest = {"program": name, "model": "openai/m", "api_base": f"{address}/v1", "settings": settings}
    return save_artifact(folder / "one", load_program(name), manifest, splits={}, report="")


@pytest.mark.slow
def test_every_way_to_run_a_version_records_the_tasks_of_its_demonstrations(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with served(model()) as address:
        artifact = compiled(own_folder, address)
        tasks = set(json.loads((artifact / "manifest.json").read_text())["shown"]["tasks"])
        assert tasks
        assert tasks <= {task(at) for at in range(8)}
        with Store() as store:
            deployments = Deployments(store.engine)
            deployments.registry.register("support", plain(own_folder, address))
            deployments.registry.register("support", artifact)
            deployments.registry.set_alias("support@1", "champion")
            champion, candidate = (assay.deployed(name, rubric=RUBRIC) for name in ("support", "support@2"))
            for at in range(2):
                champion(question=learnable(f"Question {at} of production?"), tenant="north")
            candidate(question=learnable("Another question of production?"), tenant="north")
            candidate(question=learnable("A question of production in a thread?"), tenant="north")
            calling = threading.Thread(target=candidate, kwargs={"question": learnable("As the gateway calls it?")})
            calling.start()
            calling.join()
            candidate.store.flush()
            started = deployments.start("support@2", PLAN)
            assert replay(deployments, started, rubric=RUBRIC, store=None) == 2
            assay.run(artifact, {"question": "As assay run does it?"})
            program = assay.load(artifact)
            lm = assay.get_lm("openai/m", api_base=f"{address}/v1")
            with dspy.context(lm=lm), assay.record({"question": "In the user's own code?"}):
                program(question="In the user's own code?")
            candidate.store.flush()
            rollouts = [store.rollout(row.id) for row in store.rollouts()]
        tasks_by_call: dict[str, set[frozenset[str]]] = {}
        for rollout in rollouts:
            if rollout.phase in ("deployed", "shadow", "run", "record"):
                key = f"{rollout.phase} {rollout.version or ''}".strip()
                tasks_by_call.setdefault(key, set()).update(frozenset(call.shown_tasks) for call in rollout.transitions)
        every = {frozenset(tasks)}
        assert tasks_by_call == {
            "deployed support@1": {frozenset()}, "deployed support@2": every, "shadow support@2": every, "run": every,
            "record": every,
        }  # fmt: skip
        production = tuple(rollout.id for rollout in rollouts if rollout.phase == "deployed")
        assert exported(production, "north") == 2  # those of the candidate show tasks of the tenant south
        assert exported(production, "north", "south") == 5


def exported(rollouts: tuple[str, ...], *tenants: str) -> int:
    """Number of rollouts in an export for these tenants."""
    report = assay.export(
        "transitions", f"out-{len(tenants)}", privacy="off",
        gates=Gates(min_transitions=0, min_clean=0.0, min_task_types=0),
        selection=Selection(tenants=tenants, rollouts=rollouts),
    )  # fmt: skip
    rows = [json.loads(line) for line in (report.path / "data.jsonl").read_text().splitlines()]
    return len({row["rollout"] for row in rows})


def test_a_program_that_is_loaded_again_names_its_demonstrations_and_its_copies_do_too(own_folder: Path) -> None:
    (own_folder / "p.py").write_text(PROGRAM)
    name = f"{own_folder}/p.py:One"
    program = load_program(name)
    program.ask.demos = [dspy.Example(question=question(1), answer="7")]
    manifest: dict[str, Any] = {
        "program": name, "model": "openai/m", "settings": {"adapter": "json", "parameters": {}},
        "shown": {"tasks": [task(1)], "by_demo": [[task(1)]]},
    }  # fmt: skip
    artifact = save_artifact(own_folder / "two", program, manifest, splits={}, report="")
    recorder, loaded = Recorder(), assay.load(artifact)
    for at, runs in enumerate((loaded, loaded.deepcopy())):
        rollout = Rollout(inputs={"question": f"Number {at}?"})
        lm = scripted_lm(lambda _: '{"answer": "7"}', observers=[recorder.observe])
        with dspy.context(lm=lm), recorder.active(), recorder.rollout(rollout):
            runs(question=f"Number {at}?")
        assert rollout.transitions[0].shown_tasks == (task(1),)
    own = Rollout(inputs={"question": question(1)})
    with dspy.context(lm=lm), recorder.active(), recorder.rollout(own):
        loaded(question=question(1))
    assert own.transitions[0].shown_tasks == ()  # a call's own task is not one of another
