"""What compiling the text of an agent gains over its own text, and beside GEPA: the table of a page in Markdown.

    python benchmarks/compiled_agents.py [--results benchmarks/results] [--draws 10000]

Reads the records of `figures.py run compiled_openai … gepa_node`. A gain is pooled over seeds by a bootstrap: seeds are
drawn with replacement, and so are the sealed tasks of each drawn seed; the interval has the 2.5 and 97.5 % quantiles of
the means. `auto - GEPA` is the difference of both results on the same tasks.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from claims.storing import read

AGENTS = {"openai": "OpenAI's SDK", "langgraph": "LangGraph", "node": "Node, no package"}
SEEDS = (0, 1, 2)


def pooled(differences: Sequence[np.ndarray], draws: int) -> str:
    """Mean and interval of differences by task, an array for each seed, in points."""
    rng, means = np.random.default_rng(0), []
    for _ in range(draws):
        chosen = rng.integers(len(differences), size=len(differences))
        means.append(np.mean([rng.choice(differences[at], len(differences[at])).mean() for at in chosen]))
    low, high = np.quantile(means, (0.025, 0.975))
    mean = np.mean([values.mean() for values in differences])
    return f"{100 * mean:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--draws", type=int, default=10_000)
    arguments = parser.parse_args()
    records = read(arguments.results / "seeds.jsonl")
    print("| agent | optimizer | own text, % right | compiled, % right | gain, points | calls |")
    print("|---|---|---|---|---|---|")
    for name, agent in AGENTS.items():
        results: dict[str, list[dict[str, float]]] = {}
        for optimizer in ("auto", "gepa"):
            kind = "compiled" if optimizer == "auto" else optimizer
            found = [record for seed in SEEDS if (record := records.get((f"{kind}_{name}", seed))) is not None]
            if not found:
                continue
            sides = [record["values"]["correct"] for record in found]
            results[optimizer] = [side["after"] for side in sides]
            own, new = (", ".join(f"{100 * np.mean(list(side[key].values())):.0f}" for side in sides)
                        for key in ("before", "after"))  # fmt: skip
            gains = [
                np.array([side["after"][task] - side["before"][task] for task in side["before"]]) for side in sides
            ]
            calls = ", ".join(str(record["facts"]["calls"]) for record in found)
            print(f"| {agent} | {optimizer} | {own} | {new} | {pooled(gains, arguments.draws)} | {calls} |")
        if len(results) == 2:
            pairs = zip(*results.values(), strict=False)
            apart = [np.array([one[task] - other[task] for task in one]) for one, other in pairs]
            print(f"| {agent} | auto - GEPA | | | {pooled(apart, arguments.draws)} | |")


if __name__ == "__main__":
    main()
