"""The real embedded model: constrained output, log-probabilities, tokens, HTTP."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

import dspy
import pytest

from assay.errors import ModelError
from assay.models import Call, find_model, get_lm, pull_model
from assay.models.embedded import LINES, server_url
from assay.models.registry import EMBEDDED
from assay.programs import AgentParameters, LeanAdapter, MathQA, SchemaAdapter

pytestmark = pytest.mark.model


def test_a_damaged_file_is_refused_by_its_hash(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("ASSAY_HOME", str(tmp_path))
    monkeypatch.setattr("assay.models.registry.installed_file", lambda model: None)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / EMBEDDED["smollm2-135m"].file).write_bytes(b"GGUF, but not this one")
    with pytest.raises(ModelError, match="does not match its sha256"):
        find_model("smollm2-135m")


@pytest.fixture
def hub(embedded: str) -> Iterator[str]:
    """A server of one file with the hub's routes and headers."""
    content = find_model(embedded).read_bytes()

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            model = EMBEDDED["smollm2-135m"]
            result = self.path == f"/{model.hub_repo}/resolve/main/{model.file}"
            self.send_response(200 if result else 404)
            for name, value in (
                ("X-Repo-Commit", "0" * 40),
                ("ETag", f'"{model.sha256}"'),
                ("Content-Length", str(len(content) if result else 0)),
            ):
                self.send_header(name, value)
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_the_hub_is_tried_first_and_its_file_verified(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ASSAY_HOME", str(tmp_path)), ("HF_ENDPOINT", hub), ("HF_HUB_OFFLINE", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("assay.models.registry.installed_file", lambda model: None)
    text: list[str] = []
    assert pull_model("smollm2-135m", say=text.append).parent == tmp_path / "models"
    assert "hub" in text[-1]  # no other source was needed
    assert find_model("smollm2-135m").parent == tmp_path / "models"


def test_a_call_returns_token_counts_ids_and_logprobs(embedded: str) -> None:
    calls: list[Call] = []
    lm = get_lm(embedded, observers=[calls.append], temperature=0.1, max_tokens=8, seed=1)
    lm("Say hello.")
    call = calls[0]
    assert call.completion_tokens == 8
    assert call.token_ids is not None
    assert call.logprobs is not None
    assert len(call.token_ids) == len(call.logprobs)
    assert all(value <= 0 for value in call.logprobs)
    assert call.cost_usd == 0.0
    assert call.weights == EMBEDDED["smollm2-135m"].sha256


def test_token_ids_are_complete_or_none(embedded: str) -> None:
    calls: list[Call] = []
    lm = get_lm(embedded, observers=[calls.append], temperature=0.1, max_tokens=16, seed=1)
    for word in ("Kyoto", "京都"):  # llama.cpp reports only the last token of a character that takes several
        say = dspy.Predict(
            dspy.Signature({"place": (str, dspy.InputField()), "name": (Literal[word], dspy.OutputField())})
        )
        with dspy.context(lm=lm, adapter=LeanAdapter()):
            assert say(place="the old capital").name == word
    plain, letters = calls
    assert len(plain.token_ids or ()) == plain.completion_tokens
    assert letters.token_ids is None
    assert len(letters.logprobs or ()) < (letters.completion_tokens or 0)


def test_top_p_1_samples_the_whole_distribution(small_embedded: str) -> None:
    calls: list[Call] = []
    limited = get_lm(small_embedded, observers=[calls.append], temperature=2.0, max_tokens=60, seed=1)
    for lm in (limited, limited.copy(top_p=1.0)):
        lm("Tell me about the sea.")
    least = [min(call.logprobs or [0.0]) for call in calls]
    assert least[0] > -7.5 > least[1]  # llama.cpp's default drops tokens below 0.05 times the top probability


def test_parallel_calls_answer_like_sequential_ones(small_embedded: str) -> None:
    observed: list[Call] = []
    lm = get_lm(small_embedded, temperature=0.0, max_tokens=6, seed=1, observers=[observed.append])
    prompts = [f"{'Count. ' * (10 + number)}What comes after {number}?" for number in range(8)]
    alone = [lm(prompt)[0] for prompt in prompts]
    with ThreadPoolExecutor(max_workers=8) as pool:
        together = list(pool.map(lambda prompt: lm(prompt)[0], prompts))
    read = [
        {str(call.request["messages"]): call.prompt_tokens for call in calls} for calls in (observed[:8], observed[8:])
    ]
    assert read[0] == read[1]  # each call processed its own prompt
    assert len(set(read[0].values())) == 8
    assert (
        sum(a == b for a, b in zip(alone, together, strict=True)) >= 4
    )  # batches round differently, so that near ties may flip


@pytest.mark.parametrize("adapter", [SchemaAdapter(), LeanAdapter()])
def test_output_is_constrained_to_the_schema(small_embedded: str, adapter: dspy.Adapter) -> None:
    class Pick(dspy.Signature):
        """Pick one."""

        text: str = dspy.InputField()
        code: str = dspy.OutputField(pattern=r"^[A-C]{2,4}$")
        kind: Literal["red", "green"] = dspy.OutputField()
        count: int = dspy.OutputField()

    with dspy.context(lm=get_lm(small_embedded, temperature=1.5, seed=2, max_tokens=60), adapter=adapter):
        for text in ("one", "two", "three"):
            prediction = dspy.Predict(Pick)(text=text)
            assert set(prediction.code) <= set("ABC")
            assert 2 <= len(prediction.code) <= 4
            assert prediction.kind in ("red", "green")
            assert isinstance(prediction.count, int)


@pytest.mark.parametrize("name", ["openai/any", "hosted_vllm/any"])
def test_an_agent_over_a_self_hosted_server_is_constrained_to_its_schemas(small_embedded: str, name: str) -> None:
    calls: list[Call] = []
    lm = get_lm(name, api_base=server_url(small_embedded) + "/v1", api_key="none", observers=[calls.append], seed=0)
    with dspy.context(lm=lm):
        steps = MathQA(parameters=AgentParameters(tool_usage_threshold=0.0, max_steps=2, reasoning_depth=1))(
            question="What is 12 + 30?"
        ).steps
    assert all(call.constrained for call in calls)
    assert [step["tool"] for step in steps] == ["calculator"]


def test_objects_in_lines_are_constrained_to_their_schema(small_embedded: str) -> None:
    size = {"type": "integer"}
    arguments = {
        "type": "object",
        "properties": {"größe": size, "unit": {"enum": ["cm", "m"]}},
        "additionalProperties": False,
    }
    arguments["required"] = list(arguments["properties"])
    schema = {
        "properties": {
            "thought": {"type": "string", "maxLength": 12},
            "tools": {"type": "array", "items": {"enum": ["b c"]}, "minItems": 1, "maxItems": 2},
            "arguments": arguments,
            "n": size,
        },
        LINES: True,
    }
    answer_format = {"type": "json_schema", "json_schema": {"name": "outputs", "schema": schema}}
    text = get_lm(small_embedded, seed=0)("Write about cats.", response_format=answer_format, max_tokens=200)[0]
    thought, tools, written, number = text.strip().split("\n")
    assert 0 < len(thought.removeprefix("thought: ")) <= 12
    assert set(json.loads(tools.removeprefix("tools: "))) == {"b c"}
    values = json.loads(written.removeprefix("arguments: "))
    assert isinstance(values["größe"], int)
    assert values["unit"] in ("cm", "m")
    assert int(number.removeprefix("n: ")) is not None
