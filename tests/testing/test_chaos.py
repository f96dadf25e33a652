"""Killed jobs and gateways give the results of uninterrupted ones: quick parts of `make chaos`."""

import sys
from pathlib import Path

import pytest

from rigs.chaos import chaos, differences, serving
from rigs.gateway_chaos import Settings, chaos as gateway_chaos

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="attempts are forked")


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize(("job", "kills", "seed"), [("collect", 3, 4), ("compile", 2, 2)])
def test_a_killed_and_resumed_job_has_the_results_of_an_uninterrupted_one(
    job: str, kills: int, seed: int, tmp_path: Path
) -> None:
    with serving(tmp_path / "log", delay_ms=1) as server:
        uninterrupted = chaos(job, tmp_path / "whole", server, tasks=30)
        killed = chaos(
            job, tmp_path / "killed", server, kills=kills, within_s=0.7 * uninterrupted.seconds, seed=seed, tasks=30
        )
    assert differences(uninterrupted, killed) == []
    assert uninterrupted.requests == uninterrupted.spent["calls"] > 10


@pytest.mark.chaos
@pytest.mark.slow
def test_a_gateway_that_is_killed_while_its_store_is_locked_loses_and_duplicates_nothing(tmp_path: Path) -> None:
    settings = Settings(calls=300, concurrent=12, each=1, faults=("kill server", "lock, kill gateway"))
    report = gateway_chaos(settings, tmp_path / "run")
    assert report["problems"] == {}
    assert report["faults"] == {"kill server": 1, "lock, kill gateway": 1}
    assert report["stored"] > 200
