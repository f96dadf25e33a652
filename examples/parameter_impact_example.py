"""What each of the five parameters does to an agent: `python examples/parameter_impact_example.py --out folder`.

The agent is the shipped `math_qa`, on the embedded model; each parameter is moved alone over its range. The folder gets the
table (`impact.json`) and small multiples (`impact.png`).
"""

import argparse
import json

import assay
from assay.cli.shared import Console

parser = argparse.ArgumentParser()
parser.add_argument("--program", default="math_qa")
parser.add_argument("--rubric", default="math_qa")
parser.add_argument("--data", default="arithmetic:terms=2-3&digits=2&size=200")
parser.add_argument("--model", default="embedded/smollm2-135m")
parser.add_argument("--tasks", type=int, default=12)
parser.add_argument("--levels", type=int, default=4)
parser.add_argument("--ranges", nargs="*", default=["max_steps=1:8", "temperature=0.1:1.5", "tool_usage_threshold=0:1", "reasoning_depth=1:7"])
parser.add_argument("--out", default="impact")
parser.add_argument("--json", action="store_true")
arguments = parser.parse_args()

ranges = {}
for text in arguments.ranges:
    name, _, limits = text.partition("=")
    low, _, high = limits.partition(":")
    ranges[name] = (float(low), float(high))
report = assay.parameter_impact(
    arguments.program, rubric=arguments.rubric, data=arguments.data, model=arguments.model, ranges=ranges, levels=arguments.levels,
    sizes={"val": arguments.tasks}, out=arguments.out, progress=Console(),
)  # fmt: skip
if arguments.json:
    print(json.dumps(report.to_dict()))
else:
    for effect in report.found.effects:
        moved = {name for name, change in effect.changes.items() if (change["low"] or 0.0) * (change["high"] or 0.0) > 0}
        shown = ", ".join(f"{name} {effect.metrics[name]['mean']:.2f}{'*' if name in moved else ''}" for name in ("accuracy", "efficiency", "tokens"))
        print(f"{effect.parameter} {effect.value:.3g}: {shown}")
    print(f"written: {report.folder}")
