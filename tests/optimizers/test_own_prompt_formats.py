"""Programs that set their own adapter: compared by the prompts that were sent, and their format is not varied."""

import json
from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.deployment import load_artifact
from assay.testing import scripted_lm
from assay.traces import Store
from assay.traces.messages.final_answer import sent_formats

RUBRIC = "name: r\ncriteria:\n- {name: right, check: 'assay.rubrics.checks:exact'}\n"
HEAD = "import dspy\n\nclass P(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"
IN_FORWARD = (
    "        self.ask = dspy.Predict('question -> answer')\n\n"
    "    def forward(self, question):\n        with dspy.context(adapter=dspy.{0}()):\n"
    "            return self.ask(question=question)\n"
)
PREDICTOR = (
    "        self.ask = Ask('question -> answer')\n\n"
    "    def forward(self, question):\n        return self.ask(question=question)\n\n\n"
    "class Ask(dspy.Predict):\n    def forward(self, **inputs):\n"
    "        with dspy.context(adapter=dspy.{0}()):\n            return super().forward(**inputs)\n"
)
OWN = {"XMLAdapter": "xml", "JSONAdapter": "json", "ChatAdapter": "chat"}


def answers(request: Any) -> str:
    """Seven, in the format that is asked for; right for half of the questions."""
    system = str(request.system)
    if "Reply with: " in system:
        return "answer: 7"
    if "JSON object" in system:
        return '{"answer": "7"}'
    return "[[ ## answer ## ]]\n7\n\n[[ ## completed ## ]]" if "[[ ## " in system else "<answer>\n7\n</answer>"


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"How far is place {at}?", "answer": "78"[at % 2]} for at in range(80)]
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("r.yaml").write_text(RUBRIC)
    return {
        "rubric": "r.yaml", "data": "d.jsonl", "lm": scripted_lm(answers), "store": "s.db",
        "sizes": {"train": 10, "val": 10, "gate": 4, "test": 4},
    }  # fmt: skip


def sent(store: str) -> set[str]:
    """Formats of the calls of the program, without those that propose instructions."""
    with Store(store) as opened:
        runs = [opened.rollout(row.id) for row in opened.rollouts()]
    return set(sent_formats([call for run in runs if set(run.inputs) == {"question"} for call in run.transitions]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("adapter", "code"), [("XMLAdapter", IN_FORWARD), ("JSONAdapter", PREDICTOR), ("ChatAdapter", IN_FORWARD)]
)
def test_a_format_that_the_program_sets_is_not_varied_and_is_in_the_manifest(
    options: dict[str, Any], adapter: str, code: str
) -> None:
    Path("p.py").write_text(HEAD + code.format(adapter))
    report = assay.compile("p.py:P", out="a", max_search_calls=60, **options)
    assert sent("s.db") == {OWN[adapter]}
    manifest = json.loads(Path("a/manifest.json").read_text())
    assert (manifest["prompt_format"], manifest["settings"]["adapter"]) == (OWN[adapter], None)
    assert any("prompt formats were not varied" in note for note in report.to_dict()["notes"])


@pytest.mark.parametrize("preflight", [True, False])
def test_a_prompt_format_without_effect_is_named(options: dict[str, Any], preflight: bool) -> None:
    Path("p.py").write_text(HEAD + IN_FORWARD.format("XMLAdapter"))
    jobs = ((assay.evaluate, {}), (assay.compile, {"optimizer": "labeled"}), (assay.collect, {"n": 1}))
    for job, more in jobs if preflight else jobs[:2]:
        report = job("p.py:P", prompt_format="lean", preflight=preflight, **more, **options)
        named = [note for note in report.to_dict()["notes"] if "'lean'" in note and "'xml'" in note]
        assert len(named) == 1, job
        right = job("p.py:P", prompt_format="xml", preflight=preflight, **more, **{**options, "store": "other.db"})
        assert not [note for note in right.to_dict()["notes"] if "'xml'" in note]


def test_an_artifact_keeps_its_format_under_another_default(options: dict[str, Any]) -> None:
    Path("p.py").write_text(HEAD + IN_FORWARD.format("ChatAdapter").replace("adapter=dspy.ChatAdapter()", ""))
    assay.compile("p.py:P", out="a", optimizer="labeled", gate=False, **options)
    seen: list[str] = []

    def script(request: Any) -> str:
        seen.append(str(request.system))
        return answers(request)

    program = load_artifact(Path("a")).runnable()
    with dspy.context(lm=scripted_lm(script), adapter=dspy.XMLAdapter(use_native_function_calling=True)):
        load_artifact(Path("a")).runnable()(question="How far?")
        program(question="How far?")
    assert ["[[ ## answer ## ]]" in system for system in seen] == [True, False]
    with dspy.context(adapter=dspy.XMLAdapter()):
        assay.compile("p.py:P", out="x", optimizer="labeled", gate=False, **options)
    with dspy.context(lm=scripted_lm(script)):
        load_artifact(Path("x")).runnable()(question="How far?")
    assert "<answer>" in seen[-1]
