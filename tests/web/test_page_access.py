"""Who may open the page: token, cookie, key, Host, Origin and CSRF token; static files, and the start of the server."""

import hashlib
import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from pages import ROLLOUT, Browser, browse, posted, read, rollout_of_sums, three_rollouts

from assay.errors import ConfigError
from assay.traces import Store
from assay.web.rendering import STATIC, compile_templates, static_file
from assay.web.server import PageAccess
from rigs.command_line import assay_command

KEY = "page-key-1"
PATHS = ("/", "/runs", "/runs/x", "/rollouts", "/rollouts/x", "/rollouts/x/json", "/rollouts/x/calls/0", "/compare")
PAGES = ("/runs", "/runs/run-1", "/rollouts", f"/rollouts/{ROLLOUT}", "/compare?a=run-1&b=run-1")


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


def test_other_host_names_are_refused(store: Store) -> None:
    hosts = {"127.0.0.1:80": 200, "localhost": 200, "evil.example": 403, "127.0.0.1.evil.example": 403}

    async def visit(browser: Browser) -> dict[str, int]:
        return {host: (await browser.get("/runs", Host=host))[0] for host in hosts}

    assert browse(store, visit) == hosts


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


def test_a_change_needs_the_token_of_a_form_of_this_server_or_the_key(store: Store) -> None:
    rollout = rollout_of_sums(store, 1)
    store.flush()
    path = f"/rollouts/{rollout.id}/rating"
    form = read(store, f"/rollouts/{rollout.id}")
    assert re.search(r'name="csrf" value="[0-9a-f]{64}"', form)
    for origin in ("http://evil.example", "null"):
        assert posted(store, path, {"Origin": origin}, rating="0.5").status == 403
    for token in ("", "0" * 64):
        assert posted(store, path, rating="0.5", csrf=token).status == 403
    assert store.rollout(rollout.id).human_rating is None
    assert posted(store, path, rating="0.5").status == 303
    assert store.rollout(rollout.id).human_rating == 0.5

    async def script(browser: Browser) -> int:
        headers = {"Authorization": f"Bearer {KEY}"}
        return (await browser.send("POST", path, data={"rating": "1"}, headers=headers)).status

    assert browse(store, script, key=KEY, opened=False) == 200
    assert store.rollout(rollout.id).human_rating == 1.0


def test_every_answer_has_the_headers_and_no_page_has_inline_script_or_style(store: Store) -> None:
    three_rollouts(store)
    paths = ("/nowhere", "/runs/none", "/static/htmx.min.js", "/rollouts?least=x", *PAGES)

    async def visit(browser: Browser) -> dict[str, Any]:
        answers = {path: await browser.send("GET", path) for path in paths}
        return {path: (answer.headers, await answer.text()) for path, answer in answers.items()}

    for path, (headers, text) in browse(store, visit).items():
        policy = headers["Content-Security-Policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
        if not path.startswith("/static/"):
            assert headers["Cache-Control"] == "no-store"
            assert re.findall(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=|javascript:|\shx-on", text) == []


# dist/htmx.min.js of the package htmx.org 2.0.11 in the npm registry, licence 0BSD.
HTMX_SHA256 = "d6fdc75f204e6bdefa99b69bf1e6d4ac69b8a364f77929f45c13476b4000f717"


def test_htmx_is_the_released_file() -> None:
    content, _ = static_file("htmx.min.js")
    assert hashlib.sha256(content).hexdigest() == HTMX_SHA256


def test_own_files_name_no_other_server() -> None:
    for name in set(STATIC) - {"htmx.min.js"}:
        assert re.findall(rb"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", static_file(name)[0]) == []


def test_the_command_prints_its_address_and_ends_on_a_signal(tmp_path: Path) -> None:
    Store(tmp_path / "s.db").close()
    flags = ["--port", "0", "--json", "--store", str(tmp_path / "s.db")]
    with subprocess.Popen(
        [sys.executable, "-m", "assay", "view", *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{32}", address)
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(address) as answer:
            assert "The store holds no runs yet." in answer.read().decode()
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=120) == ("", "")
    assert process.returncode == 0


def test_invalid_options_of_the_page_are_refused(tmp_path: Path) -> None:
    ended = assay_command("view", "--store", str(tmp_path / "missing.db"))
    assert (ended.code, "there is no store" in ended.stderr) == (1, True)
    ended = assay_command("view", "--host", "0.0.0.0", "--store", str(tmp_path / "missing.db"))
    assert (ended.code, "--key" in ended.stderr) == (2, True)


def test_all_templates_compile() -> None:
    assert {"base.html", "runs.html", "rollout.html", "label.html"} <= set(compile_templates())
