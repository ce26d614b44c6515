"""Measure the memory of training: real ranks of small models, for each shape, layout and precision.

The FLOPs of each kind of layer are counted beside it, by torch's counter.
"""

import contextlib
import json
import sys
from functools import partial
from unittest import mock

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from megatron_blackmamba import layers
from megatron_blackmamba.config import RunConfig, load
from megatron_blackmamba.ops.context import Chain
from megatron_blackmamba.runtime import world
from tests.runtime.ranks import fork_ranks, import_once

MAMBA2 = ["model.pattern=SES", "model.mamba2.head_dim=16", "model.mamba2.state_size=32", "model.mamba2.groups=2"]
MAMBA3 = ["model.pattern=RER", "model.mamba3.head_dim=16", "model.mamba3.state_size=32", "model.mamba3.groups=2"]
DELTA = ["model.pattern=GEG", "model.delta.head_dim=16", "model.delta.key_dim=32", "model.delta.key_heads=4"]
NORMS = ["model.mamba_norms=true", "model.attention.heads=4", "model.logit_softcap=30", "model.z_loss=0.01"]
PARALLEL = ["model.pattern=MEMEME", "model.arrangement=parallel"]
BIG_MLP = ["model.pattern=--", "model.hidden_size=256", "model.mlp_hidden_size=1024"]
NEMOTRON = [
    *('model.pattern="SE*E"', "model.mamba2.heads=6", "model.mamba2.head_dim=16", "model.mamba2.groups=2"),
    *("model.attention.heads=4", "model.attention.head_dim=24", "model.attention.rotary=false", "model.gated=false"),
    *("model.activation=relu2", "model.final_norm=rms", "model.tie_embeddings=false", "model.top_k=2"),
    *("model.router.kind=expert_bias", "model.router.scale=2.5", "model.router.bias=false"),
    *("model.expert_hidden_size=256", "model.shared_expert_hidden_size=160"),
]
HYBRID = [*MAMBA2, "model.pattern=S*SE", "model.attention.heads=4", "model.attention.kv_heads=2"]
FREE = ["model.attention.heads=4", "model.attention.kv_heads=4", "model.attention.rotary=false", "model.vocab_size=256"]
MANY_HEADS = [
    *("model.pattern=RRRR", "model.mamba3.head_dim=2", "model.mamba3.state_size=8", "model.mamba3.groups=4"),
    "model.vocab_size=256",
]
SHAPES = {
    "tiny": ["data.sequence_length=64"],
    "wide": ["model.pattern=MEMEE", "model.hidden_size=160", "model.expert_hidden_size=272", "model.vocab_size=768"],
    "deep": ["model.pattern=MMEMEM", "model.hidden_size=96", "model.experts=4", "training.precision=bf16"],
}
EP2, TP2 = ["parallel.expert=2"], ["parallel.tensor=2", "parallel.expert_tensor=2"]
CASES = {
    "tiny": (1, "tiny", []),
    "wide": (1, "wide", []),
    "wide_ep2": (2, "wide", EP2),
    "wide_tp2": (2, "wide", TP2),
    "deep_ep2": (2, "deep", EP2),
    "deep_tp2": (2, "deep", TP2),
    "tp2_ep2": (4, "wide", ["parallel.tensor=2", "parallel.expert=2"]),
    "cp2": (2, "wide", ["parallel.context=2"]),
    "layers": (1, "wide", ["training.recompute=layers"]),
    "experts": (1, "wide", ["training.recompute=experts"]),
    "whole_optimizer": (2, "wide", ["optimizer.distributed=false"]),
    "bf16_moments": (2, "deep", ["optimizer.moments=bf16"]),
    "bf16_gradients": (2, "deep", ["optimizer.gradients=bf16", "parallel.expert=2"]),
    "sgd": (2, "wide", ["optimizer.kind=sgd", "optimizer.distributed=false"]),
    "ema": (2, "deep", ["training.ema=0.99", "parallel.expert=2"]),
    "whole_ema": (1, "wide", ["training.ema=0.99", "optimizer.distributed=false"]),
    "float64": (2, "wide", ["training.precision=fp64"]),
    "parallel": (1, "wide", PARALLEL),
    "parallel_layers": (1, "wide", [*PARALLEL, "training.recompute=layers"]),
    "mamba2": (1, "tiny", MAMBA2),
    "mamba2_cp2": (2, "tiny", [*MAMBA2, "model.pattern=SS", "parallel.context=2"]),
    "mamba2_tp2": (2, "tiny", [*MAMBA2, "parallel.tensor=2", "training.precision=bf16"]),
    "mamba3": (1, "tiny", MAMBA3),
    "mamba3_cp2": (2, "tiny", [*MAMBA3, "model.pattern=RR", "parallel.context=2", "model.mamba3.output_norm=true"]),
    "mimo": (1, "tiny", [*MAMBA3, "model.mamba3.rank=3", "model.mamba3.output_norm=true"]),
    "mimo_tp2": (2, "tiny", [*MAMBA3, "model.mamba3.rank=2", "parallel.tensor=2", "training.precision=bf16"]),
    "mamba3_tp2": (2, "tiny", [*MAMBA3, "parallel.tensor=2", "training.precision=bf16"]),
    "delta": (1, "tiny", DELTA),
    "delta_cp2": (2, "tiny", [*DELTA, "model.pattern=GG", "parallel.context=2"]),
    "delta_kda": (1, "tiny", [*DELTA, "model.delta.variant=kda"]),
    "delta_gdn2_tp2": (
        2,
        "tiny",
        [*DELTA, "model.delta.variant=gdn2", "parallel.tensor=2", "training.precision=bf16"],
    ),
    "attention": (1, "tiny", ['model.pattern="*-*E"', "model.mlp_hidden_size=160", "model.attention.heads=4"]),
    "hybrid_cp2": (2, "tiny", [*HYBRID, "model.eod_reset=5", "parallel.context=2"]),
    "free_cp2": (2, "tiny", ['model.pattern="**"', *FREE, "parallel.context=2"]),
    "many_heads": (1, "tiny", [*MANY_HEADS, "model.mamba3.output_norm=false"]),
    "many_heads_mimo": (1, "tiny", [*MANY_HEADS, "model.mamba3.rank=2"]),
    "hybrid_crossed": (2, "tiny", [*HYBRID, "model.attention.qk_norm=true", "parallel.context=2"]),
    "hybrid_documents": (1, "tiny", [*HYBRID, "model.eod_reset=5", "training.precision=bf16"]),
    "norms": (1, "tiny", [*MAMBA2, *NORMS, 'model.pattern="MS*"', "model.attention.qk_norm=true"]),
    "norms_tp2": (2, "tiny", [*MAMBA2, *NORMS, "model.pattern=MS", "parallel.tensor=2", "training.precision=bf16"]),
    "ahead": (1, "tiny", ["model.mtp.pattern=ME"]),
    "ahead_tp2": (2, "wide", ["model.mtp.pattern=ME", "parallel.tensor=2", "training.precision=bf16"]),
    "mlp": (1, "tiny", BIG_MLP),
    "ungated": (1, "tiny", [*BIG_MLP, "model.gated=false", "model.activation=relu2"]),
    "relu2": (1, "tiny", [*BIG_MLP, "model.activation=relu2"]),
    "nemotron": (1, "tiny", NEMOTRON),
    "nemotron_tp2": (2, "tiny", [*NEMOTRON, "parallel.tensor=2", "model.gated=true"]),
    "mlp_tp2": (2, "tiny", [*BIG_MLP, "parallel.tensor=2"]),
}
ZAYA = ["model.router.kind=zaya", "model.router.hidden_size=96", "model.residual_scaling=true"]
TOP2 = ["model.top_k=2"]
SHARED = ["model.shared_expert_hidden_size=96"]
LATENT = ["model.latent_size=80", "model.top_k=4", "model.shared_expert_hidden_size=96"]
BIASED = [*TOP2, "model.router.kind=expert_bias"]
ROUTERS = {
    "top2": (1, "wide", TOP2),
    "shared_tp2": (2, "wide", [*SHARED, "parallel.tensor=2", "parallel.expert_tensor=2"]),
    "big_shared": (1, "wide", ["model.pattern=EE", "model.shared_expert_hidden_size=1024"]),
    "latent": (1, "wide", [*LATENT, "model.pattern=EEE"]),
    "latent_tp2": (2, "wide", [*LATENT, "parallel.tensor=2", "training.precision=bf16"]),
    "latent_ep2": (2, "deep", [*LATENT, "parallel.expert=2", "training.recompute=layers"]),
    "softmax": (1, "wide", [*TOP2, "model.router.kind=softmax"]),
    "zaya": (1, "wide", [*ZAYA, "model.pattern=EEE"]),
    "zaya_layers": (1, "wide", [*ZAYA, "model.pattern=EMEE", "training.recompute=layers"]),
    "zaya_tp2": (2, "deep", [*ZAYA, "model.router.hidden_size=16", "parallel.tensor=2"]),  # few fp32 copies of weights
    "expert_bias_ep2": (2, "deep", [*BIASED, "parallel.expert=2"]),
    "expert_choice_tp2": (2, "wide", [*TOP2, "model.router.kind=expert_choice", "parallel.tensor=2"]),
}
CASES |= ROUTERS
ONE_OF_EACH = {  # by letter, one layer in float64, where experts are plain products
    kind.letter: [
        *(f'model.pattern="{kind.letter}"', "training.precision=fp64", "data.sequence_length=64"),
        *("model.hidden_size=48", "model.mlp_hidden_size=56", "model.expert_hidden_size=40", "model.vocab_size=272"),
        *("model.attention.heads=4", "model.attention.kv_heads=2", "model.mamba2.head_dim=8", "model.mamba2.groups=2"),
        *("model.mamba3.head_dim=8", "model.mamba3.groups=2"),
        *("model.delta.head_dim=8", "model.delta.key_dim=12", "model.delta.key_heads=4"),
        "kernels.scan=reference",  # without matrix products
        *("model.router.kind=softmax", "model.top_k=2", "model.shared_expert_hidden_size=24"),
    ]
    for kind in layers.all_kinds()
}
COMMON = ["data.sequence_length=96", "training.micro_batch=2", "training.global_batch=8"]


def cases() -> dict[str, tuple[int, list[str]]]:
    """Name -> ranks and overrides of the tiny run."""
    return {name: (ranks, [*COMMON, *SHAPES[shape], *overrides]) for name, (ranks, shape, overrides) in CASES.items()}


def measure(overrides: list[str]) -> dict:
    """Bytes of distinct storages after one real step, and kept by one micro-batch for the backward pass."""
    from megatron_blackmamba.model import build
    from megatron_blackmamba.training.step.optimizer import make_trainable

    torch.set_num_threads(1)
    config = load("tiny", overrides)
    us = world.start(config.parallel)
    model = build(config, us)
    trainable = make_trainable(config, model, us)
    tokens = torch.randint(config.model.vocab_size, (2, config.data.sequence_length // config.parallel.context))
    trainable.reduced.zero_grad_buffer()
    kept = kept_for_backward(model, tokens)
    trainable.reduced(tokens, tokens).mean().backward()
    for group in trainable.reduced.bucket_groups + trainable.reduced.expert_parallel_bucket_groups:
        group.start_grad_sync()
        group.finish_grad_sync()
    trainable.optimizer.step()
    trainable.settle()
    answer = {
        "weights": _bytes(parameter.data for parameter in model.parameters()),
        "gradients": _bytes(buffer.grad_data for buffer in _buffers(trainable)),
        "optimizer": _optimizer_bytes(trainable, config),
        "expert_weights": sum(weight.nbytes for weight in model.parameters() if not getattr(weight, "allreduce", True)),
        "expert_gradients": _bytes(buffer.grad_data for buffer in trainable.reduced.expert_parallel_buffers),
        "kept": kept,
    }
    world.shutdown()
    return answer


def count_flops() -> dict[str, int]:
    """Return the FLOPs of the products that torch counts in one micro-batch, by the letter of the only layer."""
    from megatron_blackmamba.model import build

    counted = {}
    for letter, overrides in ONE_OF_EACH.items():
        config = load("tiny", overrides)
        model = build(config, world.start(config.parallel))
        tokens = torch.randint(config.model.vocab_size, (1, config.data.sequence_length))
        with torch.no_grad(), counted_attention(), FlopCounterMode(display=False) as counter:
            model(tokens, tokens)
        counted[letter] = counter.get_total_flops()
        world.shutdown()
    return counted


def counted_attention() -> contextlib.AbstractContextManager:
    """Replace the attention that torch counts as if every token saw all others."""
    return mock.patch.object(F, "scaled_dot_product_attention", causal_attention)


def causal_attention(q_BHSC, k_BGSC, v_BGSC, *, is_causal: bool, enable_gqa: bool, scale: None) -> torch.Tensor:
    """Attend token by token, to none that follows."""
    heads_per_group = q_BHSC.shape[1] // k_BGSC.shape[1]
    k_BHSC, v_BHSC = (x.repeat_interleave(heads_per_group, 1) for x in (k_BGSC, v_BGSC))
    rows = []
    for t, q_BH1C in enumerate(q_BHSC.split(1, 2)):
        scores = q_BH1C @ k_BHSC[:, :, : t + 1].transpose(2, 3) * q_BHSC.shape[3] ** -0.5
        rows.append(scores.softmax(-1) @ v_BHSC[:, :, : t + 1])
    assert is_causal and enable_gqa == (heads_per_group > 1)
    return torch.cat(rows, 2)


def kept_for_backward(model: torch.nn.Module, tokens: torch.Tensor) -> int:
    return _bytes(saved_for_backward(model, tokens))


def saved_for_backward(model: torch.nn.Module, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Return a tensor of each storage that torch keeps for the backward pass, weights aside."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            seen.setdefault(x.untyped_storage().data_ptr(), x)
        return x

    def start(chain: Chain, *summary: torch.Tensor) -> torch.Tensor:
        """Begin as a chain does, which keeps the decays of all parts itself."""
        found = begin(chain, *summary)
        pack(chain.decays_G)
        return found

    begin = Chain.start
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with hooks, mock.patch.object(Chain, "start", start):
        loss = model(tokens, tokens)
    del loss
    return list(seen.values())


def _buffers(trainable: object) -> list:
    return trainable.reduced.buffers + trainable.reduced.expert_parallel_buffers


def _optimizer_bytes(trainable: object, config: RunConfig) -> int:
    """Moments and fp32 copies: what the optimizer holds beside the weights and gradients."""
    tensors = []
    for part in getattr(trainable.optimizer, "chained_optimizers", [trainable.optimizer]):
        for state in part.optimizer.state.values():
            tensors += [x for x in state.values() if torch.is_tensor(x)]
        for groups in ("shard_fp32_from_float16_groups", "fp32_from_float16_groups"):
            tensors += [x for group in getattr(part, groups, []) for x in group if x is not None]
    if trainable.ema is not None:
        tensors += [shard.mean for shard in trainable.ema.shards]
    return _bytes(tensors)


def _bytes(tensors: object) -> int:
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def main(names: list[str]) -> None:
    import_once()
    found = {}
    for name, (ranks, overrides) in ((name, cases()[name]) for name in names):
        found[name] = fork_ranks(ranks, partial(measure, overrides))
    found["flops"] = fork_ranks(1, count_flops)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
