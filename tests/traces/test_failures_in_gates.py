"""Failed calls in the clean gate of an export: retries and failures of the agent itself are no defects of the data."""

from pathlib import Path

import pytest
from export_rows import add_rollout, exported, store as store, turn

from assay.errors import FailureKind
from assay.traces import Store, Transition


def failed(t: int, ask: str, error: str = "HTTP 429: slow down", kind: str = "model") -> Transition:
    call = turn(t, ask, "", error=error, failure=FailureKind(kind))
    call.response = None
    return call


def clean(store: Store) -> tuple[float, dict[str, int]]:
    _, manifest = exported(store, "transitions", privacy="off")
    return next(gate["value"] for gate in manifest["gates"] if gate["gate"] == "clean"), manifest["problems"]


@pytest.mark.parametrize("error", ["HTTP 429: slow down", "HTTP 503: overloaded", "Timeout"])
def test_failed_calls_that_were_made_again_do_not_count(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    add_rollout(store, failed(0, "q", error), failed(1, "q", error), turn(2, "q", "a"), turn(3, "q2", "b"))
    assert clean(store) == (1.0, {})


def test_a_call_that_failed_for_good_counts(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    add_rollout(store, failed(0, "q"), turn(1, "another", "a"))
    assert clean(store) == (0.5, {"error": 1})


@pytest.mark.parametrize(
    "last",
    [
        turn(1, "q2", "x", failure=FailureKind.PARSE),
        turn(1, "q2", "cut", finish="length"),
        failed(1, "q2", "HTTP 400: too long", "context"),
        failed(1, "q2", "it repeated itself", "loop"),
    ],
)
def test_the_failure_for_which_an_agent_was_scored_does_not_count(
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    last: Transition,
) -> None:
    monkeypatch.chdir(tmp_path)
    add_rollout(store, turn(0, "q", "a"), last, status="failed", failure=FailureKind.AGENT, score=0.0)
    add_rollout(store, turn(0, "p", "a"), task="t2")
    assert clean(store) == (1.0, {})
