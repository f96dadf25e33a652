"""`assay improve` before its first step: small splits are reported, program and judges are tried, for every order."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner

import assay
from assay.cli.main import group
from assay.commands.improve import Improve
from assay.errors import ConfigError, Diverged, ModelError, ProgramError, ProgramFailed
from assay.evaluation import SilentProgress
from assay.runs.planning import plan_of
from rigs.serving import chat_completion, served

PROGRAM = """import dspy


class Mine(dspy.Module):
    def __init__(self):
        super().__init__()
        self.answer = dspy.Predict("question -> answer")

    def forward(self, question):
        found = self.answer(question=question)
        return self.read(found)

    def read(self, found):
        {body}
"""
ORDERS = [["prompts"], ["sft"], ["grpo"]]


class CapturedProgress(SilentProgress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


class Server:
    """Answers 4 to everything, except for models named `down`."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body["model"])
        if body["model"] == "down":
            return web.json_response(
                {"error": {"message": "no such model", "type": "invalid_request_error"}}, status=404
            )
        return chat_completion(body["model"], json.dumps({"answer": "4"}))


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def job(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    for step in ("compile_program", "collect", "train"):

        def far_enough(*_: Any, **__: Any) -> None:
            raise Diverged("far enough")

        monkeypatch.setattr(f"assay.commands.improve.{step}", far_enough)
    rows = [{"question": f"What is {n} + 2?", "answer": str(n + 2)} for n in range(60)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.yaml").write_text("name: r\ncriteria:\n- {name: right, check: exact}\n")
    (tmp_path / "judged.yaml").write_text(
        "name: judged\ncriteria:\n- {name: nice, judge: 'Is it nice?', scale: ['no', 'yes']}\n"
    )
    write()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.answer)
    with served(app) as url:
        trained = {"model": "embedded/smollm2-135m"}
        yield {
            "rubric": "r.yaml", "data": "data.jsonl", "name": "up", "model": "openai/m", "api_base": f"{url}/v1",
            "prompt_format": "json",
            "sft": trained, "grpo": trained,
        }  # fmt: skip


def write(body: str = "return found") -> None:
    Path("mine.py").write_text(PROGRAM.format(body=body))


@pytest.mark.parametrize("order", ORDERS)
def test_failing_program_stops_before_the_first_step(job: dict[str, Any], server: Server, order: Sequence[str]) -> None:
    write('raise RuntimeError("no such table: prices")')
    with pytest.raises(ProgramFailed, match="first 3 tasks with RuntimeError"):
        assay.improve("mine.py:Mine", order=order, **job)
    assert len(server.requests) == 3
    write()  # corrected: the job starts from the beginning, and there is nothing to resume
    report = assay.improve("mine.py:Mine", order=order, **job)
    assert [step["note"] for step in report.steps] == ["far enough"]


def test_a_program_without_predictors_stops_before_the_first_step(job: dict[str, Any]) -> None:
    Path("mine.py").write_text("def mine(question):\n    return {'answer': '4'}\n")
    with pytest.raises(ProgramError, match="has no predictors, so there is nothing to compile"):
        assay.improve("mine.py:mine", order=["sft", "prompts"], **job)


@pytest.mark.parametrize("order", ORDERS)
def test_unreachable_judge_stops_before_the_first_step(
    job: dict[str, Any], server: Server, order: Sequence[str]
) -> None:
    with pytest.raises(ModelError, match="judge of 'nice' scored none"):
        assay.improve("mine.py:Mine", order=order, **{**job, "rubric": "judged.yaml", "judge_model": "openai/down"})
    assert server.requests.count("m") <= 3


def test_judges_of_the_monitor_rubric_are_tried(job: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="judge of 'nice' scored none"):
        assay.improve("mine.py:Mine", order=["grpo"], monitor="judged.yaml", **{**job, "judge_model": "openai/down"})


def test_retention_program_is_tried(job: dict[str, Any]) -> None:
    Path("other.py").write_text(PROGRAM.format(body='raise RuntimeError("gone")'))
    rows = [{"question": f"And {n}?", "answer": "4"} for n in range(60)]
    Path("others.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ProgramFailed, match=r"other\.py:14"):
        assay.improve("mine.py:Mine", order=["grpo"], retention=["other.py:Mine,r.yaml,others.jsonl"], **job)


@pytest.mark.parametrize("order", ORDERS)
def test_cap_on_dollars_requires_known_prices(job: dict[str, Any], server: Server, order: Sequence[str]) -> None:
    with pytest.raises(ConfigError, match="no price is known for openai/m"):
        assay.improve("mine.py:Mine", order=order, max_cost_usd=1.0, **job)
    assert server.requests == []


def test_models_of_roles_without_effect_are_refused_at_the_start(job: dict[str, Any], server: Server) -> None:
    for unused, reason in (
        ({"judge_model": "openai/x"}, "no criterion of the rubric 'r' is decided by a judge"),
        ({"reflection_model": "openai/m"}, "no step of order=sft compiles prompts"),
    ):
        with pytest.raises(ConfigError, match=f"would have no effect: {reason}"):
            assay.improve("mine.py:Mine", order=["sft"], **{**job, **unused})
    assert server.requests == []


def test_settings_without_effect_are_noted_at_the_start(job: dict[str, Any]) -> None:
    Path("assay.toml").write_text('[judge]\nmodel = "openai/of-file"\n[reflection]\nmodel = "openai/also"')
    roles = {
        name: value for name, value in assay.project_settings("improve").items() if name.startswith(("judge", "refl"))
    }
    report = assay.improve("mine.py:Mine", order=["sft"], **{**job, **roles, "optimizer": "gepa"})
    assert [note for note in report.to_dict()["notes"] if "no effect" in note] == [
        "`judge_model='openai/of-file'` has no effect: no criterion of the rubric 'r' is decided by a judge",
        "`optimizer='gepa'` has no effect: no step of `order=sft` compiles prompts",
        "`reflection_model='openai/also'` has no effect: no step of `order=sft` compiles prompts",
        "`grpo={'model': 'embedded/smollm2-135m'}` has no effect: `order=sft` has no such step",
    ]


def test_a_judge_model_of_the_monitor_rubric_alone_has_an_effect(job: dict[str, Any]) -> None:
    report = assay.improve(
        "mine.py:Mine", order=["grpo"], monitor="judged.yaml", preflight=False, **{**job, "judge_model": "openai/x"}
    )
    assert not [note for note in report.to_dict()["notes"] if "judge_model" in note]


@pytest.mark.parametrize("order", ORDERS)
def test_splits_that_are_too_small_are_reported_at_the_start(job: dict[str, Any], order: Sequence[str]) -> None:
    progress = CapturedProgress()
    report = assay.improve("mine.py:Mine", order=order, sizes={"gate": 1, "test": 2}, progress=progress, **job)
    warned = next(
        at
        for at, line in enumerate(progress.lines)
        if "too few tasks for a decision: gate has 1 task, test has 2 tasks" in line
    )
    assert warned < next(at for at, line in enumerate(progress.lines) if line.startswith("step 1"))
    assert "too few tasks for a decision" in report.notes[0]


def test_preflight_counts_against_the_caps_and_runs_once(job: dict[str, Any], server: Server) -> None:
    assay.improve("mine.py:Mine", order=["sft", "sft"], **job)
    assert len(server.requests) == 1
    server.requests.clear()
    assay.improve("mine.py:Mine", order=["sft"], preflight=False, **{**job, "name": "unchecked"})
    assert server.requests == []


def test_reflection_model_is_tried_if_configured(job: dict[str, Any], server: Server) -> None:
    with pytest.raises(ModelError, match="the reflection model openai/down did not answer"):
        assay.improve("mine.py:Mine", order=["prompts"], reflection_model="openai/down", **job)
    assert server.requests.count("m") == 1
    with pytest.raises(ModelError, match="reflection_model, reflection_api_key_env"):
        assay.compile(
            "mine.py:Mine",
            optimizer="copro",
            reflection_model="openai/down",
            **{key: job[key] for key in job if key not in ("name", "sft", "grpo")},
        )


@pytest.mark.parametrize("resume", [False, True])
def test_dry_run_refuses_an_existing_name(job: dict[str, Any], server: Server, resume: bool) -> None:
    (Path(".assay") / "adapters" / "up-2").mkdir(parents=True)
    words = [
        "improve",
        "mine.py:Mine",
        "--order",
        "prompts,sft",
        "--dry-run",
        *(["--resume"] if resume else []),
        "--sft",
        "model=embedded/smollm2-135m",
    ]
    flags = [
        word
        for name in ("rubric", "data", "name", "model", "api_base", "prompt_format")
        for word in (f"--{name.replace('_', '-')}", job[name])
    ]
    ended = CliRunner().invoke(group, [*words, *flags])
    assert (ended.exception is None) == resume  # one that is resumed made it itself
    if not resume:
        assert "there is an adapter 'up-2'" in str(ended.exception)
        with pytest.raises(ConfigError, match="there is an adapter 'up-2'"):
            assay.improve("mine.py:Mine", order=["prompts", "sft"], **job)
        folder = Path(".assay") / "improve" / "down"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")
        with pytest.raises(ConfigError, match="unfinished improvement 'down'"):
            plan_of(Improve("mine.py:Mine", order=["prompts"], **{**job, "name": "down"}))
    assert server.requests == []


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"order": ["prompt"]}, "order: 'prompt' must be one of prompts.*Did you mean 'prompts'"),
    ({"order": []}, "order: must name at least one"),
    ({"order": ["prompts", "sft"], "sft": {}}, "sft cannot train 'openai/m'.*order prompts"),
    ({"order": ["grpo"], "grpo": {"model": "embedded:some.gguf"}}, "grpo cannot train 'embedded:some.gguf'"),
    ({"order": ["prompts", "sft"], "sft": {"epoch": 2}}, "sft:.*'epoch'"),
    (
        {"order": ["grpo"], "rubric": "judged.yaml", "judge_model": "embedded/smollm2-135m"},
        "the model in training, which would learn to satisfy itself",
    ),
    ({"order": ["prompts"], "monitor": "judged.yaml"}, "monitor: would have no effect"),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED)
def test_invalid_settings_of_a_later_step_are_refused_before_the_first(
    job: dict[str, Any], server: Server, wrong: dict[str, Any], message: str
) -> None:
    settings = {**job, **wrong}
    with pytest.raises(ConfigError, match=message):
        assay.improve("mine.py:Mine", **settings)
    with pytest.raises(ConfigError, match=message):
        plan_of(Improve("mine.py:Mine", **settings))
    assert server.requests == []
    assert not Path(".assay/improve/up").exists()


@pytest.mark.parametrize("name", ["..", ".", "", "../../victim", "a/b", "/tmp/victim", "a\\b", "a\0", "-x", ".x", "é/"])
def test_a_name_that_leads_elsewhere_is_refused_and_nothing_is_removed(
    name: str, job: dict[str, Any], server: Server, tmp_path: Path
) -> None:
    for folder in (".assay/improve", ".assay/artifacts", "victim", ".assay/training", "a/b"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "thesis").touch()
    before = {path for path in tmp_path.rglob("*") if path.name != "__pycache__"}
    with pytest.raises(ConfigError, match=r"name[=:]"):
        assay.improve("mine.py:Mine", order=["prompts"], **{**job, "name": name})
    with pytest.raises(ConfigError, match=r"name[=:]"):
        plan_of(Improve("mine.py:Mine", order=["prompts"], **{**job, "name": name}))
    assert before <= set(tmp_path.rglob("*"))
    assert server.requests == []


@pytest.mark.parametrize("folder", [".assay/improve/up", ".assay/training/up-1"])
@pytest.mark.parametrize("resume", [False, True])
def test_files_of_the_user_in_the_place_of_a_job_are_kept(
    folder: str, resume: bool, job: dict[str, Any], server: Server
) -> None:
    Path(folder).mkdir(parents=True)
    (Path(folder) / "thesis").touch()
    with pytest.raises(ConfigError, match="not made"):
        assay.improve("mine.py:Mine", order=["sft"], resume=resume, **job)
    assert (Path(folder) / "thesis").is_file()
    assert server.requests == []


def test_a_link_in_the_place_of_a_job_is_not_followed(job: dict[str, Any], server: Server) -> None:
    Path("victim").mkdir()
    Path("victim/thesis").touch()
    Path(".assay/improve").mkdir(parents=True)
    Path(".assay/improve/up").symlink_to(Path("victim").resolve())
    with pytest.raises(ConfigError, match="symbolic link"):
        assay.improve("mine.py:Mine", order=["prompts"], **job)
    assert [path.name for path in Path("victim").iterdir()] == ["thesis"]
    assert server.requests == []


@pytest.mark.parametrize("resume", [False, True])
def test_what_a_killed_job_left_before_its_state_is_removed(resume: bool, job: dict[str, Any]) -> None:
    write('raise RuntimeError("gone")')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("assay.commands.improve.write_whole", _killed)
        with pytest.raises(KeyboardInterrupt):
            assay.improve("mine.py:Mine", order=["prompts"], **job)
    Path(".assay/improve/up/half-written").touch()
    write()
    report = assay.improve("mine.py:Mine", order=["prompts"], resume=resume, **job)
    assert [step["note"] for step in report.steps] == ["far enough"]
    assert not Path(".assay/improve/up").exists()


def test_resuming_a_finished_improvement_gives_its_report_again(job: dict[str, Any], server: Server) -> None:
    report = assay.improve("mine.py:Mine", order=["prompts"], **job)
    asked = list(server.requests)
    progress = CapturedProgress()
    repeated = assay.improve("mine.py:Mine", order=["prompts"], resume=True, progress=progress, **job)
    assert (repeated.to_dict(), server.requests) == (report.to_dict(), asked)
    assert progress.lines == ["this run has finished: its report is given again, and nothing is run"]


def _killed(*_: Any) -> None:
    raise KeyboardInterrupt


def test_an_artifact_leaves_the_files_in_its_place(job: dict[str, Any], server: Server) -> None:
    Path("mine").mkdir()
    Path("mine/thesis").touch()
    with pytest.raises(ConfigError, match="exists"):
        assay.improve("mine.py:Mine", order=["prompts"], out="mine", **job)
    assert [path.name for path in Path("mine").iterdir()] == ["thesis"]
    assert server.requests == []
    Path(".assay/artifacts/up").mkdir(parents=True)
    report = assay.improve("mine.py:Mine", order=["prompts"], **job)
    assert report.artifact is not None
    assert (report.artifact.name, list(Path(".assay/artifacts/up").iterdir())) == ("up-2", [])
