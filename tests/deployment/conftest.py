"""What all tests of deployments share."""

import pytest


@pytest.fixture(autouse=True)
def few_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight simulated deployments before each start, where a user has forty."""
    monkeypatch.setattr("assay.commands.deploy.EXPECTED_RUNS", 8)
