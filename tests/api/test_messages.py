"""Error messages: misspelt keywords, missing data, programs and artifacts, empty comparisons."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import assay
from assay.cli.main import group
from assay.errors import ConfigError, DataError, ProgramError, RubricError
from assay.evaluation import SilentProgress
from assay.testing import scripted_lm
from rigs.command_line import assay_command

PROGRAM = """import dspy


class Triage(dspy.Module):
    def __init__(self):
        super().__init__()
        self.read = dspy.Predict("text -> intent")

    def forward(self, text):
        return self.read(text=text)
"""
ROWS = [{"text": f"Page {n} crashes", "intent": "bug" if n % 2 else "sales"} for n in range(60)]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "triage.py").write_text(PROGRAM)
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    return tmp_path


def lm() -> Any:
    return scripted_lm(lambda request: json.dumps({"intent": "bug"}))


@pytest.mark.parametrize(
    ("command", "model", "message"),
    [
        ("evaluate", "openai/down", r"127\.0\.0\.1:9: .*: no server listens there\. Start it, or .* \(--api-base\)"),
        ("run", "ollama/down", r"127\.0\.0\.1:9: .*: no server listens there\. Start it \(ollama serve\), or"),
        ("evaluate", "Qwen/Qwen3-4B", r"names no provider: write openai/Qwen/Qwen3-4B for an .* at --api-base"),
        ("run", "opnai/m", r"names no provider: .*Did you mean 'openai/m'\?"),
    ],
)
@pytest.mark.slow
def test_a_model_that_cannot_answer_is_named_with_the_way_out(
    place: Path, command: str, model: str, message: str
) -> None:
    (place / "d.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    more = ["text=x"] if command == "run" else ["--rubric", "r.yaml", "--data", "d.jsonl"]
    done = assay_command(command, "triage.py", *more, "--model", model, "--api-base", "http://127.0.0.1:9")
    text = " ".join(done.stderr.split())
    assert re.search(message, text), text
    assert "litellm." not in text


def test_empty_data_is_reported(place: Path) -> None:
    with pytest.raises(DataError, match=r"^data is empty: pass at least one row"):
        assay.evaluate("triage.py:Triage", rubric="r.yaml", data=[], lm=lm())


def test_library_errors_name_arguments_and_the_command_line_names_flags(place: Path) -> None:
    rows = [{"mail": row["text"], "intent": row["intent"]} for row in ROWS]
    with pytest.raises(DataError, match=r"Rename columns: rename=\{'COLUMN': 'NAME'\}") as caught:
        assay.evaluate("triage.py:Triage", rubric="r.yaml", data=rows, lm=lm())
    assert "--" not in str(caught.value)
    (place / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = assay_command("evaluate", "triage.py", "--rubric", "r.yaml", "--data", "data.jsonl")
    assert ended.code == 2
    assert "Rename columns: --rename COLUMN=NAME" in ended.stderr
    assert "rename=" not in ended.stderr


def test_missing_artifact_is_reported(place: Path) -> None:
    (place / "made" / "triage-auto").mkdir(parents=True)
    with pytest.raises(ProgramError, match=r"no such file or folder\. Did you mean 'made/triage-auto'"):
        assay.evaluate("made/triage-autos", rubric="r.yaml", data=ROWS, lm=lm())
    with pytest.raises(ProgramError, match=r"'made/triage-auto' is not an artifact: it has no manifest\.json"):
        assay.evaluate("made/triage-auto", rubric="r.yaml", data=ROWS, lm=lm())
    (place / ".assay" / "artifacts" / "triage-auto").mkdir(parents=True)
    with pytest.raises(ProgramError, match=r"unknown program .*Did you mean '\.assay/artifacts/triage-auto'"):
        assay.evaluate("triage-auto", rubric="r.yaml", data=ROWS, lm=lm())
    (place / "compiled").mkdir()
    with pytest.raises(ProgramError, match=r"Did you mean 'compiled'"):
        assay.evaluate("complied", rubric="r.yaml", data=ROWS, lm=lm())


def test_file_with_one_program_needs_no_class_name(place: Path) -> None:
    assert len(assay.evaluate("triage.py", rubric="r.yaml", data=ROWS, lm=lm()).evaluation) > 0
    artifact = assay.compile(
        "triage.py", rubric="r.yaml", data=ROWS, lm=lm(), optimizer="labeled", max_search_calls=30
    ).artifact
    assert json.loads((artifact / "manifest.json").read_text())["program"] == "triage.py:Triage"
    (place / "base.py").write_text(PROGRAM + "\n\nclass Better(Triage):\n    pass\n")
    assay.evaluate("base.py", rubric="r.yaml", data=ROWS, lm=lm())  # a base class is not a candidate
    (place / "two.py").write_text(
        PROGRAM + "\n\nclass Agent:\n    def execute(self, task): ...\n    def set_parameters(self, given): ...\n"
    )
    with pytest.raises(ProgramError, match=r"two\.py has several programs; pass one of two\.py:Triage, two\.py:Agent"):
        assay.evaluate("two.py", rubric="r.yaml", data=ROWS, lm=lm())
    (place / "none.py").write_text("x = 1\n")
    with pytest.raises(ProgramError, match=r"none\.py has no class or instance"):
        assay.evaluate("none.py", rubric="r.yaml", data=ROWS, lm=lm())
    with pytest.raises(ProgramError, match=r"no such file: gone\.py"):
        assay.evaluate("gone.py", rubric="r.yaml", data=ROWS, lm=lm())


def test_file_with_one_instance_needs_no_name(place: Path) -> None:
    (place / "single.py").write_text('import dspy\n\nagent = dspy.Predict("text -> intent")\n')
    assert assay.evaluate("single.py", rubric="r.yaml", data=ROWS, lm=lm()).to_dict()["result"]["failed"] == 0
    (place / "pair.py").write_text(
        "import dspy\n\na, b = dspy.Predict('text -> intent'), dspy.Predict('text -> intent')\n"
    )
    with pytest.raises(ProgramError, match=r"pair\.py:a, pair\.py:b"):
        assay.evaluate("pair.py", rubric="r.yaml", data=ROWS, lm=lm())


def test_metric_file_without_a_name_is_told_from_an_unknown_rubric(place: Path) -> None:
    (place / "metrics.py").write_text("def right(example, prediction, trace=None):\n    return True\n")
    with pytest.raises(RubricError, match=r"metrics\.py:NAME"):
        assay.evaluate("triage.py", rubric="metrics.py", data=ROWS, lm=lm())
    with pytest.raises(RubricError, match=r"no such file: gone\.py"):
        assay.evaluate("triage.py", rubric="gone.py", data=ROWS, lm=lm())


def test_comparing_a_program_with_itself_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(
        ConfigError, match=r"a and b are both triage\.py, with the same model: there is nothing to compare"
    ):
        assay.compare("triage.py", "triage.py", rubric="r.yaml", data=ROWS, lm=lm())
    report = assay.compile("triage.py", rubric="r.yaml", data=ROWS, lm=lm(), optimizer="labeled")
    assert report.winner == "baseline"
    output = "\n".join(map(str, report.lines()))
    assert "The sealed test was not opened" in output
    assert "compiled" not in output.partition("winner:")[0]
    assert "gain:" not in output
    assert "The sealed test was not opened" in (report.artifact / "report.md").read_text()


def test_both_sides_of_a_comparison_are_loaded_before_one_is_evaluated(place: Path) -> None:
    model = lm()
    with pytest.raises(ProgramError, match=r"triage\.py has no 'Gone'"):
        assay.compare("triage.py", "triage.py:Gone", rubric="r.yaml", data=ROWS, lm=model)
    assert not model.history


def test_task_types_are_named_in_tables(place: Path) -> None:
    (place / "data.jsonl").write_text(
        "".join(json.dumps({**row, **({"task_type": "hard"} if n % 3 else {})}) + "\n" for n, row in enumerate(ROWS))
    )
    (place / "fixed.py").write_text("def answer(text):\n    return {'intent': 'bug'}\n")
    command = ["evaluate", "fixed.py:answer", "--rubric", "r.yaml", "--data", "data.jsonl"]
    output = CliRunner().invoke(group, command).output
    assert "tasks of type hard" in output
    assert "tasks without a type" in output
    (place / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert "type" not in CliRunner().invoke(group, command).output


@pytest.mark.slow
def test_first_trial_uses_defaults_and_ties_are_reported_as_equal(place: Path) -> None:
    def tuned(**options: Any) -> dict[str, Any]:
        model = scripted_lm(lambda request: json.dumps({"intent": "bug"}))
        model.kwargs.update(options)
        store = place / f"{len(options)}" / "a.db"
        result: dict[str, Any] = assay.tune(
            "triage.py", rubric="r.yaml", data=ROWS, lm=model, trials=3, store=store, prompt_format="json"
        ).to_dict()
        return result

    data = tuned()
    assert data["history"][0]["parameters"] == {"temperature": 0.7}
    assert data["best"] == {"temperature": 0.7}  # of level trials
    assert data["level_with_best"] == [1, 2]
    assert tuned(temperature=0.3)["history"][0]["parameters"] == {"temperature": 0.3}


def test_unchanged_default_is_not_compared_with_itself(place: Path) -> None:
    data = assay.tune(
        "triage.py", rubric="r.yaml", data=ROWS, lm=lm(), trials=2, prompt_format="json", store=place / "a.db"
    ).to_dict()
    assert data["best"] == data["history"][0]["parameters"] == {"temperature": 0.7}
    assert (
        data["gate"] is None
    )  # the default of the first trial and the one that gate and test compare with are the same
    assert "no point was better on val than the default; it stays" in data["notes"]
    assert any("set no temperature: the default is 0.7" in note for note in data["notes"])
    page = (Path(data["artifact"]) / "report.md").read_text()
    assert "{" not in page
    assert "The sealed test was not opened" in page
    with assay.Store(place / "a.db") as store:
        assert not [rollout for rollout in store.rollouts() if rollout.split == "test"]


def test_model_default_temperature_out_of_agent_range_is_kept(place: Path) -> None:
    model = lm()
    model.kwargs["temperature"] = 0.0
    data = assay.tune("triage.py", rubric="r.yaml", data=ROWS, lm=model, trials=1, prompt_format="json").to_dict()
    assert data["history"][0]["parameters"] == {"temperature": 0.1}
    assert any(
        "the model's temperature 0 is outside 0.1 to 2: the first trial has 0.1" in note for note in data["notes"]
    )


@pytest.mark.slow
def test_command_reports_tied_trials(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = assay.tune("triage.py", rubric="r.yaml", data=ROWS, lm=lm(), trials=2, prompt_format="json")
    print(*report.lines(), sep="\n")
    assert "no significant difference on val from 1 other trial (1)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (assay.evaluate, {"judge_model": "openai/x"}, "judge_model='openai/x' would have no effect: no criterion"),
        (assay.evaluate, {"judge_thinking": 64}, "judge_thinking=64 would have no effect: no criterion of the rubric"),
        (
            assay.evaluate,
            {"judge_thinking": 0},
            "judge_thinking='off' would have no effect: no criterion of the rubric",
        ),
        (assay.collect, {"n": 1, "judge_thinking": "high"}, "judge_thinking='high' would have no effect"),
        (assay.tune, {"trials": 1, "judge_model": "openai/x"}, "judge_model='openai/x' would have no effect"),
        *(
            (
                assay.compile,
                {"optimizer": name, "reflection_model": "openai/x", "max_calls": 40},
                f"reflection_model='openai/x' would have no effect: optimizer='{name}' writes no instructions",
            )
            for name in ("labeled", "LabeledFewShot")
        ),
    ],
)
def test_a_model_of_a_role_that_the_job_does_not_call_is_refused(
    place: Path, function: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        function("triage.py", rubric="r.yaml", data=ROWS, lm=lm(), preflight=False, **options)
    assert str(refused.value).startswith(message)


def test_a_comparison_refuses_the_model_of_a_role_that_it_does_not_call(place: Path) -> None:
    (place / "other.py").write_text((place / "triage.py").read_text())
    with pytest.raises(ConfigError, match="judge_model='openai/x' would have no effect"):
        assay.compare("triage.py", "other.py", rubric="r.yaml", data=ROWS, lm=lm(), judge_model="openai/x")


@pytest.mark.parametrize(
    ("table", "options", "note"),
    [
        (
            '[judge]\nmodel = "openai/of-file"',
            {},
            "`judge_model='openai/of-file'` has no effect: no criterion of the rubric 'r' is decided by a judge",
        ),
        (
            "[judge]\nthinking = 0",
            {},
            "`judge_thinking='off'` has no effect: no criterion of the rubric 'r' is decided by a judge",
        ),
        ("", {"sizes": {"val": 3, "test": 5}}, "`test_size=5` has no effect: only tasks of val are run"),
        ("", {}, ""),
    ],
)
def test_settings_of_the_project_file_without_effect_are_noted(
    place: Path, table: str, options: dict[str, Any], note: str
) -> None:
    (place / "assay.toml").write_text(table)
    progress = SilentProgress()
    lines: list[str] = []
    progress.say = lines.append  # type: ignore[method-assign]
    values = {**assay.project_settings("evaluate"), **options}
    report = assay.evaluate("triage.py", rubric="r.yaml", data=ROWS, lm=lm(), progress=progress, **values)
    assert [line for line in report.notes if "no effect" in line] == ([note] if note else [])
    assert [line[6:] for line in lines if "no effect" in line] == ([note] if note else [])


def test_a_note_on_a_setting_without_effect_is_in_a_comparison_once(place: Path) -> None:
    (place / "assay.toml").write_text('[judge]\nmodel = "openai/of-file"')
    (place / "other.py").write_text((place / "triage.py").read_text())
    values = assay.project_settings("compare")
    report = assay.compare("triage.py", "other.py", rubric="r.yaml", data=ROWS, lm=lm(), **values)
    assert sum("`judge_model='openai/of-file'` has no effect" in note for note in report.to_dict()["notes"]) == 1
    assert re.search(r"\(split=gate, a=\d\.\d+ .*, b=\d\.\d+ .*, gain=[+-]?\d\.\d+", repr(report)), repr(report)
