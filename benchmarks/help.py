"""`assay --help` against a bare interpreter: the median of interleaved runs."""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


bare = [sys.executable, "-c", "pass"]
help_ = [str(Path(sys.executable).parent / "assay"), "--help"]
pairs = [(seconds(bare), seconds(help_)) for _ in range(21)]
before, after = (statistics.median(column) for column in zip(*pairs, strict=True))
print(json.dumps({"bare_s": before, "help_s": after, "ratio": after / before}))
