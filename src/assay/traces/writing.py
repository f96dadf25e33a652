"""Files of an export: JSON lines, Parquet, a dataset card, and configs that plain `trl` takes. Does not choose or change rows."""

import contextlib
import gc
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from assay.models.chattemplates import ChatTemplate
from assay.scrubbing import fields
from assay.traces.formats import JSON_COLUMNS
from assay.traces.rows import as_json

__all__ = ["RowWriter", "trl_files", "without_gc"]

_REPEATED = [  # columns whose values come again and again
    "task", "task_type", "tools", "model", "weights", "adapters", "step_rewards", "status", "program", "program_version"
]  # fmt: skip
_BATCH = 2000  # rows of a Parquet row group
_LINES = 500  # hashed and written at once
_BYTES = 64 << 20  # at which a row group, or lines that wait, are written though they are few
_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Without the search for cycles: rows have none, and the search takes a third of the time of an export."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class RowWriter:
    """Writes rows of one shape as `data.jsonl`, and as `data.parquet` where asked; `files` has rows, bytes and sha256 at the end.

    In Parquet, JSON (the request, tools, adapters) is text, and token ids and logprobs are lists of numbers.
    """

    def __init__(self, folder: Path, *, parquet: bool) -> None:
        self.folder, self.parquet, self.rows = folder, parquet, 0
        self.files: dict[str, dict[str, Any]] = {}
        self._digest, self._waiting = hashlib.sha256(), list[dict[str, Any]]()
        self._buffered: list[bytes] = []
        self._json = JSON_COLUMNS if parquet else ()
        self._writer: Any = None
        self._size = 0  # bytes of the lines since the last row group

    def __enter__(self) -> "RowWriter":
        self._lines: BinaryIO = open(self.folder / "data.jsonl", "wb", buffering=1 << 20)
        return self

    def write(self, row: dict[str, Any]) -> None:
        row = _bare(row, self._json)
        line = _line(row, self._json)
        self._buffered.append(line)
        self.rows += 1
        self._size += len(line)
        full = self._size >= _BYTES
        if full or len(self._buffered) >= _LINES:
            self._put_lines()
        if self.parquet:
            self._waiting.append(row)
        if full or len(self._waiting) >= _BATCH:
            self._flush()

    def _put_lines(self) -> None:
        data = b"".join(self._buffered)
        self._buffered = []
        self._digest.update(data)
        self._lines.write(data)

    def _flush(self) -> None:
        self._size = 0
        if not self.parquet:
            return
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = pa.schema(_schema())
        columns = zip(*map(itemgetter(*schema.names), self._waiting), strict=True) if self._waiting else [()] * len(schema.names)
        arrays = [pa.array(_column(values, field.type), type=field.type) for values, field in zip(columns, schema, strict=True)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self.folder / "data.parquet", batch.schema, compression="snappy", use_dictionary=_REPEATED)
        self._writer.write_batch(batch)
        self._waiting = []

    def __exit__(self, kind: Any, *error: object) -> None:
        self._put_lines()
        self._lines.close()
        if self.parquet and kind is None:
            self._flush()
        if self._writer is not None:
            self._writer.close()
        path = self.folder / "data.jsonl"
        self.files["data.jsonl"] = {"rows": self.rows, "bytes": path.stat().st_size, "sha256": self._digest.hexdigest()}
        other = self.folder / "data.parquet"
        if other.exists():
            with open(other, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            self.files["data.parquet"] = {"rows": self.rows, "bytes": other.stat().st_size, "sha256": digest}


def _bare(row: dict[str, Any], encoded: Sequence[str]) -> dict[str, Any]:
    """The row without known secrets and fields for credentials: stores of older versions may hold some."""
    bare: dict[str, Any] = fields(row, texts=True)
    for name in encoded:
        if name in ("input", "tools") and isinstance(text := bare.get(name), str):
            read = orjson.loads(text)
            told = fields(read, known_too=False, texts=name == "tools")
            if told is not read:
                bare = {**bare, name: as_json(told)}
    return bare


def _line(row: dict[str, Any], encoded: Sequence[str]) -> bytes:
    try:
        return orjson.dumps(row | {name: orjson.Fragment(row[name]) for name in encoded} if encoded else row, default=str, option=_OPTIONS)
    except TypeError:  # lone surrogates: as text
        plain = row | {name: json.loads(row[name]) for name in encoded}
        return json.dumps(plain, ensure_ascii=False, default=str).encode("utf-8", "replace") + b"\n"


def _column(values: Sequence[Any], kind: Any) -> Sequence[Any]:
    import pyarrow as pa

    return orjson.loads(f"[{','.join(values)}]") if pa.types.is_list(kind) else values


def _schema() -> list[tuple[str, Any]]:
    import pyarrow as pa

    text, whole, real, yes = pa.string(), pa.int64(), pa.float64(), pa.bool_()
    return [
        ("rollout", text), ("group", text), ("task", text), ("task_type", text), ("t", whole), ("input", text), ("output", text),
        ("reasoning", text), ("refusal", text), ("tools", text),
        ("constrained", yes), ("cached", yes), ("model", text), ("weights", text), ("adapters", text), ("prompt_tokens", whole),
        ("completion_tokens", whole), ("token_ids", pa.list_(whole)), ("logprobs", pa.list_(real)), ("step_rewards", text), ("reward", real),
        ("return", real), ("advantage", real), ("weight", real), ("score", real), ("human_rating", real), ("status", text), ("program", text),
        ("program_version", text),
    ]  # fmt: skip


def trl_files(
    folder: Path, kind: str, manifest: Mapping[str, Any], *, rubric: Mapping[str, bytes] | None, template: ChatTemplate | None = None
) -> None:
    """The dataset card; a config for `trl sft`, `dpo`, `kto` or `grpo`; for GRPO the rubric and a module with its reward.

    Args:
        template: for whole conversations: the model's chat template with marks around what the assistant said.
    """
    command = {"sft": "sft", "grpo": "grpo", "preferences": "kto" if manifest["config"]["unpaired"] else "dpo"}.get(kind)
    if command is not None:
        extra = _EXTRA.get(command, "") + (_WHOLE if command == "sft" and manifest["config"]["whole"] else "")
        if template is not None:
            (folder / "chat_template.jinja").write_text(template.text, encoding="utf-8")
            extra += "chat_template_path: chat_template.jinja  # the model's own, with marks around what the assistant said\n"
        config = _CONFIG.format(command=command, extra=extra, model=json.dumps(manifest["template"]["trained_as"], ensure_ascii=False))
        (folder / f"{command}.yaml").write_text(config, encoding="utf-8")
    if kind == "grpo" and rubric is not None:
        for place, content in rubric.items():
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            (folder / place).write_bytes(content)
        told = {"inputs": dict(sorted(manifest["columns"]["inputs"].items())), "outputs": sorted(manifest["columns"]["outputs"])}
        (folder / "reward.py").write_text(_REWARD.format(**told, rubric=next(iter(rubric))), encoding="utf-8")
    (folder / "README.md").write_text(_card(kind, command, manifest), encoding="utf-8")


_CONFIG = """# trl {command} --config {command}.yaml, in this folder. The rows are written for the chat template of this model.
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
use_peft: true
lora_target_modules: all-linear
{extra}"""

_EXTRA = {
    "sft": "learning_rate: 2.0e-4\nmax_length: 2048\n",
    "dpo": "learning_rate: 5.0e-6\n",
    "kto": "learning_rate: 5.0e-6\n",
    "grpo": "learning_rate: 1.0e-5\nreward_funcs: [reward.reward]\nnum_generations: 4\nmax_completion_length: 256\n",
}

_WHOLE = "assistant_only_loss: true\n"  # a conversation holds prompts and results of tools as well

_REWARD = '''"""The rubric beside this file as a reward function: `trl grpo --config grpo.yaml`, run in this folder.

Loading it runs the check files that were copied with it, in `code`.
Criteria that a model judges ask the model named by ASSAY_JUDGE_MODEL; without one they are left out of the score.
"""

import os
from pathlib import Path

import assay

_judge = os.environ.get("ASSAY_JUDGE_MODEL")
_rubric = assay.load_rubric(Path(__file__).with_name({rubric!r}), judge_lm=assay.get_lm(_judge) if _judge else None)
reward = _rubric.trl_reward(inputs={inputs!r}, outputs={outputs!r})
'''


def _card(kind: str, command: str | None, manifest: Mapping[str, Any]) -> str:
    gates = [f"| {g['gate']} | {g['value']} | {g['required']} | {'yes' if g['passed'] else 'no: ' + g['missing']} |" for g in manifest["gates"]]
    lines = [
        "---", "configs:", "- config_name: default", "  data_files:", "  - split: train", "    path: data.jsonl", "---", "",
        f"# {manifest['rows']} rows for {kind}", "", f"Exported by assay {manifest['assay']}, {manifest['created_at']}.",
        f"Licence: {manifest['licence']}.", "",
        "| gate | value | required | passed |", "|---|---|---|---|", *gates, "",
        f"Personal data: {manifest['privacy']['engine']}" + (f"; {manifest['privacy']['note']}" if manifest["privacy"].get("note") else "") + ".",
        "", *([f"`trl {command} --config {command}.yaml` trains on it, run in this folder.", ""] if command else []),
        "Everything else stands in `manifest.json`.", "",
    ]  # fmt: skip
    return "\n".join(lines)
