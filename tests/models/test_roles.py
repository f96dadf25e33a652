"""Models, addresses and keys of roles; GGUF files by path; no key is stored."""

import json
from pathlib import Path
from typing import Any

import dspy
import pytest

import assay
from assay.errors import ConfigError, ModelError
from assay.models import get_lm
from assay.models.embedded import with_tool_calls
from assay.models.registry import find_model, read_metadata
from assay.models.roles import Endpoint
from assay.rubrics import Criterion, JudgeSpec, Rubric
from rigs.serving import served
from rigs.upstream import ScriptedUpstream

KEYS = {"MAIN_KEY": "sk-main-4711", "JUDGE_KEY": "sk-judge-4712", "REFLECT_KEY": "sk-reflect-4713"}
RUBRIC = "name: r\ncriteria:\n  - name: kind\n    judge:\n      use: j.yaml\n"
JUDGE = "text: Is the answer kind?\nreading: text\n"


def rows(folder: Path) -> str:
    splits = ("train", "val", "gate", "test")
    text = "\n".join(
        json.dumps({"question": f"Question {i}?", "answer": "x", "split": splits[i % 4]}) for i in range(8)
    )
    (folder / "rows.jsonl").write_text(text)
    return str(folder / "rows.jsonl")


def test_an_unset_variable_or_a_key_in_its_place_is_refused_without_repeating_it(monkeypatch: Any) -> None:
    monkeypatch.delenv("NO_SUCH", raising=False)
    with pytest.raises(ConfigError, match="NO_SUCH, which is not set"):
        Endpoint(None, "NO_SUCH").client("openai/x")
    with pytest.raises(ConfigError) as error:
        Endpoint(None, "sk-proj-secret").client("openai/x")
    assert "secret" not in str(error.value)


def test_each_role_uses_its_own_server_and_key_and_no_key_is_stored(tmp_path: Path, monkeypatch: Any) -> None:
    for name, key in KEYS.items():
        monkeypatch.setenv(name, key)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (tmp_path / "r.yaml").write_text(RUBRIC)
    (tmp_path / "j.yaml").write_text(JUDGE)
    program, judge, reflection = ScriptedUpstream(), ScriptedUpstream(), ScriptedUpstream()
    with served(program.app()) as program_url, served(judge.app()) as two, served(reflection.app()) as three:
        report = assay.compile(
            dspy.Predict("question -> answer"), rubric=tmp_path / "r.yaml", data=rows(tmp_path), optimizer="copro",
            prompt_format="json",
            model="openai/m", api_base=f"{program_url}/v1", api_key_env="MAIN_KEY",
            judge_model="openai/j", judge_api_base=f"{two}/v1", judge_api_key_env="JUDGE_KEY",
            reflection_model="openai/r", reflection_api_base=f"{three}/v1", reflection_api_key_env="REFLECT_KEY",
            out=tmp_path / "a",
        )  # fmt: skip
    for upstream, key in ((program, "MAIN_KEY"), (judge, "JUDGE_KEY"), (reflection, "REFLECT_KEY")):
        assert upstream.calls > 0, key
        assert {h["Authorization"] for h in upstream.headers} == {f"Bearer {KEYS[key]}"}
    assert json.loads((report.artifact / "manifest.json").read_text())["api_key_env"] == "MAIN_KEY"
    text = (
        b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        + json.dumps(report.to_dict(), default=str).encode()
    )
    assert not [key for key in KEYS.values() if key.encode() in text]


def test_a_model_file_is_loaded_by_path_with_its_own_template(small_embedded: str, tmp_path: Path) -> None:
    path = tmp_path / "own model+1.gguf"
    path.symlink_to(find_model(small_embedded))
    metadata = read_metadata(path)
    assert metadata["general.architecture"] == "llama"
    assert "<|im_start|>" in metadata["tokenizer.chat_template"]
    lm = get_lm(f"embedded:{path}", temperature=0.1, seed=1, max_tokens=16)
    assert lm.recording.backend.weights == get_lm(small_embedded).recording.backend.weights
    with dspy.context(lm=lm, adapter=dspy.ChatAdapter()):
        assert lm("Say hello.")[0]
    assert not lm.supports_function_calling  # its template has no tools


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("embedded:{0}/nope.gguf", "no such model file"),
        ("embedded:{0}/text.gguf", "not a GGUF file"),
        ("{0}/text.gguf", "name it embedded:"),
        ("embedded/{0}/text.gguf", "with a colon"),
    ],
)
def test_a_file_that_is_not_a_model_is_refused_by_its_path(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("no weights here")
    with pytest.raises(ModelError, match=message):
        get_lm(name.format(tmp_path))


TOOLS = [{"type": "function", "function": {"name": "look"}}]


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "look", "arguments": {"at": "it"}}', 1),
        ('```json\n{"name": "look", "arguments": {"at": "it"}}\n[[ ## completed ## ]]\n```', 1),
        (
            '<tool_call>{"name": "look", "arguments": {}}</tool_call>\n'
            '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>',
            2,
        ),
        ('{"name": "other", "arguments": {}}', 0),
        ('I would call {"name": "look", "arguments": {}}', 0),
        ('{"name": "look", "arguments": {}, "extra": 1}', 0),
        ("hello", 0),
        ("", 0),
    ],
)
def test_tool_calls_written_as_text_are_parsed(text: str, calls: int) -> None:
    reply = {"choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": text}}]}
    result = with_tool_calls(reply, TOOLS)["choices"][0]
    assert len(result["message"].get("tool_calls") or ()) == calls
    assert (result["finish_reason"] == "tool_calls") == bool(calls)


def test_a_judge_of_a_function_uses_the_address_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No program model is named: the default is an embedded one, which has no address for other roles to share."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)

    def convert(distance: str) -> str:
        return distance

    rubric = Rubric("r", [Criterion(name="clear", judge=JudgeSpec(text="Is it clear?"))])
    with pytest.raises(ModelError, match=r"failed to connect to 127\.0\.0\.1:9"):
        assay.evaluate(
            convert,
            rubric=rubric,
            judge_model="openai/judge",
            api_base="http://127.0.0.1:9/v1",
            data=[{"distance": f"{n} km", "answer": f"{n} km"} for n in range(30)],
            split="val",
        )
