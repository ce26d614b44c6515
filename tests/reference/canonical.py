"""The tiny reference models in the canonical form, and a tokenizer of their size."""

from pathlib import Path
from typing import Any

from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.interchange.canonical import Canonical, in_memory
from tests.reference.checkpoint import Tiny

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:;?!'-Ġ"


def config_of(model: Tiny) -> ModelConfig:
    given = model.config
    return ModelConfig(
        pattern="".join("M" if kind == "r" else "E" for kind in given["mamba_moe_layers"]),
        vocab_size=given["vocab_size"],
        hidden_size=given["hidden_size"],
        state_size=given["state_size"],
        experts=next(int(kind) for kind in given["mamba_moe_layers"] if kind != "r"),
        expert_hidden_size=given["ffn_hidden_size"],
        activation=given["activation"],
        eod_reset=given["eod_reset"],
    )


def canonical(model: Tiny, **more: Any) -> Canonical:
    return in_memory(config_of(model), model.weights, **more)


def write_tokenizer(path: Path) -> Path:
    """Byte-level, 64 tokens: the end of document (0), and the letters that tests write with."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {"<|endoftext|>": 0} | {letter: i + 1 for i, letter in enumerate(LETTERS[:63])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))
    return path
