"""What each of the five parameters does to an agent: `python examples/parameter_impact_example.py --out folder`.

The agent is the shipped `math_qa`, on the embedded model. A short search comes first, so that there is something to tell importance
from; then each parameter is moved alone over its range. The folder gets one page that opens without a network (`study.html`),
the pictures as PNGs and the table (`impact.json`).
"""

import argparse
import json

import assay
from assay.cli.shared import Console
from assay.optimizers.parameters import in_figures

parser = argparse.ArgumentParser()
parser.add_argument("--program", default="math_qa")
parser.add_argument("--rubric", default="math_qa")
parser.add_argument("--data", default="arithmetic:terms=2-3&digits=2&size=200")
parser.add_argument("--model", default="embedded/smollm2-135m")
parser.add_argument("--tasks", type=int, default=12)
parser.add_argument("--trials", type=int, default=12, help="Of the search; 0: none.")
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
about = {"rubric": arguments.rubric, "data": arguments.data, "model": arguments.model, "ranges": ranges, "progress": Console()}
sizes = {"val": arguments.tasks, "gate": 6, "test": 6}
if arguments.trials:
    assay.tune(arguments.program, trials=arguments.trials, sizes=sizes, **about)
report = assay.parameter_impact(arguments.program, levels=arguments.levels, sizes=sizes, out=arguments.out, **about)
if arguments.json:
    print(json.dumps(report.to_dict()))
else:
    for effect in report.found.effects:
        print(f"{effect.parameter} {in_figures(effect.value)}: {', '.join(f'{name} {effect.cell(name)}' for name in report.found.measured)}")
    for name, weights in report.importance.items():
        print(f"importance by {name}: {', '.join(f'{parameter} {weight:.2f}' for parameter, weight in weights.items())}")
    print(f"written: {report.page or report.folder}")
