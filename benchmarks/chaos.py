"""Kills jobs at random moments and compares what they leave with unkilled runs: `make chaos`. Not in CI.

    python benchmarks/chaos.py [--jobs compile tune collect improve sft grpo] [--kills 20] [--training-kills 3]
        [--each 5] [--seed 0]

Each job gets `--kills` kills, trainings of the embedded model `--training-kills`, `--each` of them in one run; a line
a run, then a table. Exits with 1 where anything differs.
"""

import argparse
import importlib
import sys
import tempfile
from pathlib import Path

import assay.api.collect
import assay.api.compile
import assay.api.export
import assay.api.improve.run
import assay.api.tune  # noqa: F401 - all of it loaded once, before the attempts are forked
from assay.testing.chaos import JOBS, TRAININGS, chaos, differences, serving


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--training-kills", type=int, default=3)
    parser.add_argument("--each", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as scratch, serving(Path(scratch) / "log") as server:
        for job in arguments.jobs:
            if job in TRAININGS:
                importlib.import_module("assay.api.train")
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
    return int(any(row[3] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
