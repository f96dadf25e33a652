"""Gates of an export: which data is clean, what is missing, and which gates stop an export or only warn."""

from pathlib import Path
from typing import Any

import pytest
from export_rows import add_rollout, exported, response_of, store as store, turn
from hypothesis import given, strategies as st

import assay
from assay.errors import ConfigError, FailureKind, MissingExtra
from assay.traces import Store, ToolCall, Transition
from assay.traces.export.settings import GateReport, Gates, UngatedExport
from assay.traces.privacy import names as privacy_gazetteers


def report(gates: Gates, *, clean: int = 9, dirty: int = 0, state: str = "patterns only") -> GateReport:
    gates_report = GateReport(gates, state=state)
    for problem, count in ((None, clean), ("truncated", dirty)):
        for _ in range(count):
            gates_report.see("sums", problem)
    return gates_report


def stopped(gates_report: GateReport) -> list[str]:
    return [gate["gate"] for gate in gates_report.failed]


def test_little_data_of_one_task_type_stops_only_a_gated_export() -> None:
    missing = ["transitions", "task types"]
    assert (stopped(report(Gates())), stopped(report(Gates(gated=True)))) == ([], missing)
    assert [gate["gate"] for gate in report(Gates()).to_list() if not gate["passed"]] == missing
    assert not report(Gates()).passed


@pytest.mark.parametrize("gated", [False, True])
def test_unclean_data_stops_an_export(gated: bool) -> None:
    assert "clean" in stopped(report(Gates(gated=gated), dirty=1))
    assert "clean" not in stopped(report(Gates(min_clean=0), dirty=1))


@pytest.mark.parametrize(
    ("required", "state", "passed"),
    [
        ("patterns", "patterns only", True),
        ("patterns", "verified", True),
        ("patterns", "failed", False),
        ("names", "patterns only", False),
        ("names", "verified", True),
        ("off", "failed", True),
    ],
)
def test_the_privacy_gate_has_three_states(required: str, state: str, passed: bool) -> None:
    gates_report = report(Gates(privacy=required), state=state)
    gate = next(gate for gate in gates_report.to_list() if gate["gate"] == "privacy")
    assert (gate["value"], gate["passed"], stopped(gates_report)) == (state, passed, [] if passed else ["privacy"])
    assert ("warning" in gate) == (passed and state == "patterns only")
    with pytest.raises(ConfigError, match="privacy: must be one of patterns, names, off, not 'maybe'"):
        Gates(privacy="maybe")


@given(st.integers(0, 200), st.integers(0, 200))
def test_the_clean_gate_reports_how_many_clean_transitions_are_missing(clean: int, broken: int) -> None:
    gate = next(gate for gate in report(Gates(), clean=clean, dirty=broken).to_list() if gate["gate"] == "clean")
    if broken and not gate["passed"]:
        more = int(gate["missing"].split(";")[1].split()[0].replace(",", ""))
        assert (clean + more) / (clean + broken + more) >= 0.95 > (clean + more - 1) / (clean + broken + more - 1)


def test_failed_gates_report_what_is_missing_and_write_nothing(store: Store) -> None:
    for at in range(10):
        made = turn(0, "a", "b", finish="length" if at < 5 else "stop")
        add_rollout(store, made, task=f"t{at}", task_type=f"k{at % 3}", run_id="late" if at else "early")
    store.flush()
    with pytest.raises(
        UngatedExport, match=r"clean is 0\.5, required is 0\.95: 5 truncated; .*4 of them in run late"
    ) as caught:
        assay.export("transitions", "out", store=store.url, privacy="patterns")
    by_name = {gate["gate"]: gate for gate in caught.value.gates}
    assert by_name["transitions"]["missing"] == "4,995 more clean transitions"
    clean = {"gate": "clean", "passed": False, "enforced": True, "value": 0.5, "required": 0.95}
    assert by_name["clean"] == {
        **clean,
        "missing": "5 truncated; 4 of them in run late; 90 more clean transitions would do",
    }
    assert by_name["task types"]["missing"] == "2 more task types"
    assert (by_name["privacy"]["passed"], by_name["privacy"]["value"]) == (True, "patterns only")
    assert "names were not detected" in by_name["privacy"]["warning"]
    assert [p.name for p in Path().iterdir()] == [".assay"]
    written = assay.export("transitions", "out", store=store.url, gates=Gates(min_clean=0))
    assert (written.manifest["passed"], written.manifest["gated"]) == (False, False)
    assert written.rows == 10  # what was cut off is what a policy must learn to avoid


def test_names_that_are_not_detected_stop_an_export_that_requires_them(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_rollout(store, turn(0, "Who is it?", "It is she."))
    strict = Gates(min_transitions=0, min_clean=0, min_task_types=0, privacy="names")
    with pytest.raises(UngatedExport, match="privacy is patterns only, required is verified"):
        exported(store, "transitions", privacy="patterns", gates=strict)
    if privacy_gazetteers.available():  # the lists do not find all planted names
        with pytest.raises(UngatedExport):
            exported(store, "transitions", privacy="names", gates=strict)
    monkeypatch.setattr("assay.traces.privacy.names.available", lambda: False)
    monkeypatch.setattr("assay.traces.privacy.names.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="privacy"):
        exported(store, "transitions", privacy="names")


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        ({"error": "boom"}, "error"),
        ({"response": None}, "schema"),
        ({"request": {}}, "schema"),
        ({"response": response_of("x", "length")}, "truncated"),
        ({"output": "", "response": response_of("")}, "parse"),
        ({"tools": [ToolCall(name="f", arguments={"arguments": "{"}, error="not a JSON object")]}, "parse"),
        ({"model": ""}, "provenance"),
        ({"token_ids": (1,), "logprobs": None}, "schema"),
    ],
)
def test_problems_of_unclean_calls_are_named(store: Store, broken: dict[str, Any], problem: str) -> None:
    plain = turn(0, "a", "b")
    for name, value in broken.items():
        setattr(plain, name, value)
    add_rollout(store, plain, turn(1, "c", "d"))
    _, manifest = exported(store, "transitions")
    assert manifest["problems"] == {problem: 1}


def failed(t: int, ask: str, error: str = "HTTP 429: slow down", kind: str = "model") -> Transition:
    call = turn(t, ask, "", error=error, failure=FailureKind(kind))
    call.response = None
    return call


def clean_share(store: Store) -> tuple[float, dict[str, int]]:
    _, manifest = exported(store, "transitions", privacy="off")
    return next(gate["value"] for gate in manifest["gates"] if gate["gate"] == "clean"), manifest["problems"]


@pytest.mark.parametrize("error", ["HTTP 429: slow down", "HTTP 503: overloaded", "Timeout"])
def test_failed_calls_that_were_made_again_do_not_count(store: Store, error: str) -> None:
    add_rollout(store, failed(0, "q", error), failed(1, "q", error), turn(2, "q", "a"), turn(3, "q2", "b"))
    assert clean_share(store) == (1.0, {})


def test_a_call_that_failed_for_good_counts(store: Store) -> None:
    add_rollout(store, failed(0, "q"), turn(1, "another", "a"))
    assert clean_share(store) == (0.5, {"error": 1})


@pytest.mark.parametrize(
    "last",
    [
        turn(1, "q2", "x", failure=FailureKind.PARSE),
        turn(1, "q2", "cut", finish="length"),
        failed(1, "q2", "HTTP 400: too long", "context"),
        failed(1, "q2", "it repeated itself", "loop"),
    ],
)
def test_the_failure_for_which_an_agent_was_scored_does_not_count(store: Store, last: Transition) -> None:
    add_rollout(store, turn(0, "q", "a"), last, status="failed", failure=FailureKind.AGENT, score=0.0)
    add_rollout(store, turn(0, "p", "a"), task="t2")
    assert clean_share(store) == (1.0, {})
