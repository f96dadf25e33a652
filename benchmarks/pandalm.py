"""A pairwise judge against the three annotators of PandaLM's test set (Wang et al. 2023), as it comes and compiled,
by seed.

FILE is testset-v1.json of the PandaLM repository (999 pairs). Labels: 1 the first response, 2 the second, 0 a tie.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

from claims.storing import Lines

import assay
from assay.judges import PairwiseJudge

WORDS = {0: "tie", 1: "a", 2: "b"}


def rows(file: Path, count: int, seed: int) -> list[dict[str, str]]:
    items = []
    for entry in random.Random(seed).sample(json.loads(file.read_text("utf-8")), count):
        first, second = entry["cmp_key"].split("_")
        asked = f"{entry['instruction']}\n{entry['input'] or ''}".strip()
        outputs = {
            "output_a": str(entry["response1"]),
            "output_b": str(entry["response2"]),
            "model_a": first,
            "model_b": second,
        }
        items += [
            {
                "item_id": str(entry["idx"]),
                "input": asked,
                **outputs,
                "rater": f"annotator{at}",
                "label": WORDS[entry[f"annotator{at}"]],
            }
            for at in (1, 2, 3)
        ]
    return items


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--pairs", type=int, default=999)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--model", default="embedded/smollm2-135m")
    parser.add_argument("--optimizer", default="calibrate")
    arguments = parser.parse_args()

    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            labels = Path(folder) / "labels.jsonl"
            labels.write_text("\n".join(json.dumps(row) for row in rows(arguments.file, arguments.pairs, seed)))
            data = assay.compile_judge(
                PairwiseJudge(),
                labels=str(labels),
                model=arguments.model,
                seed=seed,
                salt=f"seed {seed}",
                optimizer=arguments.optimizer,
                store=Path(folder) / ".assay" / "a.db",
                progress=Lines(),
            ).to_dict()
        fields = ("objective", "winner", "sizes", "replaces", "gate", "calls", "ceiling", "test", "candidates", "card")
        print(json.dumps({"pairs": arguments.pairs, "seed": seed, **{name: data[name] for name in fields}}), flush=True)


if __name__ == "__main__":
    main()
