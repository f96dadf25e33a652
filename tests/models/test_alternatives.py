"""Token alternatives: which are kept, and bounded memory over many calls."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from assay.models import ResponseCache
from assay.models.cache import CacheError
from assay.models.codec import pruned_reply

WRITTEN = ["{", '"thought"', ": ", '"so"', ", ", '"action"', ': "', "search", "_", "db", '"', "}"]


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
