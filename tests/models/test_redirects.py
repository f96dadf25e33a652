"""Redirects of a model's server are not followed: body and key of the request would go to another host."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

import assay
from assay.cli.main import names_of
from assay.commands.compile import Compile
from assay.errors import ConfigError
from assay.models.hosted import no_redirects
from assay.models.roles import Endpoint
from assay.traces import Store
from assay.traces.gateway.server import Gateway
from assay.traces.gateway.upstreams import HttpUpstream, LitellmUpstream, upstream_of
from rigs.serving import post, send, served

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
