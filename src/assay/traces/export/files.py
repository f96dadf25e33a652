"""Files of an export: JSON lines and Parquet. Does not select rows.

The dataset card and the configurations for `trl` are made here too.
"""

import contextlib
import functools
import gc
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from assay.models.chat_templates import ChatTemplate
from assay.support.scrubbing import fields
from assay.support.values import json_text, json_value
from assay.traces.export.transitions import JSON_COLUMNS, parquet_schema
from assay.traces.store.rows import as_json

_REPEATED = [  # columns with repeated values: dictionary-encoded in Parquet
    "task",
    "task_type",
    "tools",
    "model",
    "weights",
    "adapters",
    "step_rewards",
    "status",
    "program",
    "program_version",
]
_BATCH = 2000  # rows of a Parquet row group
_LINES = 500  # lines hashed and written at once
MAX_BUFFERED_BYTES = 64 << 20  # from this size on, lines and row group are written without waiting for more rows
_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Disable the cyclic garbage collector: rows have no reference cycles, and it took a third of an export's time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class RowWriter:
    """Writes rows with one schema to `data.jsonl` and optionally to `data.parquet`.

    In Parquet, JSON columns (request, tools, adapters) are text; token ids and logprobs are lists of numbers. After the
    context manager has exited, `files` has the rows, bytes and sha256 of each file.

    Args:
        folder: Existing folder to write into.
        parquet: Whether to write `data.parquet`; the rows must be `TransitionRow`s.
        encoded: Whether the rows are `TransitionRow`s, with JSON columns as text; by default as `parquet`.
    """

    def __init__(self, folder: Path, *, parquet: bool, encoded: bool | None = None) -> None:
        self.folder, self.parquet, self.rows = folder, parquet, 0
        self.files: dict[str, dict[str, Any]] = {}
        self._digest, self._waiting = hashlib.sha256(), list[dict[str, Any]]()
        self._buffered: list[bytes] = []
        self._json = JSON_COLUMNS if (parquet if encoded is None else encoded) else ()
        self._writer: Any = None
        self._size = 0  # bytes of the lines since the last row group

    def __enter__(self) -> "RowWriter":
        self._lines: BinaryIO = open(self.folder / "data.jsonl", "wb", buffering=1 << 20)
        return self

    def write(self, row: dict[str, Any]) -> None:
        row = _without_secrets(row, self._json)
        line = _line(row, self._json)
        self._buffered.append(line)
        self.rows += 1
        self._size += len(line)
        full = self._size >= MAX_BUFFERED_BYTES
        if full or len(self._buffered) >= _LINES:
            self._write_lines()
        if self.parquet:
            self._waiting.append(row)
        if full or len(self._waiting) >= _BATCH:
            self._flush()

    def leave_out(self, numbers: Sequence[int]) -> None:
        """Removes rows of these numbers, from 0, from `data.jsonl`. Only for exports without Parquet."""
        if not numbers:
            return
        self._write_lines()
        self._lines.close()
        path, removed = self.folder / "data.jsonl", set(numbers)
        path.rename(written := path.with_suffix(".all"))
        self._digest = hashlib.sha256()
        self._lines = open(path, "wb", buffering=1 << 20)  # noqa: SIM115
        with open(written, "rb") as lines:
            for number, line in enumerate(lines):
                if number not in removed:
                    self._digest.update(line)
                    self._lines.write(line)
        written.unlink()
        self.rows -= len(removed)

    def _write_lines(self) -> None:
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

        schema = pa.schema(parquet_schema())
        columns = [[row[name] for row in self._waiting] for name in schema.names]
        typed = zip(columns, (field.type for field in schema), strict=True)
        arrays = [pa.array(_column(values, kind), type=kind) for values, kind in typed]
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                self.folder / "data.parquet", batch.schema, compression="snappy", use_dictionary=_REPEATED
            )
        self._writer.write_batch(batch)
        self._waiting = []

    def __exit__(self, kind: Any, *error: object) -> None:
        self._write_lines()
        self._lines.close()
        if self.parquet and kind is None:
            self._flush()
        if self._writer is not None:
            self._writer.close()
        digests = {"data.jsonl": self._digest.hexdigest()}
        if (parquet := self.folder / "data.parquet").exists():
            with open(parquet, "rb") as file:
                digests["data.parquet"] = hashlib.file_digest(file, "sha256").hexdigest()
        for name, digest in digests.items():
            self.files[name] = {"rows": self.rows, "bytes": (self.folder / name).stat().st_size, "sha256": digest}


def _without_secrets(row: dict[str, Any], encoded: Sequence[str]) -> dict[str, Any]:
    """Remove known secrets and credential fields from a row: a row may be older than what is known as a secret."""
    scrubbed: dict[str, Any] = fields(row, texts=True)
    for name in encoded:
        if name in ("input", "tools") and isinstance(text := scrubbed.get(name), str):
            read = orjson.loads(text)
            clean = fields(read, mask_known=False, texts=name == "tools")
            if clean is not read:
                scrubbed = {**scrubbed, name: as_json(clean)}
    return scrubbed


_as_json = functools.partial(json_value, placeholders=True)


def _line(row: dict[str, Any], encoded: Sequence[str]) -> bytes:
    try:
        written = row | {name: orjson.Fragment(row[name]) for name in encoded} if encoded else row
        return orjson.dumps(written, default=_as_json, option=_OPTIONS)
    except TypeError:  # orjson refuses lone surrogates; the standard library writes them
        plain = row | {name: json.loads(row[name]) for name in encoded}
        return json_text(plain).encode() + b"\n"


def _column(values: Sequence[Any], kind: Any) -> Sequence[Any]:
    import pyarrow as pa

    return orjson.loads(f"[{','.join(values)}]") if pa.types.is_list(kind) else values


# -- Files of an export for plain `trl`: configuration, reward module and dataset card.


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
    preferences = "kto" if manifest["config"]["unpaired"] else "dpo"
    command = {"sft": "sft", "grpo": "grpo", "preferences": preferences}.get(kind)
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
        columns, left_out = manifest["columns"], f".without({without!r})" if without else ""
        reward = _REWARD.format(
            inputs=dict(sorted(columns["inputs"].items())), outputs=sorted(columns["outputs"]),
            rubric=next(iter(rubric)), without=left_out,
        )  # fmt: skip
        (folder / "reward.py").write_text(reward, encoding="utf-8")
    (folder / "README.md").write_text(_card(command, manifest), encoding="utf-8")


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


_CARD = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data.jsonl
---

# {rows} rows for {kind}

Exported by assay {assay}, {created_at}.

| gate | value | required | passed |
|---|---|---|---|
{gates}

Personal data: {personal}.

{training}All other details are in `manifest.json`.
"""


def _card(command: str | None, manifest: Mapping[str, Any]) -> str:
    gates = [
        f"| {g['gate']} | {g['value']} | {g['required']} | {'yes' if g['passed'] else 'no: ' + g['missing']} |"
        for g in manifest["gates"]
    ]
    personal = "; ".join(filter(None, (manifest["privacy"]["engine"], manifest["privacy"].get("note"))))
    training = f"Train on it with `trl {command} --config {command}.yaml`, run in this folder.\n\n" if command else ""
    parts = {"gates": "\n".join(gates), "personal": personal, "training": training}
    return _CARD.format(**{**manifest, **parts})
