"""`assay tune --curriculum`: a study for each stage, and a comparison on the whole val."""

import json
import re
from pathlib import Path
from typing import Any

import optuna
import pytest

import assay
from assay.commands.tune import Tune
from assay.errors import ConfigError
from assay.testing import scripted_lm
from assay.traces import Store

PROGRAM = "p.py:P"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.py").write_text(
        "import dspy\n\nclass P(dspy.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.ask = dspy.Predict('question -> answer')\n\n"
        "    def forward(self, question):\n        return self.ask(question=question)\n"
    )
    rows = [
        {
            "inputs": {"question": f"{level}: {at}"},
            "expected": {"answer": "yes"},
            "metadata": {"level": level},
            "split": ("train", "val", "gate", "test")[at % 4],
        }
        for level in (1, 2, 3)
        for at in range(40)
    ]
    Path("d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    stages = "".join(f"  - {{name: level{level}, where: {{level: {level}}}}}\n" for level in (1, 2, 3))
    Path("cur.yaml").write_text(f"stages:\n{stages}")


def tune(*solved: int, **options: Any) -> Any:
    """Tunes the temperature of a program whose model solves these levels, level 2 only at low temperatures."""

    def script(request: Any) -> str:
        level = int(re.findall(r"(\d): \d+", str(request.messages[-1].text))[-1])
        cold = level != 2 or request.config.temperature < 0.6
        return json.dumps({"answer": "yes" if level in solved and cold else "no"})

    return assay.tune(
        PROGRAM, rubric="r.yaml", data="d.jsonl", curriculum="cur.yaml", lm=scripted_lm(script), prompt_format="json",
        preflight=False, **{"store": "s.db", "trials": 12, "seed": 1, **options},
    )  # fmt: skip


@pytest.mark.slow
def test_a_stage_ends_at_the_first_trial_that_passes_it_and_val_decides_at_the_end() -> None:
    report = tune(1, 2)
    data = report.to_dict()
    stages = {row["name"]: row for row in data["curriculum"]["stages"]}
    assert [row["status"] for row in stages.values()] == ["passed", "passed", "not passed"]
    events = {event["stage"]: event for event in data["curriculum"]["events"]}
    assert events["level1"]["step"] == 1  # the default passes it
    assert events["level3"]["step"] == 12  # the trials that were left
    assert report.best["temperature"] < 0.6
    assert data["trials"] == 14  # of the stages, then the default and the best of level 2 on all val tasks
    assert len(data["history"]) == 2
    assert "stage 'level3' was not passed" in " ".join(data["notes"])
    names = {summary.study_name for summary in optuna.get_all_study_summaries("sqlite:///studies.db")}
    assert len(names) == 4
    with Store("s.db") as store:
        searched = [r for r in store.rollouts() if r.phase == "search"]
    assert {r.split for r in searched} == {"val"}
    runs_of_stages = sum(event["step"] for event in events.values() if event["stage"] == "level1") * 10
    assert sum(r.metadata["level"] == 1 for r in searched) == runs_of_stages + 2 * 10


@pytest.mark.slow
def test_a_limit_in_trials_moves_on_without_promotion() -> None:
    Path("cur.yaml").write_text(Path("cur.yaml").read_text().replace("stages:", "max_share: 0.25\nstages:"))
    data = tune(2, 3).to_dict()
    assert [row["status"] for row in data["curriculum"]["stages"]] == ["not passed", "passed", "passed"]
    assert data["curriculum"]["events"][1]["kind"] == "limit"
    assert data["curriculum"]["events"][1]["step"] == 3


@pytest.mark.slow
def test_a_resumed_search_ends_with_the_same_result() -> None:
    sizes = {"gate": 2, "test": 2}
    whole = tune(1, 2, sizes=sizes).to_dict()
    stopped = tune(1, 2, sizes=sizes, store="t/s.db", max_calls=70)
    assert stopped.stopped
    assert stopped.curriculum is not None
    assert stopped.curriculum["stage"] == "level3"
    resumed = tune(1, 2, sizes=sizes, store="t/s.db", resume=True).to_dict()
    assert resumed["stopped"] is None
    assert {**resumed["curriculum"], "path": ""} == {**whole["curriculum"], "path": ""}
    assert resumed["best"] == whole["best"]
    for path in ("s.db", "t/s.db"):  # a trial overwrites the records of no other study's trial of that number
        with Store(path) as store:
            assert sum(r.phase == "search" for r in store.rollouts()) == 12 * 10 + 2 * 30


@pytest.mark.parametrize(
    ("name", "value"),
    [("method", "policy"), ("workers", 2), ("study", "mine"), ("objectives", ("score", "tokens"))],
)
def test_settings_that_do_not_go_with_a_curriculum_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}: cannot be used with a curriculum") as caught:
        Tune(program="p", rubric="r", data="d", curriculum="c", **{name: value})
    assert caught.value.field == name
