"""Batches that the database does not accept at once are in a file within a second and are written in order."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from assay.traces.store.writer import Keeper, Rows, Spill, leftover_batches


class Database:
    """A database that writes once `free` is set, and waits until then; or is unreachable."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.free, self.unreachable = threading.Event(), False

    def write(self, rows: Rows) -> bool:
        self.free.wait(120)
        self.written += [] if self.unreachable else [row["n"] for row in rows["t"].values()]
        return not self.unreachable


@pytest.fixture
def spill(tmp_path: Path) -> Iterator[Spill]:
    opened = Spill(tmp_path / "s.db", 1 << 20)
    yield opened
    opened.leave()


def batch(*numbers: int) -> Rows:
    return {"t": {number: {"n": number} for number in numbers}}


def in_files(spill: Spill, folder: Path) -> list[int]:
    """The rows that another process would find if this one were killed now."""
    spill.leave()
    return [row["n"] for rows in leftover_batches(folder / "s.db") for part in rows for row in part["t"].values()]


def until_written(keeper: Keeper) -> None:
    for _ in range(100):
        if keeper.commit({}):
            return
        time.sleep(0.05)
    raise AssertionError("not written")


@pytest.mark.timeout(60)
def test_a_hanging_batch_and_later_ones_are_in_the_file(tmp_path: Path, spill: Spill) -> None:
    database = Database()
    keeper = Keeper(spill, database.write, lambda: True, retry_s=0.01)
    assert not keeper.commit(batch(1, 2))
    assert not keeper.commit(batch(3))
    assert keeper.waiting == 3
    assert in_files(spill, tmp_path) == [1, 2, 3]
    database.free.set()


def test_a_slow_batch_is_written_once_and_in_order(spill: Spill) -> None:
    database = Database()
    keeper = Keeper(spill, database.write, lambda: True, retry_s=0.01)
    keeper.commit(batch(1, 2))
    keeper.commit(batch(3))
    database.free.set()
    until_written(keeper)
    assert keeper.commit(batch(4))
    assert database.written == [1, 2, 3, 4]
    assert (keeper.waiting, spill.path.exists()) == (0, False)


@pytest.mark.timeout(60)
def test_rows_that_arrive_while_the_file_is_written_back_are_added_to_it(tmp_path: Path, spill: Spill) -> None:
    database = Database()
    database.unreachable = True
    database.free.set()
    keeper = Keeper(spill, database.write, lambda: True, retry_s=0.01)
    for number in range(5):
        assert not keeper.commit(batch(number))
    database.unreachable = False
    database.free.clear()  # it is back, and slow
    time.sleep(0.05)
    assert not keeper.commit(batch(5))
    assert in_files(spill, tmp_path) == [0, 1, 2, 3, 4, 5]
    database.free.set()


def test_a_batch_that_exceeds_the_file_limit_waits_for_earlier_batches(tmp_path: Path) -> None:
    database = Database()
    keeper = Keeper(Spill(tmp_path / "s.db", 40), database.write, lambda: True, retry_s=0.01)
    assert not keeper.commit(batch(1))
    threading.Timer(0.5, database.free.set).start()
    assert keeper.commit(batch(2, 3, 4, 5, 6))
    assert database.written == [1, 2, 3, 4, 5, 6]
