"""Anonymization: recall and precision by entity type on a synthetic corpus, changes of clean texts, and MB per second.

The corpus (`privacy_corpus.py`, values by Faker in several locales, a seed) was written before the patterns and is not
fitted to them: what is hard stays in. A value counts as found where no letter and digit of it is left; a find counts
as right where it overlaps something personal of its own type.
"""

import argparse
import json
import time
from collections import Counter, defaultdict
from typing import Any

from personal_values import WHOLE
from privacy_corpus import CLEAN, PROSE, Text, clean, personal

from assay.traces.privacy.anonymizer import Anonymizer
from assay.traces.privacy.names import KnownValue

NAMES = {"person", "place"}  # only a name model, or the task's metadata, can tell them


def letters(text: str, start: int, end: int) -> set[int]:
    return {at for at in range(start, end) if text[at].isalnum()}


def measure(texts: list[Text], anonymizer: Anonymizer, *, with_known: bool = False) -> dict[str, Any]:
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    for item in texts:
        known = item.known if with_known else ()
        spans = anonymizer.find(item.text, known)
        covered = set().union(*(letters(item.text, span.start, span.end) for span in spans))
        for kind, hard, start, end in item.gold:
            here = letters(item.text, start, end) <= covered
            by_kind[kind].update(n=1, found=here, **({"hard": 1, "hard_found": here} if hard else {}))
        for span in spans:
            over = {kind for kind, _, start, end in item.gold if start < span.end and span.start < end}
            right = span.type in {"secret" if kind in ("password", "key", "opaque", "pem") else kind for kind in over}
            by_kind[span.type].update(
                finds=1, right=right, of_another_type=bool(over) and not right, of_nothing=not over
            )
    return {kind: row(counts) for kind, counts in sorted(by_kind.items())}


def row(counts: Counter[str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    if counts["n"]:
        out |= {"n": counts["n"], "found": counts["found"], "recall": round(counts["found"] / counts["n"], 4)}
        easy = counts["n"] - counts["hard"]
        out |= {"recall_plain": round((counts["found"] - counts["hard_found"]) / easy, 4) if easy else None}
        out |= {
            "n_hard": counts["hard"],
            "recall_hard": round(counts["hard_found"] / counts["hard"], 4) if counts["hard"] else None,
        }
    if counts["finds"]:
        out |= {"finds": counts["finds"], "precision": round(counts["right"] / counts["finds"], 4)}
        out |= {"of_another_type": counts["of_another_type"], "of_nothing": counts["of_nothing"]}
    return out


def with_metadata(texts: list[Text]) -> list[Text]:
    """The same texts, and the full names of the persons and places in them as the task's metadata have them."""
    plain = {json.dumps(seen)[1:-1]: name for seen, name in WHOLE.items()} | WHOLE
    return [
        Text(
            t.text,
            t.gold,
            tuple(KnownValue(kind, plain.get(t.text[s:e], t.text[s:e])) for kind, _, s, e in t.gold if kind in NAMES),
        )
        for t in texts
    ]


def speed(texts: list[str], engine: str) -> dict[str, float]:
    """MB a second of processor time: the first time, from the cache, and for comparison of writing and reading the
    texts as JSON."""
    anonymizer, size = Anonymizer(b"0" * 32, engine=engine), sum(len(text.encode()) for text in texts) / 1e6
    out = {"mb": round(size, 2)}
    for name, run_ in (
        ("first", anonymizer.text),
        ("again", anonymizer.text),
        ("json", lambda text: json.loads(json.dumps(text))),
    ):
        clock = time.process_time()
        for text in texts:
            run_(text)
        out[f"{name}_mb_per_s"] = round(size / (time.process_time() - clock), 2)
    return out


def pages(texts: list[Text], count: int, length: int = 2000) -> list[str]:
    """Texts of about 2 KB, put together from those of the corpus; no two alike."""
    out, at = [], 0
    for number in range(count):
        page = [f"page {number}"]
        while sum(map(len, page)) < length:
            page.append(texts[at % len(texts)].text)
            at += 1
        out.append("\n".join(page))
    return out


def growing(texts: list[str], turns: int = 10) -> list[str]:
    return ["\n\n".join(texts[at : at + turn]) for at in range(0, len(texts), turns) for turn in range(1, turns + 1)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=2000, help="texts with something personal; half as many clean ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pages", type=int, default=500, help="of 2 KB, for the speed")
    parser.add_argument(
        "--show", metavar="TYPE", help="print what was missed of a type, and what was taken from clean texts, instead"
    )
    parser.add_argument("--engine", nargs="*", default=["patterns", "presidio"])
    arguments = parser.parse_args()
    mine, nobodys, prose = (
        personal(arguments.size, arguments.seed),
        clean(arguments.size // 2, arguments.seed, CLEAN),
        clean(200, arguments.seed, PROSE),
    )
    if arguments.show:
        return show(mine, nobodys + prose, arguments.show, Anonymizer(b"0" * 32, engine=arguments.engine[0]))
    known = with_metadata(mine)
    report: dict[str, Any] = {
        "personal_texts": len(mine),
        "clean_texts": len(nobodys),
        "prose_texts": len(prose),
        "seed": arguments.seed,
    }
    for engine in arguments.engine:
        try:
            anonymizer = Anonymizer(b"0" * 32, engine=engine)
        except ImportError as error:
            report[engine] = {"not run": str(error)}
            continue
        few = arguments.pages if engine == "patterns" else arguments.pages // 20
        plain = pages(clean(1000, arguments.seed, PROSE + CLEAN[:10]), few)
        report[engine] = {
            "engine": anonymizer.engine_name,
            "finds_names": anonymizer.finds_names,
            "types": measure(mine, anonymizer),
            "clean_changed": sum(bool(anonymizer.find(t.text)) for t in nobodys),
            "prose_changed": sum(bool(anonymizer.find(t.text)) for t in prose),
            "speed": {
                "prose and arithmetic": speed(plain, engine),
                "the same as prompts that grow over ten turns": speed(growing(plain), engine),
                "what is taken for personal, dense": speed(pages(nobodys, few), engine),
                "personal, dense": speed(pages(mine, few), engine),
            },
        }
        if engine == "patterns":
            report["patterns, names known"] = {
                kind: value for kind, value in measure(known, anonymizer, with_known=True).items() if kind in NAMES
            }
    print(json.dumps(report))


def show(mine: list[Text], nobodys: list[Text], kind: str, anonymizer: Anonymizer) -> None:
    for item in mine + nobodys:
        spans = anonymizer.find(item.text)
        covered = set().union(*(letters(item.text, span.start, span.end) for span in spans))
        for gold, _, start, end in item.gold:
            if gold == kind and not letters(item.text, start, end) <= covered:
                print(
                    "missed",
                    json.dumps(
                        item.text[max(0, start - 40) : start]
                        + "⟦"
                        + item.text[start:end]
                        + "⟧"
                        + item.text[end : end + 15]
                    ),
                )
        for span in spans:
            if kind in (span.type, "all") and not any(
                start < span.end and span.start < end for _, _, start, end in item.gold
            ):
                print(
                    "taken ",
                    span.type,
                    json.dumps(
                        item.text[max(0, span.start - 30) : span.start] + "⟦" + item.text[span.start : span.end] + "⟧"
                    ),
                )


if __name__ == "__main__":
    main()
