"""Settings that are called otherwise in other tools: which one an unknown name probably means."""

from collections.abc import Collection, Mapping, Sequence

from assay.support.names import nearest

SIZES = ("train_size", "val_size", "gate_size", "test_size")
_IN_PYTHON = {
    "trainset": "data={'train': …}", "valset": "data={'val': …}", "devset": "data={'val': …}",
    "testset": "data={'test': …}", "state": "program=ARTIFACT, of compile(…, state=…)",
}  # fmt: skip
# Names of other tools, and those that may be meant; of these the first that a command or function has is named.
MEANT: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(
        ("limit", "n", "num", "count", "num_examples", "max_examples", "max_samples", "sample"),
        ("size", "limit", "trials", *SIZES),
    ),
    **dict.fromkeys(("output", "o", "output_dir", "output_file", "out_dir", "out_file", "dest"), ("out", "report")),
    **dict.fromkeys(("html", "page"), ("report",)),
    **dict.fromkeys(("dataset", "tasks", "input", "inputs", "examples", "d"), ("data", "file")),
    **dict.fromkeys(("trainset", "valset", "devset", "testset", "train", "val"), ("data",)),
    "state": (),
    "student": ("program",),
    "data": ("labels", "file"),
    **dict.fromkeys(("out", "directory", "dir"), ("report", "out")),
    **dict.fromkeys(("metric", "scorer", "criteria", "evaluator"), ("rubric", "objective")),
    **dict.fromkeys(("lm", "llm", "model_name", "engine", "m"), ("model",)),
    **dict.fromkeys(
        ("base_url", "api_url", "endpoint", "openai_base_url", "api_base"), ("api_base", "upstream", "judge_api_base")
    ),
    "upstream": ("api_base",),
    **dict.fromkeys(("api_key", "token"), ("api_key_env", "key")),
    **dict.fromkeys(("judge", "grader", "grader_model"), ("judge_model",)),
    **dict.fromkeys(("teacher", "prompt_model", "reflection_lm", "teacher_model"), ("reflection_model",)),
    **dict.fromkeys(
        ("num_threads", "concurrency", "parallel", "num_workers", "workers", "jobs", "j"), ("threads", "workers")
    ),
    **dict.fromkeys(("budget", "max_cost", "max_usd", "max_budget", "cost"), ("max_cost_usd",)),
    **dict.fromkeys(("max_requests", "max_lm_calls", "max_metric_calls"), ("max_search_calls", "max_calls")),
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens", "max_output_tokens"), ("max_completion",)),
    **dict.fromkeys(("timeout", "time_limit"), ("task_timeout", "rollout_timeout_s")),
    **dict.fromkeys(("db", "database", "storage"), ("store",)),
    **dict.fromkeys(("adapter", "format"), ("prompt_format", "name")),
    **dict.fromkeys(("adapter_name", "output_name"), ("name",)),
    **dict.fromkeys(("num_demos", "max_demos", "shots", "few_shot", "max_bootstrapped_demos"), ("demos",)),
    **dict.fromkeys(("param", "parameter", "temperature"), ("parameters",)),
    **dict.fromkeys(("n_trials", "num_trials", "iterations"), ("trials", "steps")),
    "lr": ("learning_rate",),
    **dict.fromkeys(("batch_size", "train_batch_size"), ("batch", "per_device_batch_size")),
    **dict.fromkeys(("num_epochs", "num_train_epochs"), ("epochs",)),
    **dict.fromkeys(("max_steps", "num_steps"), ("steps",)),
    **dict.fromkeys(("rank", "lora_rank", "r"), ("lora_r",)),
    **dict.fromkeys(("random_seed", "random_state"), ("seed",)),
    **dict.fromkeys(("min_score", "fail_below", "threshold"), ("fail_under",)),
    **dict.fromkeys(("as_json", "json_output"), ("json",)),
    **dict.fromkeys(("continue", "resume_from"), ("resume",)),
}  # fmt: skip


def meant(name: str, known: Collection[str]) -> list[str]:
    """The settings that a name of `MEANT` probably means: one, or the sizes of all splits; none if none is there."""
    found = [item for item in MEANT.get(name, ()) if item in known]
    return [item for item in found if item in SIZES] if found[:1] and found[0] in SIZES else found[:1]


def keyword_hint(name: str, known: Collection[str]) -> str:
    """What to write in Python in place of a keyword that a function does not have; empty if nothing is like it."""
    text = _IN_PYTHON.get(name, "")
    if text and text.partition("=")[0] in known:
        return text
    likely = meant(name, known)
    near = likely[0] if likely else None if name in MEANT else nearest(name, known)
    return repr(near) if near else ""
