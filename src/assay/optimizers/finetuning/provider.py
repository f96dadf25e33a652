"""DSPy provider that trains with TRL: `lm.provider = TRLProvider()`.

For DSPy's own `BootstrapFinetune`, `BetterTogether` and `GRPO`.
"""

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dspy

from assay.errors import ConfigError
from assay.optimizers.finetuning.dspy_grpo import TRLReinforceJob
from assay.optimizers.finetuning.settings import SFTSettings, settings_from
from assay.optimizers.finetuning.sft import train_sft
from assay.support.values import json_text


class TRLProvider(dspy.Provider):  # type: ignore[misc]
    """Fine-tunes embedded models with TRL. The result is a language model with the adapter.

    `train_kwargs` are fields of `SFTSettings` (for `lm.reinforce`: of `PolicySettings`), and `name` for the adapter (by
    default derived from the data).
    """

    def __init__(self) -> None:
        super().__init__()
        self.finetunable = self.reinforceable = True
        self.ReinforceJob = TRLReinforceJob

    @staticmethod
    def is_provider_model(model: str) -> bool:
        return model.startswith("embedded/")

    @staticmethod
    def finetune(
        job: dspy.TrainingJob,
        model: str,
        train_data: Sequence[Mapping[str, Any]],
        train_data_format: Any,
        train_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Trains on chat messages. Returns the name of the model with the adapter.

        Raises:
            ConfigError: the data is not in the chat format, or a setting is unknown.
        """
        kind = getattr(train_data_format, "value", train_data_format)
        if kind != "chat":
            raise ConfigError(f"train_data_format={kind!r} must be 'chat': dspy.ChatAdapter makes it")
        text = "".join(json_text(dict(row)) + "\n" for row in train_data)
        settings = {"model": model, **(train_kwargs or {})}
        name = str(settings.pop("name", f"dspy-{hashlib.sha256(f'{settings}{text}'.encode()).hexdigest()[:12]}"))
        config = settings_from(SFTSettings, settings, "train_kwargs")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.jsonl"
            path.write_text(text, encoding="utf-8")
            report = train_sft(path, name, config)
        return report.name or str(report.path)
