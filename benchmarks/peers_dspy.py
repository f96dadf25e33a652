"""Stock DSPy optimizers with settings that spend at most a budget of LM calls. `benchmarks/peers.py` runs them."""

import random
from collections.abc import Callable
from typing import Any

import dspy
from peers_tasks import Setting


def _plain(setup: Setting, budget: int, seed: int, threads: int) -> Any:
    return setup.program()


def _labeled(setup: Setting, budget: int, seed: int, threads: int) -> Any:
    return dspy.LabeledFewShot(k=16).compile(setup.program(), trainset=_shuffled(setup.examples(setup.train), seed))


def _bfrs(setup: Setting, budget: int, seed: int, threads: int) -> Any:
    # 3 + 3 programs on the selection tasks, and about ten runs for each of four sets of bootstrapped demonstrations
    val = budget * 16 // 150 // setup.calls
    optimizer = dspy.BootstrapFewShotWithRandomSearch(
        metric=setup.metric,
        max_bootstrapped_demos=4,
        max_labeled_demos=16,
        num_candidate_programs=3,
        num_threads=threads,
    )
    return optimizer.compile(
        setup.program(), trainset=_shuffled(setup.examples(setup.train), seed), valset=setup.examples(setup.val[:val])
    )


def _mipro(setup: Setting, budget: int, seed: int, threads: int) -> Any:
    # seven programs on the selection tasks, some of them again and from the cache, about 15 calls to bootstrap and 20
    # to propose
    val = budget * 20 // 150 // setup.calls
    optimizer = dspy.MIPROv2(
        metric=setup.metric,
        prompt_model=setup.lm,
        task_model=setup.lm,
        auto=None,
        num_candidates=4,
        max_bootstrapped_demos=4,
        max_labeled_demos=16,
        num_threads=threads,
        seed=seed + 1,
        init_temperature=1.0,
    )
    return optimizer.compile(
        setup.program(),
        trainset=_shuffled(setup.examples(setup.train), seed),
        valset=setup.examples(setup.val[:val]),
        num_trials=6,
        minibatch=False,
        seed=seed + 1,
    )


def _simba(setup: Setting, budget: int, seed: int, threads: int) -> Any:
    # two steps of 3 * 8 sampled and at most 4 * 8 evaluated runs; at the end it runs the winners on all its tasks
    size = max(3, budget * 8 // 150 // setup.calls)
    optimizer = dspy.SIMBA(
        metric=setup.metric,
        bsize=size,
        num_candidates=3,
        max_steps=2,
        max_demos=4,
        prompt_model=setup.lm,
        num_threads=threads,
    )
    examples = _shuffled(setup.examples(setup.train + setup.val), seed)[: max(size, budget * 20 // 150 // setup.calls)]
    return optimizer.compile(setup.program(), trainset=examples, seed=seed)


def _gepa(setup: Setting, budget: int, seed: int, threads: int) -> Any:
    # about one call of reflection for every nine runs; it ends a little after its cap
    def metric(example: Any, prediction: Any, trace: Any = None, pred_name: Any = None, pred_trace: Any = None) -> Any:
        right = setup.metric(example, prediction)
        expected = ", ".join(f"{name}: {value}" for name, value in example.labels().toDict().items())
        return dspy.Prediction(
            score=float(right), feedback="Right." if right else f"Wrong. The right answer is {expected}."
        )

    optimizer = dspy.GEPA(
        metric=metric,
        reflection_lm=setup.lm.copy(temperature=1.0),
        max_metric_calls=budget * 8 // 10 // setup.calls,
        num_threads=threads,
        seed=seed,
        track_stats=False,
    )
    val = setup.examples(setup.val[: budget * 20 // 150 // setup.calls])
    return optimizer.compile(setup.program(), trainset=_shuffled(setup.examples(setup.train), seed), valset=val)


def _shuffled(examples: list[Any], seed: int) -> list[Any]:
    random.Random(seed).shuffle(examples)
    return examples


PEERS: dict[str, Callable[[Setting, int, int, int], Any]] = {
    "plain": _plain, "labeled": _labeled, "bfrs": _bfrs, "mipro": _mipro, "simba": _simba, "gepa": _gepa,
}  # fmt: skip
