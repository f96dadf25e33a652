"""Passages, the words that are searched, and the fusion of rankings."""

import pytest

from assay.programs.retrieval.fulltext import searched, words_of
from assay.programs.retrieval.retriever import fused
from assay.programs.retrieval.splitting import passages_of


def test_ranks_are_fused_by_their_reciprocals() -> None:
    # b: 1/(60+2) + 1/(60+1); a: 1/(60+1); c: 1/(60+2)
    assert fused([["a", "b"], ["b", "c"]]) == pytest.approx({"b": 1 / 62 + 1 / 61, "a": 1 / 61, "c": 1 / 62})
    assert list(fused([["a", "b"], ["b", "c"]])) == ["b", "a", "c"]


def test_passages_end_at_paragraphs_lines_sentences_or_words() -> None:
    text = "one two.\n\nthree four.\nfive six. seven eight nine ten"
    assert list(passages_of([text], 24)) == [
        (1, "one two."),
        (3, "three four."),
        (4, "five six."),
        (4, "seven eight nine ten"),
    ]
    assert list(passages_of(["x" * 25], 10)) == [(1, "x" * 10), (1, "x" * 10), (1, "x" * 5)]
    assert list(passages_of(["\n\n --- \n", "a", "b\n"], 100)) == [(3, "--- \nab")]
    assert list(passages_of(["- - -\n***\n"], 100)) == []


def test_common_words_are_left_out() -> None:
    assert words_of("What is the height of the weir?") == ["height", "weir"]
    assert words_of("to be or not to be") == ["not"]
    assert words_of("what is it") == []
    assert searched("What is The height\nof the weir?") == "height weir"
    assert words_of("?!") == []
