"""Exports: that trainers load and train on them, and the rubric that computes their reward."""

import asyncio
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from export_rows import LOOSE, add_rollout, exported, store as store, turn

import assay
from assay.traces import Store


@pytest.mark.slow
def test_the_files_load_in_datasets(store: Store) -> None:
    from datasets import load_dataset

    add_rollout(store, turn(0, "a", "b"))
    exported(store, "sft")
    loaded = load_dataset("out", split="train")
    assert loaded[0]["prompt"] == [{"role": "user", "content": "a"}]
    exported(store, "transitions", "out2")
    assert len(load_dataset("parquet", data_files="out2/data.parquet", split="train")) == 1


@pytest.mark.tutorial
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sft", "grpo", "preferences"])
def test_plain_trl_trains_on_an_export_with_its_config(store: Store, tiny_model: Path, kind: str) -> None:
    for at in range(8):
        for answer, score in ((f"The answer is {at}.", 1.0), ("I do not know.", 0.0)):
            fields = {"inputs": {"question": f"How much is {at} + 0?"}, "expected": {"answer": str(at)}}
            add_rollout(store, turn(0, f"How much is {at} + 0?", answer), task=f"t{at}", score=score, **fields)
    exported(store, kind, **({"rubric": "math_qa"} if kind == "grpo" else {}))
    command = {"sft": "sft", "grpo": "grpo", "preferences": "dpo"}[kind]
    options = "--max_steps 2 --use_cpu --bf16 false --per_device_train_batch_size 4 --gradient_accumulation_steps 1"
    flags = ["--model_name_or_path", str(tiny_model), *options.split(), "--use_peft", "false"]
    flags += ["--max_completion_length", "8"] if kind == "grpo" else []
    result = subprocess.run(
        [str(Path(sys.executable).with_name("trl")), command, "--config", f"{command}.yaml", *flags], cwd="out",
        capture_output=True, text=True, timeout=600,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": "."},
    )  # fmt: skip
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    assert "Training completed" in result.stdout + result.stderr
    assert (Path("out") / "out").is_dir()


@pytest.mark.slow
def test_a_rubric_is_exported_with_its_check_files_helpers_and_judges(store: Store, tmp_path: Path) -> None:
    for folder in ("own", "own/judges", "own/more"):
        (tmp_path / folder).mkdir()
    (tmp_path / "own" / "help.py").write_text("RIGHT = 'good'\n")
    (tmp_path / "own" / "mine.py").write_text(
        "from help import RIGHT\ndef check(task, prediction, rollout):\n"
        "    return float(prediction['label'] == RIGHT)\n"
    )
    (tmp_path / "own" / "more" / "mine.py").write_text("def check(task, prediction, rollout):\n    return 1.0\n")
    (tmp_path / "own" / "judges" / "one.yaml").write_text("text: Is it kind?\n")
    (tmp_path / "own" / "jury.yaml").write_text("jury:\n  members: [judges/one.yaml, judges/one.yaml]\n")
    (tmp_path / "own" / "r.yaml").write_text(
        "name: r  # mine.py:check is in check below\ncriteria:\n- {name: a, weight: 2, check: 'mine.py:check'}\n"
        "- {name: b, check: more/mine.py:check}\n"
        "- name: c\n  judge:\n    use: jury.yaml\n"
    )
    add_rollout(store, turn(0, "Text: fine", "good"), inputs={"text": "fine"}, expected={"label": "good"})
    store.flush()
    assay.export("grpo", "out", store=store.url, rubric=tmp_path / "own" / "r.yaml", gates=LOOSE)
    shutil.rmtree(tmp_path / "own")
    shutil.move("out", "elsewhere")
    rubric = assay.load_rubric("elsewhere/rubric.yaml")
    checks = [c.check for c in rubric.criteria if c.check is not None]
    assert [check({}, {"label": "bad"}, None) for check in checks] == [0.0, 1.0]
    assert checks[0]({}, {"label": "good"}, None) == 1.0
    use = rubric.criteria[2].judge.use
    assert [member.spec.text for member in assay.load_judge(use).members] == ["Is it kind?"] * 2


@pytest.mark.parametrize(
    "answer", ['{"label": "good"}', "[[ ## label ## ]]\ngood\n\n[[ ## completed ## ]]", "label: good", "good"]
)
def test_a_reward_reads_the_fields_of_a_completion_and_the_columns_of_the_inputs(store: Store, answer: str) -> None:
    call = turn(0, "Text: fine\nLabel:", answer)
    add_rollout(store, call, inputs={"text": "fine", "prompts": "p"}, expected={"label": "good"})
    rows, manifest = exported(store, "grpo", rubric="classify")
    assert manifest["columns"] == {"inputs": {"text": "text", "prompts_": "prompts"}, "outputs": ["label"]}
    assert rows[0].keys() == {"text", "prompts_", "label", "prompt", "tools", "task_type"}
    spec = importlib.util.spec_from_file_location("exported_reward", Path("out") / "reward.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    completions = [[{"role": "assistant", "content": text}] for text in (answer, answer.replace("good", "bad"))]
    right, wrong = (
        asyncio.run(module.reward([rows[0]["prompt"]], [completion], **columns)) for completion in completions
    )
    assert (right, wrong) == ([1.0], [0.0])
