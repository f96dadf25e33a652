"""A policy learns which of the five parameters to change, on an agent whose best setting is known: `python
examples/rl_training_example.py`.

The agent is one of `assay.testing`: a published test function decides how often it is right, and the trainer only
sees whether a run was right. `--json` prints one object with the same keys before and after.
"""

import argparse
import json
import sys

from assay.optimizers import RLTrainer
from assay.optimizers.parameters import Episode, in_figures
from assay.testing import SyntheticAgent

parser = argparse.ArgumentParser()
parser.add_argument("--function", default="ackley", choices=["ackley", "rosenbrock", "hartmann"])
parser.add_argument("--episodes", type=int, default=60)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--json", action="store_true")
arguments = parser.parse_args()

agent = SyntheticAgent(arguments.function, tasks=70, seed=arguments.seed)
trainer = RLTrainer(agent, agent.right, agent, seed=arguments.seed)
before = trainer.get_best_parameters()
outcome = trainer.train(episodes=arguments.episodes, tasks_per_episode=None, learning_rate=0.01, update_policy=True)
after = trainer.get_best_parameters()


def line(episode: Episode) -> str:
    moved = ", ".join(
        f"{name} {'+' if step > 0 else ''}{in_figures(step)}" for name, step in episode.adjustments.items() if step
    )
    change = f"{episode.improvement:+.2f}: {episode.meaning}"
    return f"episode {episode.number:3}: overall {episode.overall:.2f}, {change}. {moved}"


report = {
    side: {
        "score": agent.success(parameters),
        "of_optimum": agent.success(parameters) / agent.best,
        "parameters": parameters,
    }
    for side, parameters in (("before", before), ("after", after))
}
if arguments.json:
    print(json.dumps({**report, "episodes": len(outcome.history), "history": trainer.training_history}))
else:
    for episode in outcome.history:
        print(line(episode), file=sys.stderr)
    for side, entry in report.items():
        settings = ", ".join(f"{name} {in_figures(value)}" for name, value in entry["parameters"].items())
        print(
            f"{side}: right {100 * entry['score']:.0f} % of the time, "
            f"{100 * entry['of_optimum']:.0f} % of the optimum, with {settings}"
        )
