"""Which gates stop an export, and which only warn."""

import pytest

from assay.traces.export.gates import GateReport, Gates


def report(gates: Gates, *, clean: int = 9, dirty: int = 0) -> GateReport:
    found = GateReport(gates, verified=True)
    for _ in range(clean):
        found.see("sums", None)
    for _ in range(dirty):
        found.see("sums", "truncated")
    return found


def stopped(found: GateReport) -> list[str]:
    return [gate["gate"] for gate in found.failed]


def test_little_data_of_one_kind_is_a_warning_by_default() -> None:
    found = report(Gates())
    assert stopped(found) == []
    assert [gate["gate"] for gate in found.to_list() if not gate["passed"]] == ["transitions", "task types"]
    assert not found.passed


def test_gated_enforces_all() -> None:
    assert stopped(report(Gates(gated=True))) == ["transitions", "task types"]


@pytest.mark.parametrize("gates", [Gates(), Gates(gated=True)])
def test_unclean_data_stops_an_export(gates: Gates) -> None:
    assert "clean" in stopped(report(gates, clean=9, dirty=1))
    assert "clean" not in stopped(report(Gates(min_clean=0), clean=9, dirty=1))


def test_data_that_was_not_anonymised_stops_an_export() -> None:
    found = report(Gates())
    found.verified = False
    assert stopped(found) == ["privacy"]
