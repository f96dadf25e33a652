"""Fixtures of the contract suite. It imports the public names of assay and the entry point of its command line."""

from collections.abc import Iterator

import pytest
from contract_files import Contract


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-contract", action="store_true", help="store what the tests of tests/contract find")


@pytest.fixture(scope="session")
def contract(pytestconfig: pytest.Config) -> Iterator[Contract]:
    stored = Contract(writing=pytestconfig.getoption("--write-contract", default=False))
    yield stored
    if stored.writing:
        stored.write()
