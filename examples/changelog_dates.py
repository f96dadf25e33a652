"""Real dates into ISO 8601: compiles `extract` on the date strings of this machine's Debian changelogs.

    python examples/changelog_dates.py [--json] [--rows 700] [--model embedded/smollm2-135m]

The dates are those of the changelogs in /usr/share/doc, in two forms: `Tue, 05 Mar 2024 10:22:33 +0100` and
`Wed Sep 30 22:20:50 1998`. The expected answers are computed by Python's own parsers. Only the dates are read.
"""

import argparse
import contextlib
import datetime
import email.utils
import gzip
import json
import random
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import assay
from assay.cli import Console

DEBIAN = re.compile(r"^ -- .*>  (\w{3},\s+\d{1,2} \w{3} \d{4} \d\d:\d\d:\d\d [-+]\d{4})$")
CTIME = re.compile(r"^(\w{3} \w{3} +\d{1,2} \d\d:\d\d:\d\d \d{4})\b")


def dates(folder: Path) -> dict[str, str]:
    """Date strings with their ISO dates."""
    iso_dates = {}
    for path in sorted(folder.glob("*/changelog*.gz")):
        with contextlib.suppress(OSError, EOFError), gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
            for line in file:
                if match := DEBIAN.match(line.rstrip()):
                    iso_dates[match[1]] = email.utils.parsedate_to_datetime(match[1]).date().isoformat()
                elif match := CTIME.match(line):
                    with contextlib.suppress(ValueError):
                        iso_dates[match[1]] = (
                            datetime.datetime.strptime(match[1], "%a %b %d %H:%M:%S %Y").date().isoformat()
                        )
    return iso_dates


def result(report: Mapping[str, Any]) -> dict[str, Any]:
    """What `--json` prints of a compile: the score and the criteria on the held-out dates, under the same keys
    `before` and `after`; None where the baseline was kept, and the test therefore not opened."""
    test = report["test"]
    before, after = (
        side and {"score": side["score"], **side["criteria"]} for side in (test["baseline"], test["compiled"])
    )
    return {
        "before": before,
        "after": after,
        "gain": test["gain"],
        "winner": report["winner"],
        "n": test["baseline"] and test["baseline"]["n"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", type=int, default=700)
    parser.add_argument("--model", default="embedded/smollm2-135m")
    parser.add_argument("--folder", type=Path, default=Path("/usr/share/doc"))
    parser.add_argument("--test-size", type=int, default=100)
    parser.add_argument("--gate-size", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    every = sorted(dates(arguments.folder).items())
    if len(every) < 50:
        sys.exit(
            f"{arguments.folder} has only {len(every)} changelog dates; "
            "point --folder at a Debian machine's /usr/share/doc"
        )
    rows = random.Random(0).sample(every, min(arguments.rows, len(every)))
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "dates.jsonl"
        data.write_text(
            "".join(json.dumps({"inputs": {"text": text}, "expected": {"date": iso}}) + "\n" for text, iso in rows)
        )
        report = assay.compile(
            "extract",
            rubric="extract",
            data=str(data),
            model=arguments.model,
            parameters={"temperature": 0.1},
            sizes={"test": arguments.test_size, "gate": arguments.gate_size},
            seed=arguments.seed,
            store=f"{folder}/.assay/assay.db",
            progress=Console(),
        ).to_dict()
    outcome = result(report)
    if arguments.json:
        print(json.dumps(outcome))
        return
    before, after, gain = outcome["before"], outcome["after"], outcome["gain"]
    if gain is None:
        print(f"winner: {outcome['winner']}; the baseline is kept, and the sealed test was not opened")
        return
    print(f"{outcome['n']} sealed dates; winner: {outcome['winner']}")
    for name, value in before.items():
        print(f"  {name:8} {100 * value:5.0f} % -> {100 * after[name]:5.0f} %")
    print(f"  gain of the score {gain['mean']:+.3f}, 95 % [{gain['low']:+.3f}, {gain['high']:+.3f}]")


if __name__ == "__main__":
    main()
