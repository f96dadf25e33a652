"""Settings of `assay serve`. Keys are not settings: settings are stored with the run, and a key must not be."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from assay.errors import ConfigError
from assay.runs.settings.fields import price_of_model, replace_lms_of
from assay.runs.settings.shared import DEFAULT_MODEL
from assay.runs.settings.traces import StoredJudgeSettings
from assay.support.settings import setting
from assay.traces.gateway import MAX_BODY_MB

_ADVANCE_S, _TIMEOUT_S = 10.0, 600.0


def _seconds(default: float, help: str) -> Any:
    return setting(default, help, ge=0.1, metavar="SECONDS")


@dataclass(frozen=True, kw_only=True)
class ServeSettings(StoredJudgeSettings):
    """Settings of the gateway. The defaults of the connection limits are those of `ConnectionLimits`.

    Attributes:
        idle_s, connection_idle_s, receive_s, upstream_idle_s: seconds.
        max_connections: None for a third of the file descriptors of the process, at most 2000.
    """

    model: str | None = setting(
        None,
        "Model that answers: embedded/NAME or a litellm name; with --upstream, the name that the server knows. "
        f"Without --upstream the default is {DEFAULT_MODEL}.",
        metavar="NAME",
    )
    upstream: str | None = setting(
        None,
        "Base URL of a server that implements OpenAI chat completions (vLLM, llama.cpp, a provider).",
        metavar="URL",
    )
    price: str | None = price_of_model(default="the cost of the gateway's calls to a server is unknown")
    host: str = setting("127.0.0.1", "Address to bind; non-loopback addresses require --key.")
    port: int = setting(8321, "Port to bind; 0 selects a free port.", ge=0, le=65535)
    allow_host: Sequence[str] = setting(
        (), "Additional host name under which clients may reach this gateway; repeatable.", metavar="NAME", many=True
    )
    idle_s: float = _seconds(600.0, "Seconds without a call after which a rollout ends.")
    max_body_mb: int = setting(
        MAX_BODY_MB, "Maximum request body in MiB; a larger request is answered with status 413.", ge=1
    )
    max_connections: int | None = setting(
        None,
        "Maximum number of concurrent connections; others wait. "
        "By default a third of the open-file limit (ulimit -n), at most 2000.",
        ge=1,
    )
    connection_idle_s: float = _seconds(75.0, "Seconds after which a connection without a request is closed.")
    receive_s: float = _seconds(60.0, "Time limit for receiving a request body, plus 1 second for each 64 KiB.")
    upstream_idle_s: float = _seconds(
        600.0, "Seconds in which the upstream sends nothing, or the caller reads nothing, after which a call fails."
    )

    loops: str = setting(
        "alarm",
        "What to do with an answer whose text repeats itself: alarm marks its call with the failure kind loop, "
        "stop also ends a streamed answer, off disables the check.",
        choices=("off", "alarm", "stop"),
    )

    agent: Sequence[str] = setting(
        (), "Agent of the registry that POST /agents/NAME runs; repeatable.", metavar="NAME", many=True
    )
    agent_rubric: str | None = setting(
        None,
        "Rubric that scores the rollouts of --agent when they end. Its judges score after the answer.",
        metavar="R",
        file=True,
    )
    agent_timeout_s: float = _seconds(
        _TIMEOUT_S, "Time limit of one rollout of --agent; beyond it the agent has failed."
    )
    replace_lms: bool = replace_lms_of("the program of an --agent", "the model of the version")
    advance_s: float = setting(
        _ADVANCE_S, "Seconds between two evaluations of the deployment of an --agent; with 0 only assay deploy "
        "advance evaluates it.",
        ge=0,
    )  # fmt: skip
    otlp: str = setting(
        "off",
        "What is sent to an OTLP/HTTP endpoint as it comes: metrics; structure, also the rollouts that have ended, "
        "without their texts; content, with them.",
        choices=("off", "metrics", "structure", "content"),
    )
    otlp_endpoint: str | None = setting(
        None, "OTLP/HTTP address, to which /v1/traces and /v1/metrics are added; by default "
        "$OTEL_EXPORTER_OTLP_ENDPOINT.", metavar="URL",
    )  # fmt: skip
    otlp_tenants: Sequence[str] = setting(
        (), "Tenant whose rollouts are sent too; repeatable.", metavar="NAME", flag="--otlp-tenant", many=True
    )

    OF_JUDGE: ClassVar[tuple[str, ...]] = ("judge_api_base", "judge_api_key_env", "judge_thinking")

    @property
    def judge_price(self) -> str | None:
        return self.price if self.judge_model == self.answering else None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.agent_rubric is not None and not self.agent:
            raise ConfigError(f"agent_rubric={self.agent_rubric!r} would have no effect without agent")
        if self.judge_model is not None and self.agent_rubric is None:
            raise ConfigError(f"judge_model={self.judge_model!r} would have no effect without agent_rubric")
        if self.agent_timeout_s != _TIMEOUT_S and not self.agent:
            raise ConfigError(f"agent_timeout_s={self.agent_timeout_s!r} would have no effect without agent")
        if self.replace_lms and not self.agent:
            raise ConfigError("replace_lms=True would have no effect without agent")
        if self.advance_s != _ADVANCE_S and not self.agent:
            raise ConfigError(f"advance_s={self.advance_s!r} would have no effect without agent")
        if self.otlp == "off" and (self.otlp_endpoint is not None or self.otlp_tenants):
            named = "otlp_endpoint" if self.otlp_endpoint is not None else "otlp_tenants"
            raise ConfigError(f"{named}={getattr(self, named)!r} would have no effect with otlp='off'")

    @property
    def answering(self) -> str | None:
        """The model that answers; None where the upstream's own choice is passed through."""
        return DEFAULT_MODEL if self.model is None and self.upstream is None else self.model
