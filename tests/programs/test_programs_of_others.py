"""Programs of other people's shape, each with one optimizer; `make test-clients` runs them with every one."""

from pathlib import Path

import pytest
from program_steps import PROGRAMS, compiles, evaluates, laid_out, stops_at_a_cap
from prompt_server import serving

OPTIMIZERS = {"hops": "auto", "tools": "mipro", "structured": "gepa", "concurrent": "simba"}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_server_sees_the_calls_that_are_reported_stored_and_capped(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as server:
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        monkeypatch.setenv("PROGRAMS_SERVER", server.url)
        place = laid_out(tmp_path / program, program, server)
        evaluates(place)
        stops_at_a_cap(place)
        if program in OPTIMIZERS:
            assert compiles(place, OPTIMIZERS[program]).is_dir()
