"""Files of an export for plain `trl`: configuration, reward module and dataset card."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from assay.models.chat_templates import ChatTemplate

__all__ = ["trl_files"]


def trl_files(
    folder: Path,
    kind: str,
    manifest: Mapping[str, Any],
    *,
    rubric: Mapping[str, bytes] | None,
    template: ChatTemplate | None = None,
    without: Sequence[str] = (),
) -> None:
    """Write the dataset card, a configuration for `trl sft`, `dpo`, `kto` or `grpo`, and for GRPO the reward module.

    Args:
        folder: Folder of the export.
        kind: Kind of the export.
        manifest: Manifest of the export.
        rubric: Files of the rubric for GRPO, by relative path.
        without: Criteria that the reward leaves out.
        template: For whole conversations: chat template with marks around the assistant's text.
    """
    command = {"sft": "sft", "grpo": "grpo", "preferences": "kto" if manifest["config"]["unpaired"] else "dpo"}.get(
        kind
    )
    if command is not None:
        extra = _EXTRA.get(command, "") + (_ASSISTANT_ONLY if command == "sft" and manifest["config"]["whole"] else "")
        if template is not None:
            (folder / "chat_template.jinja").write_text(template.text, encoding="utf-8")
            extra += "chat_template_path: chat_template.jinja  # the model's, with marks around the assistant's text\n"
        config = _CONFIG.format(
            command=command, extra=extra, model=json.dumps(manifest["template"]["trained_as"], ensure_ascii=False)
        )
        (folder / f"{command}.yaml").write_text(config, encoding="utf-8")
    if kind == "grpo" and rubric is not None:
        for place, content in rubric.items():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            (folder / place).write_bytes(content)
        fields = {
            "inputs": dict(sorted(manifest["columns"]["inputs"].items())),
            "outputs": sorted(manifest["columns"]["outputs"]),
        }
        left_out = f".without({without!r})" if without else ""
        reward = _REWARD.format(**fields, rubric=next(iter(rubric)), without=left_out)
        (folder / "reward.py").write_text(reward, encoding="utf-8")
    (folder / "README.md").write_text(_card(kind, command, manifest), encoding="utf-8")


_CONFIG = """# Run in this folder: trl {command} --config {command}.yaml. The rows are for this model's chat template.
model_name_or_path: {model}
datasets:
- path: json
  data_files: data.jsonl
  split: train
output_dir: out
num_train_epochs: 1
per_device_train_batch_size: 4
gradient_accumulation_steps: 4
logging_steps: 1
report_to: none
bf16: false  # runs on a CPU too; true is faster on a GPU with bfloat16
use_peft: true
lora_target_modules: all-linear
{extra}"""

_EXTRA = {
    "sft": "learning_rate: 2.0e-4\nmax_length: 2048\n",
    "dpo": "learning_rate: 5.0e-6\n",
    "kto": "learning_rate: 5.0e-6\n",
    "grpo": "learning_rate: 1.0e-5\nreward_funcs: [reward.reward]\nnum_generations: 4\nmax_completion_length: 256\n",
}

_ASSISTANT_ONLY = "assistant_only_loss: true\n"  # conversations also contain prompts and tool results

_REWARD = '''"""Reward function of the rubric in this folder, for `trl grpo --config grpo.yaml`.

Loading the rubric runs the check files in `code`.
ASSAY_JUDGE_MODEL names the model of judge criteria.
"""

import os
from pathlib import Path

import assay

_rubric = assay.load_rubric(Path(__file__).with_name({rubric!r}), judge_model=os.environ.get("ASSAY_JUDGE_MODEL"))
reward = _rubric{without}.trl_reward(inputs={inputs!r}, outputs={outputs!r})
'''


def _card(kind: str, command: str | None, manifest: Mapping[str, Any]) -> str:
    gates = [
        f"| {g['gate']} | {g['value']} | {g['required']} | {'yes' if g['passed'] else 'no: ' + g['missing']} |"
        for g in manifest["gates"]
    ]
    lines = [
        "---",
        "configs:",
        "- config_name: default",
        "  data_files:",
        "  - split: train",
        "    path: data.jsonl",
        "---",
        "",
        f"# {manifest['rows']} rows for {kind}",
        "",
        f"Exported by assay {manifest['assay']}, {manifest['created_at']}.",
        f"Licence: {manifest['licence']}.",
        "",
        "| gate | value | required | passed |",
        "|---|---|---|---|",
        *gates,
        "",
        f"Personal data: {manifest['privacy']['engine']}"
        + (f"; {manifest['privacy']['note']}" if manifest["privacy"].get("note") else "")
        + ".",
        "",
        *([f"Train on it with `trl {command} --config {command}.yaml`, run in this folder.", ""] if command else []),
        "All other details are in `manifest.json`.",
        "",
    ]
    return "\n".join(lines)
