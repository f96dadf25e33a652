"""A random model of two layers for llama.cpp, a hundredth of the embedded model's work for each token.

It writes nonsense. Whatever holds for any model is tried with it: grammars, token ids, log-probabilities, training.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from assay.models.registry import EMBEDDED, EmbeddedModel

WIDTH, LAYERS, HEADS = 64, 2, 2
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # of the shipped model's chat template
_NORMAL, _CONTROL = 1, 3  # llama.cpp's types of tokens


def small_model(folder: Path) -> EmbeddedModel:
    """Writes the model and its tokenizer as `small.gguf`; its entry for `EMBEDDED`."""
    import gguf
    import numpy as np

    shipped, path = EMBEDDED["smollm2-135m"], folder / "small.gguf"
    vocabulary, merges = _tokenizer()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name(str(folder))  # a hash of its own, by which unpacked weights are cached
    writer.add_context_length(shipped.context)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary))
    writer.add_file_type(0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types([_CONTROL if token in _SPECIAL else _NORMAL for token in vocabulary])
    writer.add_token_merges(merges)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(shipped.chat_template)
    generator = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (len(vocabulary), WIDTH),
        "output": (len(vocabulary), WIDTH),
        "output_norm": (WIDTH,),
    }
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": (WIDTH,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{layer}.attn_{name}": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")}
        shapes |= {f"blk.{layer}.ffn_{name}": (2 * WIDTH, WIDTH) for name in ("gate", "up")}
        shapes[f"blk.{layer}.ffn_down"] = (WIDTH, 2 * WIDTH)
    for name, shape in shapes.items():
        weights = generator.normal(0.0, 0.1, shape) if len(shape) == 2 else np.ones(shape)
        # The first number of a state is the same for all tokens. Through it, no answer has a part of a character:
        # llama.cpp reports only the last token of a character that takes several, so that the ids would be unknown.
        if name == "token_embd":
            weights[:, 0] = 1.0
        elif name == "output":
            weights[:, 0] = [0.0 if token.replace("Ġ", "").isascii() else -9.0 for token in vocabulary]
        elif name.endswith(("attn_output", "ffn_down")):
            weights[0] = 0.0
        writer.add_tensor(f"{name}.weight", weights.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = path.read_bytes()
    words = "\0".join(f"{token}\1{word}" for token, word in enumerate(vocabulary))
    return replace(
        shipped,
        name="small",
        file=str(path),
        sha256=hashlib.sha256(content).hexdigest(),
        tokenizer_sha256=hashlib.sha256(words.encode()).hexdigest(),
        size=len(content),
        hub_repo="",
        base_repo="",
    )


def _tokenizer() -> tuple[list[str], list[str]]:
    """Tokens in their order and merges of a byte-level vocabulary of the licence's words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=_SPECIAL[0]))
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    trainer = trainers.BpeTrainer(
        vocab_size=2048, special_tokens=list(_SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")  # which no edit of the project changes
    tokenizer.train_from_iterator([text], trainer)
    state = json.loads(tokenizer.to_str())["model"]
    return sorted(state["vocab"], key=state["vocab"].__getitem__), [" ".join(pair) for pair in state["merges"]]
