"""Settings of `judge compile`, `audit`, `score`, `drift` and `fidelity`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from assay.errors import ConfigError
from assay.models.limits import DEFAULT_S
from assay.optimizers.prompts.config import optimizer_of
from assay.runs.settings.fields import RESUMED, api_base, selected, thinking_of
from assay.runs.settings.shared import CommonSettings, ReflectionSettings, SearchSettings
from assay.support.settings import named_setting, setting

_SCALE = (
    "Labels of the scale from worst to best, separated by commas, for a judge given as a sentence. By default no,yes."
)
MEASURES = ("accuracy", "kappa", "weighted_kappa", "alpha", "spearman", "brier")


@dataclass(frozen=True, kw_only=True)
class JudgeSettings(CommonSettings):
    """Settings shared by the commands that run one judge."""

    ROLE: ClassVar[str] = "judge"

    judge: str = named_setting("Judge: a YAML file, an artifact's folder, file.py:NAME, or a question in one sentence.")
    data: str = ""  # internal: the judged data, part of the job
    model: str = setting(CommonSettings.model, "Language model of the judge; by default that of a compiled judge.")
    api_base: str | None = api_base("the model")
    thinking: int | str | None = thinking_of("the judge", " By default that of a compiled judge.")
    scale: Sequence[str] | None = setting(None, _SCALE)


def _rows(help: str, flag: str) -> Any:
    """The field that names rows for one call. `JudgeSettings.data` is the part of the job that they are."""
    return selected(help, flag=flag, metavar="D", named=True, file=True, job=False)


@dataclass(frozen=True, kw_only=True)
class JudgeAuditSettings(JudgeSettings):
    """Settings of `audit_judge`."""

    kind: str = "judge audit"
    rename: Mapping[str, str] = field(default_factory=dict)  # internal here and below: of no use to this command
    salt: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    preflight: bool = False
    cases: str | None = _rows(
        "Rows with good and bad outputs (and input) to make the attacks from; shipped ones by default.", "--cases"
    )
    labels: str | None = _rows(
        "Human labels to take good and bad outputs from, instead of --cases; 'store': the labels in the store.",
        "--labels",
    )
    attack: str | None = _rows(
        "Additional attacks: rows with name and text, in which {output} is the output.", "--attack"
    )
    profile: str | None = setting(
        None,
        "What the scale measures. quality: how good an output is; property: a property of it, such as its tone. By "
        "default derived from the scale and the question.",
        choices=("quality", "property"),
    )
    pass_at: float = setting(0.8, "Share of the cases of an attack that the judge must decide correctly.", ge=0, le=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cases is not None and self.labels is not None:
            raise ConfigError("an audit takes its cases from cases=… or from labels=…, not from both")


@dataclass(frozen=True, kw_only=True)
class JudgeScoreSettings(JudgeSettings):
    """Settings of `score_rows`."""

    kind: str = "judge score"
    salt: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    data: str = named_setting(
        "Rows with input and output (or output_a and output_b); labels of some rows correct the mean.",
        flag="--data",
        metavar="D",
        file=True,
        project=False,
    )


@dataclass(frozen=True, kw_only=True)
class JudgeDriftSettings(JudgeSettings):
    """Settings of `replay_anchors`."""

    kind: str = "judge drift"
    rename: Mapping[str, str] = field(default_factory=dict)
    salt: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    cache: bool = False  # a cached answer cannot show drift
    anchors: str | None = selected(
        "The frozen set, a .json file; by default the one next to a compiled judge.",
        metavar="FILE",
        flag="--anchors",
        named=True,
        job=False,
    )
    freeze: str | None = _rows("Freeze the verdicts of JUDGE on these rows.", "--freeze")


@dataclass(frozen=True, kw_only=True)
class FidelitySettings(CommonSettings):
    """Settings of `audit_user`."""

    ROLE: ClassVar[str] = "judge"

    kind: str = "judge fidelity"
    rename: Mapping[str, str] = field(default_factory=dict)
    salt: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    threads: int | None = None  # one interview at a time
    preflight: bool = False
    user: str = named_setting("Simulated user: rules, model, or file.py:Class.")
    data: str = named_setting(
        "Tasks with an input 'user', such as conversations:?size=40.",
        flag="--data",
        metavar="D",
        file=True,
        project=False,
    )
    model: str = setting(CommonSettings.model, "Language model of the user.")
    api_base: str | None = api_base("the model")
    thinking: int | str | None = thinking_of("the user")
    tasks: int = setting(40, "Maximum number of tasks.", ge=1)
    task_timeout: float = setting(
        DEFAULT_S,
        "Time limit of one interview in seconds. A user that exceeds it has failed.",
        gt=0,
        metavar="SECONDS",
        job=RESUMED,
    )
    fail_over: float = setting(0.05, "Maximum share of runs with a fault; above it the exit code is 1.", ge=0, le=1)


@dataclass(frozen=True, kw_only=True)
class JudgeCompileSettings(SearchSettings, ReflectionSettings):
    """Settings of `assay.compile_judge`. `scale` and `scale_kind` apply to a judge given as a sentence."""

    ROLE: ClassVar[str] = "judge"

    kind: str = "judge compile"
    judge: str = named_setting("Judge: a YAML file, an artifact's folder, file.py:NAME, or a question in one sentence.")
    labels: str = named_setting(
        "Human labels: a .jsonl, .json, .csv or .parquet file, hf:…, or 'store'.",
        flag="--labels",
        metavar="D",
        file=True,
    )
    model: str = setting(CommonSettings.model, "Language model of the judge.")
    thinking: int | str | None = thinking_of("the judge", " It is stored with the compiled judge.")
    scale: Sequence[str] = setting(
        (),
        "Labels of the scale from worst to best, separated by commas, for a judge given as a sentence: no,partly,yes.",
    )
    scale_kind: str | None = setting(
        None,
        "Kind of the scale, for a judge given as a sentence; ordinal by default.",
        choices=("ordinal", "nominal", "numeric"),
        flag="--kind",
    )
    shows: Sequence[str] = setting(
        (), "Columns that the judge sees, separated by commas; by default task_input,output."
    )
    optimizer: Any = setting(
        "auto",
        "Optimizer: auto, calibrate, or one of assay compile, such as gepa, mipro or copro.",
        parse=optimizer_of,
        file=True,
    )
    objective: str | None = setting(
        None, "Measure of agreement to optimize; by default chosen by the kind of the scale.", choices=MEASURES
    )
    demos: int = setting(2, "Number of demonstrations of each label.", ge=1, le=16)
    negatives: int = setting(
        0, "Number of attacks on train items to add to the training set, with the worst label.", ge=0
    )
