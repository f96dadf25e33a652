"""Compiling the texts of an agent of any framework: search, gate, test, artifact, patch."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from calling_agents import chat, post

import assay
from assay.deployment.demands import demands_of_values
from assay.errors import ArtifactError, ConfigError
from assay.jobs.agents import apply_texts
from assay.optimizers.budget import calls_per_run
from assay.programs.foreign_agent import TextAgent
from assay.rubrics import Criterion, Rubric
from assay.sources.artifact_files import resealed
from assay.testing import scripted_lm
from assay.traces import Store
from rigs.projects import Said

SPLITS = ("train", "val", "gate", "test")
TASKS = [{"question": f"What is {n} + 1?", "answer": str(n + 1), "split": SPLITS[n % 4]} for n in range(160)]
OWN = "You are a calculator for {name}.\n\nAnswer with the number."
BETTER = "You are a calculator for {name}. Think step by step, then answer with the number."


def right(task: Any, prediction: Any, rollout: Any) -> float:
    return float(prediction.get("answer") == task.expected["answer"])


RUBRIC = Rubric("right", [Criterion(name="right", check=right)])


def careful(request: Any, proposal: str = BETTER) -> str:
    """A model that is right if its system text says so, else in a third of its answers; it proposes one text."""
    system, user = str(request.system), request.messages[-1].text or ""
    if "improved_text" in system:
        return f"[[ ## improved_text ## ]]\n{proposal}\n\n[[ ## why ## ]]\nSums go wrong.\n\n[[ ## completed ## ]]"
    if "edits" in system:
        own = user.partition("[[ ## text ## ]]\n")[2].partition("\n\n[[ ## failures")[0]
        edits = json.dumps([{"passage": own, "new": proposal, "why": "Sums go wrong."}])
        return f"[[ ## edits ## ]]\n{edits}\n\n[[ ## completed ## ]]"
    number = int(user.split()[2])
    draw = int.from_bytes(hashlib.sha256(user.encode()).digest()[:4], "big") / 2**32
    return str(number + (1 if "step by step" in system or draw < 0.33 else 2))


def compiled(agent: Any, text: Any = ("prompts/a.md",), *, script: Any = careful, **options: Any) -> Any:
    lm = options.pop("lm", None) or scripted_lm(script)
    settings = {"max_search_calls": 150, "threads": 2, **options}
    return assay.compile(agent=agent, text=text, rubric=RUBRIC, data=TASKS, lm=lm, **settings)


def rendered(task: dict[str, Any]) -> str:
    """An agent that fills in its template."""
    system = Path("prompts/a.md").read_text().format(name="Ann")
    return str(chat(task, ("system", system), ("user", task["inputs"]["question"]))["content"])


@pytest.fixture
def prompts(own_folder: Path) -> Path:
    Path("prompts").mkdir()
    place = Path("prompts/a.md")
    place.write_text(f"---\nname: a\n---\n\n{OWN}\n")
    return place


def test_a_text_is_improved_and_the_gain_is_shown_on_the_sealed_test(prompts: Path) -> None:
    before = prompts.read_bytes()
    report = compiled(rendered)
    assert report.replaces
    assert report.test["gain"]["low"] > 0
    winner = next(candidate for candidate in report.candidates if candidate["name"] == report.winner)
    assert winner["why"] == ["prompts/a.md: Sums go wrong."]
    assert prompts.read_bytes() == before
    new = (report.artifact / "texts/prompts/a.md").read_text()
    assert new.startswith(f"---\nname: a\n---\n\n{BETTER}")
    manifest = json.loads((report.artifact / "manifest.json").read_text())
    assert manifest["texts_before"] == {"prompts/a.md": hashlib.sha256(before).hexdigest()}
    assert report.patch == report.artifact / "changes.patch"
    assert f"new texts: git apply {report.patch}" in list(report.lines())


def test_the_record_has_the_text_that_was_sent(prompts: Path) -> None:
    report = compiled(rendered)
    with Store(None) as store:
        runs = [store.rollout(row.id) for row in store.rollouts(run_id=report.run_id, limit=None)]
    sent = {str(call.request["body"]["messages"][0]) for run in runs if run.phase == "test" for call in run.transitions}
    assert any("calculator for Ann.\\n\\nAnswer with the number.\\n" in text for text in sent)
    assert any("calculator for Ann. Think step by step, then" in text for text in sent)
    assert report.test["baseline"]["score"] < 0.6 < report.test["compiled"]["score"]
    examples = [call for run in runs for call in run.transitions if "<example>" in str(call.request)]
    assert all(call.shown_tasks for call in examples)  # so that exports know whose data a prompt shows
    assert examples


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_patch_of_a_compile_applies(prompts: Path) -> None:
    subprocess.run(["git", "init", "-q", "."], check=True)
    report = compiled(rendered)
    subprocess.run(["git", "apply", str(report.patch)], check=True)
    assert prompts.read_bytes() == (report.artifact / "texts/prompts/a.md").read_bytes()


def test_apply_writes_the_files_and_refuses_those_that_changed(prompts: Path) -> None:
    before, lm = prompts.read_text(), scripted_lm(careful)
    report = compiled(rendered, lm=lm, apply=True)
    assert report.applied == ["prompts/a.md"]
    assert prompts.read_bytes() == (report.artifact / "texts/prompts/a.md").read_bytes()
    assert Path("prompts/a.md.orig").read_text() == before
    prompts.write_text(before)

    def editing(task: dict[str, Any]) -> str:
        answer = rendered(task)
        prompts.write_text(before + "\nBy hand.\n")
        return answer

    report = compiled(editing, lm=lm, apply=True)
    assert not report.applied
    assert "prompts/a.md changed while this ran, so nothing was written" in report.failure
    assert prompts.read_text() == before + "\nBy hand.\n"
    assert report.patch.is_file()


def test_a_file_that_was_emptied_meanwhile_is_not_overwritten(prompts: Path) -> None:
    artifact = compiled(rendered).artifact
    prompts.write_text("")
    with pytest.raises(ConfigError, match="changed while this ran, so nothing was written"):
        apply_texts(artifact)
    assert prompts.read_text() == ""


def test_a_compiled_artifact_is_evaluated_with_its_texts(prompts: Path) -> None:
    report = compiled(rendered)
    lm = scripted_lm(careful)
    loaded = assay.load(report.artifact)
    assert loaded.texts[0]["text"] == OWN
    scored = assay.evaluate(report.artifact, rubric=RUBRIC, data=TASKS, lm=lm, size=10)
    assert scored.result["score"] == 1.0


def test_an_artifact_of_an_agent_is_refused_where_it_would_not_run_with_the_way_out(prompts: Path) -> None:
    artifact = compiled(rendered, max_search_calls=40).artifact
    with pytest.raises(ConfigError, match=r"an artifact of an agent, not of a program.*assay compile --agent"):
        assay.migrate(artifact, data="d.jsonl", model="openai/new")
    for job in (assay.evaluate, assay.collect):
        with pytest.raises(ConfigError, match="runs its agent by itself: leave out the agent"):
            job(artifact, agent=rendered, rubric=RUBRIC, data=TASKS, lm=scripted_lm(careful))


def test_an_agent_is_compared_with_its_compiled_texts(prompts: Path) -> None:
    lm = scripted_lm(careful)
    artifact = compiled(rendered, lm=lm).artifact
    report = assay.compare(artifact, agent=rendered, rubric=RUBRIC, data=TASKS, lm=lm, split="gate", threads=2)
    assert report.gain["low"] > 0
    assert [side["program"] for side in (report.a, report.b)] == ["test_compiled_texts:rendered", str(artifact)]
    for arguments, options, rule in (
        ((artifact,), {}, "b: is missing"),
        ((artifact, artifact), {"agent": rendered}, "b: must be left out"),
    ):
        with pytest.raises(ConfigError, match=rule):
            assay.compare(*arguments, **options, rubric=RUBRIC, data=TASKS, lm=lm)


def test_an_artifact_of_somebody_else_asks_for_trust_before_it_runs_a_command(prompts: Path) -> None:
    manifest = json.loads((compiled(rendered).artifact / "manifest.json").read_text())
    (reason,) = demands_of_values(manifest, {})
    assert "sets agent=" in reason


def test_a_text_that_is_erased_from_an_artifact_leaves_no_patch_with_it(prompts: Path) -> None:
    artifact = compiled(rendered).artifact
    text = artifact / "texts/prompts/a.md"
    text.write_text(text.read_text().replace("step by step", "[erased]"))
    with pytest.raises(ArtifactError, match=r"texts/prompts/a.md was changed"):
        assay.load(artifact)
    resealed(artifact, {})
    assay.load(artifact, trust=True)
    assert not (artifact / "changes.patch").exists()


def test_nothing_is_paid_again_by_resume(prompts: Path) -> None:
    lm, uninterrupted = scripted_lm(careful), scripted_lm(careful)
    runs: list[str] = []

    def agent(task: dict[str, Any]) -> str:
        runs.append(task["rollout"])
        if len(runs) == 60:
            raise ConfigError("a setting of the agent is wrong")  # which ends a job at once
        return rendered(task)

    with pytest.raises(ConfigError, match="a setting of the agent is wrong"):
        compiled(agent, lm=lm)
    assert lm.scripted.calls > 40
    report = compiled(agent, lm=lm, resume=True)
    assert report.replaces
    assert report.calls == lm.scripted.calls
    compiled(agent, lm=uninterrupted, store=prompts.parent / "other.db")
    assert lm.scripted.calls == uninterrupted.scripted.calls
    done = compiled(agent, lm=lm, resume=True)
    assert (lm.scripted.calls, done.gate) == (report.calls, report.gate)


def test_a_lost_placeholder_is_rejected_and_counted(prompts: Path) -> None:
    report = compiled(rendered, script=lambda request: careful(request, "Think step by step and answer."))
    assert not any(candidate["instructions"] for candidate in report.candidates[1:])
    assert any("placeholder" in note for note in report.notes)


def test_a_text_in_no_request_is_an_error_that_names_it(prompts: Path) -> None:
    Path("prompts/b.md").write_text("Never sent to any model.")
    with pytest.raises(ConfigError, match=r"'prompts/b.md' is in no request of the agent's first 8 tasks"):
        compiled(rendered, ("prompts/a.md", "prompts/b.md"))


def test_the_description_of_a_tool_is_a_text(own_folder: Path) -> None:
    tool = {"name": "add", "description": "Adds two numbers.", "parameters": {"type": "object", "properties": {}}}
    Path("tools.json").write_text(json.dumps([tool], indent=2))

    def script(request: Any) -> str:
        if not request.tools:
            return careful(request, "Adds numbers, step by step.")
        return careful(type("Request", (), {"system": request.tools[0].description, "messages": request.messages}))

    def agent(task: dict[str, Any]) -> str:
        tools = [{"type": "function", "function": function} for function in json.loads(Path("tools.json").read_text())]
        messages = [{"role": "user", "content": task["inputs"]["question"]}]
        answer = post(task, "/chat/completions", {"messages": messages, "tools": tools})
        return str(answer["choices"][0]["message"]["content"])

    report = compiled(agent, ["tools.json#/0/description"], script=script)
    assert report.replaces
    new = json.loads((report.artifact / "texts/tools.json").read_text())
    assert new == [{**tool, "description": "Adds numbers, step by step."}]


def test_settings_that_do_not_fit_an_agent_are_refused(prompts: Path) -> None:
    for options, rule in (
        ({"text": ()}, "text: is missing"),
        ({"prompt_format": "json"}, "prompt_format: would have no effect"),
        ({"optimizer": "knn"}, "knn cannot be used for the texts of an agent"),
    ):
        with pytest.raises(ConfigError, match=rule):
            compiled(rendered, **options)
    for options in ({"text": ["prompts/a.md"]}, {"apply": True}):
        with pytest.raises(ConfigError, match="would have no effect without"):
            assay.compile("math_qa", rubric=RUBRIC, data=TASKS, **options)


CLIENT = """
import json, os, sys, urllib.request
from pathlib import Path

def ask(system, task):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": task["inputs"]["question"]}]
    data = json.dumps({"messages": messages, "model": task["model"]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + task["api_key"]}
    request = urllib.request.Request(task["base_url"] + "/chat/completions", data=data, headers=headers)
    print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])

task = json.load(sys.stdin)
"""
SOME = {"max_search_calls": 60, "sizes": {"train": 8, "val": 8, "gate": 12, "test": 12}}


def test_a_command_reads_new_texts_in_a_copy_of_its_folder(prompts: Path) -> None:
    reading = "text = (Path(__file__).resolve().parent / 'prompts/a.md').read_text()\n"
    Path("agent.py").write_text(CLIENT + reading + "ask(text.upper(), task)")
    before = prompts.read_bytes()
    with pytest.raises(ConfigError, match="is in no request of the agent's first 8 tasks"):
        compiled(f"{sys.executable} agent.py", **SOME)
    Path("tools.json").write_text('{"description": "Adds."}')
    with pytest.raises(ConfigError, match="A value of a JSON or YAML file is named FILE#/json/pointer"):
        compiled(f"{sys.executable} agent.py", ["tools.json"], **SOME)
    Path("agent.py").write_text(CLIENT + reading + "ask(text, task)")
    report = compiled(f"{sys.executable} agent.py", delivery="copy", **SOME)
    assert report.replaces
    assert prompts.read_bytes() == before


def test_an_agent_reads_new_texts_from_its_task(prompts: Path) -> None:
    def agent(task: dict[str, Any]) -> str:
        text = task["texts"]["prompts/a.md"]
        return str(chat(task, ("system", text), ("user", task["inputs"]["question"]))["content"])

    assert compiled(agent, delivery="task").replaces
    with pytest.raises(ConfigError, match=r"reads the text from task\['texts'\]"):
        compiled(rendered, delivery="task")
    Path("agent.py").write_text(CLIENT + "ask(json.load(open(os.environ['ASSAY_TEXTS']))['prompts/a.md'], task)")
    assert compiled(f"{sys.executable} agent.py", delivery="task", **SOME).replaces


@pytest.mark.parametrize("delivery", ["copy", "task"])
def test_of_texts_that_an_agent_reads_itself_the_one_that_does_not_arrive_is_named(
    delivery: str, prompts: Path
) -> None:
    Path("prompts/b.md").write_text("Never sent to any model.")
    texts = "{'prompts/a.md': open('prompts/a.md').read()}"
    texts = texts if delivery == "copy" else "json.load(open(os.environ['ASSAY_TEXTS']))"
    Path("agent.py").write_text(CLIENT + f"ask({texts}['prompts/a.md'], task)")
    with pytest.raises(ConfigError, match=r"'prompts/b.md' is in no request of the agent's first 8 tasks"):
        compiled(f"{sys.executable} agent.py", ("prompts/a.md", "prompts/b.md"), delivery=delivery, **SOME)


def test_a_text_in_several_places_of_a_request_is_told(prompts: Path) -> None:
    def agent(task: dict[str, Any]) -> str:
        system, question = Path("prompts/a.md").read_text(), task["inputs"]["question"]
        return str(chat(task, ("system", system), ("user", f"You were told: {system}"), ("user", question))["content"])

    said = Said()
    compiled(agent, max_search_calls=20, progress=said)
    assert any("prompts/a.md is in 2 places of one request (roles: system, user)" in line for line in said.lines)


def test_two_texts_are_improved_where_they_fail(prompts: Path) -> None:
    """Of a planner and a solver the solver's text is at fault: the planner's requests are in no failed run."""
    Path("prompts/b.md").write_text("You plan the work of others.")

    def agent(task: dict[str, Any]) -> str:
        question = task["inputs"]["question"]
        if int(question.split()[2]) % 8 < 4:
            chat(task, ("system", Path("prompts/b.md").read_text()), ("user", question))
            return str(int(question.split()[2]) + 1)
        return rendered(task)

    report = compiled(agent, ("prompts/a.md", "prompts/b.md"))
    assert report.replaces
    assert [path.name for path in (report.artifact / "texts/prompts").iterdir()] == ["a.md"]
    edited = {name for candidate in report.candidates[1:] for name in candidate["instructions"]}
    assert edited == {"prompts/a.md"}


@pytest.mark.parametrize(
    ("answer", "rule"),
    [(json.dumps({"new_instruction": "Think step by step."}), "placeholder"), ("I would rather not.", "unreadable")],
)
def test_proposals_of_gepa_that_are_not_taken_are_counted(answer: str, rule: str, prompts: Path) -> None:
    def script(request: Any) -> str:
        return answer if "new_instruction" in (request.messages[-1].text or "") else careful(request)

    report = compiled(rendered, script=script, optimizer="gepa", max_search_calls=120)
    assert not report.replaces
    assert any(re.fullmatch(rf"(\d+) of \1 proposed instructions were rejected: \1 {rule}", n) for n in report.notes)


def test_texts_of_an_agent_are_not_counted_as_calls() -> None:
    texts = [{"name": name, "text": f"You answer. {name}", "is_value": False} for name in ("a.md", "b.md", "c.md")]
    assert calls_per_run(TextAgent("agent.py:solve", texts)) == 1


def test_gepa_improves_a_text_by_name(prompts: Path) -> None:
    def script(request: Any) -> str:
        user = request.messages[-1].text or ""
        return json.dumps({"new_instruction": BETTER}) if "new_instruction" in user else careful(request)

    report = compiled(rendered, script=script, optimizer="gepa", max_search_calls=120)
    assert report.replaces
    assert (report.artifact / "texts/prompts/a.md").read_text().endswith(f"{BETTER}\n")


def test_a_file_with_a_name_that_programs_use_is_given_by_its_path(prompts: Path) -> None:
    Path("texts").write_text(OWN)
    with pytest.raises(ConfigError, match=r"Give it as \./texts"):
        assay.compile(agent=rendered, text=["texts"], rubric=RUBRIC, data=TASKS, lm=scripted_lm(careful))
    assert compiled(rendered, text=["./texts"], max_search_calls=40).artifact
