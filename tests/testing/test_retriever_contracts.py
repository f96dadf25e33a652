"""Retrievers meet their contract, and each broken one fails the part that it breaks."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

import assay
from assay.programs import (
    DocumentIndex,
    Passage,
    TextRetriever,
)
from assay.testing.contracts import (
    RetrieverContract,
)
from assay.traces.store.tables import metadata


class TestTextRetriever(RetrieverContract):
    def make(self) -> TextRetriever:
        return TextRetriever(self.documents)


class TestDocumentIndex(RetrieverContract):
    @pytest.fixture(autouse=True, params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
    def _at(self, request: pytest.FixtureRequest, tmp_path: Path) -> None:
        self.url = str(tmp_path / "s.db")
        if request.param == "postgres":
            self.url = request.getfixturevalue("postgres_url")
            engine = sa.create_engine(self.url.replace("postgresql://", "postgresql+psycopg://"))
            metadata.drop_all(engine)
            engine.dispose()
        self.folder = tmp_path / "docs"
        self.folder.mkdir()
        for name, text in self.documents.items():
            (self.folder / name).write_text(text)

    def make(self) -> DocumentIndex:
        assay.index(self.folder, store=self.url)
        return DocumentIndex(self.url)


class _Broken(RetrieverContract):
    """A retriever whose results are changed by `of`."""

    def of(self, passages: list[Passage], query: str, k: int) -> list[Passage]:
        return passages

    def make(self) -> Any:
        suite, inner = self, TextRetriever(self.documents)

        class Changed:
            def search(self, query: str, k: int = 5) -> list[Passage]:
                return suite.of(inner.search(query, k), query, k)

        return Changed()


class _Unlimited(_Broken):
    def of(self, passages: list[Passage], query: str, k: int) -> list[Passage]:
        return [*passages, Passage(id="more", text="more")]


class _Ascending(_Broken):
    def of(self, passages: list[Passage], query: str, k: int) -> list[Passage]:
        return passages[::-1]


class _Redacted(_Broken):
    def of(self, passages: list[Passage], query: str, k: int) -> list[Passage]:
        return [dataclasses.replace(passage, text=passage.text.replace("Ignore", "")) for passage in passages]


class _WithOperators(_Broken):
    def of(self, passages: list[Passage], query: str, k: int) -> list[Passage]:
        if '"' in query:
            raise ValueError("unbalanced quote")
        without = query.partition(" NOT ")[2]
        return [passage for passage in passages if not without or without not in passage.text]


class _AnyCount(_Broken):
    def make(self) -> Any:
        inner = TextRetriever(self.documents)

        class AnyCount:
            def search(self, query: str, k: int = 5) -> list[Passage]:
                return inner.search(query, max(k, 1))

        return AnyCount()


class _Twice(_Broken):
    def of(self, passages: list[Passage], query: str, k: int) -> list[Passage]:
        return [part for p in passages for part in (p, dataclasses.replace(p, id=f"{p.id}2"))][:k]


@pytest.mark.parametrize(
    ("suite", "failed"),
    [
        (_Broken, set()),
        (_Unlimited, {"test_passages_are_the_best_k_in_order"}),
        (_Ascending, {"test_passages_are_the_best_k_in_order", "test_a_question_finds_its_document"}),
        (_Redacted, {"test_a_question_finds_its_document"}),
        (_WithOperators, {"test_any_text_is_a_query", "test_operators_are_words"}),
        (_AnyCount, {"test_k_is_at_least_one"}),
        (_Twice, {"test_equal_texts_are_one_passage"}),
    ],
)
def test_broken_retrievers_fail_their_contract(suite: type[RetrieverContract], failed: set[str]) -> None:
    assert failed <= suite.failures().keys() if failed else suite.failures() == {}
