"""Plain data records: rollouts, transitions, tool calls and verdicts. Other packages create and fill them."""

import hashlib
import random
import time
import unicodedata
from dataclasses import dataclass, field
from typing import Any, Protocol

from assay.errors import ConfigError, FailureKind
from assay.models.calls import Call
from assay.support.systems import after_fork

RUN_FIELDS = frozenset({"rounds", "steps", "turn_calls"})
"""Fields of a prediction that record how it was made. Not part of the answer, which judges and checks grade."""

NOT_AGENTS = ("judge", "check", "simulated_user")
"""Sources of rollouts that no agent made: exports, lists and scoring leave them out unless they are asked for."""


_AGENT_NAME = 64  # characters; the width of the column


# Seeded once by the system: `os.urandom` for each id would release the interpreter's lock.
_random = random.Random()
after_fork(_random.seed)


def new_id() -> str:
    """New random id of 32 hex digits. It starts with the time in milliseconds, so that later ids sort later."""
    return f"{time.time_ns() // 1_000_000:012x}{_random.getrandbits(80):020x}"


def short_id(name: str) -> str:
    """The random end of an id, for names of files: ids of the same minute begin with the same digits."""
    return name[-8:]


def check_agent_name(name: Any, argument: str = "name") -> str:
    """The name of an agent.

    Raises:
        ConfigError: it is none. `argument`: what held it.
    """
    if not isinstance(name, str) or not 0 < len(name) <= _AGENT_NAME or not name.isprintable() or not name.strip():
        raise ConfigError(f"`{argument}={name!r}` must be a text of 1 to {_AGENT_NAME} characters that can be printed")
    return name


def person_digest(name: str) -> str:
    """Short hash of the name of a rater or data subject, used to find everything made from their data."""
    return hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:16]


def subject_digest(name: str) -> str:
    """`person_digest` of a data subject's name or id, ignoring case and white space."""
    return person_digest(" ".join(name.casefold().split()))


def subject_digests(name: str) -> frozenset[str]:
    """The `subject_digest` of a name as it is and in both Unicode forms of its accents.

    Stores hold the digest of the form in which a name came, so whoever looks for a person looks for all of these.
    """
    forms = (name, *(unicodedata.normalize(form, name) for form in ("NFC", "NFD")))
    return frozenset(map(subject_digest, forms))


def of_tenant(subject: str, tenant: str) -> str:
    """Digest of a data subject (`subject_digest`) within one tenant."""
    return person_digest(f"{tenant}\0{subject}")


@dataclass(kw_only=True)
class ToolCall:
    """A tool call. After it has ended, exactly one of `result` and `error` is set.

    `isolation` is that of the sandbox in which the tool ran code (`bubblewrap`, `landlock` or `none`); None if it ran
    none.
    """

    name: str
    arguments: dict[str, Any]
    result: str | None = None
    error: str | None = None
    isolation: str | None = None


@dataclass(kw_only=True)
class Verdict:
    """Verdict of a check or judge on one criterion.

    `grade` is in [0, 1], higher is better; None means unscored, with a `reason`. `applies` is False if the criterion
    has a `when` condition that is not met; it is then neither graded nor unscored.
    """

    criterion: str
    grade: float | None
    weight: float = 1.0
    scope: str = "final"
    reason: str = ""
    label: str | None = None
    confidence: float | None = None
    cost_usd: float = 0.0
    applies: bool = True


@dataclass(kw_only=True)
class Transition(Call):
    """An LM call of a rollout, at turn `t` (from 0)."""

    t: int
    tools: list[ToolCall] = field(default_factory=list)
    shown_tasks: tuple[str, ...] = ()  # keys of the tasks in its demonstrations
    step_rewards: dict[str, float] = field(default_factory=dict)
    return_: float | None = None
    agent: str = ""  # name of the agent that made the call, see `assay.traces.acting_as`; header `x-assay-agent`
    # Set where several processes may record calls of the rollout: the store then numbers the calls anew, see
    # `assay.traces.store.turns`. None: `t` is the turn.
    id: str | None = None

    @property
    def key(self) -> str | int:
        """What says within the rollout which call it is: its id, or the turn where it has none."""
        return self.t if self.id is None else self.id


@dataclass(kw_only=True)
class Rollout:
    """A run of a program on a task.

    `status` is `running`, `done`, `failed` (failure of the agent, scored 0) or `error` (failure of the model or the
    infrastructure, unscored). `score` is in [0, 1], higher is better; None means unscored.
    """

    id: str = field(default_factory=new_id)
    run_id: str = ""
    task_id: str = ""
    task_type: str = "default"
    group_id: str = ""
    sample: int = 0
    program: str = ""
    program_version: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    model: str = ""
    adapters: tuple[str, ...] = ()
    seed: int | None = None
    split: str = ""
    phase: str = ""
    source: str = "program"
    status: str = "running"
    inputs: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, Any] = field(default_factory=dict)  # expected outputs of the task
    metadata: dict[str, Any] = field(
        default_factory=dict
    )  # of the task: difficulty, personal entities, other fields for rubrics
    prediction: dict[str, Any] | None = None
    error: str | None = None
    failure: FailureKind | None = None  # set if status is failed or error; check or judge if scoring failed
    rubric: str = ""
    score: float | None = None
    coverage: float | None = None
    verdicts: list[Verdict] = field(default_factory=list)
    human_rating: float | None = None
    tenant: str | None = None
    data_subject: str | None = None
    consent: str | None = None
    started_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    deployment: str | None = None  # id of the deployment that assigned it, see `assay.deployment`
    stage: int | None = None  # step of its plan, from 0
    arm: str | None = None  # champion or candidate
    propensity: float | None = None  # probability with which the arm was assigned
    unit: str | None = None  # digest of the user or conversation
    version: str | None = None  # of the agent: NAME@NUMBER
    early_tools: list[ToolCall] = field(default_factory=list)  # called before the first LM call
    transitions: list[Transition] = field(default_factory=list)

    @property
    def tools(self) -> list[ToolCall]:
        """All tool calls in order."""
        return self.early_tools + [tool for transition in self.transitions for tool in transition.tools]

    @property
    def quality(self) -> float | None:
        """Human rating, else the score; None if there is neither or it is not in [0, 1]."""
        value = self.human_rating if self.human_rating is not None else self.score
        return value if value is not None and 0 <= value <= 1 else None

    @property
    def unpriced(self) -> bool:
        """Whether the price of a call is unknown."""
        return any(t.cost_usd is None and t.error is None and not t.cached for t in self.transitions)

    @property
    def cost_usd(self) -> float:
        """Cost of the calls with a known price. Cached answers cost nothing."""
        return sum(t.cost_usd or 0.0 for t in self.transitions if not t.cached)

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens of all calls, including cached ones."""
        return sum((t.prompt_tokens or 0) + (t.completion_tokens or 0) for t in self.transitions)


# -- Which rollouts a person may rate: one rule for the command line and the local page.


UNRATED_SOURCES = ("outside", *NOT_AGENTS)  # sources of rollouts that no export uses by itself
_NAMES = {
    "judge": "a verdict of a judge",
    "check": "a group of LM calls of checks",
    "simulated_user": "a turn of a simulated user",
    "outside": "a group of LM calls outside of a task",
}
SEALED = ("gate", "test")  # splits whose ratings would be used for selection


def why_not_rated(rollout: Rollout) -> str | None:
    """Why a rollout takes no rating, as a sentence without a full stop; None if it may be rated.

    A rollout of a sealed split is refused too: a rating replaces the score wherever rollouts are selected.
    """
    if rollout.source in UNRATED_SOURCES:
        return f"{rollout.id} is {_NAMES.get(rollout.source, rollout.source)}, which no export uses"
    if rollout.split in SEALED:
        return f"{rollout.id} is of the sealed split {rollout.split}, on which nothing may be selected"
    if rollout.status == "running":
        return f"{rollout.id} is still running"
    return None


class Ratings(Protocol):
    """Stores ratings."""

    def rate(self, rollout_id: str, rating: float) -> None: ...


def store_rating(store: Ratings, rollout: Rollout, rating: float) -> None:
    """Stores a person's rating, in [0, 1].

    Raises:
        ConfigError: the rollout takes no rating.
    """
    if (reason := why_not_rated(rollout)) is not None:
        hint = ""
        if rollout.source in UNRATED_SOURCES:
            hint = ". Rate the program's rollout (see assay traces list); for a judge's example use assay judge label"
        raise ConfigError(f"not rated: {reason}{hint}")
    store.rate(rollout.id, rating)
