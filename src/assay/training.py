"""The users' line around the weight update in Python: `assay.train`. Joins program, rubric, data, policy and guards."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import dspy

from assay.api import evaluate
from assay.datasets import Task
from assay.deployment.trust import trusts
from assay.errors import ConfigError
from assay.given import takes
from assay.jobs import Job, RunConfig, home_of, load_judge, load_rubric, open_job
from assay.models.roles import is_embedded
from assay.optimizers import Progress
from assay.optimizers.weights.config import PolicyConfig
from assay.optimizers.weights.engines import LlamaPolicy, PolicyEngine, TrainerPolicy
from assay.optimizers.weights.offline import Recorded, export_temperature
from assay.optimizers.weights.online import Rollouts
from assay.optimizers.weights.policy import PolicyReport, train_policy
from assay.optimizers.weights.validation import MODES, Bench, compared
from assay.optimizers.weights.work import rank, world
from assay.preflight import checked, preflight, preflight_judges
from assay.programs.loading import full_name
from assay.rubrics import Rubric
from assay.traces.records import new_id
from assay.traces.sealing import Openings

__all__ = ["ROLLOUTS_ONLY", "Retained", "check_comparison", "compare", "guards_of", "independent", "train", "train_offline"]

ROLLOUTS_ONLY = frozenset(
    {"step_weight", "outcome_weight", "rollout_timeout_s", "evaluate_every", "held_out", "forget", "samples_every", "max_completion", "vllm"}
)
_OURS = {item.name for item in fields(PolicyConfig)}


@dataclass(frozen=True)
class Retained:
    """What the policy must not forget: another program, its rubric and its tasks."""

    program: str
    rubric: str
    data: str

    @classmethod
    def read(cls, text: str) -> "Retained":
        """Of `PROGRAM,RUBRIC,DATA`."""
        parts = [part.strip() for part in text.split(",", 2)]
        if len(parts) != 3 or not all(parts):
            raise ConfigError(f"{text!r} must be PROGRAM,RUBRIC,DATA, such as extract,extract,data/mails.jsonl")
        return cls(*parts)


@dataclass(frozen=True, kw_only=True)
class _TrainConfig(RunConfig):
    kind: str = "train"
    name: str = ""
    settings: str = ""


@trusts
@takes(PolicyConfig, _TrainConfig)
def train(
    program: str | dspy.Module,
    *,
    rubric: str | Path | Rubric,
    data: str,
    name: str,
    algorithm: str = "grpo",
    retain: Sequence[Retained | str] = (),
    watch: str | Path | Rubric | None = None,
    judged_by_itself: bool = False,
    store: str | Path | None = None,
    resume: bool = False,
    test: bool = True,
    progress: Progress | None = None,
    sizes: Mapping[str, int] | None = None,
    **options: Any,
) -> PolicyReport:
    """Trains weights by policy gradient on rollouts of a program, and keeps the adapter under `name`, to be served as `MODEL+NAME`.

    It learns on `train`, is looked at on `val`, and is compared with the old weights on the sealed `test`, greedily and sampled.

    Args:
        program: a name, an artifact's path (its prompts and demonstrations stay), or a `dspy.Module`.
        algorithm: `grpo`, `reinforce++`, `reinforce++-turn`, `ppo`, `rloo`.
        retain: what must not be forgotten; text as `PROGRAM,RUBRIC,DATA`.
        watch: a second rubric that scores the rollouts and is not trained on.
        test: whether the sealed test split is opened at the end, before and after; without it the report has no validation.
        judged_by_itself: lets the model in training judge its own rollouts.
        options: the fields of `PolicyConfig` and of `RunConfig`.
    Raises:
        AssayError: what was wrong, which rule, what to do.
        Cancelled: a signal came; call again with `resume=True`.
    """
    program = full_name(program) if isinstance(program, str) else program
    if "temperature" in options.get("parameters", {}):
        raise ConfigError("the agent parameter temperature would have no effect: rollouts are sampled at --temperature")
    shown = (progress or Progress()) if not rank() else Progress()
    if rank():  # processes that train together each write a store of their own
        store = home_of(store) / f"rank-{rank()}" / "assay.db"
    options = _shared_out(options)
    settings = PolicyConfig(algorithm=algorithm, **{key: options.pop(key) for key in list(options) if key in _OURS and key != "algorithm"})
    judge, parameters = options.get("judge_model"), {**options.pop("parameters", {}), "temperature": settings.temperature}
    common = {"model": settings.model, "seed": settings.seed, "cache": False, "name": name, "settings": repr(settings.of_what()), **options}
    measure = independent(rubric, judge, settings.model, forced=judged_by_itself)
    others, watching = guards_of(retain, watch, program=str(program), data=data, judge=judge, model=settings.model)
    engine, titles = _engine(settings), list[str]()
    with ExitStack() as opened:

        def bench(what: str | dspy.Module, by: Any, source: str, given: Mapping[str, Any], trained: bool) -> tuple[Bench, Job]:
            config = _TrainConfig.of(what, by, source, engine.lm, sizes=sizes or {}, parameters=given, **common)
            need = ("train", "val", "test") if trained else ("val", "test")
            job = opened.enter_context(open_job(config, program=what, rubric=by, lm=engine.lm, progress=shown, store=store, resume=resume, need=need))
            job.session.lm.recording.cache = None  # a policy in training is never answered from a cache
            for split in need[:-1]:
                job.session.know(getattr(job.splits, split), split)
            titles.append(_title(job.session.program_name, source, titles))
            sealed = job.splits.parts()["test"] if test else []  # its content hashes are part of what the training is; it is run at the end
            opens = functools.partial(_open, job) if test else None
            return Bench(titles[-1], job.student, job.session, job.splits.val, sealed, trained, opens), job

        main, job = bench(program, measure, data, parameters, True)
        kept = [bench(one.program, one.rubric, one.data, {"temperature": settings.temperature}, False)[0] for one in others]
        for one, other in itertools.permutations([main, *kept], 2):
            one.session.meter.beside(other.session.meter)  # the caps are of the whole training
        watcher = job.rubric_beside(watching) if watching is not None else None
        if job.config.preflight and not rank():
            shown.say("preflight: one task, each judge once")
            _tried(main, job.splits.train, engine, watcher, job.config.max_cost_usd)
            for one in kept:
                _tried(one, one.val, engine, None, job.config.max_cost_usd)
        source = Rollouts(main, job.splits.train, settings, engine, watching=watcher)
        return train_policy(source, name, settings, retained=kept, resume=resume, progress=shown)


def _tried(bench: Bench, tasks: Sequence[Task], engine: PolicyEngine, watcher: Rubric | None, max_cost_usd: float | None) -> None:
    """Has the program run a task and each judge give a verdict, before weights are loaded; judges alone where the engine cannot answer yet.

    Raises:
        AssayError: as `assay.preflight.preflight`.
    """
    session, split = bench.session, "train" if bench.trained else "val"
    watching = [replace(session, rubric=watcher)] if watcher is not None and watcher.needs_judge else []
    for one in [session, *watching]:
        if engine.answers_before:
            preflight(one, bench.student, tasks, split=split, max_cost_usd=max_cost_usd)
        elif one.judge_lm is not None and one.judge_lm.recording.backend is not engine.lm.recording.backend:
            preflight_judges(one, tasks, split=split, max_cost_usd=max_cost_usd)


def check_comparison(
    program: str, *, rubric: str | Path, data: str, model: str, progress: Progress | None = None, store: str | Path | None = None, **options: Any
) -> None:
    """What `compare` will need after a training, tried before it: data, rubric, program, and each model once.

    Raises:
        AssayError: what was wrong, which rule, what to do.
    """
    program = full_name(program)
    independent(rubric, options.get("judge_model"), model)
    config = RunConfig.of(program, rubric, data, None, **{**options, "kind": "preflight", "model": model})
    with open_job(config, program=program, rubric=rubric, progress=progress or Progress(), store=store, need=("train", "test")) as job:
        checked(job, job.splits.train, split="train")


def _open(job: Job) -> Openings | None:
    job.session.know(job.splits.unseal(), "test")
    return job.openings


def _shared_out(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with this process's share of the caps, which are of all that train together."""
    shared = dict(options)
    for cap in ("max_calls", "max_tokens", "max_cost_usd"):
        if shared.get(cap) is not None and world() > 1:
            shared[cap] = shared[cap] / world() if cap == "max_cost_usd" else max(1, shared[cap] // world())
    return shared


def guards_of(
    given: Sequence[Retained | str], watch: str | Path | Rubric | None, *, program: str, data: str, judge: str | None, model: str
) -> tuple[list[Retained], Rubric | None]:
    """What is to be retained, each once and none of it what is trained on, and the rubric that watches; none judged by the model in training.

    Raises:
        ConfigError: something is named twice, judged by that model, or no PROGRAM,RUBRIC,DATA. RubricError: there is no such rubric.
    """
    others = [Retained.read(part) if isinstance(part, str) else part for part in given]
    named = [(program, data), *((one.program, one.data) for one in others)]
    if twice := [name for at, name in enumerate(named) if name in named[:at]]:
        raise ConfigError(f"{twice[0][0]} on {twice[0][1]} is named twice: once is enough, and what is trained on is no retained task")
    for one in others:
        independent(one.rubric, judge, model)
    return others, independent(watch, judge, model) if watch is not None else None


def _title(program: str, data: str, taken: Sequence[str]) -> str:
    """The shortest name that no other bench has."""
    short = program.rpartition(":")[2]
    names = itertools.chain((short, f"{short} on {data}", f"{program} on {data}"), (f"{program} on {data} ({at})" for at in itertools.count(2)))
    return next(name for name in names if name not in taken)


@trusts
@takes(RunConfig)
def compare(
    program: str, *, rubric: str | Path, data: str, models: tuple[str, str], progress: Progress | None = None, store: str | Path | None = None,
    parameters: Mapping[str, Any] | None = None, on_open: Callable[[Openings], Any] | None = None, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """A program under two models on the sealed test split: `greedy` (temperature 0.1, the least an agent has) and `sampled` (as it is set),
    each with `before`, `after`, the paired `gain`, and the share of tool calls that were valid and of answers that were parsed.

    Args:
        models: before and after, by name.
        on_open: told, after each run, how often the test split was opened.
        options: the fields of `RunConfig`.
    """
    independent(rubric, options.get("judge_model"), models[1])
    found, opened = {}, f"compare-{new_id()[:12]}"
    for mode in MODES:
        given = {**(parameters or {}), **({"temperature": 0.1} if mode == "greedy" else {})}
        before, after = (
            evaluate(
                program,
                rubric=rubric,
                data=data,
                split="test",
                model=model,
                parameters=given,
                store=store,
                progress=progress,
                opens_as=opened,
                **options,
            )
            for model in models
        )
        if on_open is not None and after.openings is not None:
            on_open(after.openings)
        found[mode] = compared(before.evaluation, after.evaluation)
    return found


@trusts
@takes(PolicyConfig)
def train_offline(
    export: str | Path, *, name: str, algorithm: str = "grpo", resume: bool = False, progress: Progress | None = None, **options: Any
) -> PolicyReport:
    """Trains weights by policy gradient on an export of transitions (its folder), by the rewards that stand in it.

    The ratio is to the weights that made the calls. What the new weights do is seen by `assay evaluate`: nothing is run here.

    Args:
        options: the fields of `PolicyConfig`, but for what only rollouts have (`ROLLOUTS_ONLY`); the temperature is the export's own.
    Raises:
        DataError: no transitions export, changed since, of another tokenizer, or with nothing to learn from.
        ConfigError: a setting that would have no effect.
    """
    if ignored := sorted(ROLLOUTS_ONLY & options.keys()):
        raise ConfigError(f"{', '.join(ignored)} would have no effect: an export brings its tasks and rewards, and nothing is run")
    options["temperature"] = export_temperature(export, options.get("temperature"))
    settings = PolicyConfig(algorithm=algorithm, **options)
    return train_policy(Recorded(export, settings), name, settings, resume=resume, progress=progress)


def _engine(settings: PolicyConfig) -> PolicyEngine:
    if is_embedded(settings.model):
        if settings.vllm != "none":
            raise ConfigError(f"vllm={settings.vllm!r} serves models of the hub or of a folder; an embedded one is served by llama.cpp")
        return LlamaPolicy(settings.model, temperature=settings.temperature, max_completion=settings.max_completion, seed=settings.seed)
    return TrainerPolicy(settings.model, max_completion=settings.max_completion)


def independent(rubric: str | Path | Rubric, judge: str | None, model: str, *, forced: bool = False) -> Rubric:
    """The rubric, if it is not judged by the model in training.

    Raises:
        ConfigError: it would be, and that is not forced; or it has a judge that compares, which has nothing to compare with.
    """
    found = load_rubric(rubric)
    judges = [load_judge(c.judge.use, own_model=judge is None) if c.judge.use else None for c in found.criteria if c.judge is not None]
    if compared := [one for one in judges if one is not None and one.compares]:
        raise ConfigError(
            f"the rubric {found.name!r} has a judge that compares outputs ({compared[0].spec.text[:80]!r}), and a training scores each rollout by "
            "itself: take a judge of one output"
        )
    asked = {name for one in judges for name in _models_of(one, judge or model)}
    if model in asked and not forced:
        raise ConfigError(
            f"the rubric {found.name!r} would be judged by {model}, the model in training, which would learn to please itself: name another with "
            "--judge-model (or in the judge's own file), or, for the rubric that is trained on, say --judged-by-itself"
        )
    return found


def _models_of(judge: Any, default: str) -> Iterator[str]:
    """Names of the models that a judge asks, those of a jury's or a cascade's members included."""
    own = getattr(judge, "model", None) or default
    members = [*getattr(judge, "members", ()), *(part for name in ("first", "second") if (part := getattr(judge, name, None)) is not None)]
    for member in members:
        yield from _models_of(member, own)
    if not members:
        yield own
