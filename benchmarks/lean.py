"""Overhead of assay itself: imports, `traces stats`, an evaluation next to `dspy.Evaluate`, queries of a large store,
memory over calls.

    python benchmarks/lean.py [imports] [stats] [evaluate] [queries] [memory]

All are CPU seconds of the process, or resident megabytes; models are scripted. Prints one JSON object.
"""

import argparse
import gc
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS = 9
ROLLOUTS, TURNS = 75_000, 4  # 300,000 transitions
TASKS = 200
EVALUATIONS = 25
CALLS = 5_000


def cpu_of(command: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {"median": round(statistics.median(ordered), 4), "min": round(ordered[0], 4), "max": round(ordered[-1], 4)}


def imports() -> dict[str, Any]:
    code = (
        "from assay.rubrics import Rubric; import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peak = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    return {
        "cpu_s": spread([cpu_of([sys.executable, "-c", code]) for _ in range(ROUNDS)]),
        "peak_mb": round(int(peak) / 1024, 1),
    }


def stats() -> dict[str, Any]:
    from assay.traces import Rollout, Store

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "s.db")
        with Store(path) as store:
            store.put_rollout(Rollout(status="done"))
        command = [sys.executable, "-m", "assay", "traces", "stats", "--store", path]
        return {"cpu_s": spread([cpu_of(command) for _ in range(ROUNDS)])}


def scripted_session(folder: Path, threads: int = 1) -> tuple[Any, Any, Any, Any]:
    import dspy

    from assay.evaluation import RecordedProgram, Session
    from assay.models import Meter, with_recording
    from assay.rubrics import Criterion, Rubric
    from assay.testing import ScriptedEngine
    from assay.traces import Recorder, Store

    engine = ScriptedEngine(lambda _: "[[ ## answer ## ]]\nfour\n\n[[ ## completed ## ]]")
    recorder, meter = Recorder(Store(folder / "s.db")), Meter()
    plain = dspy.LM("scripted/model", engine=engine, cache=False, num_retries=0)
    rubric = Rubric("r", [Criterion(name="ok", check=lambda *_: True)])
    recorded = with_recording(
        dspy.LM("scripted/model", engine=engine, cache=False, num_retries=0), meter=meter, observers=[recorder.observe]
    )
    session = Session(recorded, rubric, recorder, meter, "bench", threads=threads)
    return session, RecordedProgram(dspy.Predict("question -> answer"), session), plain, rubric


def tasks_of(count: int, start: int = 0) -> list[Any]:
    from assay.datasets import Task

    return [
        Task(id=str(at), inputs={"question": f"How much is {at} + 1?"}, expected={"answer": "four"})
        for at in range(start, start + count)
    ]


def evaluation() -> dict[str, Any]:
    return {f"{threads} threads": compared_with_dspy(threads) for threads in (1, 8)}


def compared_with_dspy(threads: int) -> dict[str, Any]:
    """CPU and wall time of a task under `dspy.Evaluate` and under `evaluate`, in pairs. Every round has
    new tasks."""
    import dspy

    from assay.evaluation import evaluate
    from assay.optimizers.prompts.named import to_examples

    with tempfile.TemporaryDirectory() as folder:
        session, student, plain, rubric = scripted_session(Path(folder), threads)
        program = dspy.Predict("question -> answer")

        def bare(examples: list[Any]) -> None:
            with dspy.context(lm=plain):
                dspy.Evaluate(devset=examples, metric=rubric.metric(), num_threads=threads, display_progress=False)(
                    program
                )

        def ours(tasks: list[Any]) -> None:
            with session.context():
                evaluate(student, tasks, session)
            session.recorder.store.flush()

        def ms_of(run: Callable[[list[Any]], None], tasks: list[Any]) -> tuple[float, float]:
            cpu, wall = time.process_time(), time.perf_counter()
            run(tasks)
            return 1000 * (time.process_time() - cpu) / TASKS, 1000 * (time.perf_counter() - wall) / TASKS

        pairs = [
            (ms_of(bare, to_examples(tasks)), ms_of(ours, tasks))
            for tasks in (tasks_of(TASKS, TASKS * at) for at in range(EVALUATIONS + 1))
        ][1:]
        session.recorder.store.close()
    report: dict[str, Any] = {}
    for place, what in enumerate(("cpu", "wall")):
        base, recorded = ([pair[side][place] for pair in pairs] for side in (0, 1))
        ratios = [second / first for first, second in zip(base, recorded, strict=True)]
        report |= {
            f"dspy_{what}_ms": spread(base),
            f"assay_{what}_ms": spread(recorded),
            f"{what}_ratio": spread(ratios),
        }
        report[f"{what}_ratio"]["of_sums"] = round(sum(recorded) / sum(base), 4)
    return report


def queries() -> dict[str, Any]:
    from assay.traces import Rollout, Store, Transition

    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "s.db") as store:
        text = "lorem ipsum dolor sit amet " * 40
        for at in range(ROLLOUTS):
            split = ("train", "val", "gate", "test")[at % 4]
            store.put_rollout(
                Rollout(
                    id=f"{at:032x}",
                    run_id=f"run{at % 50}",
                    task_id=f"t{at % 1000}",
                    split=split,
                    status="done",
                    score=0.5,
                )
            )
            for t in range(TURNS):
                request = {"messages": [{"role": "user", "parts": [{"type": "text", "text": text}]}]}
                store.put_transition(
                    f"{at:032x}",
                    Transition(t=t, model="m", request=request, output="ok", prompt_tokens=9, cost_usd=0.0),
                )
        store.flush(600)
        asked: dict[str, Callable[[], Any]] = {
            "list": lambda: list(store.rollouts(limit=20)),
            "list_run": lambda: list(store.rollouts(run_id="run7", limit=20)),
            "show": lambda: store.rollout(f"{4711:032x}"),
            "stats": store.stats,
            "stats_run": lambda: store.stats(run_id="run7"),
            "spent": lambda: store.spent("run7"),
        }
        report = {"transitions": store.stats()["transitions"]}
        for name, ask in asked.items():
            times = []
            for _ in range(5):
                clock = time.process_time()
                ask()
                times.append(1000 * (time.process_time() - clock))
            report[f"{name}_ms"] = spread(times)
    return report


def memory() -> dict[str, Any]:
    from assay.evaluation import evaluate

    def resident_mb() -> float:
        return round(int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6, 1)

    with tempfile.TemporaryDirectory() as folder:
        session, student, _, _ = scripted_session(Path(folder))
        sizes = []
        for start in range(0, CALLS + 1_000, 500):
            with session.context():
                evaluate(student, tasks_of(500, start), session)
            session.tasks.clear()
            session.recorder.store.flush()
            gc.collect()
            sizes.append(resident_mb())
        session.recorder.store.close()
    return {
        "calls": CALLS,
        "mb_after_1000": sizes[1],
        "mb_at_the_end": sizes[-1],
        "grown_mb": round(sizes[-1] - sizes[1], 1),
    }


if __name__ == "__main__":
    parts = {"imports": imports, "stats": stats, "evaluate": evaluation, "queries": queries, "memory": memory}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"Of {', '.join(parts)}; all by default.")
    print(json.dumps({name: parts[name]() for name in parser.parse_args().parts or parts}, indent=1))
