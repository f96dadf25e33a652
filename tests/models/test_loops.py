"""Loop detection: exact copies, reuse of word groups, tool calls; no alarm on ordinary text."""

import itertools
import random
import string
import sysconfig
from pathlib import Path

from hypothesis import given, settings, strategies as st

from assay.models.loops import (
    LoopDetector,
    ToolLoopDetector,
    find_loop,
)

ROOT = Path(__file__).resolve().parents[2]
WORDS = st.text(string.ascii_lowercase, min_size=1, max_size=6)


def prose(words: int, seed: int) -> list[str]:
    """Words without structure: no group of four is likely to occur twice."""
    rng = random.Random(seed)
    return ["".join(rng.choices(string.ascii_lowercase, k=5)) for _ in range(words)]


@settings(deadline=None)
@given(phrase=st.lists(WORDS, min_size=1, max_size=80), before=st.integers(0, 300), seed=st.integers(0, 99))
def test_every_repeated_phrase_is_found_at_the_latest_16_words_late(phrase: list[str], before: int, seed: int) -> None:
    # A period of at most 80 words is found within 5 copies, or 1024 words' level for longer ones.
    detector, lead = LoopDetector(), prose(before, seed)
    for word in lead:
        assert detector.add_word(word) is None
    needed = max(4 * len(phrase), 64)
    stride = 16 if needed <= 256 - 16 else 64
    for index in range(needed + stride):
        if detector.add_word(phrase[index % len(phrase)]) is not None:
            break
    loop = detector.loop
    assert loop is not None
    if loop.kind == "copies":
        assert len(phrase) % loop.period == 0
        # the first copy is not a repetition, so a loop never begins before its second copy
        assert loop.start >= before - len(phrase)
        assert loop.repeated >= needed - len(phrase) - 1


@settings(deadline=None, max_examples=40)
@given(words=st.lists(WORDS, max_size=400, unique=True), seed=st.integers(0, 99))
def test_words_without_repetition_raise_no_alarm(words: list[str], seed: int) -> None:
    assert find_loop(" ".join(words)) is None
    assert find_loop(" ".join(prose(800, seed))) is None


@settings(deadline=None, max_examples=60)
@given(text=st.text("ab 1.,\n", max_size=600), cuts=st.lists(st.integers(0, 600), max_size=12))
def test_the_parts_in_which_a_text_arrives_make_no_difference(text: str, cuts: list[int]) -> None:
    whole, parts, at = LoopDetector(), LoopDetector(), sorted({0, *cuts, len(text)})
    whole.add(text + " ")
    for begin, end in itertools.pairwise(at):
        parts.add(text[begin:end])
    parts.add(text[at[-1] :] + " ")
    assert parts.loop == whole.loop
    assert parts.words == whole.words


def test_a_ruled_line_and_an_empty_table_are_no_loops() -> None:
    assert find_loop("=" * 5000) is None
    assert find_loop("| " + " | ".join("-" * 3 for _ in range(12)) + " |\n") is None


def test_documents_and_sources_raise_no_alarm() -> None:
    # cp852 is a table of 256 numbered lines, mimetypes one of file types
    library = ("argparse", "json/decoder", "encodings/cp852", "statistics", "mimetypes", "socket")
    files = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md"), *(ROOT / "src/assay/models").glob("*.py")]
    assert len(files) > 40
    files += [Path(sysconfig.get_paths()["stdlib"]) / f"{module}.py" for module in library]
    alarms = {str(path): loop for path in files if (loop := find_loop(path.read_text(encoding="utf-8")))}
    assert alarms == {}


def test_the_same_call_with_the_same_result_is_a_loop() -> None:
    detector = ToolLoopDetector()
    assert detector.add("search", {"q": "a", "n": 2}, "x") is None
    assert detector.add("search", {"q": "b", "n": 2}, "x") is None
    loop = detector.add("search", {"n": 2.0, "q": " a "}, "x")  # the same call, written differently
    assert loop is not None
    assert (loop.kind, loop.start, loop.end) == ("same call", 2, 3)


def test_a_call_that_returns_something_new_is_progress() -> None:
    detector = ToolLoopDetector()
    for turn in range(20):
        assert detector.add("status", {"job": 1}, f"{turn} %") is None
