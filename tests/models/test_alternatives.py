"""Token alternatives: which are kept, and bounded memory over many calls."""

import math
import re
import sqlite3
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import dspy
import pytest
from dspy import lm15
from dspy.lm15 import TokenLogprob, TopLogprob

from assay.models import Call, ResponseCache
from assay.models.alternatives import pruned_reply
from assay.models.cache import CacheError
from assay.models.lm import with_recording
from assay.models.scope import alternatives_of
from assay.testing import ScriptedEngine

WRITTEN = ["{", '"thought"', ": ", '"so"', ", ", '"action"', ': "', "search", "_", "db", '"', "}"]


class Spelled(ScriptedEngine):
    """Engine that answers token by token, with the given alternatives."""

    def __init__(self, tokens: list[str], alternatives: dict[str, float]) -> None:
        super().__init__(lambda _: "".join(tokens), logprobs=True)
        top = tuple(TopLogprob(token=word, logprob=math.log(p)) for word, p in alternatives.items())
        self.spelled = tuple(TokenLogprob(token=token, logprob=-0.1, top=top) for token in tokens)
        self.requests: list[Any] = []

    def complete(self, request: Any) -> Any:
        self.requests.append(request)
        plain = super().complete(request)
        return lm15.Response(
            id=None, model=plain.model, message=plain.message, finish_reason="stop", usage=plain.usage,
            logprobs=self.spelled
        )  # fmt: skip


def spelled_lm(engine: Any, **recording: Any) -> Any:
    return with_recording(dspy.LM("scripted/model", engine=engine, cache=False, num_retries=0), **recording)


def test_a_raw_reply_keeps_only_requested_alternatives() -> None:
    def reply() -> dict[str, Any]:
        content = [
            {"token": token, "id": 1, "logprob": -0.1, "top_logprobs": [{"token": "a", "logprob": -0.1}]}
            for token in WRITTEN
        ]
        return {"choices": [{"logprobs": {"content": content}}]}

    def counts(requested: bool, field: str | None) -> list[int]:
        pruned_reply(options := reply(), requested=requested, field=field)
        return [len(token["top_logprobs"]) for token in options["choices"][0]["logprobs"]["content"]]

    assert counts(False, None) == [0] * 12
    assert counts(True, None) == [1] * 12
    assert counts(True, "action") == [0] * 7 + [1] * 4 + [0]
    pruned_reply({"choices": [{"message": {}}, None]}, requested=True, field="action")


def test_the_cache_key_contains_the_field_whose_alternatives_are_kept() -> None:
    calls: list[Call] = []
    lm = spelled_lm(Spelled(WRITTEN, {"a": 0.5}), cache=ResponseCache(), observers=[calls.append])
    for scope in (nullcontext(), alternatives_of("action"), alternatives_of("action"), nullcontext()):
        with scope:
            lm("hello", logprobs=True, top_logprobs=20)
    assert [call.cached for call in calls] == [False, False, True, True]


def test_a_cache_of_another_format_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    place = tmp_path / "c.db"
    with closing(sqlite3.connect(place)) as db:
        db.execute("CREATE TABLE responses (key TEXT PRIMARY KEY, response TEXT NOT NULL) WITHOUT ROWID")
    for _ in range(2):
        with pytest.raises(CacheError, match=re.escape(str(place))):
            ResponseCache(place)
    ResponseCache(tmp_path / "new.db").close()
    with closing(sqlite3.connect(tmp_path / "new.db")) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(CacheError):
        ResponseCache(tmp_path / "new.db")
    with closing(sqlite3.connect(place)) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("responses",)]
