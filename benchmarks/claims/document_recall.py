"""Recall at 5 of the document index, and of `bm25s` on the same passages and questions. Needs no language model.

The passages are those of generated tasks, one file each, in one index: the passage that answers among some 1,300.
`bm25s` runs with its English stop words and without a stemmer, which is another package. It is downloaded and unpacked,
but not installed.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import assay
from assay.programs import DocumentIndex
from assay.shipped.programs.answer_from_documents.tasks import rows
from claims.storing import Measured, Setting

TASKS, PASSAGES, K = 300, 20, 5
PACKAGE = "bm25s"


def measure(setting: Setting) -> Measured:
    texts, questions = collection(setting.seed)
    folder = setting.scratch / "passages"
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:05}.txt").write_text(text)
    store = setting.scratch / "documents.db"
    assay.index(folder, store=store)
    index = DocumentIndex(store)
    after = {task: [passage.text for passage in index.search(question, K)] for task, (question, _) in questions.items()}
    before = bm25s_found(texts, {task: question for task, (question, _) in questions.items()}, setting.downloads)
    sides = {"before": before, "after": after}
    values: dict[str, Any] = {
        "recall": {
            side: {task: float(text in passages[task]) for task, (_, text) in questions.items()}
            for side, passages in sides.items()
        }
    }
    return Measured(values=values, facts={"passages": len(texts), "questions": len(questions), "k": K})


def collection(seed: int) -> tuple[list[str], dict[str, tuple[str, str]]]:
    """Distinct passages, and task -> (question, passage that answers).

    Tasks have facts of their own about the same places. Of each place the facts of one task are taken, so that one
    passage answers each question.
    """
    owner: dict[str, int] = {}
    texts: dict[str, None] = {}
    questions: dict[str, tuple[str, str]] = {}
    for number, (_, row) in enumerate(rows(f"facts?size={TASKS}&seed={seed}&passages={PASSAGES}&removed=0.0")):
        own_texts = [
            document["text"]
            for document in row["inputs"]["documents"]
            if owner.setdefault(document["source"], number) == number
        ]
        texts |= dict.fromkeys(own_texts)
        (answering,) = row["expected"]["passages"]
        if answering in own_texts:
            questions[str(number)] = (row["inputs"]["question"], answering)
    return list(texts), questions


def bm25s_found(texts: list[str], questions: dict[str, str], downloads: Path) -> dict[str, list[str]]:
    """Task -> the first `K` passages of `bm25s`."""
    sys.path.insert(0, str(downloaded(downloads)))
    try:
        import bm25s
    finally:
        sys.path.pop(0)
    options: dict[str, Any] = {"stopwords": "en", "show_progress": False}
    retriever = bm25s.BM25(corpus=texts)
    retriever.index(bm25s.tokenize(texts, **options), show_progress=False)
    ranked, _ = retriever.retrieve(bm25s.tokenize(list(questions.values()), **options), k=K, show_progress=False)
    return dict(zip(questions, (list(row) for row in ranked), strict=True))


def downloaded(folder: Path) -> Path:
    """The folder of the unpacked package, from the package registry if it is not there."""
    place = folder / PACKAGE
    if not (place / PACKAGE).is_dir():
        words = ["install", "--quiet", "--no-deps", "--target", str(place), PACKAGE]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)
    return place
