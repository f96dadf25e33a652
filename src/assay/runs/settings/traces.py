"""Settings that several commands on what the store holds share."""

from dataclasses import dataclass
from typing import ClassVar

from assay.errors import ConfigError
from assay.models.roles import check_address
from assay.runs.settings.fields import (
    api_base,
    price_of_model,
    thinking_of,
)
from assay.runs.settings.shared import JudgeModelSettings
from assay.support.settings import setting


@dataclass(frozen=True, kw_only=True)
class StoredJudgeSettings(JudgeModelSettings):
    """Settings of the model of a rubric's judges where no program runs, whose model could judge."""

    judge_model: str | None = setting(
        None, "Model of the rubric's judges; by default the one that a judge's file names."
    )
    judge_api_base: str | None = api_base("the judges' model")
    judge_thinking: int | str | None = thinking_of("the rubric's judges")
    price: str | None = price_of_model("the judges' model", "")

    OF_JUDGE: ClassVar[tuple[str, ...]] = ("judge_api_base", "judge_api_key_env", "judge_thinking", "price")

    @property
    def judge_price(self) -> str | None:
        return self.price

    def __post_init__(self) -> None:
        check_address(self.judge_api_base, "judge_api_base")
        super().__post_init__()
        unused = self.changed(*self.OF_JUDGE)
        if unused and self.judge_model is None:
            raise ConfigError(f"{unused[0]}={getattr(self, unused[0])!r} would have no effect without judge_model")
