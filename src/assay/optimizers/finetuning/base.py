"""Loads the model that is trained, in torch, and identifies its tokenizer. Needs the extra `train`."""

import hashlib
import logging
import os
import shutil
import socket
import tempfile
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from assay.errors import MissingExtra, ModelError, NoModelFile
from assay.models.lora import Adapter, with_adapters
from assay.models.registry import find_model, model_home, spec
from assay.support.scrubbing import error_text

# -- Whether the Hugging Face hub can be reached. Its client retries every file of a model for half a minute.


CONNECT_S = 30.0  # enough for five transmissions of the first packet: a slow network is not an absent one
PAUSE_S = 1.0  # before the second of two tries: a name server may answer late


def why_unreachable(source: str) -> str:
    """Reason why the hub, which has the model `source`, cannot be reached; empty if it can, or is not needed.

    It is not asked about folders, where it was turned off (`HF_HUB_OFFLINE`), or where a proxy is set, of which its
    client supports more kinds than this check. An error of any other kind than that of a connection, such as an
    unknown certificate or a status, is left to the client.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or Path(source).exists() or urllib.request.getproxies():
        return ""
    address = constants.ENDPOINT
    if not (reason := _failure(address)):
        return ""
    time.sleep(PAUSE_S)
    reason = _failure(address)
    return f"{address} cannot be reached ({reason})" if reason else ""


def _failure(address: str) -> str:
    """Why no connection can be made; empty if one can."""
    request = urllib.request.Request(address, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=CONNECT_S).close()
    except urllib.error.HTTPError as error:
        error.close()
    except urllib.error.URLError as error:  # before an answer; the time limit of an answer is a TimeoutError
        if isinstance(error.reason, socket.gaierror | ConnectionError | TimeoutError) or type(error.reason) is OSError:
            return error_text(error.reason)
    except (OSError, ValueError):
        pass
    return ""


# -- Base.


@dataclass
class Policy:
    """A causal language model with its tokenizer.

    Attributes:
        embedded: name of the embedded model whose weights these are; None for a model of the hub or a folder.
        merged: adapters that are already merged into the weights, in order.
    """

    name: str
    model: Any
    tokenizer: Any
    embedded: str | None
    merged: tuple[Adapter, ...] = ()


@contextmanager
def quiet() -> Iterator[None]:
    """Turns off bars and warnings of transformers and datasets: a run uses its own `Progress`."""
    import datasets
    from transformers.utils import logging as hf_logging

    level, bars_enabled = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.ERROR)
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    bars_disabled = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    accelerate_level = logging.getLogger("accelerate").level
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        hf_logging.set_verbosity(level)
        logging.getLogger("accelerate").setLevel(accelerate_level)
        if bars_enabled:
            hf_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        if not bars_disabled:
            datasets.enable_progress_bars()


@contextmanager
def lean_head() -> Iterator[None]:
    """On a CPU, computes logits for completion tokens only. The results are the same.

    TRL's fused head skips the prompts on GPUs only. Elsewhere it computes the whole vocabulary at every position, which
    took more than half of a step of SmolLM2-135M.
    """
    import torch
    from trl.trainer import utils

    before = utils._use_triton
    if not torch.cuda.is_available():
        # in TRL's CPU path this function decides only whether masked positions are scored
        utils._use_triton = lambda device: True
    try:
        yield
    finally:
        utils._use_triton = before


def check_trainable(name: str) -> None:
    """Checks that a model has weights that can be loaded, without loading them.

    Raises:
        MissingExtra: huggingface_hub, which transformers brings, is not installed.
        ModelError: it has none, or they are neither on this machine nor on the hub.
    """
    _check_kind(name)
    if name.startswith("embedded/") or Path(name).is_dir():
        return
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise MissingExtra(str(error.name), "train") from error
    unreachable = why_unreachable(name)
    try:
        hf_hub_download(name, "config.json", local_files_only=bool(unreachable))
    except (OSError, ValueError) as error:
        raise _not_loadable(name, unreachable, error) from error


def _check_kind(name: str) -> None:
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise NoModelFile(
            f"the folder {name!r} has no config.json, so it holds no model: name one with all its weights"
        )
    if name.startswith("embedded:"):
        raise ModelError(
            f"{name!r} can be run and judged with, not trained: train embedded/NAME, a model of the hub, "
            "or a folder of weights"
        )


def _not_loadable(name: str, unreachable: str, error: Exception) -> ModelError:
    if unreachable:
        return ModelError(
            f"{name!r} cannot be loaded for training: {unreachable}, and its cache does not have all files of the "
            "model. Connect to the network, or name a folder with its weights. A model that only a server has cannot "
            "be trained"
        )
    return ModelError(f"{name!r} cannot be loaded for training: {' '.join(str(error).split())[:300]}")


def load_policy(name: str) -> Policy:
    """Loads a model by name.

    An embedded model is loaded with the adapters in its name merged in order. A model of the hub or of a folder is
    loaded in bfloat16 on a GPU.

    Raises:
        MissingExtra: torch, transformers or peft is not installed.
        ModelError: it cannot be loaded, or it is of a kind that cannot be trained.
    """
    _check_kind(name)
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise MissingExtra(str(error.name), "train") from error
    embedded, adapters, source = None, tuple[Adapter, ...](), name
    if name.startswith("embedded/"):
        embedded, adapters = with_adapters(name)
        source = str(unpacked_weights(embedded))
    unreachable = why_unreachable(source)
    cached_only = bool(unreachable)
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=cached_only)
            # LoRA's own weights stay in 32 bits
            half = embedded is None and torch.cuda.is_available() and fast_bf16()
            model = AutoModelForCausalLM.from_pretrained(
                source, dtype=torch.bfloat16 if half else torch.float32, local_files_only=cached_only
            )
    except (OSError, ValueError) as error:
        raise _not_loadable(name, unreachable, error) from error
    with quiet():
        for adapter in adapters:
            model = _merged(model, adapter.path)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return Policy(name, model, tokenizer, embedded, adapters)


def lora_of(rank: int) -> Any:
    """LoRA configuration for all linear layers; alpha is twice the rank."""
    from peft import LoraConfig

    return LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")


def _merged(model: Any, path: Path) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(path)).merge_and_unload()


def unpacked_weights(name: str) -> Path:
    """Folder with an embedded model's weights in torch's format. The first call unpacks them from GGUF (15 s)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = find_model(name)
    target = model_home() / f"{name}-{spec(name).sha256[:12]}-torch-3"  # 3: version of `_as_in_llama_cpp`
    if target.is_dir():
        return target
    model_home().mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if target.is_dir():
            return target
        if shutil.disk_usage(target.parent).free < 8 * source.stat().st_size:
            raise ModelError(
                f"{target.parent} has too little free space: {8 * source.stat().st_size / 1e6:.0f} MB are needed to "
                f"unpack {name}. Free some, or set ASSAY_HOME to another folder"
            )
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unpacked-") as scratch, quiet():
            ready = Path(scratch) / "model"
            tokenizer = _as_in_llama_cpp(AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name), source)
            model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
            if (quantizer := getattr(model, "hf_quantizer", None)) is not None:
                quantizer.remove_quantization_config(model)
            model.save_pretrained(ready)
            tokenizer.save_pretrained(ready)
            os.rename(ready, target)
    return target


def _as_in_llama_cpp(tokenizer: Any, source: Path) -> Any:
    """The tokenizer with the special tokens of the GGUF, and digits split before words where it asks for that.

    transformers 5.17 took `<|im_start|>` for the end of SmolLM2's answers. It ignores the field for digits: two spaces
    before a digit, one token in llama.cpp, became two.
    """
    import gguf
    from tokenizers import pre_tokenizers

    reader = gguf.GGUFReader(str(source))
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (field := reader.get_field(f"tokenizer.ggml.{theirs}_token_id")) is not None:
            setattr(tokenizer, f"{ours}_token", tokenizer.convert_ids_to_tokens(int(field.contents())))
    pre = reader.get_field("tokenizer.ggml.pre")
    if pre is not None and pre.contents() == "smollm":
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), words]
        )
    return tokenizer


def fast_bf16() -> bool:
    """Whether bfloat16 is native here: a GPU that supports it, or a CPU with AVX-512 BF16 or AMX.

    On such a CPU, steps of SmolLM2-135M are 1.6 times as fast as in 32 bits.
    """
    import torch

    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported())
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def tokenizer_sha(tokenizer: Any) -> str:
    """Identity of a tokenizer: sha256 of its vocabulary in the order of the ids."""
    words: Sequence[tuple[str, int]] = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256("\0".join(f"{token}\1{word}" for word, token in words).encode("utf-8", "replace")).hexdigest()
