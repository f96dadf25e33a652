"""Chaos run of the gateway: part of `make chaos`. Not in CI.

    python benchmarks/chaos_gateway.py [--calls 10000] [--seed 0] [--store sqlite|postgresql] [--concurrent 40] [--json]

Clients hold conversations through `assay serve`, in all dialects, with tools, streamed and not. The server answers by
a seeded plan with 429, 500, errors with status 200, empty, broken, cut, slow and hanging answers. Meanwhile the store
is locked, its disk full, a PostgreSQL restarted, and each process killed. Then the store is compared with what the
clients and the server saw. Exits with 1 where anything differs.

The disk is a tmpfs that is made full; it needs the right to mount, in a namespace of its own (`unshare`). Without it
no disk is full.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from rigs.gateway_chaos import FAULTS, Settings, chaos

INSIDE = "ASSAY_CHAOS_NAMESPACE"


def in_namespace() -> None:
    """Runs this again with mounts of its own, where the machine allows that."""
    command = ["unshare", "--mount", *(() if os.geteuid() == 0 else ("--user", "--map-root-user"))]
    try:
        allowed = subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        allowed = False
    os.environ[INSIDE] = "mounts" if allowed else "no mounts"
    if allowed:
        os.execvp(command[0], [*command, sys.executable, *sys.argv])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--concurrent", type=int, default=40)
    parser.add_argument("--each", type=int, help="how often each fault comes; by default by the number of calls")
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    parser.add_argument("--folder", type=Path, help="where everything is kept; by default a folder that is removed")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if INSIDE not in os.environ:
        in_namespace()
    settings = Settings(
        calls=arguments.calls,
        seed=arguments.seed,
        store=arguments.store,
        concurrent=arguments.concurrent,
        each=arguments.each,
        faults=tuple(arguments.faults),
        mounts=os.environ[INSIDE] == "mounts",
    )
    with tempfile.TemporaryDirectory() as scratch, Progress(console=Console(stderr=True)) as progress:
        os.chmod(scratch, 0o755)  # PostgreSQL runs as another user where this one is root
        task = progress.add_task("calls", total=arguments.calls)
        report = chaos(
            settings, arguments.folder or Path(scratch) / "run", lambda done: progress.update(task, completed=done)
        )
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
    return int(bool(report["problems"]))


def show(report: dict[str, object]) -> None:
    print("| what | |\n|---|---|")
    for name, value in report.items():
        if name != "problems":
            text = ", ".join(f"{key} {count}" for key, count in value.items()) if isinstance(value, dict) else value
            print(f"| {name} | {text} |")
    problems = report["problems"]
    assert isinstance(problems, dict)
    counts = [f"{kind} {problem['count']}" for kind, problem in problems.items()]
    print(f"| problems | {', '.join(counts) or 'none'} |")
    for kind, problem in problems.items():
        for text in problem["first"]:
            print(f"{kind}: {text}")


if __name__ == "__main__":
    sys.exit(main())
