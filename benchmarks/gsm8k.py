"""GSM8K: a calculator agent compiled, trained, and both, on word problems that no part of it has seen.

    python benchmarks/gsm8k.py TRAIN.jsonl [--problems 300] [--test-size 100] [--folder gsm8k]

The file's answers mark each calculation as `<<48/2=24>>`. These are replayed through the program as if a perfect
model had answered its calls, so that what is trained on has the very prompts of the agent; what a calculator does not
confirm is left out by the rubric's score. The same command continues after the last part that was finished. Prints
one JSON object.

Cobbe et al. 2021, arXiv:2110.14168, who marked the calculations, trained models of 3 and 175 billion parameters on
all 7,473.
"""

import argparse
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dspy

import assay
from assay.cli import Console
from assay.evaluation import paired_gain
from assay.models.lora import adapter_home
from assay.optimizers.finetuning import SFTSettings, train_sft
from assay.optimizers.finetuning.comparison import compared
from assay.programs.agent import WRITTEN_DECISIONS
from assay.testing.fakes import scripted_lm
from assay.traces.export.settings import Gates

MARK = re.compile(r"<<([^<>=]+)=[^<>]*>>")
STEPS = 6  # of the agent: four calculations at most, and the answer
PARAMETERS = {"max_steps": STEPS, "reasoning_depth": 1, "temperature": 0.1}


def problems(source: str) -> dict[str, tuple[list[str], str]]:
    """Expressions and answer of each question, as the file has them."""
    rows = {}
    for line in Path(source).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        rows[row["question"]] = (
            MARK.findall(row["answer"]),
            row["answer"].rpartition("####")[2].strip().replace(",", ""),
        )
    return rows


def perfect(known: dict[str, tuple[list[str], str]]) -> Callable[[Any], str]:
    """What the marks say to each call of the agent: as many calculations as there are, then the answer."""

    def answer(request: Any) -> str:
        system, asked = str(request.system or ""), "".join(part.text for part in request.messages[-1].parts)
        question, results = re.fullmatch(r"question: (.*?)(?:\nresults: (.*))?", asked, re.DOTALL).groups()  # type: ignore[union-attr]
        expressions, final = known[question]
        done = len(results.splitlines()) if results else 0
        if "Choose the next action" in system:
            return "action: calculator" if done < len(expressions) else "action: answer"
        return f"expression: {expressions[done]}" if "next call of calculator" in system else f"answer: {final}"

    return answer


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--folder", default="gsm8k")
    parser.add_argument("--model", default="embedded/smollm2-135m")
    parser.add_argument("--problems", type=int, default=300, help="That are trained on.")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--search-calls", type=int, default=140)
    parser.add_argument("--test-size", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def trained(
    arguments: argparse.Namespace, folder: Path, job: dict[str, Any], known: dict[str, tuple[list[str], str]]
) -> dict[str, float]:
    """Compiles the agent, collects rows and trains on them, where this is not done; the seconds of each step."""
    seconds = dict[str, float]()
    artifact, clock = folder / "compiled", time.perf_counter()
    if not artifact.exists():
        sizes = {"train": 100, "val": 24, "gate": 16, "test": 16}
        assay.compile(
            "math_qa",
            **job,
            model=arguments.model,
            parameters=PARAMETERS,
            max_search_calls=arguments.search_calls,
            sizes=sizes,
            store=folder / "compile.db",
            out=artifact,
        )
        seconds["compile"] = time.perf_counter() - clock
    if not (folder / "rows").exists():
        with dspy.context(**{WRITTEN_DECISIONS: True}):
            assay.collect(
                "math_qa",
                **job,
                lm=scripted_lm(perfect(known)),
                prompt_format="lean",
                n=1,
                sizes={"train": arguments.problems},
                parameters=PARAMETERS,
                store=folder / "a.db",
            )
        assay.export(
            "sft", folder / "rows", store=folder / "a.db", gates=Gates(min_clean=0)
        )  # one rollout a task: no balance to ask for
    clock = time.perf_counter()
    if not (adapter_home() / "gsm8k").is_dir():
        train_sft(
            folder / "rows",
            "gsm8k",
            SFTSettings(model=arguments.model, epochs=arguments.epochs, seed=arguments.seed),
            progress=Console(),
        )
        seconds["sft"] = time.perf_counter() - clock
    return seconds


def evaluated(arguments: argparse.Namespace, folder: Path, job: dict[str, Any]) -> dict[str, Any]:
    """The evaluations of the plain, the compiled and the trained agent, and of both together."""
    artifact, trained_model = str(folder / "compiled"), f"{arguments.model}+gsm8k"
    agents = {
        "plain": ("math_qa", arguments.model),
        "compiled": (artifact, arguments.model),
        "trained": ("math_qa", trained_model),
        "both": (artifact, trained_model),
    }
    return {
        name: assay.evaluate(
            program,
            **job,
            split="test",
            model=model,
            prompt_format="lean" if program == "math_qa" else None,
            parameters=PARAMETERS,
            sizes={"test": arguments.test_size},
            store=folder / "e.db",
        ).evaluation
        for name, (program, model) in agents.items()
    }


def main() -> None:
    arguments = parsed()
    folder = Path(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("ASSAY_ADAPTERS", str(folder / "adapters"))
    known = problems(arguments.file)
    short = {question: steps for question, steps in known.items() if 0 < len(steps[0]) < STEPS - 1}
    data = folder / "problems.jsonl"
    data.write_text(
        "".join(
            json.dumps({"inputs": {"question": q}, "expected": {"answer": a}}) + "\n" for q, (_, a) in short.items()
        )
    )
    job: dict[str, Any] = {"rubric": "math_qa", "data": str(data), "seed": arguments.seed, "progress": Console()}
    seconds = trained(arguments, folder, job, known)
    evaluations = evaluated(arguments, folder, job)
    comparisons = {name: compared(evaluations["plain"], one) for name, one in evaluations.items()}
    pairs = (("plain", "compiled"), ("plain", "trained"), ("compiled", "both"), ("trained", "both"))
    gains = {
        f"{old} to {new}": paired_gain(evaluations[old].scores, evaluations[new].scores).to_dict() for old, new in pairs
    }
    counts = {"problems": len(known), "with one to four marks": len(short), "trained on": arguments.problems}
    adapter = json.loads((adapter_home() / "gsm8k" / "adapter.json").read_text())["made"]
    training = {name: adapter[name] for name in ("rows", "steps", "best_step", "loss", "held_out_loss", "left_out")}
    print(
        json.dumps(
            {
                **counts,
                "seconds": seconds,
                "agents": {name: one["after"] for name, one in comparisons.items()},
                "gains": gains,
                "training": training,
            }
        )
    )


if __name__ == "__main__":
    main()
