"""Groups of settings of jobs, and what a job reads of them. A command inherits the groups that it needs.

The object of a command is the configuration of its job, with names in place of objects (`assay.jobs.arguments.named`).
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from annotated_types import Ge, Gt, Le

from assay.errors import ConfigError
from assay.jobs.project_file import is_of_project
from assay.models.limits import DEFAULT_S
from assay.models.prices import price_text
from assay.models.roles import DEFAULT_MODEL, check_address
from assay.models.thinking import short_form
from assay.optimizers.settings import CompileConfig, Objectives
from assay.support.addresses import DatabaseAddress
from assay.support.options import EXPERT, Count, Flag, Pair, Parse, Positive, Seconds, Seed, Settings, options_of
from assay.support.values import json_text

if TYPE_CHECKING:
    from typing import Self

    import dspy

    from assay.models import Caps
    from assay.optimizers.budget import Decisions

    LM: TypeAlias = dspy.LM
else:
    LM = Any  # so that the types of the fields can be read without the heavy packages

Address: TypeAlias = Annotated[str | None, Flag(metavar="URL")]
KeyVariable: TypeAlias = Annotated[str | None, Flag(metavar="NAME", job=False)]
Budget: TypeAlias = Annotated[int | str | None, Flag(metavar="BUDGET"), Parse(short_form)]
State: TypeAlias = Annotated[str | Path | None, Flag(metavar="FILE", path=True), Parse(str)]
SPLITS = ("train", "val", "gate", "test")
DEFAULT_SALT = "assay"  # of `assay.traces.store.sealing`, which loads the database
_SIZES = ("size", "train_size", "val_size", "gate_size", "test_size")  # stored as `sizes`
_MODEL = ("model", "api_base", "api_key_env", "price", "thinking")


def _source(value: Any) -> Any:
    """A name, a path or an object of Python."""
    if isinstance(value, bool | int | float):
        raise ValueError(f"must be text, not {value!r}")
    if isinstance(value, str) and not value.strip():
        raise ValueError("must not be empty")
    return value


Source: TypeAlias = Annotated[Any, Parse(_source)]


class Sized(Settings):
    """Rubric and data."""

    rename: Annotated[Mapping[str, str], Flag(metavar="COLUMN=NAME")] = field(default_factory=dict)
    """Column of the data to rename, and its new name."""
    salt: Annotated[str | None, EXPERT] = None
    """Salt of the hash that assigns tasks to splits. By default the salt of the store; for a new store that of the
    artifact, or 'assay'."""
    sizes: Annotated[Any, Flag(key=False, shown=False)] = field(default_factory=dict)
    """Maximum numbers of tasks by split, such as {'val': 5}, for settings that several functions take."""

    def check(self) -> None:
        from assay.datasets import check_sizes

        check_sizes(self.sizes)


class Task(Sized):
    """Rubric and data."""

    rubric: Annotated[Source, Flag(metavar="R", path=True)]
    """Rubric: a YAML file, a shipped name (math_qa, classify, extract, tool_user, code_repair, text_to_sql,
    answer_from_documents, converse, nim, experiment), a check (exact), or metrics.py:NAME of a DSPy metric."""
    data: Annotated[Source, Flag(metavar="D", path=True)]
    """Tasks: a .jsonl, .json, .csv or .parquet file, or a spec (hf:…, reasoning_gym:…, bfcl:…, mutants:…,
    arithmetic:…, tools:…, documents:…, conversations:…, nim:…, experiment:…, curriculum:…)."""

    @property
    def needed(self) -> tuple[str, ...]:
        """The splits that must not be empty."""
        return ("val", "gate", "test")

    def prepared(self) -> "Self":
        """The settings with the data as one value."""
        return self


class FourSplits(Sized):
    """Splits."""

    train_size: Positive | None = None
    """Maximum number of train tasks."""
    val_size: Positive | None = None
    """Maximum number of val tasks."""
    gate_size: Positive | None = None
    """Maximum number of gate tasks."""
    test_size: Positive | None = None
    """Maximum number of test tasks."""

    def check(self) -> None:
        sizes = {split: size for split in SPLITS if (size := getattr(self, f"{split}_size")) is not None}
        object.__setattr__(self, "sizes", {**self.sizes, **sizes})


class OneSplit(Task):
    """Split."""

    split: Literal["train", "val", "gate", "test", "all"] = "val"
    """Split to score. The test split is sealed; each opening is counted. 'all' scores every row; such a score is not
    held out."""
    size: Positive | None = None
    """Maximum number of tasks taken from the split."""

    @property
    def splits(self) -> tuple[str, ...]:
        """The splits that are scored."""
        return SPLITS if self.split == "all" else (self.split,)

    @property
    def needed(self) -> tuple[str, ...]:
        """The splits that must not be empty."""
        return () if self.split == "all" else (self.split,)

    @property
    def limits(self) -> Mapping[str, int | None]:
        """Largest number of rows by split, None for all; splits that are not named have the usual limits."""
        return {**(dict.fromkeys(SPLITS) if self.split == "all" else {}), **self.sizes}

    def check(self) -> None:
        if self.size is not None:
            if self.split == "all":
                raise ConfigError("would have no effect with `split` all, which scores every row", field="size")
            object.__setattr__(self, "sizes", {**self.sizes, self.split: self.size})


class Sampled(OneSplit):
    """Split."""

    samples: Annotated[Positive, Flag(job=False)] = 1
    """Number of runs of each task; the score of a task is their mean."""


class Model(Settings):
    """Model."""

    model: str | None = None
    """Language model of the program: PROVIDER/NAME, embedded/NAME or embedded:FILE.gguf; by default
    embedded/smollm2-135m. An artifact runs with the model it was compiled for, unless one is named; a program whose
    predictors all have a model needs none."""
    api_base: Address = None
    """Base URL of an OpenAI-compatible server for the model. Also used for the other models that have no base URL of
    their own."""
    api_key_env: KeyVariable = None
    """Environment variable with the API key for this server; by default the provider's usual one."""
    price: Annotated[str | None, Flag(metavar="IN,OUT", job=False), Parse(price_text)] = None
    """Price of the model in US dollars for a million tokens of prompt and answer: 0.15,0.60. It also applies to
    other roles with this model. By default litellm's, to which litellm.register_model adds."""
    thinking: Budget = None
    """How much the program may think in a call: a number of tokens, minimal, low, medium, high, xhigh, max, off or
    auto (no limit). It replaces the program's own, and is stored in the artifact. A model or program that cannot keep
    it is refused."""
    lm: Annotated[LM | None, Flag(key=False, shown=False)] = None
    """The model as an object, in place of `model`; by default the one set in DSPy."""

    RUNS: ClassVar[Sequence[str]] = ("program",)  # fields that may be an artifact, which has its own model

    @property
    def model_name(self) -> str:
        """The model of the job."""
        return self.model or DEFAULT_MODEL

    def check(self) -> None:
        check_address(self.api_base)

    @classmethod
    def of_file(cls, stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """What the project file sets, without the model if an artifact runs, which has its own."""
        names = ({**stored, **given}.get(name) for name in cls.RUNS)
        runs_artifact = any(name and (Path(str(name)) / "manifest.json").is_file() for name in names)
        return {name: value for name, value in stored.items() if not (runs_artifact and name in _MODEL)}


class JudgeModel(Settings):
    """Model of the rubric's judges."""

    judge_model: str | None = None
    """Language model of the rubric's judges; by default the one that a judge's file names, else the program's."""
    judge_api_base: Address = None
    """Base URL of an OpenAI-compatible server for the judges' model. By default that of the program's model;
    'provider': the provider's own address."""
    judge_api_key_env: KeyVariable = None
    """Environment variable with the API key for the judges' model; by default the provider's usual one."""
    judge_thinking: Budget = None
    """How much the rubric's judges may think in a call: a number of tokens, minimal, low, medium, high, xhigh, max, off
    or auto (no limit). A judge that names its own model keeps that model's default. A model or program that cannot
    keep it is refused."""

    @property
    def own_models(self) -> bool:
        """Whether compiled judges use the model they were calibrated with, as none is named for judges."""
        return not (self.judge_model or self.judge_api_base or self.judge_api_key_env)

    def check(self) -> None:
        check_address(self.judge_api_base, "judge_api_base")


class Capped(Settings):
    """Caps."""

    max_calls: Annotated[Count | None, Flag(job=False)] = None
    """Maximum number of LM calls; the run stops there."""
    max_tokens: Annotated[Count | None, Flag(job=False)] = None
    """Maximum number of tokens; the run stops there."""
    max_cost_usd: Annotated[Annotated[float, Ge(0)] | None, Flag(job=False)] = None
    """Maximum cost in US dollars; the run stops there."""


class ReflectionModel(Settings):
    """Model that proposes instructions."""

    reflection_model: str | None = None
    """Language model that proposes instructions; by default that of the program."""
    reflection_api_base: Address = None
    """Base URL of an OpenAI-compatible server for the reflection model. By default that of the program's model;
    'provider': the provider's own address."""
    reflection_api_key_env: KeyVariable = None
    """Environment variable with the API key for the reflection model; by default the provider's usual one."""
    reflection_thinking: Budget = None
    """How much the reflection model may think in a call: a number of tokens, minimal, low, medium, high, xhigh, max,
    off or auto (no limit). A model or program that cannot keep it is refused."""

    def check(self) -> None:
        check_address(self.reflection_api_base, "reflection_api_base")


class Execution(Settings):
    """Execution."""

    seed: Seed = 0
    """Seed of the random number generators."""
    task_timeout: Annotated[Seconds, Flag(metavar="SECONDS", job=False)] = DEFAULT_S
    """Time limit in seconds of one run with its tools, of one check and of one judge. A run that exceeds it fails; the
    criterion of a check or judge is unscored. The limit of one tool call is a quarter of it."""


class Threads(Settings):
    """Execution."""

    threads: Annotated[Positive | None, Flag(job=False)] = None
    """Number of concurrent runs; by default the number that suits the model's engine."""


class Preflight(Settings):
    """Execution."""

    preflight: Annotated[bool, Flag(job=False)] = True
    """Check first, on one task, that the program runs and its judges answer."""


class Cached(Settings):
    """Execution."""

    cache: Annotated[bool, Flag(job=False)] = True
    """Read and write the response cache. Without it equal calls are sent once in a run, and again in the next."""


class Resumable(Settings):
    """Execution."""

    resume: Annotated[bool, Flag(key=False)] = False
    """Continue this job's unfinished run."""


class ProgramExecution(Resumable, Cached, Preflight, Threads, Execution):
    """Execution."""

    parameters: Annotated[Mapping[str, Any], Flag(name="--set", metavar="NAME=VALUE")] = field(default_factory=dict)
    """Agent parameter and its value, such as temperature=0.1."""
    prompt_format: Literal["json", "lean", "xml", "chat"] | None = None
    """Format in which a program's fields are written into messages; by default the program's own."""
    replace_lms: bool = False
    """Call the language model in place of the models that the program makes itself. By default they are used
    unchanged, even with `model`."""
    executor: Annotated[Literal["threads", "ray"], Flag(job=False)] = "threads"
    """Where tasks run. threads: in this process; ray: on the hosts of the Ray cluster at RAY_ADDRESS, or of one that is
    started on this machine."""


class KeyedJob(Execution, Capped, Model):
    """Settings of a job with a key in the store."""

    kind: ClassVar[str]  # of the run in the store
    ROLE: ClassVar[str] = "program"  # role of `model`: the table of assay.toml that sets it

    @property
    def threads(self) -> int | None:
        """Number of concurrent runs; None for the number that suits the model's engine."""
        return None

    @property
    def cache(self) -> bool:
        """Whether the response cache is used."""
        return True

    @property
    def to_help(self) -> str:
        """How another process can help this job while it is running, for a message; empty if it cannot."""
        return ""

    @property
    def stored_salt(self) -> str | None:
        """The salt of its splits, which the store keeps; None for a job without splits."""
        return None

    @property
    def stored_sizes(self) -> Mapping[str, int]:
        """Maximum numbers of tasks by split, as they were given."""
        return {}

    @property
    def caps(self) -> "Caps":
        from assay.models import Caps

        return Caps(
            calls=self.max_calls,
            tokens=self.max_tokens,
            cost_usd=self.max_cost_usd,
            search_calls=getattr(self, "max_search_calls", None),  # of commands with a search
        )

    @property
    def endpoints(self) -> dict[str, tuple[str | None, str | None, str | None]]:
        """Role -> model, base URL and key variable, for the roles other than `model`; None where not set."""
        return {}

    @property
    def without_passwords(self) -> dict[str, Any]:
        """The settings as they are stored."""
        return self._stored()

    @property
    def key(self) -> str:
        """12 hex digits that identify the job. Fields with `Flag(job=False)`, such as caps, do not change it."""
        job = {**self._stored(of_job=True), "salt": self.stored_salt or DEFAULT_SALT}
        return hashlib.sha256(json_text(job, sort_keys=True).encode()).hexdigest()[:12]

    def _stored(self, *, of_job: bool = False) -> dict[str, Any]:
        kind: Any = type(self)
        options = [option for option in options_of(kind).values() if option.flag.key or option.flag.stored]
        values = {
            option.name: getattr(self, option.name)
            for option in options
            if option.name not in _SIZES and (option.flag.job or not of_job)
        }
        return {**values, "kind": self.kind, "sizes": dict(self.stored_sizes), "model": self.model_name}


class JobSettings(ProgramExecution, Capped, JudgeModel, Model, Task):
    """Settings of a job that runs programs against a rubric."""


class ProgramJob(JobSettings, KeyedJob):
    """Program."""

    program: Annotated[Source, Flag(path=True)] = field(kw_only=False)
    """Program: path/file.py:Class, package.module:Class, an artifact's folder or a shipped name. In Python also a
    module, a function of the task's inputs, or an agent with `execute` and `set_parameters`."""
    state: State = None
    """State of the program, as DSPy's program.save('x.json') writes it: instructions, field texts and demonstrations.
    It must have the program's predictors and fields. Not for an artifact, which has its own."""

    @property
    def stored_salt(self) -> str | None:
        return self.salt

    @property
    def stored_sizes(self) -> Mapping[str, int]:
        sizes: Mapping[str, int] = self.sizes
        return sizes

    @property
    def limits(self) -> Mapping[str, int | None]:
        """Largest number of rows by split, None for all; splits that are not named have the usual limits."""
        return self.sizes

    @property
    def endpoints(self) -> dict[str, tuple[str | None, str | None, str | None]]:
        return {**super().endpoints, "judge": (self.judge_model, self.judge_api_base, self.judge_api_key_env)}

    @property
    def generation(self) -> dict[str, Any]:
        """Generation settings that override those of the program's model."""
        return {}

    @property
    def decisions(self) -> "Decisions":
        """How gate and test are sized and decided."""
        from assay.optimizers.budget import Decisions

        return Decisions(sized=frozenset(self.sizes))

    @property
    def shown_demos(self) -> int:
        """Maximum number of demonstrations in a prompt, for estimates."""
        return 0


class AgentServing(Settings):
    """Agent of one's own."""

    agent_model: Annotated[str | None, Flag(metavar="NAME")] = None
    """Further name by which the agent may call the model, such as the one in its code."""
    agent_listen: Annotated[str, Flag(metavar="HOST:PORT", job=False)] = "127.0.0.1:0"
    """Address at which the model is served to the agent; port 0 is any free one. Beyond loopback `agent_key` is
    required."""
    agent_key: Annotated[str | None, Flag(env="ASSAY_AGENT_KEY", key=False)] = field(default=None, repr=False)
    """Key that `assay agent run` sends; required for the agent remote, and where `agent_listen` is not loopback."""


class AgentJob(AgentServing):
    """Agent of one's own."""

    program: Annotated[Source, Flag(path=True)] = field(default=None, kw_only=False)
    """Program: path/file.py:Class, package.module:Class, an artifact's folder or a shipped name. In Python also a
    module, a function of the task's inputs, or an agent with `execute` and `set_parameters`."""
    agent: Annotated[str | Callable[..., Any] | None, Flag(metavar="AGENT")] = None
    """Agent in place of a program: MODULE:CALLABLE, a command, or remote for one that `assay agent run` runs. It calls
    the model at OPENAI_BASE_URL. In Python also a function of the task."""

    @property
    def texts(self) -> Sequence[str]:
        """Texts of the agent that the job changes."""
        return ()

    @property
    def delivered(self) -> Mapping[str, Any]:
        """How the agent gets its new texts, as arguments of `TextAgent`."""
        return {}

    def check(self) -> None:
        names, why = ("agent_model", "agent_key", "agent_listen"), "a program is run, not an agent"
        if self.agent is not None:
            names, why = ("prompt_format", "state", "replace_lms"), "an agent writes its prompts itself"
        kind: Any = type(self)
        if self.agent is not None and getattr(self, "executor", "threads") != "threads":
            raise ConfigError("must be threads with `agent`: its model is served on this machine", field="executor")
        for name in self.changed(*(name for name in names if name in options_of(kind))):
            if not is_of_project(name, getattr(self, name)):
                raise ConfigError(f"would have no effect: {why}", field=name)

    @classmethod
    def of_file(cls, stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """What the project file sets; its agent is not for a program that was given, nor its program for an agent."""
        other = "agent" if "program" in given else "program" if "agent" in given else ""
        return dict(super().of_file({name: value for name, value in stored.items() if name != other}, given))


class StagedJob(ProgramJob):
    """Curriculum."""

    data: Annotated[Source, Flag(metavar="D", path=True)] = None
    """Tasks, as for other commands. Needed only if a stage of the curriculum names no data."""
    curriculum: Annotated[str | None, Flag(metavar="FILE", path=True)] = None
    """Curriculum: a YAML or JSON file of stages of data, or a shipped one (tool_use). A stage is left when its val
    score is high enough."""

    @property
    def needs_data(self) -> bool:
        return True

    def check(self) -> None:
        if self.data is None and self.curriculum is None and self.needs_data:
            hint = "Give the tasks, here or in assay.toml, or a `curriculum` whose stages name them"
            raise ConfigError("is missing", field="data", hint=hint)


class DecidedJob(FourSplits, ProgramJob):
    """Decision."""

    difference: Annotated[float, Gt(0), Le(1), Flag(job=False)] = 0.1
    """Smallest gain in mean score that gate and test are to detect. It decides how many tasks they take, unless the
    size of the split is set."""
    early_stop: Annotated[bool, replace(EXPERT, job=False)] = True
    """Stop gate and test as soon as the sequential test has decided. False runs all their tasks, for an interval of a
    fixed sample."""
    portable: Annotated[bool, Flag(job=False)] = True
    """Stop before the search if the program needs files or modules that its artifact cannot contain: outside of its
    folder, or too large. Otherwise the artifact runs on this machine only."""

    @property
    def decisions(self) -> "Decisions":
        from assay.optimizers.budget import Decisions

        return Decisions(difference=self.difference, early_stop=self.early_stop, sized=frozenset(self.sizes))


class ParameterJob(Objectives, FourSplits, ProgramJob):
    """Parameters."""

    ranges: Annotated[Mapping[str, Pair], Flag(name="--range", metavar="NAME=LOW:HIGH")] = field(default_factory=dict)
    """Range to search for a parameter; repeatable. By default all parameters over their whole ranges, and for a program
    with a thinking budget probe_margin, stable, confidence and samples of its thinking policy."""
    samples: Positive = 1
    """Number of runs of each task in a trial."""
    study: str | None = None
    """Name of the study to create or join; by default a study of this run alone."""
    storage: Annotated[str | None, Flag(metavar="URL", job=False)] = None
    """URL of the study's database; by default a file next to the store."""

    def check(self) -> None:
        from assay.optimizers.parameters.space import check_ranges

        if self.storage:
            DatabaseAddress.of(self.storage, "storage")
        check_ranges(self.ranges, self.parameters)

    @property
    def searches_thresholds(self) -> bool:
        """Whether the thresholds of a thinking policy can be searched."""
        return True

    @property
    def artifacts(self) -> Sequence[str | Path]:
        """Artifacts whose prompts are tried as well."""
        return ()

    @property
    def without_passwords(self) -> dict[str, Any]:
        storage = {"storage": DatabaseAddress.of(self.storage).shown} if self.storage else {}
        return {**super().without_passwords, **storage}


class PromptJob(ReflectionModel, CompileConfig, DecidedJob):
    """Prompts."""

    @property
    def needed(self) -> tuple[str, ...]:
        return ("train", "val", "gate", "test")

    @property
    def endpoints(self) -> dict[str, tuple[str | None, str | None, str | None]]:
        reflection = (self.reflection_model, self.reflection_api_base, self.reflection_api_key_env)
        return {**super().endpoints, "reflection": reflection}


class StoredJudge(Settings):
    """Judges."""

    judge_model: str | None = None
    """Language model of the rubric's judges; by default the one that a judge's file names."""

    judge_api_base: Annotated[str | None, Flag(metavar="URL")] = None
    """Base URL of an OpenAI-compatible server for the judges' model."""

    judge_api_key_env: Annotated[str | None, Flag(metavar="NAME")] = None
    """Environment variable with the API key for the judges' model; by default the provider's usual one."""

    judge_thinking: Annotated[int | str | None, Flag(metavar="BUDGET"), Parse(short_form)] = None
    """How much the rubric's judges may think in a call: a number of tokens, minimal, low, medium, high, xhigh, max, off
    or auto (no limit). A model or program that cannot keep it is refused."""

    price: Annotated[str | Sequence[float] | None, Flag(metavar="IN,OUT"), Parse(price_text)] = None
    """Price of the judges' model in US dollars for a million tokens of prompt and answer: 0.15,0.60. By default
    litellm's, to which litellm.register_model adds."""

    OF_JUDGE: ClassVar[Sequence[str]] = ("judge_api_base", "judge_api_key_env", "judge_thinking", "price")

    def check(self) -> None:
        check_address(self.judge_api_base, "judge_api_base")
        if self.judge_model is None:
            for name in self.changed(*self.OF_JUDGE):
                if not is_of_project(name, getattr(self, name)):
                    raise ConfigError("would have no effect without `judge_model`", field=name)


class ScoringSettings(StoredJudge):
    """Scoring."""

    again: Annotated[bool, Flag(key=False)] = False
    """Also score rollouts that have a score, and replace it."""

    threads: Positive | None = None
    """Number of rollouts scored at the same time; by default chosen for the judges' model."""

    task_timeout: Seconds = DEFAULT_S
    """Time limit in seconds of one check or one judge; beyond it the criterion is unscored."""

    preflight: bool = True
    """Stop if a judge leaves each of the first three rollouts with an answer unscored."""
