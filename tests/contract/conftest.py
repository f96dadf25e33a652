"""Fixtures of the contract suite. It imports the public names of assay and the entry point of its command line."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from contract_files import Contract
from contract_project import Project
from prompt_server import PromptServer, serving


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-contract", action="store_true", help="store what the tests of tests/contract find")


@pytest.fixture(scope="session")
def contract(pytestconfig: pytest.Config) -> Iterator[Contract]:
    stored = Contract(writing=pytestconfig.getoption("--write-contract", default=False))
    yield stored
    if stored.writing:
        stored.write()


@pytest.fixture(scope="session")
def server() -> Iterator[PromptServer]:
    """The scripted model of all projects."""
    with pytest.MonkeyPatch.context() as patch, serving() as running:
        patch.setenv("OPENAI_API_KEY", "none")
        yield running


@pytest.fixture
def project(server: PromptServer, tmp_path: Path) -> Project:
    return Project(tmp_path, server.url)
