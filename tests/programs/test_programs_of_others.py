"""Programs of other people's shape, each with one optimizer; `make test-clients` runs them with every one."""

from pathlib import Path

import pytest
from program_steps import PROGRAMS, compiles, evaluates, laid_out, stops_at_a_cap
from prompt_server import serving


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "optimizer"),
    list(
        zip(
            PROGRAMS,
            ("auto", "mipro", "gepa", "simba", "auto", "gepa", "mipro", "simba", "gepa", "mipro", "simba"),
            strict=True,
        )
    ),
)
def test_the_server_sees_the_calls_that_are_reported_stored_and_capped(
    program: str, optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving() as server:
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        monkeypatch.setenv("PROGRAMS_SERVER", server.url)
        place = laid_out(tmp_path / program, program, server)
        evaluates(place)
        stops_at_a_cap(place)
        assert compiles(place, optimizer).is_dir()
