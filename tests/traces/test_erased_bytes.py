"""An erasure removes a person's text from the files of an SQLite store, not only from its tables."""

from pathlib import Path

from assay.traces import Rollout, Store
from assay.traces.store.erasure import erase_subject


def test_no_file_of_the_store_holds_an_erased_text(own_folder: Path) -> None:
    with Store(own_folder / "a.db") as store:
        for name in ("ann", "bob"):
            inputs = {"question": f"the parcel of {name} is lost " * 300}
            store.put_rollout(Rollout(task_id=name, inputs=inputs, data_subject=name, status="done"))
        store.flush()
        assert erase_subject(store, "ann").removed == 1
        left = [file.name for file in own_folder.glob("a.db*") if b"the parcel of ann" in file.read_bytes()]
        assert left == []
        assert any(b"the parcel of bob" in file.read_bytes() for file in own_folder.glob("a.db*"))
