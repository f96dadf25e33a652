"""Keys of the JSON and files of a training, each run for one step on a random model of two layers."""

from pathlib import Path

import pytest
from contract_files import Contract, shape
from contract_project import Project
from prompt_server import PromptServer

CHECKS = """
import hashlib


def spread(task, prediction, rollout):
    \"\"\"Two answers hardly ever have the same grade, so that a group has advantages.\"\"\"
    return hashlib.sha256(str(prediction.get("answer")).encode()).digest()[0] / 255
"""
LORA = ("--lora-r", "2")


@pytest.fixture(scope="module")
def trainings(server: PromptServer, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Project:
    """A supervised training and one by reward."""
    project = Project(tmp_path_factory.mktemp("trainings"), server.url)
    project.write("checks.py", CHECKS)
    project.write("spread.yaml", "name: spread\ncriteria:\n- {name: spread, check: checks.py:spread}\n")
    turns = [
        {
            "prompt": [{"role": "user", "content": f"What is {number} + 1?"}],
            "completion": [{"role": "assistant", "content": f"It is {number + 1}."}],
        }
        for number in range(8)
    ]
    project.write_rows("turns.jsonl", turns)
    model = ("--model", str(tiny_model), *LORA)
    project.report("train sft", "turns.jsonl", "--name", "taught", "--epochs", "1", "--max-length", "128", *model)
    small = ("--steps", "1", "--prompts-per-step", "1", "--num-generations", "2", "--eval-tasks", "1", "--no-preflight")
    lengths = ("--max-length", "512", "--max-completion", "8", "--prompt-format", "lean")
    rubric = ("--rubric", "spread.yaml")
    project.report("train grpo", "sums.py:Sums", "--name", "rewarded", *rubric, *small, *lengths, *model)
    return project


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train sft", "train grpo"])
def test_keys_of_the_json_of_a_training_are_unchanged(command: str, trainings: Project, contract: Contract) -> None:
    contract.check("trainings", command, shape(trainings.reports[command].report))


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train sft", "train grpo"])
def test_a_training_writes_an_adapter_that_other_tools_read(command: str, trainings: Project) -> None:
    adapter = trainings.folder / trainings.reports[command].report["path"]
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in adapter.iterdir()}
