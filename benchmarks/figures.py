"""The project's claims in one table, each measured with three seeds on tasks that nothing was selected on.

    python benchmarks/figures.py run                    # every row, every seed that is missing
    python benchmarks/figures.py run ROW --seed 1       # one row, one seed, again
    python benchmarks/figures.py table                  # the table, from the records

A row is measured for each seed by a function in `benchmarks/claims`, and its values by task are appended to
`results/seeds.jsonl` with the command, the versions and the commit. A run that is cut off loses one seed at most, and
the next `run` continues. If a measurement fails, the others still run, and the exit code is 1. `results/seeds.md` is
made of these records. Rows that read the same measurement are measured together. Rows without a measurement, and those
that need the stronger model where no `--stronger FILE.gguf` is given, say "not run".
"""

import argparse
import importlib
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from claims.groups import GROUPS, Group
from claims.rows import ROWS
from claims.storing import Setting, append, read, record
from claims.table import page

RESULTS = Path(__file__).parent / "results"
SEEDS = (0, 1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="measure rows, then write the table")
    run.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(sorted({*GROUPS, *(row.name for row in ROWS)})))
    run.add_argument("--seed", type=int, help="Only this seed, also if it was measured before.")
    run.add_argument("--model", default="embedded/smollm2-135m")
    run.add_argument("--stronger", metavar="FILE.gguf", help="The stronger model, for the rows that need it.")
    run.add_argument("--downloads", type=Path, default=Path(tempfile.gettempdir()) / "assay-figures")
    commands.add_parser("table", help="write the table")
    for command in commands.choices.values():
        command.add_argument("--results", type=Path, default=RESULTS, help="Folder of seeds.jsonl and seeds.md.")
    arguments = parser.parse_args()
    arguments.results.mkdir(parents=True, exist_ok=True)
    if arguments.command == "run":
        failed = [name for name in groups(arguments.rows, parser) if not run_group(name, GROUPS[name], arguments)]
    else:
        failed = []
    text = page(ROWS, read(arguments.results / "seeds.jsonl"), SEEDS)
    (arguments.results / "seeds.md").write_text(text)
    print(text)
    if failed:
        sys.exit(f"failed, see above: {', '.join(failed)}")


def groups(names: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """The measurements of some rows, in the order of the table; all without names."""
    measured_by = {name: [name] for name in GROUPS} | {row.name: row.measurements for row in ROWS}
    if unknown := sorted(set(names) - measured_by.keys()):
        parser.error(f"there is no row {unknown[0]!r}; the rows are {', '.join(sorted(measured_by))}")
    chosen = {group for name in names for group in measured_by[name]} or set(GROUPS)
    return [name for name in GROUPS if name in chosen]


def run_group(name: str, group: Group, arguments: argparse.Namespace) -> bool:
    """Measures the seeds; False if one of them failed."""
    if group.stronger and arguments.stronger is None:
        say(f"{name}: not run (needs --stronger FILE.gguf)")
        return True
    path = arguments.results / "seeds.jsonl"
    seeds = next((row.seeds for row in ROWS if row.measurement == name and row.seeds), SEEDS)
    for seed in seeds if arguments.seed is None else (arguments.seed,):
        if arguments.seed is None and (name, seed) in read(path):
            say(f"{name}, seed {seed}: measured before")
            continue
        try:
            measure(name, group, seed, arguments)
        except Exception:  # of any row: the other rows are still measured
            traceback.print_exc()
            return False
    return True


def measure(name: str, group: Group, seed: int, arguments: argparse.Namespace) -> None:
    """Measures one seed and appends its record."""
    say(f"{name}, seed {seed}: started")
    start = time.perf_counter()
    arguments.downloads.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(os.environ.get("ASSAY_FIGURES_SCRATCH", temporary))
        scratch.mkdir(parents=True, exist_ok=True)
        setting = Setting(
            seed=seed,
            model=arguments.model,
            stronger=arguments.stronger,
            scratch=scratch,
            downloads=arguments.downloads,
        )
        function = getattr(importlib.import_module(f"claims.{group.module}"), group.function)
        measured = function(setting, **group.options)
    seconds = time.perf_counter() - start
    command = f"python benchmarks/figures.py run {name} --seed {seed}"
    stronger = Path(arguments.stronger).name if group.stronger else None  # its folder is of one machine only
    line = record(
        name,
        setting,
        measured,
        model=f"embedded:{stronger}" if stronger else setting.model,
        command=f"{command} --stronger {stronger}" if stronger else command,
        seconds=seconds,
    )
    append(arguments.results / "seeds.jsonl", line)
    say(f"{name}, seed {seed}: done in {seconds:.0f} s")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
