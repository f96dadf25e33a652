"""The model in torch that is trained, and what it is checked against. Needs the extra `train`."""

import hashlib
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from assay.errors import MissingExtra, ModelError
from assay.models.adapters import Adapter, with_adapters
from assay.models.registry import find_model, model_home, spec

__all__ = ["Policy", "fast_bf16", "lean_head", "load_policy", "lora_of", "quiet", "tokenizer_sha"]


@dataclass
class Policy:
    """A causal model with its tokenizer. `embedded` is the name of the embedded model it was made from, None for others;
    `merged` are the adapters that are part of its weights already."""

    name: str
    model: Any
    tokenizer: Any
    embedded: str | None
    merged: tuple[Adapter, ...] = ()


@contextmanager
def quiet() -> Iterator[None]:
    """Bars and warnings of transformers off: what a run says, it says by its own progress."""
    import datasets
    from transformers.utils import logging as theirs

    level, shown = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity_error()
    theirs.disable_progress_bar()
    drawn = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    loud = logging.getLogger("accelerate").level
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        theirs.set_verbosity(level)
        logging.getLogger("accelerate").setLevel(loud)
        if shown:
            theirs.enable_progress_bar()
        if not drawn:
            datasets.enable_progress_bars()


@contextmanager
def lean_head() -> Iterator[None]:
    """On a CPU: logits of the completions alone. TRL's fused head leaves prompts out on GPUs only; elsewhere it works out all of the
    vocabulary at every position, which took more than half of a step of SmolLM2-135M. The numbers are the same."""
    import torch
    from trl.trainer import utils

    before = utils._use_triton
    if not torch.cuda.is_available():
        utils._use_triton = lambda device: True  # there it only says whether masked positions are scored
    try:
        yield
    finally:
        utils._use_triton = before


def load_policy(name: str) -> Policy:
    """The model by name: an embedded one with its adapters merged in order, or one of the hub or a folder, in bfloat16 on a GPU.

    Raises:
        MissingExtra: torch, transformers or peft is not installed.
        ModelError: it cannot be loaded.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise MissingExtra(str(error.name), "train") from error
    if name.startswith("embedded:"):
        raise ModelError(f"{name!r} can be run and judged with, not trained: train embedded/NAME, a model of the hub, or a folder of weights")
    embedded, adapters, source = None, tuple[Adapter, ...](), name
    if name.startswith("embedded/"):
        embedded, adapters = with_adapters(name)
        source = str(_unpacked(embedded))
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(source)
            half = embedded is None and torch.cuda.is_available() and fast_bf16()  # LoRA's own weights stay in 32 bits
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16 if half else torch.float32)
    except (OSError, ValueError) as error:
        raise ModelError(f"{name!r} cannot be loaded to be trained: {str(error).partition(chr(10))[0]}") from error
    with quiet():
        for adapter in adapters:
            model = _merged(model, adapter.path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return Policy(name, model, tokenizer, embedded, adapters)


def lora_of(rank: int) -> Any:
    """LoRA on all linear layers."""
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")


def _merged(model: Any, path: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(path)).merge_and_unload()


def _unpacked(name: str) -> Path:
    """The folder with an embedded model's weights as torch reads them, unpacked from GGUF the first time (a quarter of a minute)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = find_model(name)
    target = model_home() / f"{name}-{spec(name).sha256[:12]}-torch-2"  # 2: with the split into digits
    if target.is_dir():
        return target
    model_home().mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if target.is_dir():
            return target
        if shutil.disk_usage(target.parent).free < 8 * source.stat().st_size:
            raise ModelError(f"{target.parent} has too little room: {8 * source.stat().st_size / 1e6:.0f} MB are needed to unpack {name}")
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unpacked-") as scratch, quiet():
            ready = Path(scratch) / "model"
            tokenizer = _split_as_llama_cpp(AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name), source)
            model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
            if (quantizer := getattr(model, "hf_quantizer", None)) is not None:
                quantizer.remove_quantization_config(model)
            model.save_pretrained(ready)
            tokenizer.save_pretrained(ready)
            os.rename(ready, target)
    return target


def _split_as_llama_cpp(tokenizer: Any, source: Path) -> Any:
    """With digits split off before words are, where the GGUF says so: transformers forgets it, and two blanks before a digit, which
    llama.cpp has as one token, became two."""
    import gguf
    from tokenizers import pre_tokenizers

    if gguf.GGUFReader(str(source)).get_field("tokenizer.ggml.pre").contents() == "smollm":
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    return tokenizer


def fast_bf16() -> bool:
    """Whether this machine multiplies in bfloat16 natively: a GPU, or a CPU with AVX-512 BF16 or AMX (1.6 times the steps of SmolLM2-135M)."""
    import torch

    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported())
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def tokenizer_sha(tokenizer: Any) -> str:
    """What makes two tokenizers the same: the sha256 of their vocabulary in order of its ids."""
    words: Sequence[tuple[str, int]] = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256("\0".join(f"{at}\1{word}" for word, at in words).encode("utf-8", "replace")).hexdigest()
