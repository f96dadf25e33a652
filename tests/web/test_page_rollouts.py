"""The pages of rollouts: filters, paging, one rollout as a conversation, rating, and hostile content."""

import asyncio
import re
from typing import Any

import pytest
from pages import NOW, Browser, browse, got, links_in, posted, read, rollout_of_sums

from assay.errors import FailureKind
from assay.traces import Rollout, Store, ToolCall, Transition, Verdict

ROW = re.compile(r'id="rollout-([0-9a-f]+)"')


def listed(store: Store, *queries: str) -> list[list[int]]:
    """Numbers of the rollouts on each page, as `rollout_of_sums` made their ids."""
    texts = [text for _, text in got(store, *(f"/rollouts{query}" for query in queries))]
    return [[int(rollout_id, 16) for rollout_id in ROW.findall(text)] for text in texts]


@pytest.fixture
def varied(store: Store) -> Store:
    """Rollouts 1 to 6, each different from the first in one thing."""
    rollout_of_sums(store, 1)
    second = rollout_of_sums(store, 2, program="other.py:Other", task_id="task-1")
    store.put_transition(second.id, Transition(t=1, model="m", request={}, failure=FailureKind.LOOP))
    rollout_of_sums(store, 3, score=0.25, split="val", phase="evaluate")
    rollout_of_sums(store, 4, status="failed", failure=FailureKind.PARSE, score=0.0, run_id="run-2")
    rollout_of_sums(store, 5, score=None, source="gateway", inputs={"question": 'Say "Ünder_score 100%" twice'})
    rollout_of_sums(store, 6, source="judge")
    rollout_of_sums(store, 7, source="simulated_user")
    rollout_of_sums(store, 8, deployment="d1", arm="candidate", stage=1, started_at=NOW)
    store.flush()
    return store


FILTERS: dict[str, list[int]] = {
    "": [5, 4, 3, 2, 1, 8],  # not those of judges and simulated users
    "?source=simulated_user": [7],
    "?deployment=d1&arm=candidate": [8],
    "?deployment=d1&arm=champion": [],
    "?source=judge": [6],
    "?source=gateway": [5],
    "?program=OTHER": [2],
    "?status=failed": [4],
    "?failure=parse": [4],
    "?failure=loop": [2],  # of a call: the agent was stopped and then answered
    "?split=val": [3],
    "?phase=evaluate": [3],
    "?run=run-2": [4],
    "?task=task-1": [2, 1],
    "?task=task-1&run=run-1&program=sums": [1],
    "?least=0.2&most=0.5": [3],
    "?least=1": [2, 1, 8],
    "?text=much+is+3": [3],
    "?text=MUCH+IS+3": [3],
    "?text=say+%22": [5],  # as JSON writes a quotation mark
    "?text=Ünder_score+100%25": [5],
    "?text=_": [5],  # no wildcard
    "?text=%25": [5],
    "?since=2025-06-15": [5, 4, 3, 2, 1, 8],
    "?since=2025-06-16": [],
    "?program=nowhere": [],
}
REFUSED = {
    "least=2": "from 0 to 1", "most=nan": "from 0 to 1", "since=soon": "30m, 12h, 7d", "before=x": "follow the links",
}  # fmt: skip


def test_filters_select_rollouts_and_a_wrong_one_is_refused_with_its_rule(varied: Store) -> None:
    assert dict(zip(FILTERS, listed(varied, *FILTERS), strict=True)) == FILTERS
    for (status, text), message in zip(
        got(varied, *(f"/rollouts?{q}" for q in REFUSED)), REFUSED.values(), strict=True
    ):
        assert (status, message in text) == (400, True)


def test_rollouts_are_found_by_criterion_and_tool(store: Store) -> None:
    for number, criterion, tool in ((1, "right", "add"), (2, "short 100%", "add"), (3, "right", 'say "x"')):
        rollout = rollout_of_sums(store, number, verdicts=[Verdict(criterion=criterion, grade=1.0, weight=1.0)])
        call = ToolCall(name=tool, arguments={"name": "add 9"}, result="")
        store.put_transition(
            rollout.id, Transition(t=1, model="m", request={}, output="", tools=[call], latency_ms=1.0)
        )
    store.put_rollout(Rollout(id=f"{4:032x}", started_at=NOW + 4, early_tools=[ToolCall(name="early", arguments={})]))
    store.flush()
    queries = {
        "?criterion=right": [3, 1], "?criterion=short+100%25": [2], "?criterion=short+1": [], "?tool=say+%22x%22": [3],
        "?tool=add&criterion=right": [3, 1],  # each calls add in its first call
        "?tool=early": [4],
    }  # fmt: skip
    assert dict(zip(queries, listed(store, *queries), strict=True)) == queries


def test_pages_follow_each_other_in_both_directions(store: Store) -> None:
    for number in range(1, 121):
        rollout_of_sums(store, number, started_at=NOW + number // 3)  # three start at the same time
    store.flush()

    async def visit(browser: Browser) -> list[list[int]]:
        pages, path = [], "/rollouts?status=done"
        for name in ("older", "older", "newer", "newer"):
            text = (await browser.get(path))[1]
            pages.append([int(rollout_id, 16) for rollout_id in ROW.findall(text)])
            path = re.findall(rf'id="{name}"[^>]*href="([^"]*)"', text)[0].replace("&amp;", "&")
        return pages

    first, second, third, again = browse(store, visit)
    assert first + second + third == list(range(120, 0, -1))
    assert again == second


def test_a_rollout_is_shown_as_a_conversation(store: Store) -> None:
    rollout = rollout_of_sums(store, 7)
    store.flush()
    top, _, text = read(store, f"/rollouts/{rollout.id}").partition("<h2>Task</h2>")
    assert "the sum is right" in top
    order = ["How much is 7 + 1?", "Add.", ">7 + 1<", "I count on.", ">8<", "tool_executed 0.150", "return 1.150"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    command = "assay run sums.py:Sums &#39;question=How much is 7 + 1?&#39; --model openai/m"
    for part in ("12 + 3 tokens", "40 ms", "$0.0010", "Tool <code>add</code>", command):
        assert part in text


def test_errors_of_calls_and_tools_are_shown(store: Store) -> None:
    rollout = rollout_of_sums(store, 1, status="error", error="no answer", prediction=None, score=None)
    failed = Transition(
        t=1, model="m", request={}, error="connection refused", failure=FailureKind.MODEL,
        tools=[ToolCall(name="look", arguments={}, error="no such file")],
    )  # fmt: skip
    store.put_transition(rollout.id, failed)
    store.flush()
    text = read(store, f"/rollouts/{rollout.id}")
    for part in ("connection refused", "no such file", "no answer", "unscored", ">model<"):
        assert part in text


def test_messages_of_the_call_before_are_not_repeated(store: Store) -> None:
    rollout = rollout_of_sums(store, 1)
    messages = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1"}]
    messages += [{"role": "assistant", "content": "2"}, {"role": "user", "content": "and twice that"}]
    body = {"messages": messages}
    store.put_transition(rollout.id, Transition(t=1, model="m", request={"dialect": "chat", "body": body}, output="4"))
    store.flush()
    text = read(store, f"/rollouts/{rollout.id}")
    assert text.count(">Add.</pre>") == 1
    assert "2 messages as in the call before" in text
    assert "and twice that" in text


def test_a_long_rollout_is_shown_in_parts(store: Store) -> None:
    rollout = rollout_of_sums(store, 1)
    for t in range(1, 45):
        store.put_transition(rollout.id, Transition(t=t, model="m", request={}, output=f"answer-{t}."))
    store.flush()

    async def visit(browser: Browser) -> list[str]:
        texts, path = [], f"/rollouts/{rollout.id}"
        for _ in range(3):
            texts.append((await browser.get(path))[1])
            path = next((link for link in links_in(texts[-1], f"/rollouts/{rollout.id}?call=")[::-1]), "")
        return texts

    texts = browse(store, visit)
    assert [re.findall(r"answer-(\d+)\.", text)[-1] for text in texts] == ["19", "39", "44"]
    assert all("<dd>45, " in text for text in texts)  # the sums are those of all calls


def test_next_and_previous_stay_within_the_filters(varied: Store) -> None:
    text = read(varied, f"/rollouts/{3:032x}?program=sums&status=done")
    newer, older = (re.findall(rf'rel="{rel}"[^>]*href="/rollouts/([0-9a-f]+)\?program=sums&amp;status=done"', text)
                    for rel in ("prev", "next"))  # fmt: skip
    assert (newer, older) == ([f"{5:032x}"], [f"{1:032x}"])
    assert 'rel="next"' not in read(varied, f"/rollouts/{8:032x}?program=sums")


def rated(store: Store, rollout: Rollout, rating: str, **headers: str) -> tuple[int, str]:
    answer = posted(store, f"/rollouts/{rollout.id}/rating", headers, rating=rating)
    return answer.status, asyncio.run(answer.text())


def test_each_digit_is_a_button_that_rates(store: Store) -> None:
    rollout = rollout_of_sums(store, 1)
    store.flush()
    buttons = re.findall(r'<button [^>]*value="([\d.]+)" data-key="(\d)"', read(store, f"/rollouts/{rollout.id}"))
    assert [key for _, key in buttons] == [str(key) for key in range(10)]
    assert (buttons[0][0], buttons[-1][0]) == ("0.0", "1.0")
    assert rated(store, rollout, buttons[6][0])[0] == 303
    assert store.rollout(rollout.id).human_rating == pytest.approx(6 / 9, abs=1e-4)
    assert "rated 0.67" in read(store, f"/rollouts/{rollout.id}")
    status, text = rated(store, rollout, "0", **{"HX-Request": "true"})  # htmx gets only the form back
    assert (status, text.startswith("<form"), "rated 0.00" in text) == (200, True, True)
    for rating in ("1.1", "-1", "nan", "", "good"):
        status, text = rated(store, rollout, rating)
        assert (status, "must be a number from 0 to 1" in text) == (400, True)


NOT_RATED = {
    "sealed split gate": {"split": "gate"},
    "sealed split test": {"split": "test"},
    "a verdict of a judge": {"source": "judge"},
    "a turn of a simulated user": {"source": "simulated_user"},
    "still running": {"status": "running"},
}


def test_ratings_of_sealed_judge_user_and_running_rollouts_are_refused(store: Store) -> None:
    for number, (reason, fields) in enumerate(NOT_RATED.items(), 1):
        rollout = rollout_of_sums(store, number, **fields)
        store.flush()
        page = read(store, f"/rollouts/{rollout.id}")
        assert reason in page
        if "sealed" in reason:  # only keys that do something are named
            assert re.findall(r"Keys: (.*?)← newer", page) == [""]
        status, text = rated(store, rollout, "1")
        assert (status, reason in text) == (400, True)
        assert store.rollout(rollout.id).human_rating is None
    rollout_of_sums(store, 9)
    store.flush()
    hints = re.findall(r"Keys: (.*?)← newer", read(store, f"/rollouts/{9:032x}"))
    assert hints == ["0 to 9 rate, d adds to the dataset, "]


HOSTILE = "<script>alert(1)</script>\"'&{{ 7*7 }}\u202egnp.exe\x1b[31m\x07\ud800"


def test_hostile_content_shows_as_text(store: Store) -> None:
    fields: dict[str, Any] = {
        "inputs": {HOSTILE: HOSTILE}, "prediction": {HOSTILE: HOSTILE}, "error": HOSTILE, "program": HOSTILE,
        "program_version": HOSTILE, "model": HOSTILE, "phase": HOSTILE[:30], "task_id": HOSTILE, "rubric": HOSTILE,
        "parameters": {HOSTILE: HOSTILE}, "expected": {HOSTILE: HOSTILE},
    }  # fmt: skip
    rollout = rollout_of_sums(store, 1, **fields)
    store.put_run(
        "run-1", kind=HOSTILE[:30], config={"program": HOSTILE, HOSTILE: HOSTILE}, status="done", started_at=1
    )
    store.flush()
    paths = ("/runs", "/runs/run-1", "/rollouts", f"/rollouts/{rollout.id}", "/compare?a=run-1&b=run-1")
    for _, text in got(store, *paths):
        assert "<script>alert" not in text
        assert "&lt;script&gt;" in text
        assert "{{ 7*7 }}" in text  # no template of its own
        assert re.search("[\x00-\x08\x0b-\x1f\u202e\ud800]", text) is None
        assert "[U+202E]" in text


@pytest.mark.slow
def test_a_megabyte_of_text_makes_a_small_page(store: Store) -> None:
    rollout = rollout_of_sums(store, 1, inputs={"question": "<" * 1_000_000}, prediction={"answer": "y" * 1_000_000})
    body = {"messages": [{"role": "user", "content": "z" * 1_000_000} for _ in range(30)]}
    store.put_transition(rollout.id, Transition(t=1, model="m", request={"dialect": "chat", "body": body}, output="x"))
    store.flush()
    assert len(read(store, f"/rollouts/{rollout.id}")) < 100_000
    assert len(read(store, "/rollouts")) < 20_000


def test_json_is_a_text_that_no_browser_interprets(store: Store) -> None:
    rollout = rollout_of_sums(store, 1, inputs={"question": "<script>alert(1)</script>"})
    store.flush()

    async def visit(browser: Browser) -> list[Any]:
        plain = await browser.send("GET", f"/rollouts/{rollout.id}/json")
        part = (await browser.get(f"/rollouts/{rollout.id}/json", HX_Request="true"))[1]
        call = (await browser.get(f"/rollouts/{rollout.id}/calls/0"))[1]
        missing = (await browser.get(f"/rollouts/{rollout.id}/calls/9"))[0]
        return [plain.content_type, "<script>" in await plain.text(), "<script>" in part, '"t": 0' in call, missing]

    assert browse(store, visit) == ["text/plain", True, False, True, 404]


def test_the_list_of_rollouts_is_reloaded_only_if_it_changed(store: Store) -> None:
    rollout_of_sums(store, 1)
    store.put_run("run-1", kind="evaluate", config={}, status="running", started_at=1.0)
    store.flush()

    async def visit(browser: Browser) -> list[Any]:
        text = (await browser.get("/rollouts"))[1]
        again, every = re.findall(r'hx-get="([^"]*)" hx-trigger="every (\d+)s"', text)[0]
        unchanged = (await browser.get(again, HX_Request="true"))[0]
        rollout_of_sums(store, 2)
        store.flush()
        status, part = await browser.get(again, HX_Request="true")
        return [every, unchanged, status, part.lstrip().startswith("<section"), len(ROW.findall(part))]

    assert browse(store, visit) == ["3", 204, 200, True, 2]


def test_everything_that_a_rollout_may_have_is_shown(store: Store) -> None:
    verdicts = [
        Verdict(criterion="long reason", grade=0.0, weight=1.0, reason=f"because {'of this ' * 40}"),
        Verdict(criterion="polite", grade=None, reason="the judge did not answer"),
        Verdict(criterion="short", grade=None, applies=False, scope="step"),
        Verdict(criterion="right", grade=0.5, label="partly", confidence=0.75),
    ]
    early = [ToolCall(name="search", arguments={"q": "x"}, result="found", isolation="landlock")]
    rollout = rollout_of_sums(
        store, 1, verdicts=verdicts, early_tools=early, adapters=("a1", "a2"), task_type="sum", coverage=0.5,
        rubric="math@1", human_rating=0.25, parameters={"temperature": 1.23456789}, stage=0,
        deployment="d1", failure=FailureKind.JUDGE,
    )  # fmt: skip
    running = ToolCall(name="slow", arguments={})
    messages = [{"role": "user", "content": f"message {number}"} for number in range(9)]
    call = {"id": "1", "type": "function", "function": {"name": "asked", "arguments": "{}"}}
    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    body = {
        "messages": [*messages, {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "part"}]}]
    }
    store.put_transition(
        rollout.id,
        Transition(t=1, model="m", request={"dialect": "chat", "body": body}, cached=True, constrained=True,
                   thinking_tokens=7, shown_tasks=("t1", "t2"), tools=[running]),
    )  # fmt: skip
    store.flush()
    text = read(store, f"/rollouts/{rollout.id}")
    for part in (
        "the judge did not answer", "not counted", "partly", "0.75", "isolation landlock", "a1, a2", "type sum",
        "coverage 0.50", "math@1", "rated 0.25", "<dd>1.235</dd>", "step 1", "(7 thinking)", ", cached",
        ", constrained",
        "messages between, with demonstrations from 2 tasks", "calls <code>asked</code>", "no result yet", ">empty<",
    ):  # fmt: skip
        assert part in text, part


def test_a_request_that_cannot_be_read_is_shown_all_the_same(store: Store) -> None:
    rollout = rollout_of_sums(store, 1)
    for t, request in enumerate(
        ({"dialect": "chat", "body": "text"}, {"dialect": "gemini", "body": {"contents": 3}}), 1
    ):
        call = Transition(t=t, model="m", request=request, response={"body": [1]}, output=f"answer {t}")
        store.put_transition(rollout.id, call)
    store.flush()
    text = read(store, f"/rollouts/{rollout.id}")
    assert "answer 1" in text
    assert "answer 2" in text
