"""Progress in a notebook: when it is shown, and what."""

import sys
from types import SimpleNamespace

import pytest

from assay.evaluation import NotebookProgress, SilentProgress, default_progress


def in_a_kernel(monkeypatch: pytest.MonkeyPatch, shell: object) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))


def test_a_given_progress_is_kept_in_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_kernel(monkeypatch, SimpleNamespace(kernel=object()))
    progress = SilentProgress()
    assert default_progress(progress) is progress


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
