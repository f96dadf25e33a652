"""Jobs that are killed and resumed leave what they would have left: a quick part of `make chaos`."""

import sys
from pathlib import Path

import pytest

from assay.testing.chaos import chaos, differences, serving

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="attempts are forked")


@pytest.mark.parametrize(("job", "kills", "seed"), [("collect", 3, 4), ("compile", 2, 2)])
def test_a_killed_job_leaves_what_an_unkilled_one_leaves(job: str, kills: int, seed: int, tmp_path: Path) -> None:
    with serving(tmp_path / "log", delay_ms=1) as server:
        whole = chaos(job, tmp_path / "whole", server, tasks=30)
        killed = chaos(job, tmp_path / "killed", server, kills=kills, within_s=0.7 * whole.seconds, seed=seed, tasks=30)
    assert differences(whole, killed) == []
    assert whole.requests == whole.spent["calls"] > 10
