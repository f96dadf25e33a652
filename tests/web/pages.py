"""A client that opens the local page as a browser does, and stores with content."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer

from assay.traces import Rollout, Store, ToolCall, Transition, Verdict
from assay.web.server import LocalPage, PageAccess

T = TypeVar("T")
NOW = 1_750_000_000.0
ROLLOUT = f"{2:032x}"
PLACE = f"1750000002.0~{ROLLOUT}"
PATHS = [
    "/runs", "/runs?kind=evaluate&program=p&status=done&since=1d", "/runs/run-1", "/runs/run-1?count=all", "/rollouts",
    "/rollouts?text=a&program=b&least=0.1&most=1&since=1d", "/rollouts?status=failed&split=val&failure=parse&phase=x",
    f"/rollouts?source=judge&before={PLACE}", f"/rollouts?after={PLACE}", "/rollouts?run=run-1",
    "/rollouts?task=task-1", "/rollouts?criterion=right&tool=add",
    f"/rollouts/{ROLLOUT}", f"/rollouts/{ROLLOUT}?status=done&run=run-1",
    f"/rollouts/{ROLLOUT}/json", f"/rollouts/{ROLLOUT}/calls/0", "/compare", "/compare?a=run-1&b=run-1",
]  # fmt: skip


class Browser:
    """A client of the page. Its cookies are kept; redirects are followed unless `follow` is False."""

    def __init__(self, client: TestClient, page: LocalPage) -> None:
        self.client, self.page, self.access = client, page, page.access

    async def open(self) -> None:
        assert (await self.get(f"/?token={self.access.token}"))[0] == 200

    async def send(self, method: str, path: str, *, follow: bool = True, **options: object) -> ClientResponse:
        return await self.client.request(method, path, allow_redirects=follow, **options)

    async def get(self, path: str, **headers: str) -> tuple[int, str]:
        """Status and text."""
        answer = await self.send("GET", path, headers={name.replace("_", "-"): text for name, text in headers.items()})
        return answer.status, await answer.text()


def browse(
    store: Store, visit: Callable[[Browser], Awaitable[T]], *, key: str | None = None, opened: bool = True,
    where: Path | None = None,
) -> T:  # fmt: skip
    """What a visit of the page returns. `opened`: the printed address was opened before."""

    async def run() -> T:
        page = LocalPage(store, PageAccess(key, host="127.0.0.1"), where=where)
        async with TestClient(TestServer(page.app())) as client:
            browser = Browser(client, page)
            if opened:
                await browser.open()
            return await visit(browser)

    return asyncio.run(run())


def got(store: Store, *paths: str, **options: object) -> list[tuple[int, str]]:
    """Status and text of each page, in one visit."""

    async def visit(browser: Browser) -> list[tuple[int, str]]:
        return [await browser.get(path) for path in paths]

    return browse(store, visit, **options)


def read(store: Store, path: str, **options: object) -> str:
    """The text of a page."""
    ((status, text),) = got(store, path, **options)
    assert status == 200, text
    return text


def posted(store: Store, path: str, headers: dict[str, str] | None = None, **fields: str) -> ClientResponse:
    """The answer to a form of the page, whose text is read. Redirects are not followed."""

    async def visit(browser: Browser) -> ClientResponse:
        data = {"csrf": browser.access.csrf, **fields}
        answer = await browser.send("POST", path, data=data, headers=headers or {}, follow=False)
        await answer.read()
        return answer

    return browse(store, visit)


def put_report(store: Store, report: dict[str, Any], *, run_id: str = "run-1") -> None:
    """Stores the report of a run."""
    store.put_state(run_id, {"report": report})
    store.flush()


def links_in(text: str, prefix: str) -> list[str]:
    """Addresses of links that begin with a prefix."""
    return [link.replace("&amp;", "&") for link in re.findall(r'href="([^"]*)"', text) if link.startswith(prefix)]


def rollout_of_sums(store: Store, number: int, **fields: object) -> Rollout:
    """Stores a rollout with one LM call and one tool call. `number` orders them in time."""
    rollout = Rollout(
        **{
            "id": f"{number:032x}", "run_id": "run-1", "task_id": f"task-{number}", "program": "sums.py:Sums",
            "program_version": "v1", "model": "openai/m", "split": "train", "phase": "search", "status": "done",
            "inputs": {"question": f"How much is {number} + 1?"}, "prediction": {"answer": str(number + 1)},
            "score": 1.0, "started_at": NOW + number, "ended_at": NOW + number + 1,
            "verdicts": [Verdict(criterion="right", grade=1.0, weight=2.0, reason="the sum is right")],
            **fields,
        }
    )  # fmt: skip
    store.put_rollout(rollout)
    body = {"messages": [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{number} + 1"}]}
    message = {"role": "assistant", "content": str(number + 1), "reasoning_content": "I count on."}
    store.put_transition(
        rollout.id,
        Transition(
            t=0, model="openai/m", request={"dialect": "chat", "body": body},
            response={"body": {"choices": [{"message": message, "finish_reason": "stop"}]}}, output=str(number + 1),
            prompt_tokens=12, completion_tokens=3, latency_ms=40.0, cost_usd=0.001, started_at=NOW + number,
            tools=[ToolCall(name="add", arguments={"a": number, "b": 1}, result=str(number + 1))],
            step_rewards={"tool_executed": 0.15}, return_=1.15,
        ),
    )  # fmt: skip
    return rollout


def three_rollouts(store: Store) -> None:
    """Stores a running run with the rollouts 1 to 3, which `PATHS` show."""
    store.put_run("run-1", kind="evaluate", config={}, status="running", started_at=1.0)
    for number in (1, 2, 3):
        rollout_of_sums(store, number)
    store.flush()


class Scans:
    """Collects the plan's lines that scan rollouts or transitions, of the queries inside of it."""

    def __init__(self, store: Store) -> None:
        self._engine, self.lines = store.engine, list[str]()

    def __enter__(self) -> list[str]:
        sa.event.listen(self._engine, "before_cursor_execute", self._explain)
        return self.lines

    def __exit__(self, *exc: object) -> None:
        sa.event.remove(self._engine, "before_cursor_execute", self._explain)

    def _explain(self, connection: Any, cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.lstrip().upper().startswith("SELECT"):
            plan = connection.connection.dbapi_connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
            self.lines += [line for *_, line in plan if re.match(r"SCAN (rollouts|transitions)\b", line)]
