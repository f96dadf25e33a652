"""The comparison of greedy texts of torch and of the served model, in a report."""

from typing import Any

import pytest

from assay.optimizers.finetuning import run_folder


def test_the_note_on_different_texts_says_of_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "greedy_agreement", lambda *_: 1 / 3)
    nothing: Any = None
    notes: list[str] = []
    prompts = [[{"role": "user", "content": "?"}]] * 3
    assert run_folder.report_agreement(nothing, nothing, nothing, prompts, notes) == 1 / 3
    assert notes == ["only 1 of 3 greedy texts are the same as in torch: what is served may not be what was trained"]
