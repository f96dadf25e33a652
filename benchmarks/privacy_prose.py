"""Names that anonymization replaces in technical prose: counts per 1,000 words, and a sample to be judged by hand.

Texts are the READMEs of installed Python packages (their METADATA), or files by pattern. A name of a real person in a
README is a right change, so the share of wrong changes comes from the judged sample.

    python benchmarks/privacy_prose.py --sample 40 --seed 1
    python benchmarks/privacy_prose.py --files '/usr/lib/node_modules/**/README*' --sample 40 --seed 1
    python benchmarks/privacy_prose.py --wrong 3 --sample 40 --changes 643 --words 261206
"""

import argparse
import glob
import json
import random
import re
from collections import Counter
from importlib.metadata import distributions
from pathlib import Path

from privacy_recall import wilson

from assay.traces.privacy.anonymizer import Anonymizer


def texts(patterns: list[str]) -> list[str]:
    if patterns:
        paths = sorted(path for pattern in patterns for path in glob.glob(pattern, recursive=True))
        read = [Path(path).read_text(encoding="utf-8", errors="replace") for path in paths if Path(path).is_file()]
    else:
        found = sorted(distributions(), key=lambda package: package.metadata["Name"].lower())
        read = [str(package.metadata.get_payload() or "") for package in found]
    return [text for text in dict.fromkeys(read) if len(text) > 400]


def rate(wrong: int, sample: int, changes: int, words: int) -> dict[str, object]:
    """Wrong changes per 1,000 words: the judged share, with its interval, times all changes."""
    per = 1000 * changes / words
    low, high = wilson(wrong, sample)
    return {
        "changes_per_1000_words": round(per, 2),
        "wrong_share": [round(wrong / sample, 3), [low, high]],
        "wrong_per_1000_words": [round(per * wrong / sample, 2), [round(per * low, 2), round(per * high, 2)]],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", nargs="*", default=[], help="patterns of files, in place of the installed packages")
    parser.add_argument("--engine", default="gazetteers")
    parser.add_argument("--sample", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--wrong", type=int, help="wrong changes in the judged sample; with --changes and --words")
    parser.add_argument("--changes", type=int)
    parser.add_argument("--words", type=int)
    arguments = parser.parse_args()
    if arguments.wrong is not None:
        print(json.dumps(rate(arguments.wrong, arguments.sample, arguments.changes, arguments.words)))
        return
    anonymizer, words, changes = Anonymizer(b"0" * 32, engine=arguments.engine), 0, []
    read = texts(arguments.files)
    for text in read:
        words += len(re.findall(r"[^\W\d_]+", text))
        for match in anonymizer.find(text):
            if match.type in ("person", "place"):
                start, end = match.start, match.end
                changes.append(
                    (match.type, f"{text[max(0, start - 40) : start]}<<{text[start:end]}>>{text[end : end + 25]}")
                )
    kinds = Counter(kind for kind, _ in changes)
    print(json.dumps({"texts": len(read), "words": words, "changes": len(changes), "types": dict(kinds)}))
    for kind, shown in random.Random(arguments.seed).sample(changes, min(arguments.sample, len(changes))):
        print(kind, repr(shown))


if __name__ == "__main__":
    main()
