"""Which gates stop an export, and which only warn."""

import pytest

from assay.traces.export.settings import GateReport, Gates


def report(gates: Gates, *, clean: int = 9, dirty: int = 0) -> GateReport:
    gates_report = GateReport(gates, state="patterns only")
    for _ in range(clean):
        gates_report.see("sums", None)
    for _ in range(dirty):
        gates_report.see("sums", "truncated")
    return gates_report


def stopped(gates_report: GateReport) -> list[str]:
    return [gate["gate"] for gate in gates_report.failed]


def test_little_data_of_one_task_type_is_a_warning_by_default() -> None:
    gates_report = report(Gates())
    assert stopped(gates_report) == []
    assert [gate["gate"] for gate in gates_report.to_list() if not gate["passed"]] == ["transitions", "task types"]
    assert not gates_report.passed


def test_gated_enforces_all_gates() -> None:
    assert stopped(report(Gates(gated=True))) == ["transitions", "task types"]


@pytest.mark.parametrize("gates", [Gates(), Gates(gated=True)])
def test_unclean_data_stops_an_export(gates: Gates) -> None:
    assert "clean" in stopped(report(gates, clean=9, dirty=1))
    assert "clean" not in stopped(report(Gates(min_clean=0), clean=9, dirty=1))


def test_data_that_is_not_anonymized_stops_an_export() -> None:
    gates_report = report(Gates())
    gates_report.state = "failed"
    assert stopped(gates_report) == ["privacy"]
