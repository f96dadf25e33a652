"""Addresses, models and keys of roles: redirects are not followed, and no key is repeated or stored."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dspy
import httpx
import pytest
from aiohttp import web

import assay
from assay.cli import names_of
from assay.commands.compile import Compile
from assay.errors import ConfigError, ModelError
from assay.models import get_lm
from assay.models.embedded import with_tool_calls
from assay.models.hosted import no_redirects
from assay.models.registry import find_model, read_metadata
from assay.models.roles import Endpoint
from assay.rubrics import Criterion, JudgeSpec, Rubric
from assay.traces import Store
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import HttpUpstream, LitellmUpstream, upstream_of
from rigs.serving import post, send, served
from rigs.upstream import ScriptedUpstream

ADDRESSES = ("api_base", "judge_api_base", "reflection_api_base")
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


class Elsewhere:
    """Another host: a request that reaches it followed a redirect."""

    def __init__(self) -> None:
        self.requests: list[str] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.Response:
        self.requests.append(f"{request.method} {request.path}")
        return web.json_response(
            {"choices": [{"message": {"role": "assistant", "content": "from elsewhere"}, "finish_reason": "stop"}]}
        )


@pytest.fixture
def redirecting() -> Iterator[tuple[str, Elsewhere]]:
    elsewhere = Elsewhere()
    with served(elsewhere.app()) as other:

        async def answer(request: web.Request) -> web.Response:
            return web.Response(status=307, headers={"Location": f"{other}{request.path}?api_key=sk-in-the-address-1"})

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        with served(app) as url:
            yield url, elsewhere


@pytest.mark.parametrize(
    ("address", "rule"),
    [
        *((f"http://{user}/v1", "no user or password") for user in ("user:PASSWORD-1@host", "a@b:PASSWORD-1@host")),
        *((address, "no user or password") for address in ("https://PASSWORD-1@host", "user:PASSWORD-1@host:80/v1")),
        *((f"http://h/v1?{query}=PASSWORD-1", "must hold no key") for query in ("api_key", "a=1&key", "access_token")),
        ("http://h/v1?sig=PASSWORD-1#x", "must hold no key"),
    ],
)
def test_an_address_with_a_password_or_key_is_refused_without_repeating_it(address: str, rule: str) -> None:
    for refuse in (
        lambda: Endpoint(address),
        lambda: Endpoint().role(address, None),
        lambda: assay.get_lm("openai/m", api_base=address, api_key="k"),
        lambda: assay.get_lm("openai/m", base_url=address, api_key="k"),
        *(lambda name=name: Compile(program="p", rubric="r", data="d", **{name: address}) for name in ADDRESSES),
        lambda: upstream_of("m", base=address if "://" in address else f"http://{address}"),
    ):
        with pytest.raises(ConfigError, match=rule) as caught:
            refuse()
        assert "PASSWORD-1" not in str(caught.value)
    for valid in ("http://h/v1?api-version=2024-10-21", "http://host/v1/@team", "http://host?user=a@b"):
        assert Endpoint(valid).api_base == valid


@pytest.mark.parametrize("variable", ["OPENAI_BASE_URL", "OPENAI_API_BASE"])
@pytest.mark.parametrize("address", ["http://u:PASSWORD-1@h/v1", "http://h/v1?api_key=PASSWORD-1"])
def test_a_providers_variable_with_a_password_or_key_in_its_address_is_refused(
    variable: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, address)
    for refuse in (lambda: assay.get_lm("openai/m", api_key="k"), lambda: upstream_of("openai/m")):
        with pytest.raises(ConfigError, match=f"{variable} must hold no") as caught:
            refuse()
        assert "PASSWORD-1" not in str(caught.value)
    assert assay.get_lm("openai/m", api_base="http://h/v1", api_key="k")


@pytest.mark.parametrize("through", ["http", "litellm"])
def test_the_gateway_neither_follows_nor_forwards_a_redirect(
    redirecting: tuple[str, Elsewhere], tmp_path: Path, through: str
) -> None:
    url, elsewhere = redirecting
    upstream: Any = (
        HttpUpstream("m", url, key="k" * 20)
        if through == "http"
        else LitellmUpstream("openai/m", {"api_base": f"{url}/v1", "api_key": "k"})
    )
    with Store(tmp_path / "s.db") as store, served(Gateway(store, upstream).app()) as gateway:
        status, body = post(f"{gateway}/v1/chat/completions", CHAT)
        assert status >= 300
        if through == "http":
            assert (status, "redirect (307) to http://127.0.0.1:" in body["error"]["message"]) == (502, True)
            assert send("GET", f"{gateway}/v1/models")[0] == 502
        store.flush()
        (transition,) = store.rollout(next(store.rollouts()).id).transitions
    assert transition.error is not None
    assert "sk-in-the-address" not in str(body) + transition.error
    assert elsewhere.requests == []


@pytest.mark.parametrize("engine", ["lm15", "litellm"])
def test_a_model_call_in_process_follows_no_redirect(redirecting: tuple[str, Elsewhere], engine: str) -> None:
    url, elsewhere = redirecting
    lm = assay.get_lm("openai/m", api_base=f"{url}/v1", api_key="k" * 20, num_retries=0, engine=engine)
    with pytest.raises(Exception, match=r".*"):
        lm("hello")
    assert elsewhere.requests == []


def test_other_requests_of_a_program_still_follow_redirects(redirecting: tuple[str, Elsewhere]) -> None:
    url, elsewhere = redirecting
    with no_redirects():
        assert httpx.post(f"{url}/x", follow_redirects=True).status_code == 307
    assert httpx.post(f"{url}/x", follow_redirects=True).status_code == 200
    assert elsewhere.requests == ["POST /x"]


def test_a_refused_address_names_the_flag_and_where_the_key_goes() -> None:
    with pytest.raises(ConfigError, match="judge_api_key_env") as caught:
        Compile(program="p", rubric="r", data="d", judge_api_base="http://a:b@c")
    assert caught.value.text(names_of(["compile"])).startswith("--judge-api-base must hold no")


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
