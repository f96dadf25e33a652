"""A file or folder that a command names and that cannot be used is wrong usage: exit code 2, before anything is run."""

from pathlib import Path

import pytest

from assay.commands.judge import Label
from assay.commands.traces import list_rollouts, rate_rollouts
from assay.errors import DataError
from assay.support.places import check_writable
from assay.traces import Rollout, Store


def test_a_run_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with Store(tmp_path / "a.db") as store:
        store.put_rollout(Rollout(run_id="abcd"))
        store.flush()
        assert list_rollouts(run_id="abcd", store=store.url).rollouts
        for call in (list_rollouts, rate_rollouts):
            with pytest.raises(DataError, match="there is no run 'gone'; `assay runs list` shows the runs"):
                call(run_id="gone", store=store.url)
        with pytest.raises(DataError, match="there is no run 'gone'"):
            Label("Is it 2?", run_id="gone").waiting(store)


def test_a_file_that_can_be_written_is_left_as_it_is(own_folder: Path) -> None:
    (own_folder / "there").write_text("text")
    check_writable(own_folder / "there", "out")
    check_writable(own_folder / "new" / "file", "out")
    assert (own_folder / "there").read_text() == "text"
    assert list((own_folder / "new").iterdir()) == []
