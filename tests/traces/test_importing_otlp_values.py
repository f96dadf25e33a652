"""Imports of OTLP spans, written by hand: other operations, values of every type and spelling, counts."""

import json
from pathlib import Path
from typing import Any

import pytest
from importing_rows import attributes, chat, only, otlp, read, request, span


@pytest.mark.parametrize("bad", ["NaN", "-1", "abc", "1e400", str(2**31), True, None, [1], {"a": 1}, "9" * 5000])
def test_a_missing_count_is_unknown_and_never_zero(tmp_path: Path, bad: Any) -> None:
    written = [
        *attributes({"gen_ai.operation.name": "chat"}),
        {"key": "gen_ai.usage.input_tokens", "value": {"intValue": bad}},
    ]
    call = only(otlp(tmp_path, {**span(1), "attributes": written}))
    assert (call.prompt_tokens, call.completion_tokens) == (None, None)


def test_a_document_lines_and_an_array_give_the_same_rollouts(tmp_path: Path) -> None:
    spans = [span(1), span(2, chat("a"), parent=1, at=1), span(3, chat("b"), parent=1, at=2)]
    forms = {
        "document": json.dumps(request(*spans), indent=2), "one line": json.dumps(request(*spans)),
        "lines": "\n".join(json.dumps(request(item)) for item in spans),
        "array": json.dumps([request(item) for item in spans], indent=1),
        "array in lines": "[\n" + ",\n".join(json.dumps(request(item)) for item in spans) + "\n]\n",
        "array of one": "[\n" + json.dumps(request(*spans)) + "\n]\n",
        "documents": "\n".join(json.dumps(request(item), indent=2) for item in spans),
        "bom": "\ufeff" + "\n".join(json.dumps(request(item)) for item in spans),
        "blank lines": "\n\r\n" + "\n\n".join(json.dumps(request(item)) for item in spans) + "\n \n",
    }  # fmt: skip
    for name, text in forms.items():
        (path := tmp_path / "x.json").write_text(text, encoding="utf-8")
        (run,), skipped = read("otlp", path)
        assert ([t.output for t in run.transitions], skipped) == (["a", "b"], []), name
