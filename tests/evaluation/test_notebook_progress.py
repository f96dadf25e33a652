"""Progress in a notebook: when it is shown, and what."""

import pytest

from assay.evaluation import NotebookProgress


def test_bars_count_and_lines_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    progress = NotebookProgress()
    with progress.bar("evaluate", 4) as advance:
        advance(3)
        progress.say("half of them")
        advance(1)
    with progress.bar("search", None) as advance:
        advance(7)
    printed = capsys.readouterr()
    assert printed.out == "half of them\n"
    assert "evaluate: 100%" in printed.err
    assert "4/4" in printed.err
    assert "search: 7it" in printed.err
