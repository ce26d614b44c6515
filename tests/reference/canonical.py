"""The tiny reference models in the canonical form, and a tokenizer of their size."""

from pathlib import Path
from typing import Any

from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.interchange.canonical import Canonical, in_memory
from megatron_blackmamba.settings import AttentionConfig, DeltaConfig, Mamba2Config, Mamba3Config, RouterConfig
from tests.reference.checkpoint import Tiny

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:;?!'-Ġ"


def config_of(model: Tiny) -> ModelConfig:
    given = model.config
    return ModelConfig(
        pattern="".join(
            {"r": "M", "mamba2": "S", "mamba3": "R", "delta": "G", "attention": "*", "mlp": "-"}.get(kind, "E")
            for kind in given["mamba_moe_layers"]
        ),
        vocab_size=given["vocab_size"],
        hidden_size=given["hidden_size"],
        state_size=given["state_size"],
        experts=next((int(kind) for kind in given["mamba_moe_layers"] if kind.isdecimal()), 1),
        top_k=given.get("num_experts_per_tok", 1),
        router=RouterConfig(
            kind=given.get("router_kind", "sinkhorn"),
            bias=given.get("router_bias", True),
            scale=given.get("router_scale", 1.0),
            normalize=given.get("router_kind") == "softmax" and given.get("router_normalized", False),
        ),
        shared_expert_hidden_size=given.get("shared_expert_hidden_size"),
        latent_size=given.get("latent_size"),
        arrangement=given.get("arrangement", "sequential"),
        mlp_hidden_size=given.get("mlp_hidden_size"),
        attention=AttentionConfig(
            heads=given.get("num_attention_heads", 16),
            kv_heads=given.get("num_key_value_heads"),
            rotary_base=given.get("rope_theta", 10000),
            qk_norm=given.get("qk_norm", False),
            head_dim=given.get("head_dim"),
            rotary=given.get("rotary", True),
            across_documents=given.get("attention_across_documents", False),
        ),
        mamba2=Mamba2Config(
            **{name[7:]: given[name] for name in given if name.startswith("mamba2_")},
        ),
        mamba3=Mamba3Config(
            **{name[7:]: given[name] for name in given if name.startswith("mamba3_")},
        ),
        delta=DeltaConfig(
            **{name[6:]: given[name] for name in given if name.startswith("delta_")},
        ),
        expert_hidden_size=given["ffn_hidden_size"],
        activation=given["activation"],
        gated=given.get("gated", True),
        final_norm=given.get("final_norm", "layer"),
        tie_embeddings=given.get("tie_word_embeddings", True),
        eod_reset=given["eod_reset"],
        mamba_norms=given.get("mamba_norms", False),
        logit_softcap=given.get("logit_softcap"),
        multipliers={
            "embedding": given.get("embedding_multiplier", 1.0),
            "residual": given.get("residual_multiplier", 1.0),
            "attention": given.get("attention_multiplier"),
            "logits": given.get("logits_scaling", 1.0),
        },  # type: ignore[arg-type]
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
