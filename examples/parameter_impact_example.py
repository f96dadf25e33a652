"""What each of the five parameters does to an agent: `python examples/parameter_impact_example.py --out folder`.

The agent is the shipped `math_qa`, on the embedded model. A short search comes first, from whose trials the importance
of the parameters is estimated; then each parameter is varied alone over its range. The folder gets one page that opens
without a network (`study.html`) and the table (`impact.json`). `--json` prints the table, with
the default parameters under `before` and the best of the search under `after`, measured on the same held-out tasks
(both null with `--trials 0`).
"""

import argparse
import json
from collections.abc import Mapping
from typing import Any

import assay
from assay.cli import Console
from assay.optimizers.parameters import in_figures
from assay.programs import AgentParameters


def sides(searched: Mapping[str, Any] | None) -> dict[str, Any]:
    """The default parameters and the best of a search, as `assay.tune` reports them, under `before` and `after`."""
    if searched is None:
        return {"before": None, "after": None}
    default_values = AgentParameters().model_dump()
    parameters = {"default": default_values, "tuned": {**default_values, **searched["best"]}}
    reports = {name: searched["test"][name] or {} for name in parameters}
    default, tuned = (
        {
            "score": reports[name].get("score"),
            "tokens_per_task": reports[name].get("tokens_per_task"),
            "parameters": parameters[name],
        }
        for name in parameters
    )
    return {"before": default, "after": tuned}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", default="math_qa")
    parser.add_argument("--rubric", default="math_qa")
    parser.add_argument("--data", default="arithmetic:terms=2-3&digits=2&size=200")
    parser.add_argument("--model", default="embedded/smollm2-135m")
    parser.add_argument("--tasks", type=int, default=12)
    parser.add_argument("--trials", type=int, default=12, help="Of the search; 0: none.")
    parser.add_argument("--levels", type=int, default=4)
    parser.add_argument(
        "--ranges",
        nargs="*",
        default=["max_steps=1:8", "temperature=0.1:1.5", "tool_usage_threshold=0:1", "reasoning_depth=1:7"],
    )
    parser.add_argument("--out", default="impact")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    ranges = {}
    for text in arguments.ranges:
        name, _, limits = text.partition("=")
        low, _, high = limits.partition(":")
        ranges[name] = (float(low), float(high))
    about = {
        "rubric": arguments.rubric,
        "data": arguments.data,
        "model": arguments.model,
        "ranges": ranges,
        "progress": Console(),
    }
    held_out = min(6, arguments.tasks)
    sizes = {"val": arguments.tasks, "gate": held_out, "test": held_out}
    searched = (
        assay.tune(arguments.program, trials=arguments.trials, sizes=sizes, **about).to_dict()
        if arguments.trials
        else None
    )
    report = assay.parameter_impact(arguments.program, levels=arguments.levels, sizes=sizes, out=arguments.out, **about)
    if arguments.json:
        print(json.dumps({**sides(searched), **report.to_dict()}))
    else:
        for effect in report.impact.effects:
            cells = ", ".join(f"{name} {effect.cell(name)}" for name in report.impact.measured)
            print(f"{effect.parameter} {in_figures(effect.value)}: {cells}")
        for name, weights in report.importance.items():
            shares = ", ".join(f"{parameter} {weight:.2f}" for parameter, weight in weights.items())
            print(f"importance by {name}: {shares}")
        print(f"written: {report.page or report.folder}")


if __name__ == "__main__":
    main()
