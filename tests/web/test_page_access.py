"""Who may open the page: token, cookie, key, Host, Origin and CSRF token; and the headers of its answers."""

import re
from typing import Any

import pytest
from pages import Browser, browse, rollout_of_sums

from assay.errors import ConfigError
from assay.traces import Store
from assay.web.access import PageAccess

KEY = "page-key-1"
PATHS = ("/", "/runs", "/runs/x", "/rollouts", "/rollouts/x", "/rollouts/x/json", "/rollouts/x/calls/0", "/compare")


def test_nothing_but_static_files_opens_without_the_token(store: Store) -> None:
    async def visit(browser: Browser) -> dict[str, int]:
        return {path: (await browser.get(path))[0] for path in (*PATHS, "/?token=wrong", "/static/page.css")}

    statuses = browse(store, visit, opened=False)
    assert statuses.pop("/static/page.css") == 200
    assert set(statuses.values()) == {401}


def test_the_token_is_exchanged_once_for_a_strict_cookie(store: Store) -> None:
    async def visit(browser: Browser) -> tuple[Any, ...]:
        first = await browser.send("GET", f"/rollouts?token={browser.access.token}&status=done", follow=False)
        cookie = first.headers["Set-Cookie"]
        browser.client.session.cookie_jar.clear()
        again = await browser.send("GET", f"/rollouts?token={browser.access.token}", follow=False)
        with_cookie = await browser.get("/rollouts", Cookie=cookie.split(";")[0])
        return first.status, first.headers["Location"], cookie, again.status, with_cookie[0]

    status, location, cookie, again, with_cookie = browse(store, visit, opened=False)
    assert (status, location, again, with_cookie) == (303, "/rollouts?status=done", 401, 200)
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie


def test_the_redirect_of_the_token_stays_on_this_server(store: Store) -> None:
    async def visit(browser: Browser) -> str:
        address = f"{browser.client.make_url('/')}/evil.example/x?token={browser.access.token}"
        answer = await browser.client.session.get(address, allow_redirects=False)
        return answer.headers["Location"]

    assert browse(store, visit, opened=False) == "/evil.example/x"


@pytest.mark.parametrize("method", ["HEAD", "POST"])
def test_only_opening_the_address_uses_the_token_up(store: Store, method: str) -> None:
    async def visit(browser: Browser) -> int:
        await browser.send(method, f"/?token={browser.access.token}", follow=False)
        browser.client.session.cookie_jar.clear()
        return (await browser.get(f"/?token={browser.access.token}"))[0]

    assert browse(store, visit, opened=False) == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:80", 200), ("localhost", 200), ("evil.example", 403), ("127.0.0.1.evil.example", 403)],
)
def test_other_host_names_are_refused(store: Store, host: str, status: int) -> None:
    async def visit(browser: Browser) -> int:
        return (await browser.get("/runs", Host=host))[0]

    assert browse(store, visit) == status


def test_an_address_beyond_loopback_needs_a_key() -> None:
    with pytest.raises(ConfigError, match="reachable from other machines"):
        PageAccess(None, host="0.0.0.0")
    assert PageAccess(KEY, host="0.0.0.0").has_key


def test_the_key_opens_the_page_in_a_form_and_as_a_bearer_token(store: Store) -> None:
    async def visit(browser: Browser) -> list[int]:
        form = (await browser.get("/runs"))[1]
        wrong = await browser.send("POST", "/login", data={"key": "page-key-2"})
        bearer = (await browser.get("/runs", Authorization=f"Bearer {KEY}"))[0]
        wrong_bearer = (await browser.get("/runs", Authorization="Bearer page-key-2"))[0]
        right = await browser.send("POST", "/login", data={"key": KEY})
        return ['name="key"' in form, wrong.status, bearer, wrong_bearer, right.status, (await browser.get("/runs"))[0]]

    assert browse(store, visit, key=KEY, opened=False) == [True, 401, 200, 401, 200, 200]


def test_without_a_key_no_key_opens_the_page(store: Store) -> None:
    async def visit(browser: Browser) -> list[Any]:
        form = (await browser.get("/runs"))[1]
        empty = await browser.send("POST", "/login", data={"key": ""})
        return ['name="key"' in form, empty.status, (await browser.get("/runs", Authorization="Bearer "))[0]]

    assert browse(store, visit, opened=False) == [False, 401, 401]


@pytest.mark.parametrize(
    ("sent", "headers", "status"),
    [
        ("right", {}, 200),
        ("", {}, 403),
        ("0" * 64, {}, 403),
        ("right", {"Origin": "http://evil.example"}, 403),
        ("right", {"Origin": "null"}, 403),
    ],
)
def test_a_change_needs_the_token_of_a_form_of_this_server(
    store: Store, sent: str, headers: dict[str, str], status: int
) -> None:
    rollout = rollout_of_sums(store, 1)
    store.flush()

    async def visit(browser: Browser) -> int:
        form = (await browser.get(f"/rollouts/{rollout.id}"))[1]
        token = re.findall(r'name="csrf" value="([0-9a-f]{64})"', form)[0]
        data = {"rating": "0.5", "csrf": token if sent == "right" else sent}
        answer = await browser.send("POST", f"/rollouts/{rollout.id}/rating", data=data, headers=headers)
        return answer.status

    assert browse(store, visit) == status
    assert store.rollout(rollout.id).human_rating == (0.5 if status == 200 else None)


def test_a_script_with_the_key_needs_no_form(store: Store) -> None:
    rollout = rollout_of_sums(store, 1)
    store.flush()

    async def visit(browser: Browser) -> int:
        headers = {"Authorization": f"Bearer {KEY}"}
        path = f"/rollouts/{rollout.id}/rating"
        return (await browser.send("POST", path, data={"rating": "1"}, headers=headers)).status

    assert browse(store, visit, key=KEY, opened=False) == 200
    assert store.rollout(rollout.id).human_rating == 1.0


@pytest.mark.parametrize(
    "path", ["/runs", "/rollouts", "/nowhere", "/runs/none", "/static/htmx.min.js", "/rollouts?least=x"]
)
def test_every_answer_has_the_headers(store: Store, path: str) -> None:
    async def visit(browser: Browser) -> dict[str, str]:
        return dict((await browser.send("GET", path)).headers)

    headers = browse(store, visit)
    policy = headers["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store" or path.startswith("/static/")


def test_no_page_has_inline_script_or_style(store: Store) -> None:
    rollout = rollout_of_sums(store, 1)
    store.put_run("run-1", kind="evaluate", config={"program": "p"}, status="running", started_at=1.0)
    store.flush()

    async def visit(browser: Browser) -> list[str]:
        paths = ("/runs", "/runs/run-1", "/rollouts", f"/rollouts/{rollout.id}", "/compare?a=run-1&b=run-1", "/nowhere")
        return [(await browser.get(path))[1] for path in paths]

    for text in browse(store, visit):
        assert re.findall(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=|javascript:|\shx-on", text) == []
