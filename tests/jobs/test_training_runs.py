"""Runs of trainings on rows: their entry in the store while they run, how they ended, and which one is resumed."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from assay.errors import Cancelled, ConfigError
from assay.evaluation import SilentProgress
from assay.jobs.trainings import TrainingRun, open_training
from assay.support.report import refused
from assay.traces import Store
from assay.traces.store.listing import failure_of, find_run
from rigs.projects import Said

CONFIG = {"algorithm": "sft", "export": "rows"}


def status_of(store: Path, run: TrainingRun) -> tuple[str, str | None]:
    with Store(store) as opened:
        return str(find_run(opened, run.run_id)["status"]), failure_of(opened, run.run_id)


def test_a_training_that_was_stopped_is_resumed_as_the_same_run(tmp_path: Path) -> None:
    store, ids = tmp_path / "s.db", []
    for error, status in ((Cancelled, "stopped"), (ValueError, "failed")):
        with (
            pytest.raises(error),
            open_training(CONFIG, name="warm", progress=SilentProgress(), store=store, resume=bool(ids)) as run,
        ):
            raise error("x")
        assert status_of(store, run) == (status, "x" if error is Cancelled else "ValueError: x")
        ids.append(run.run_id)
    with open_training(CONFIG, name="warm", progress=SilentProgress(), store=store, resume=True) as run:
        ids.append(run.run_id)
        assert status_of(store, run) == ("running", None)
        with (
            pytest.raises(ConfigError, match="running already"),
            open_training(CONFIG, name="warm", progress=SilentProgress(), store=store),
        ):
            pass
    assert len(set(ids)) == 1
    with (
        pytest.raises(ConfigError, match="this training has finished"),
        open_training(CONFIG, name="warm", progress=SilentProgress(), store=store, resume=True),
    ):
        pass
    assert status_of(store, run) == ("done", None)
    with open_training(CONFIG, name="warm", progress=SilentProgress(), store=store) as another:
        assert another.run_id != run.run_id


@pytest.mark.parametrize("error", [None, Cancelled])
def test_a_store_that_is_gone_at_the_end_of_a_training_costs_no_report(
    tmp_path: Path, error: type[Cancelled] | None
) -> None:
    store, said, before = tmp_path / "s.db", Said(), refused()
    with (
        nullcontext() if error is None else pytest.raises(error),
        open_training(CONFIG, name="warm", progress=said, store=store) as run,
    ):
        store.rename(tmp_path / "elsewhere.db")
        store.mkdir()  # a folder is not a database
        run.report = {"steps": 1}
        if error is not None:
            raise error("by the user")
    assert "how this training ended is not stored" in said.lines[-1]
    assert refused().since(before).rows == 2


def test_only_the_first_of_several_processes_stores_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with open_training(CONFIG, name="warm", progress=SilentProgress(), store=tmp_path / "s.db") as run:
        run.report = {"steps": 1}
    assert (run.folder, run.log) == (None, None)
    assert list(tmp_path.iterdir()) == []
