"""`assay index`: what is read, replaced, removed and found, on both databases."""

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from indexed_documents import docs as docs, rows, sources, url as url

import assay
from assay.cli import group
from assay.commands.index import IndexReport
from assay.errors import ConfigError, ModelError, StoreError
from assay.programs import DocumentIndex, Memory
from assay.traces.store.location import store_address


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


def test_an_empty_folder_does_not_empty_the_index(docs: Path) -> None:
    assay.index(docs, store="s.db")
    for file in docs.rglob("*.*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"has no files, but the index 'documents' has documents of it \(2\)"):
        assay.index(docs, store="s.db")
    assert sources("s.db", "Marlow") == ["pump.md"]
    assert assay.index(docs, store="s.db", remove=True).documents == 0


def test_an_index_that_another_process_changes_is_refused(docs: Path) -> None:
    from filelock import FileLock

    assay.index(docs, store="s.db")
    (lock,) = Path().glob("s.db.index-*.lock")
    with FileLock(lock), pytest.raises(ConfigError, match="another process changes the index"):
        assay.index(docs, store="s.db")


def letters(texts: list[str]) -> Any:
    """Counts of pairs of letters: near texts have near vectors, also with other forms of a word."""
    vectors = np.zeros((len(texts), 676), dtype=np.float32)
    for row, text in zip(vectors, texts, strict=True):
        lowered = [ord(letter) - 97 for letter in text.lower() if "a" <= letter <= "z"]
        for one, two in pairwise(lowered):
            row[26 * one + two] += 1
    return vectors


def test_a_failing_embedder_leaves_the_full_text_index(docs: Path) -> None:
    def short(texts: list[str]) -> Any:
        return np.zeros((len(texts) - 1, 3))

    def broken(texts: list[str]) -> Any:
        raise RuntimeError("no quota")

    for embedder, message in ((short, r"shape \(1, 3\) for 2 texts"), (broken, "no quota")):
        with pytest.raises(ModelError, match=message):
            assay.index(docs, store="s.db", embedder=embedder)
    assert sources("s.db", "Marlow") == ["pump.md"]


def test_an_embedder_without_vectors_in_the_index_is_refused(url: str, docs: Path, own_folder: Path) -> None:
    Path("mine.py").write_text("def letters(texts):\n    return [[len(text), text.count('e')] for text in texts]\n")
    assay.index(docs, store=url, embedder="mine.py:letters")
    scope: dict[str, Any] = {"__name__": "mine"}
    exec(Path("mine.py").read_text(), scope)
    assert len(DocumentIndex(url, embedder=scope["letters"]).search("no word of it")) == 2  # the same name anywhere
    with pytest.raises(
        StoreError, match=r"no vectors by the embedder \S+:letters \(embedders of its vectors: mine:let"
    ):
        DocumentIndex(url, embedder=letters).search("Marlow")
    with pytest.raises(ConfigError, match="pass the function itself"):
        DocumentIndex(url, embedder="mine.py:letters")


def test_the_store_of_a_command_is_that_of_the_programs_index_and_memory(docs: Path, own_folder: Path) -> None:
    Path("lookup.py").write_text(
        "import dspy\nfrom assay.programs import DocumentIndex, Memory, TextRetriever\n\n\n"
        "class Lookup(dspy.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.index = DocumentIndex()\n\n"
        "    def forward(self, question):\n        Memory().remember('Ada', question)\n"
        "        return dspy.Prediction(source=self.index.search(question)[0].source)\n"
    )
    for words in (["index", str(docs)], ["run", "lookup.py:Lookup", "question=Marlow"]):
        result = CliRunner().invoke(group, [*words, "--store", "own.db"])
        assert result.exit_code == 0, result.output
    assert "pump.md" in result.output
    assert [fact.text for fact in Memory("own.db").history("Ada")] == ["Marlow"]
    assert not Path(".assay").exists()
    assert store_address().file == Path(".assay/assay.db")  # the next command has its own
