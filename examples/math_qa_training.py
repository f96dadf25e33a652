"""From a prompt to better weights on two CPU cores: `python examples/math_qa_training.py --folder math_qa`.

1. **compile**: the calculator agent's prompt, so that a 135M model uses its tool at all (or `--artifact`, compiled
   before);
2. **collect**: rollouts of the compiled agent on tasks of `train`, scored by the rubric;
3. **sft**: a short warm-up on its good rollouts, its demonstrations left out, so that the plain agent can do some of
   it;
4. **grpo**: rollouts of the plain agent; calls that led to right answers become more likely;
5. **serve and compare**: on sealed tasks, greedily and sampled, by the names that any command takes; on longer sums;
   and on another kind of task, which was not trained.

Half an hour and more on two cores; `--artifact` and a smaller `--test-size` save some of it. The same command
continues after the last finished step. `--json` prints one object: the plain agent under `before` and
the compiled and trained one under `after`, both greedily on the held-out sums, and every comparison (`comparison`,
`scores`).
"""

import argparse
import json
import os
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console as Rich
from rich.table import Table

import assay
from assay.cli import Console
from assay.models.lora import adapter_home, find_adapter
from assay.optimizers.finetuning import SFTSettings, train_sft
from assay.optimizers.finetuning.comparison import compared
from assay.reports.training import interval
from assay.traces.export.settings import Gates

KINDS = {  # what must not be forgotten: another task, in another form
    "animal": "horse cat eagle shark tiger rabbit snake goat wolf whale frog bear",
    "fruit": "apple pear plum cherry banana mango grape lemon peach melon fig orange",
    "city": "Paris London Tokyo Berlin Madrid Rome Cairo Lima Oslo Vienna Delhi Boston",
    "tool": "hammer saw drill wrench chisel pliers screwdriver axe shovel rake ladder clamp",
}
LEADS = ("I like the word", "Write about the", "Tell me of the", "My favourite is the")
LONGER = "arithmetic:terms=5-6&digits=3-4&size=600"  # sums of a kind that nothing was trained on


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="math_qa")
    parser.add_argument("--artifact", help="A compiled math_qa.")
    parser.add_argument(
        "--data", default="arithmetic:terms=3-4&digits=2-3&size=600", help="Sums that a guess does not get right."
    )
    parser.add_argument("--model", default="embedded/smollm2-135m")
    parser.add_argument("--collect", type=int, default=48, help="Tasks that the compiled agent does.")
    parser.add_argument(
        "--epochs", type=int, default=1, help="Of the warm-up; after a long one there is nothing left to learn."
    )
    parser.add_argument("--steps", type=int, default=8, help="Of the policy gradient.")
    parser.add_argument("--group", type=int, default=6, help="Rollouts of a task, four tasks a step.")
    parser.add_argument("--test-size", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def done(name: str) -> bool:
    return (adapter_home() / name).is_dir()


def result(comparison: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """What `--json` prints: of all comparisons that of the plain agent with the compiled, trained one comes first."""
    last = comparison["compiled, trained, greedy"]
    return {"before": last["before"], "after": last["after"], **more, "comparison": comparison}


def collected(arguments: argparse.Namespace, folder: Path, sums: Mapping[str, Any], artifact: str) -> None:
    """Rollouts of the compiled agent, and their export in the form that the plain agent will have."""
    sizes = {"train": arguments.collect}
    parameters = {"temperature": 0.1}
    assay.collect(
        artifact,
        **sums,
        model=arguments.model,
        prompt_format="lean",
        n=1,
        sizes=sizes,
        parameters=parameters,
        store=folder / "a.db",
    )
    assay.export("sft", folder / "rows", store=folder / "a.db", demos=False, gates=Gates(min_clean=0))


def trained(
    arguments: argparse.Namespace, folder: Path, sums: Mapping[str, Any], seconds: dict[str, float]
) -> tuple[str, str]:
    """Steps 1 to 4; those that are done are not repeated. The artifact, and the name of the warmed-up model."""
    artifact = arguments.artifact or str(folder / "compiled")
    if not Path(artifact).exists():
        assay.compile(
            "math_qa",
            **sums,
            model=arguments.model,
            parameters={"temperature": 0.1},
            max_search_calls=140,
            sizes={"gate": 10, "test": 10},
            store=folder / "compile.db",
            out=artifact,
        )
    if not (folder / "rows").exists():
        collected(arguments, folder, sums, artifact)
    clock = time.perf_counter()
    if not done("warm"):
        train_sft(
            folder / "rows",
            "warm",
            SFTSettings(model=arguments.model, epochs=arguments.epochs, seed=arguments.seed),
            progress=sums["progress"],
        )
        seconds["sft"] = time.perf_counter() - clock
    warm, clock = f"{arguments.model}+warm", time.perf_counter()
    if not done("grpo"):
        # The score alone is trained on: the rubric's step rewards would be earned by calling again and again.
        assay.train(
            "math_qa",
            **sums,
            name="grpo",
            model=warm,
            prompt_format="lean",
            steps=arguments.steps,
            prompts_per_step=4,
            num_generations=arguments.group,
            learning_rate=2e-4,
            beta=0.0,
            step_weight=0.0,
            max_completion=64,
            parameters={"max_steps": 3},
            evaluate_every=0,
            sizes={"test": arguments.test_size},
            store=folder / "g.db",
            resume=(adapter_home().parent / "training" / "grpo").exists(),
        )
        seconds["grpo, with its comparison on sealed tasks"] = time.perf_counter() - clock
    return artifact, warm


def measured(
    arguments: argparse.Namespace, folder: Path, sums: Mapping[str, Any], artifact: str, warm: str
) -> tuple[dict[str, Any], dict[str, dict[str, dict[str, float]]]]:
    """Step 5: the comparisons by name, and the scores by mode, agent and task."""
    agents = {
        "plain": ("math_qa", arguments.model),
        "compiled": (artifact, arguments.model),
        "warmed up": ("math_qa", warm),
        "trained": ("math_qa", f"{warm}+grpo"),
        "compiled, trained": (artifact, f"{warm}+grpo"),
    }
    comparisons, scores = dict[str, Any](), dict[str, dict[str, dict[str, float]]]()
    modes = {"greedy": (arguments.data, 0.1), "sampled": (arguments.data, 1.0), "longer sums": (LONGER, 0.1)}
    for mode, (data, temperature) in modes.items():
        parameters, sizes = {"max_steps": 3, "temperature": temperature}, {"test": arguments.test_size}
        evaluations = {
            name: assay.evaluate(
                program,
                **{**sums, "data": data},
                split="test",
                model=model,
                prompt_format="lean" if program == "math_qa" else None,
                parameters=parameters,
                sizes=sizes,
                store=folder / "e.db",
            ).evaluation
            for name, (program, model) in agents.items()
        }
        scores[mode] = {name: one.scores for name, one in evaluations.items()}
        comparisons |= {f"{name}, {mode}": compared(evaluations["plain"], evaluations[name]) for name in agents}
        comparisons |= {
            f"both against {name}, {mode}": compared(evaluations[name], evaluations["compiled, trained"])
            for name in ("compiled", "trained")
        }
    classify_job = {
        "rubric": "classify",
        "data": str(folder / "words.jsonl"),
        "prompt_format": "lean",
        "parameters": {"temperature": 0.1},
        "store": folder / "e.db",
    }
    before, after = (
        assay.evaluate("classify", **classify_job, split="val", model=model, progress=sums["progress"]).evaluation
        for model in (arguments.model, f"{warm}+grpo")
    )
    comparisons["words, never trained on"] = compared(before, after)
    scores["words"] = {"plain": before.scores, "trained": after.scores}
    return comparisons, scores


def main() -> None:
    arguments = parsed()
    folder, console, seconds = Path(arguments.folder), Console(), dict[str, float]()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("ASSAY_ADAPTERS", str(folder / "adapters"))
    sums = {"rubric": "math_qa", "data": arguments.data, "seed": arguments.seed, "progress": console}
    words = [(f"{lead} {word}.", kind) for kind, text in KINDS.items() for word in text.split() for lead in LEADS]
    random.Random(0).shuffle(words)
    (folder / "words.jsonl").write_text(
        "".join(json.dumps({"inputs": {"text": text}, "expected": {"label": kind}}) + "\n" for text, kind in words)
    )
    artifact, warm = trained(arguments, folder, sums, seconds)
    comparisons, scores = measured(arguments, folder, sums, artifact, warm)
    training = find_adapter("grpo").made
    if arguments.json:
        print(json.dumps(result(comparisons, seed=arguments.seed, seconds=seconds, scores=scores, training=training)))
    else:
        table = Table(
            "",
            "score",
            "tool",
            "valid calls",
            "tokens a task",
            "gain, 95 %",
            title=f"{arguments.test_size} sealed tasks",
        )
        for name, row in comparisons.items():
            end = row["after"]
            numbers = (end["score"], end["criteria"].get("tool_adoption"), end["valid_calls"], end["tokens_per_task"])
            table.add_row(name, *("" if value is None else f"{value:.3g}" for value in numbers), interval(row["gain"]))
        Rich().print(table)
        Rich().print(f"curves and samples: {folder / 'adapters' / 'grpo' / 'training.html'}")


if __name__ == "__main__":
    main()
