"""`assay index`: what is read, replaced, removed, on both databases."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from indexed_documents import docs as docs, rows, sources, url as url

import assay
from assay.cli.main import group
from assay.commands.index import IndexReport
from assay.errors import ConfigError, StoreError
from assay.programs import DocumentIndex
from assay.programs.retrieval import building as folders
from assay.programs.retrieval.building import update_index
from assay.traces import Store
from assay.traces.store.connection import open_engine


def counts(report: IndexReport) -> tuple[int, int, int, int]:
    counted = report
    return counted.added, counted.changed, counted.unchanged, counted.removed


def test_only_new_and_changed_files_are_read_and_deleted_ones_removed(url: str, docs: Path) -> None:
    report = assay.index(docs, store=url)
    assert (counts(report), report.documents, report.passages) == ((2, 0, 0, 0), 2, 2)
    passages = DocumentIndex(url).search("How many litres does Marlow's pump lift?")
    assert [(p.source, p.line, "420 litres" in p.text) for p in passages] == [("pump.md", 1, True)]
    assert counts(assay.index(docs, store=url)) == (0, 0, 2, 0)

    (docs / "pump.md").write_text("The pumps of Marlow station lift 515 litres a second.\n")
    (docs / "sub" / "gate.txt").unlink()
    (docs / "new.txt").write_text("The weir of Tarn is made of oak.")
    assert counts(assay.index(docs, store=url)) == (1, 1, 0, 1)
    assert [p.text for p in DocumentIndex(url).search("litres of Marlow")] == [
        "The pumps of Marlow station lift 515 litres a second."
    ]
    assert sources(url, "hand wheel of Hollin lock") == []
    assert sources(url, "oak weir") == ["new.txt"]
    assert rows(url) == (2, 2, 0)  # nothing of former versions is left


def test_a_touched_file_is_compared_by_its_hash(url: str, docs: Path) -> None:
    assay.index(docs, store=url)
    os.utime(docs / "pump.md", (time.time() - 30, time.time() - 30))
    report = assay.index(docs, store=url)
    assert (counts(report), report.passages_written) == ((0, 0, 2, 0), 0)


def test_files_that_are_not_text_are_skipped_and_counted(docs: Path) -> None:
    (docs / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0" * 100)
    (docs / "packed.gz").write_bytes(os.urandom(5000))
    (docs / "unpacks.sh").write_bytes(b"echo unpacking\n" * 5000 + os.urandom(5000))
    (docs / ".secret").write_text("hidden text")
    (docs / ".git").mkdir()
    (docs / ".git" / "config").write_text("hidden text")
    (docs / "link.txt").symlink_to(docs / "pump.md")
    (docs / "loop").symlink_to(docs)
    os.mkfifo(docs / "pipe")
    (docs / "big.txt").write_text("large text " * 200_000)
    report = assay.index(docs, store="s.db", max_file_mb=1)
    assert dict(report.skipped) == {
        "binary": 3, "hidden": 2, "link": 2, "special file": 1, "too large": 1,
    }  # fmt: skip
    assert report.examples == {"too large": ["big.txt"]}
    assert sources("s.db", "hidden large text unpacking") == []


def test_encodings_and_html_are_read(docs: Path) -> None:
    (docs / "latin.txt").write_bytes("Die Schleuse von Mühlau".encode("latin-1"))
    (docs / "utf16.txt").write_text("The sluice of Kestrel", encoding="utf-16")
    (docs / "page.html").write_text(
        "<html><head><style>p {color: red}</style><script>var zinc = 1 < 2;</script></head>"
        "<body><p>The <b>culvert</b> of Brant &amp; Sons</p><!-- zinc --></body></html>"
    )
    (docs / "crlf.txt").write_bytes(b"The quay\r\nof Selby\r\n")
    assay.index(docs, store="s.db")
    index = DocumentIndex("s.db")
    texts = {q: [p.text for p in index.search(q)] for q in ("Mühlau", "kestrel sluice", "culvert", "zinc", "selby")}
    assert texts == {
        "Mühlau": ["Die Schleuse von Mühlau"],
        "kestrel sluice": ["The sluice of Kestrel"],
        "culvert": ["The  culvert  of Brant & Sons"],
        "zinc": [],
        "selby": ["The quay\nof Selby"],
    }


def test_a_name_that_is_not_utf8_is_escaped(docs: Path) -> None:
    (Path(os.fsdecode(os.fsencode(docs) + b"/caf\xe9.txt"))).write_text("The ferry of Wick leaves at noon")
    assay.index(docs, store="s.db")
    assert sources("s.db", "ferry of Wick") == ["caf\\xe9.txt"]
    assert counts(assay.index(docs, store="s.db"))[3] == 0


def test_a_file_that_never_stops_growing_keeps_its_former_passages(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assay.index(docs, store="s.db")
    file, real = docs / "pump.md", folders.open_text.blocks
    file.write_text("short")

    def blocks(self: Any) -> Iterator[str]:
        for block in real(self):
            if self.file.name == "pump.md":
                with file.open("a") as opened:
                    opened.write("more\n")
            yield block

    monkeypatch.setattr(folders.open_text, "blocks", blocks)
    report = assay.index(docs, store="s.db")
    assert (counts(report), dict(report.skipped)) == ((0, 0, 1, 0), {"changing": 1})
    assert report.examples == {"changing": ["pump.md"]}
    assert sources("s.db", "litres of Marlow") == ["pump.md"]
    assert rows("s.db") == (2, 2, 0)


def test_a_file_that_vanishes_after_the_listing_is_no_error(docs: Path) -> None:
    assay.index(docs, store="s.db")
    listed = folders.FolderFiles.of(docs)
    (docs / "pump.md").write_text("changed")
    listed = folders.FolderFiles.of(docs)
    (docs / "pump.md").unlink()
    engine = open_engine("sqlite:///s.db")
    updated = update_index(engine, docs, "documents", listed=listed)
    engine.dispose()
    assert (updated.removed, updated.unchanged, dict(updated.skipped)) == (1, 1, {})
    assert sources("s.db", "litres of Marlow") == []


@pytest.mark.chaos
@pytest.mark.slow
def test_a_killed_run_is_continued_and_leaves_nothing(docs: Path) -> None:
    for number in range(3000):
        (docs / f"{number:04}.txt").write_text(f"Barge {number} carries gravel to Selby.\n" * 40)
    code = f"import assay; assay.index({str(docs)!r}, store='s.db')"
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not Path("s.db").exists() or rows("s.db")[0] < 200):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = rows("s.db")[0]
    assert 200 <= before < 3002
    report = assay.index(docs, store="s.db")
    assert report.added + report.unchanged == report.documents == 3002
    assert report.unchanged >= 200
    assert rows("s.db")[:2] == (report.documents, report.passages)


def test_unfinished_rows_of_a_large_file_are_not_found_and_are_removed(
    docs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (docs / "log.txt").write_text("".join(f"Entry {number} of the Calder log.\n" for number in range(60_000)))
    real = folders.open_text.blocks

    def blocks(self: Any) -> Iterator[str]:
        for number, block in enumerate(real(self)):
            if number == 20:
                raise KeyboardInterrupt
            yield block

    with monkeypatch.context() as patched:
        patched.setattr(folders.open_text, "blocks", blocks)
        with pytest.raises(KeyboardInterrupt):
            assay.index(docs, store="s.db", passage_chars=200)
    with pytest.raises(StoreError, match="no index"):
        sources("s.db", "Calder log")
    assert rows("s.db")[1] > 1000
    report = assay.index(docs, store="s.db", passage_chars=200)
    assert rows("s.db")[:2] == (3, report.passages)
    assert sources("s.db", "Calder log entry 59999") == ["log.txt"] * 5


def test_another_passage_size_reads_all_files_again(docs: Path) -> None:
    (docs / "long.txt").write_text("The towpath of Ripley is flooded in spring. " * 20)
    assert assay.index(docs, store="s.db").passages == 3
    report = assay.index(docs, store="s.db", passage_chars=200)
    assert (counts(report), report.passages) == ((0, 3, 0, 0), 7)


def test_passages_of_another_index_do_not_displace_those_of_this_one(tmp_path: Path, docs: Path) -> None:
    crowd = tmp_path / "crowd"
    crowd.mkdir()
    (crowd / "a.txt").write_text("\n\n".join(f"pumps pumps pumps {number} " + "x" * 80 for number in range(600)))
    assay.index(crowd, store="s.db", name="crowd", passage_chars=100)
    assay.index(docs, store="s.db")
    assert sources("s.db", "pumps") == ["pump.md"]


def test_an_empty_folder_does_not_empty_the_index(docs: Path) -> None:
    assay.index(docs, store="s.db")
    for file in docs.rglob("*.*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"has no files, but the index 'documents' has documents of it \(2\)"):
        assay.index(docs, store="s.db")
    assert sources("s.db", "Marlow") == ["pump.md"]
    assert assay.index(docs, store="s.db", remove=True).documents == 0


def test_wrong_use_says_what_to_do(docs: Path) -> None:
    for folder, options, message in (
        ("nowhere", {}, "no folder 'nowhere'"),
        (docs / "pump.md", {}, "is a file. Name the folder whose files"),
        ("nowhere", {"remove": True}, "has no documents of the folder .*nowhere': it is empty"),
        (docs, {"name": "a/b"}, "name='a/b' must be"),
        (docs, {"passage_chars": 5}, "passage_chars: must be greater than or equal to 100, not 5"),
        (docs, {"embedder": 3}, "embedder: must be a text or callable, not 3"),
        (docs, {"embedder": "gone.py:embed"}, "there is no file"),
        (docs, {"remove": True, "embedder": len}, "no effect"),
    ):
        with pytest.raises(ConfigError, match=message):
            assay.index(folder, store="s.db", **options)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match=r"no store at .*build it with assay index DIR --name documents"):
        DocumentIndex("gone.db").search("x")
    Store("s.db").close()
    with pytest.raises(StoreError, match=r"has no index 'documents': build it with assay index"):
        DocumentIndex("s.db").search("x")
    assay.index(docs, store="s.db")
    with pytest.raises(StoreError, match=r"has no index 'dcs', but 'documents': build it with"):
        DocumentIndex("s.db", "dcs").search("x")
    with pytest.raises(ConfigError, match=r"no documents of the folder .*nowhere': it has those of .*docs'"):
        assay.index("nowhere", store="s.db", remove=True)


def test_a_folder_without_text_is_noted(docs: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    noted, indexed = (CliRunner().invoke(group, ["index", str(folder)]) for folder in (tmp_path / "empty", docs))
    assert noted.exit_code == 0
    assert "has no text files, so nothing was indexed" in noted.output
    assert "nothing was indexed" not in indexed.output


def test_an_index_that_another_process_changes_is_refused(docs: Path) -> None:
    from filelock import FileLock

    assay.index(docs, store="s.db")
    (lock,) = Path().glob("s.db.index-*.lock")
    with FileLock(lock), pytest.raises(ConfigError, match="running already"):
        assay.index(docs, store="s.db")
