"""A rubric as the reward of TRL's GRPOTrainer: two steps of the embedded model on a CPU, with LoRA.

    pip install 'dspy-assay[embedded,train]'
    python examples/trl_reward.py

The dataset's other columns are what the rubric's checks expect; a completion that cannot be scored gets None, which TRL
leaves out.
"""

import argparse
import json
import tempfile

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from assay.datasets import load_tasks
from assay.models import find_model
from assay.rubrics import Criterion, Rubric, checks

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2)
parser.add_argument("--generations", type=int, default=4)
parser.add_argument("--tokens", type=int, default=24)
parser.add_argument("--json", action="store_true")
arguments = parser.parse_args()

rubric = Rubric(
    "sums",
    [
        Criterion(name="correct", weight=4, check=checks.numeric),
        Criterion(name="says_a_number", weight=1, check=checks.regex, arguments={"pattern": r"\d"}),
    ],
)
rows = [
    {"prompt": [{"role": "user", "content": task.inputs["question"]}], "answer": task.expected["answer"]}
    for task in load_tasks("arithmetic:size=16&digits=1-1")
]

file = find_model("embedded/smollm2-135m")
model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
if quantizer := getattr(model, "hf_quantizer", None):  # the weights are read, and plain floats from here on
    quantizer.remove_quantization_config(model)
model.is_quantized = False
tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
with tempfile.TemporaryDirectory() as folder:
    settings = GRPOConfig(
        output_dir=folder,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.generations,
        num_generations=arguments.generations,
        max_completion_length=arguments.tokens,
        learning_rate=1e-4,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        seed=0,
        save_strategy="no",
        disable_tqdm=arguments.json,
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=rubric.trl_reward(),
        args=settings,
        train_dataset=Dataset.from_list(rows),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    trainer.train()
log = [
    {key: entry[key] for key in ("step", "reward", f"rewards/rubric_{rubric.name}/mean") if key in entry}
    for entry in trainer.state.log_history
]
print(json.dumps({"steps": trainer.state.global_step, "log": [entry for entry in log if "reward" in entry]}))
