"""Kills and stops jobs at random moments and compares what they leave: `make chaos`. Not in CI.

    python benchmarks/chaos.py [--jobs compile tune collect improve sft grpo] [--kills 20] [--training-kills 3]
        [--each 5] [--stops 3] [--seed 0]

Each job gets `--kills` kills, trainings of the embedded model `--training-kills`, `--each` of them in one run; a line
a run, then a table. What is left is compared with an unkilled run. Each job that calls a server is also stopped
`--stops` times by each of caps, Ctrl-C, SIGTERM and a full disk: calls that the server answered must be stored or
counted, and nothing may be left running. Exits with 1 where anything differs.
"""

import argparse
import importlib
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from rigs.chaos import JOBS, STOPS, TRAININGS, chaos, differences, serving, stopped


def stop_jobs(jobs: list[str], times: int, seed: int) -> int:
    """Stops each job in each way; prints a line for each job. Returns the number of jobs with a problem."""
    rng, wrong = random.Random(seed), 0
    print("\n| job | stopped by | times | calls answered | stored | unrecorded | problems |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch, serving(Path(scratch) / "log", delay_ms=100) as server:
        for job in jobs:
            for name, stop in STOPS.items():
                rows, problems = [], []
                for number in range(times):
                    place = Path(scratch) / job / name.replace(" ", "-") / str(number)
                    accounts, found = stopped(job, place, server, replace(stop, after=rng.randint(3, 100)))
                    rows.append(accounts)
                    problems += found
                wrong += bool(problems)
                sums = [sum(getattr(row, field) for row in rows) for field in ("answered", "stored", "unrecorded")]
                cells = [job, name, times, *sums, "; ".join(problems) or "none"]
                print(f"| {' | '.join(map(str, cells))} |", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--training-kills", type=int, default=3)
    parser.add_argument("--each", type=int, default=5)
    parser.add_argument("--stops", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch, serving(Path(scratch) / "log") as server:
        for job in arguments.jobs:
            if job in TRAININGS:
                importlib.import_module("assay.jobs.trainings")
                from trl import GRPOTrainer, SFTTrainer  # noqa: F401
            most = arguments.training_kills if job in TRAININGS else arguments.kills
            whole = chaos(job, Path(scratch) / job / "whole", server)
            kills = repeated = wrong = number = 0
            while kills < most:
                wanted, folder = min(arguments.each, most - kills), Path(scratch) / job / str(number)
                killed = chaos(job, folder, server, kills=wanted, within_s=whole.seconds, seed=arguments.seed + number)
                problems = differences(whole, killed)
                kills, repeated, number, wrong = (
                    kills + killed.kills,
                    repeated + killed.spent["repeated"],
                    number + 1,
                    wrong + bool(problems),
                )
                outcome = "; ".join(problems)[:2000] or "as unkilled"
                print(
                    f"{job}: {killed.kills} kills, {killed.requests - whole.requests} requests more, {outcome}",
                    flush=True,
                )
            rows.append(
                (
                    job,
                    kills,
                    number,
                    wrong,
                    repeated,
                    whole.spent["calls"],
                    len(whole.rollouts),
                    len(whole.rows),
                    whole.seconds,
                )
            )
    print(
        "\n| job | kills | runs | runs that differ | calls sent again | calls | rollouts | rows exported "
        "| seconds unkilled |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(str(value) for value in row[:-1])} | {row[-1]:.1f} |")
    wrong = stop_jobs([job for job in arguments.jobs if job not in TRAININGS], arguments.stops, arguments.seed)
    return int(any(row[3] for row in rows) or wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
