"""Thinking tokens and score of an agent with and without dynamic allocation, paired on the same tasks.

    python benchmarks/thinking.py [--seed 0] [--tasks 24] [--budget 64] [--demos 4]

The shipped `math_qa` on mixed chain sums with the embedded model, in the prompt format `lean`, with a fixed thinking
budget for each decision: once thinking always, then with each of the policies that `assay compile` fits. All run on the
same tasks with the same seeds. The demonstrations are made from the tasks' own sums, without thoughts; the tasks that
are measured are others. Prints a table and one JSON object.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from assay.datasets import Task, load_tasks
from assay.evaluation import RecordedProgram, Session
from assay.evaluation.evaluation import Evaluation, evaluate
from assay.evaluation.metrics import thinking_report
from assay.evaluation.statistics import paired_gain
from assay.models import Meter, get_lm
from assay.optimizers.prompts.thinking import POLICIES, fitted_policy
from assay.programs import MathQA, ThinkingPolicy
from assay.programs.budgets import with_policy
from assay.rubrics import Criterion, Rubric
from assay.rubrics.checks import numeric
from assay.traces import Recorder, Store

MODEL = "embedded/smollm2-135m"
EXTRA = {"never thinks": ThinkingPolicy(probe_margin=0.0), "five samples": ThinkingPolicy(samples=5)}


def demonstrations(agent: MathQA, tasks: list[Task]) -> None:
    """Shows each predictor the steps of solved tasks."""
    for task in tasks:
        question, answer = task.inputs["question"], task.expected["answer"]
        sum_of = str(task.metadata["expression"])
        done = {"question": question, "results": f"{sum_of} = {answer}"}
        agent.decide.demos += [
            {"question": question, "results": "", "thought": "No results yet.", "action": "calculator"},
            {**done, "thought": f"The result is {answer}.", "action": "answer"},
        ]
        agent.use["calculator"].demos.append({"question": question, "results": "", "expression": sum_of})
        agent.respond.demos.append({**done, "answer": answer})


def measured(evaluation: Evaluation, plain: Evaluation) -> dict[str, Any]:
    report, gain = thinking_report(list(evaluation.runs.values())), paired_gain(plain.scores, evaluation.scores)
    return {
        "score": round(evaluation.mean, 4),
        "difference": [round(value, 4) for value in (gain.mean, gain.low, gain.high)],
        "thinking_tokens": round(report.tokens, 2) if report else 0.0,
        "after_stable": round(report.after_stable, 2) if report else 0.0,
        "loops": report.loops if report else 0,
        "tokens": round(sum(evaluation.tokens.values()) / len(evaluation), 1),
        "calls": round(sum(evaluation.calls.values()) / len(evaluation), 2),
    }


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    size = arguments.tasks + arguments.demos
    tasks = load_tasks(f"arithmetic:terms=2-4&digits=1-2&ops=+-&size={size}&seed={arguments.seed}")
    demonstrated, asked = tasks[: arguments.demos], tasks[arguments.demos :]
    recorder, meter = Recorder(Store(folder / "s.db")), Meter()
    lm = get_lm(MODEL, meter=meter, observers=[recorder.observe], seed=arguments.seed)
    rubric = Rubric("right", [Criterion(name="right", check=numeric)])
    session = Session(lm, rubric, recorder, meter, "math_qa", seed=arguments.seed, threads=1)
    agent = MathQA(prompt_format="lean", thinking=arguments.budget)
    agent.set_parameters({"max_steps": 3, "temperature": 0.1})
    demonstrations(agent, demonstrated)
    evaluations: dict[str, Evaluation] = {}
    with session.context(), recorder.active():
        for name, policy in {**POLICIES, **EXTRA}.items():
            student = RecordedProgram(with_policy(agent, policy), session, prompt_format="lean")
            evaluations[name] = evaluate(student, asked, session, name=name)
    plain = evaluations["thinks once"]
    chosen, _ = fitted_policy({name: evaluations[name] for name in POLICIES}, margin=0.01)
    policies = {name: measured(evaluation, plain) for name, evaluation in evaluations.items()}
    return {"model": MODEL, "n": len(asked), **vars(arguments), "policies": policies, "fitted": chosen}


def show(result: dict[str, Any]) -> None:
    title = f"math_qa on mixed chain sums, {result['model']}, n = {result['n']}, seed {result['seed']}"
    table = Table("policy", "score", "difference [95 %]", "thinking", "after stable", "tokens", "calls", title=title)
    for name, row in result["policies"].items():
        mean, low, high = row["difference"]
        cells = (row["thinking_tokens"], row["after_stable"], row["tokens"], row["calls"])
        mark = " (fitted)" if name == result["fitted"] else ""
        table.add_row(name + mark, f"{row['score']:.3f}", f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]", *map(str, cells))
    Console(stderr=True, width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tasks", type=int, default=24)
    parser.add_argument("--budget", type=int, default=64, help="thinking tokens of a decision")
    parser.add_argument("--demos", type=int, default=4)
    with tempfile.TemporaryDirectory() as folder:
        result = run(parser.parse_args(), Path(folder))
    show(result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
