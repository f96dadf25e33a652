"""Names: those that become paths, and which one an unknown name probably means: the nearest, or that of another tool.

Every name that is joined to a folder is checked here, wherever it comes from.
"""

import difflib
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath

from assay.errors import ConfigError

_MOST_BYTES = 200  # a file system takes 255; names get endings, such as `.lock`
_SLASHES = frozenset("\u2044\u2215\u2216\u29f5\u29f8\u29f9\uff0f\uff3c\ufe68")  # they look like a slash
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_DEVICE = re.compile(r"(?:con|prn|aux|nul|com\d|lpt\d)(?:\..*)?", re.IGNORECASE)  # Windows opens a device
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def check_name(name: object, argument: str = "name", *, plain: bool = False) -> str:
    """The name, if it can name one file or folder within another.

    Args:
        argument: what held the name, for the message.
        plain: only ASCII letters, digits, dots, dashes and underscores: the name is a part of other names, such as that
            of a model.
    Raises:
        ConfigError: it is empty or too long, has a slash, control or invisible characters, begins with a dot, dash or
            space, ends with a dot or space, or is a device of Windows.
    """
    if isinstance(name, str) and is_name(name, plain=plain):
        return name
    allowed = (
        "1 to 63 ASCII letters, digits, dots, dashes and underscores, begin with a letter or digit and not end with "
        "a dot"
        if plain
        else "one file name: no slashes or control characters, no dot, dash or space at its start, no dot or space at "
        f"its end, at most {_MOST_BYTES} bytes"
    )
    raise ConfigError(f"`{argument}={name if not isinstance(name, str) else name[:80]!r}` must be {allowed}")


def place_in(folder: Path, name: object, argument: str = "name", *, ending: str = "") -> Path:
    """The path of a file or folder to write in a folder, by a checked name.

    Raises:
        ConfigError: the name is invalid, or a symbolic link has it, which may lead out of the folder.
    """
    place = folder / f"{check_name(name, argument)}{ending}"
    if place.is_symlink():
        raise ConfigError(f"{place} is a symbolic link, and nothing is written through it: remove it, or name another")
    return place


def is_within(place: object) -> bool:
    """Whether a relative path, with slashes, as in a manifest, stays within the folder that it is joined to."""
    if not isinstance(place, str) or _CONTROLS.search(place):
        return False
    parts = PurePosixPath(place).parts
    return bool(parts) and all(part != ".." and _is_part(part) for part in parts)


def is_name(name: str, *, plain: bool = False) -> bool:
    """Whether `check_name` accepts a name."""
    return (
        all(_is_part(form) and form[0] not in ".- " and form[-1] not in ". " for form in _forms(name))
        and name.isprintable()
        and _SLASHES.isdisjoint(name)
        and len(name.encode()) <= _MOST_BYTES
        and _DEVICE.fullmatch(name) is None
        and (not plain or _PLAIN.fullmatch(name) is not None)
    )


def _forms(name: str) -> tuple[str, str]:
    """The name, and as a file system or another program may read its compatibility characters (`‥` is two dots)."""
    return name, unicodedata.normalize("NFKC", name)


def _is_part(text: str) -> bool:
    """Whether a text is one part of a path on every system: not empty, no slash or backslash, no drive, no `.`."""
    return text != "" and PureWindowsPath(text).name == text


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that an unknown one was probably meant to be."""
    by_text = {text.lower(): text for text in known}  # case does not matter: GEPA is near to gepa
    close = difflib.get_close_matches(name.lower(), list(by_text), 1)
    return by_text[close[0]] if close else None


def one_of(value: object, choices: Iterable[str], *, other: str = "") -> str:
    """The rule that a value breaks which is none of the choices, with the nearest one: the end of an error message.

    Args:
        other: text that says what is allowed besides the choices.
    """
    listed = [str(choice) for choice in choices]
    near = nearest(value, listed) if isinstance(value, str) else None
    hint = f". Did you mean {near!r}?" if near else ""
    return f"must be one of {', '.join(listed)}{f', or {other}' if other else ''}{hint}"


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
