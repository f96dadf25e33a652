"""Programs of other people's shape through every step with every optimizer, with requests counted at the server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from program_steps import (
    OPTIMIZERS,
    OTHERS,
    PROGRAMS,
    Place,
    collects,
    compiles,
    evaluates,
    exports,
    laid_out,
    runs_elsewhere,
    stops_at_a_cap,
)
from prompt_server import serving

pytestmark = pytest.mark.slow


@pytest.fixture(params=PROGRAMS)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with serving() as server:
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        monkeypatch.setenv("PROGRAMS_SERVER", server.url)
        yield laid_out(tmp_path / request.param, request.param, server)


def test_a_program_is_evaluated_within_its_cap(place: Place) -> None:
    evaluates(place)
    stops_at_a_cap(place)


def test_collected_rollouts_of_a_program_are_exported(place: Place, tiny_model: Path) -> None:
    exports(place, collects(place), tiny_model)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_compiled_program_runs_elsewhere(place: Place, optimizer: str, tmp_path: Path) -> None:
    runs_elsewhere(place, compiles(place, optimizer), tmp_path / "elsewhere")


@pytest.mark.filterwarnings("ignore:Implementing custom LMs:DeprecationWarning")  # of own_lm, until DSPy 3.5
@pytest.mark.parametrize("place", OTHERS, indirect=True)
def test_other_programs_pass_every_step(place: Place, tiny_model: Path, tmp_path: Path) -> None:
    """RLM, own engines, audio, files, an own adapter, native tool calls, code."""
    evaluates(place)
    stops_at_a_cap(place)
    runs_elsewhere(place, compiles(place, OTHERS[place.name][1]), tmp_path / "elsewhere")
    exports(place, collects(place), tiny_model)
