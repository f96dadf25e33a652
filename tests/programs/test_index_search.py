"""Searches in an index: full text, dense, hybrid; passages and common words."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from indexed_documents import docs as docs, sources, url as url

import assay
from assay.cli.main import group
from assay.errors import ConfigError, ModelError, StoreError
from assay.programs import DocumentIndex, Memory
from assay.programs.retrieval.retriever import fused
from assay.traces.store.location import store_url


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


def test_ranks_are_fused_by_their_reciprocals() -> None:
    # b: 1/(60+2) + 1/(60+1); a: 1/(60+1); c: 1/(60+2)
    assert fused([["a", "b"], ["b", "c"]]) == pytest.approx({"b": 1 / 62 + 1 / 61, "a": 1 / 61, "c": 1 / 62})
    assert list(fused([["a", "b"], ["b", "c"]])) == ["b", "a", "c"]


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
    assert store_url() == "sqlite:///.assay/assay.db"  # the next command has its own
