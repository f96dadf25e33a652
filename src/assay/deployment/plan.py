"""The plan of a staged rollout: its steps, its metrics, and what ends it.

The vocabulary is that of Argo Rollouts: steps with a weight, metrics with success and failure conditions, an interval;
inconclusive pauses, a failure aborts to 0 %.
"""

import asyncio
import logging
import math
import os
import queue
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, Le, Lt

from assay.errors import ConfigError
from assay.support.names import one_of
from assay.support.options import Count, Items, Positive, Seconds, Settings
from assay.support.scrubbing import add_secrets, error_text
from assay.support.systems import kill_group
from assay.support.values import json_text

# -- Events of deployments and loops: webhooks and commands are called, in threads, with a time limit, after the
# decision.
#
# An event is sent once. What could not be sent is counted and logged, and never delays or undoes a decision: the
# history in the store has them all.


EVENTS = ("promoted", "rolled_back", "paused", "next", "alarm", "fallback", "waiting", "failed")
_LOG = logging.getLogger("assay.events")
_WAITING = 1000  # events that wait for a hook, at most
_HEADERS = {"Content-Type": "application/json", "User-Agent": "assay"}


class Hook(Settings):
    """What is called on events: an address (POST with a JSON body) or a command (JSON on standard input)."""

    url: str | None = None
    """Address of a webhook, http or https."""

    url_env: str | None = None
    """Environment variable with the address, where it holds a secret."""

    command: Items[str] = ()
    """Command with its arguments; run without a shell."""

    events: Items[str] = EVENTS
    """Events that are sent."""

    timeout_s: Annotated[Seconds, Le(300)] = 5.0
    """Time limit in seconds."""

    def check(self) -> None:
        if sum((self.url is not None, self.url_env is not None, bool(self.command))) != 1:
            raise ConfigError("a hook needs one of url, url_env and command")
        if self.url is not None and (
            urlsplit(self.url).scheme not in ("http", "https") or not urlsplit(self.url).netloc
        ):
            raise ConfigError(f"must be an http or https address, not {self.url!r}", field="url")
        for name in self.events:
            if name not in EVENTS:
                raise ConfigError(one_of(name, EVENTS), field="events")

    @property
    def name(self) -> str:
        """For messages; without the path of an address, which may hold a secret."""
        return str(self.command[0]) if self.command else urlsplit(self.address or "").netloc or str(self.url_env)

    @property
    def address(self) -> str | None:
        return self.url if self.url_env is None else os.environ.get(self.url_env)

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value not in (None, ())}


class Notifier:
    """Sends events to hooks, each in a thread of its own, so that one that hangs delays no other.

    Attributes:
        sent: events that a hook has accepted.
        failed: those that it has not, or that found too many others waiting.
    """

    def __init__(self, hooks: Sequence[Hook]) -> None:
        self.hooks, self.sent, self.failed = tuple(hooks), 0, 0
        self._lock = threading.Lock()
        self._queues: dict[int, queue.Queue[bytes | None]] = {}
        self._threads: list[threading.Thread] = []

    def notify(self, event: str, **fields: Any) -> None:
        """Hands an event over. Does not wait."""
        body = json_text({"event": event, "at": time.time(), **fields}).encode()
        for at, hook in enumerate(self.hooks):
            if event not in hook.events:
                continue
            with self._lock:
                if at not in self._queues:
                    self._queues[at] = queue.Queue(_WAITING)
                    thread = threading.Thread(target=self._sending, args=(hook, self._queues[at]), daemon=True)
                    self._threads.append(thread)
                    thread.start()
            try:
                self._queues[at].put_nowait(body)
            except queue.Full:
                self._count(hook, "too many events wait for it")

    def close(self, timeout_s: float | None = None) -> None:
        """Waits until the events are sent, at most `timeout_s`, by default the longest time limit of a hook."""
        limit = max((hook.timeout_s for hook in self.hooks), default=0.0) + 1 if timeout_s is None else timeout_s
        until = time.monotonic() + limit
        for waiting in self._queues.values():
            with suppress(queue.Full):
                waiting.put_nowait(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def to_dict(self) -> dict[str, int]:
        return {"sent": self.sent, "failed": self.failed}

    def _sending(self, hook: Hook, waiting: "queue.Queue[bytes | None]") -> None:
        while (body := waiting.get()) is not None:
            try:
                _run(hook, body) if hook.command else _post(hook, body)
            except Exception as error:  # whatever a server or a command does
                self._count(hook, error_text(error))
            else:
                with self._lock:
                    self.sent += 1

    def _count(self, hook: Hook, reason: str) -> None:
        with self._lock:
            self.failed += 1
        _LOG.warning("the event could not be sent to %s: %s", hook.name, reason)


def _post(hook: Hook, body: bytes) -> None:
    """One POST. The limit holds for all of it, also for a server that sends a byte from time to time."""
    import aiohttp

    if (address := hook.address) is None:
        raise ConfigError(f"the environment variable {hook.url_env} is not set")
    if hook.url_env is not None:
        add_secrets(address)

    async def post(url: str) -> int:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=hook.timeout_s)) as session,
            session.post(url, data=body, headers=_HEADERS, allow_redirects=False) as answer,
        ):
            return answer.status

    if not 200 <= (status := asyncio.run(post(address))) < 300:
        raise ConnectionError(f"status {status}")


def _run(hook: Hook, body: bytes) -> None:
    process = subprocess.Popen(
        list(hook.command), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        process.communicate(body, timeout=hook.timeout_s)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"not finished after {hook.timeout_s:g} s") from None
    finally:
        kill_group(process)
    if process.returncode:
        raise RuntimeError(f"exit status {process.returncode}")


# -- What a deployment is watched for, besides its comparison: settings. Evaluated by `assay.deployment.watching`.


INPUT_DRIFT, JUDGE_DRIFT = "input_drift", "judge_drift"
RATES = ("error_rate", "parse_error_rate", "tool_error_rate", "refusal_rate")
SCORES = ("score", "human_rating")
AMOUNTS = ("latency_s", "cost_usd", "tokens")


def check_metric(name: str, *others: str) -> None:
    """Raises `ConfigError` if this is neither the name of a metric nor one of the others."""
    known = (*SCORES, *RATES, *AMOUNTS, *others)
    if name not in known and not name.startswith(("criterion:", "judge:")):
        raise ConfigError(one_of(name, known, other="criterion:NAME or judge:NAME"), field="name")


class Watch(Settings):
    """One alarm on the rollouts of the candidate, while it is deployed and after its promotion."""

    name: str
    """error_rate, parse_error_rate, tool_error_rate, refusal_rate, score, human_rating, criterion:NAME, judge:NAME,
    latency_s, cost_usd, tokens (their medians), input_drift (how far task types and lengths of inputs are from those
    before, in [0, 1]), or judge_drift (how far a judge's verdicts on its anchors are from the frozen ones, as a share
    of its scale: root mean square, less the judge's own noise)."""

    above: Annotated[float, Ge(0)] | None = None
    """The alarm is given once the value is shown to be above. Exactly one of the two limits is given."""

    below: Annotated[float, Ge(0)] | None = None
    """The alarm is given once the value is shown to be below."""

    action: Literal["alarm", "pause", "rollback"] = "alarm"
    """What follows: alarm tells the hooks, pause also stops a running deployment, rollback takes the candidate back."""

    judge: str | None = None
    """Of judge_drift: folder of a compiled judge, or a YAML file; its anchors are replayed."""

    anchors: str | None = None
    """Of judge_drift: file of the frozen anchors; by default the compiled judge's own."""

    model: str | None = None
    """Of judge_drift: model of the judge; by default that of the compiled judge."""

    api_base: str | None = None
    """Of judge_drift: address of the model."""

    every_s: Seconds = 86400.0
    """Of judge_drift: seconds between two replays."""

    def check(self) -> None:
        check_metric(self.name, INPUT_DRIFT, JUDGE_DRIFT)
        if (self.above is None) == (self.below is None):
            raise ConfigError(f"the watch of {self.name} needs one limit: above or below")
        limit = self.above if self.above is not None else self.below
        if self.name not in AMOUNTS and limit is not None and limit > 1:
            raise ConfigError(f"the limit {limit!r} of the watch of {self.name} must be between 0 and 1")
        self._check_judge()

    def _check_judge(self) -> None:
        if self.name != JUDGE_DRIFT:
            if unused := self.changed("judge", "anchors", "model", "api_base", "every_s"):
                raise ConfigError(f"would have no effect on the watch of {self.name}", field=unused[0])
        elif self.judge is None or self.above is None:
            raise ConfigError(f"the watch of {JUDGE_DRIFT} needs judge (the folder of a compiled judge) and above")
        elif ":" in Path(self.judge).name:  # plans are stored in the database, so they must name no code
            raise ConfigError(
                f"must be the folder of a compiled judge or a YAML file, not {self.judge!r}", field="judge"
            )

    @property
    def key(self) -> str:
        """Identifies it in the history: a watch gives its alarm once."""
        name = self.name if self.judge is None else f"{self.name} of {self.judge}"
        return f"{name} above {self.above:g}" if self.above is not None else f"{name} below {self.below:g}"


# -- Plan.


class Metric(Settings):
    """One thing that is measured on each rollout of both arms.

    Differences are candidate less champion, in the direction of better. Those of `latency_s`, `cost_usd` and `tokens`
    are of logarithms, so that they are relative.
    """

    name: str = "score"
    """score, human_rating, criterion:NAME, judge:NAME (values in [0, 1], higher is better); error_rate,
    parse_error_rate, tool_error_rate, refusal_rate (the grade of a criterion with the name refusal; shares, lower is
    better); latency_s, cost_usd, tokens (lower is better)."""

    success_gain: Annotated[float, Ge(0)] | None = None
    """Relative gain over the champion that promotes; None for a metric that only guards."""

    failure_loss: Annotated[float, Ge(0)] = 0.0
    """Relative loss that is tolerated; a larger one, once it is shown, rolls back."""

    failure_above: float | None = None
    """Value of the candidate above which (below, where higher is better) it is rolled back, once it is shown."""

    horizon_s: Annotated[float, Ge(0)] = 0.0
    """Only rollouts that ended this many seconds ago count, so that early rewards do not bias."""

    def check(self) -> None:
        check_metric(self.name)
        if self.failure_above is None:
            return
        if self.is_amount and self.failure_above <= 0:
            raise ConfigError(f"must be above 0 for {self.name}, not {self.failure_above}", field="failure_above")
        if not self.is_amount and not 0 <= self.failure_above <= 1:
            rule = f"must be between 0 and 1 for {self.name}, not {self.failure_above}"
            raise ConfigError(rule, field="failure_above")

    @property
    def is_amount(self) -> bool:
        """Whether values are positive amounts, compared by their logarithms."""
        return is_amount(self.name)

    @property
    def sign(self) -> int:
        """1 where higher is better, else -1."""
        return -1 if self.is_amount or self.name in RATES else 1

    def value(self, raw: float) -> float:
        """A measured value in the scale in which arms are compared; NaN stays NaN."""
        return math.log(max(raw, 1e-9)) if self.is_amount else raw

    def tolerated(self, champion: float) -> float:
        """The tolerated loss as a difference in that scale."""
        return math.log1p(self.failure_loss) if self.is_amount else self.failure_loss * abs(champion)

    def needed(self, champion: float) -> float:
        """The gain that promotes, as a difference in that scale."""
        gain = self.success_gain or 0.0
        if self.is_amount:
            return -math.log(max(1 - gain, 1e-9))
        return gain * abs(champion)


class Step(Settings):
    """One step of a rollout. A step ends after `requests` that are older than the horizon of every metric, and after
    `hold_s`; one that decides ends with the gain."""

    weight: Annotated[float, Ge(0), Le(100)] = 0.0
    """Per cent of the units on the candidate; 0 with shadow. The last step is that of the whole traffic: what is
    missing to 100 is the holdback, which stays on the champion."""

    shadow: bool = False
    """Replay recorded rollouts of the champion on the candidate; no live traffic."""

    decides: bool = False
    """The step ends only when every success condition holds."""

    requests: Count = 0
    """Smallest number of rollouts of the step, of both arms; with shadow of replayed ones."""

    max_requests: Positive | None = None
    """Number of rollouts of a step that decides after which it is inconclusive and pauses."""

    hold_s: Annotated[float, Ge(0)] = 0.0
    """Smallest duration of the step in seconds."""

    def check(self) -> None:
        if self.shadow and (self.weight or self.decides):
            raise ConfigError("a shadow step has no weight and does not decide: leave out weight and decides")
        if not self.shadow and not self.weight:
            raise ConfigError("a step needs a weight above 0, or shadow=True")
        if self.max_requests is not None and not self.decides:
            raise ConfigError("would have no effect on a step that does not decide", field="max_requests")

    @property
    def share(self) -> float:
        """Share of the units on the candidate."""
        return self.weight / 100

    @property
    def label(self) -> str:
        return "shadow" if self.shadow else f"{self.weight:g} %"


def _default_steps() -> tuple[Step, ...]:
    return (
        Step(shadow=True, requests=100),
        Step(weight=10, requests=400),
        Step(weight=50, requests=400),  # a gain of novelty fades before the step that decides
        Step(weight=50, decides=True, requests=200, max_requests=6000),
        Step(weight=95, requests=500),
    )


class Plan(Settings):
    """How a candidate replaces a champion."""

    steps: Items[Step] = field(default_factory=_default_steps)
    """With weights that do not fall; at most one shadow step, the first; exactly one that decides."""

    metrics: Items[Metric] = field(default_factory=lambda: (Metric(success_gain=0.1),))
    """What is measured; at least one metric promotes."""

    alpha: Annotated[float, Gt(0), Lt(0.5)] = 0.05
    """Error rate of false rollbacks, of all claims of harm together, and of false promotions."""

    test: Literal["normal_mixture", "obrien_fleming"] = "normal_mixture"
    """Test of the gain: normal_mixture may be evaluated at any time; obrien_fleming at `evaluations` planned ones."""

    evaluations: Annotated[int, Ge(1), Le(50)] = 5
    """Number of planned evaluations, for obrien_fleming."""

    max_missing: Annotated[float, Gt(0), Le(1)] = 0.5
    """Share of rollouts without a value of a metric above which the deployment pauses."""

    missing: Literal["alike", "bounds", "propensity"] = "alike"
    """What decisions assume about missing values: alike in both arms, as bad or as good as they can be (alike); each
    the worst for the claim (bounds); or missing at random within stage and task type (propensity)."""

    covariate: bool = True
    """Subtract from live values what their task and unit scored before, recorded and replayed."""

    events: Items[Hook] = ()
    """Webhooks that are called on decisions."""

    watch: Items[Watch] = ()
    """Alarms; for `watch_s` after a promotion too."""

    watch_s: Annotated[float, Ge(0)] = 604800.0
    """Seconds for which a promoted candidate is watched."""

    def check(self) -> None:
        if named := [hook.name for hook in self.events if hook.command]:
            raise ConfigError(  # whoever may write to the store could run it elsewhere
                f"the command {named[0]!r} cannot be a hook of a plan, because plans are stored in the database: name "
                "it in the loop file"
            )
        if not self.steps or self.steps[-1].shadow:
            raise ConfigError("a plan needs at least one step with a weight")
        if any(step.shadow for step in self.steps[1:]):
            raise ConfigError("only the first step can be a shadow step")
        weights = [step.weight for step in self.steps if not step.shadow]
        if weights != sorted(weights):
            raise ConfigError(
                f"the weights of the steps must not decrease; they are {', '.join(f'{w:g}' for w in weights)}"
            )
        if sum(step.decides for step in self.steps) != 1:
            raise ConfigError("exactly one step must decide (decides: true)")
        if self.steps[self.deciding].weight == 100:
            raise ConfigError("the step that decides needs rollouts of the champion: its weight must be below 100")
        names = [metric.name for metric in self.metrics]
        if len(names) != len(set(names)):
            raise ConfigError(f"a metric is named twice: {', '.join(names)}")
        if all(metric.success_gain is None for metric in self.metrics):
            raise ConfigError(
                "at least one metric needs success_gain, the smallest gain that promotes; 0 means any gain"
            )

    @property
    def deciding(self) -> int:
        """Index of the step that decides."""
        return next(at for at, step in enumerate(self.steps) if step.decides)

    def missing_by(self, metric: Metric) -> str:
        """How missing values of a metric enter decisions, see `missing`. Amounts have no bounds: by propensity."""
        return "propensity" if metric.is_amount else self.missing

    def harm_alpha(self, metric: Metric) -> float:
        """One-sided error of the claim that the candidate is worse on this metric.

        A fifth is for the shadow step. Metrics that promote share one half of the rest, the others the other half.
        """
        live = self.alpha * (0.8 if self.steps[0].shadow else 1.0)
        same = sum((other.success_gain is None) == (metric.success_gain is None) for other in self.metrics)
        return live / same / (1 if same == len(self.metrics) else 2)

    @property
    def shadow_alpha(self) -> float:
        """One-sided error of the claim of harm on replayed rollouts, for each metric."""
        return 0.2 * self.alpha / len(self.metrics)

    def to_dict(self) -> dict[str, Any]:
        """The plan as a file has it."""
        return {
            "steps": [_set_fields(step) for step in self.steps],
            "metrics": [_set_fields(metric) for metric in self.metrics],
            **{
                name: getattr(self, name)
                for name in ("alpha", "test", "evaluations", "max_missing", "missing", "covariate")
            },
            **({"events": [hook.to_dict() for hook in self.events]} if self.events else {}),
            **({"watch": [_set_fields(watch) for watch in self.watch], "watch_s": self.watch_s} if self.watch else {}),
        }


def _set_fields(entry: Any) -> dict[str, Any]:
    return {
        item.name: value
        for item in fields(entry)
        if (value := getattr(entry, item.name)) != item.default or item.name in ("name", "weight")
    }


def is_amount(name: str) -> bool:
    """Whether a metric's values are positive amounts, compared by their logarithms."""
    return name in AMOUNTS


def default_plan(*, gain: float = 0.1) -> Plan:
    """Shadow, 10 %, 50 % and everything but a holdback of 5 %, decided by the score."""
    return Plan(metrics=(Metric(success_gain=gain),))


def load_plan(path: str | Path) -> Plan:
    """Reads a plan from a YAML file with the keys `steps`, `metrics` and the other settings of `Plan`.

    Raises:
        ConfigError: there is no such file, it is not YAML, or a setting breaks its rule.
    """
    from assay.support.yaml_files import load_settings

    return load_settings(path, Plan, "plan")
