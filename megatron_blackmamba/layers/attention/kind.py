"""Causal self-attention, with rotary positions as in the paper's transformer baselines or without any.

Shapes: B batch, L new tokens, S all tokens so far, D model, H heads, G key-value heads, C channels of a head,
Q = (H + 2G) C.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from megatron_blackmamba.costs import FP32, Sizes, Work, kept_by_norms
from megatron_blackmamba.layers.base import Decoding, Division, Inputs, LayerKind, Runner
from megatron_blackmamba.layers.rows import Weight, by_columns, by_rows, whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_blackmamba.settings import ModelConfig


QK_NORMS = ("q_layernorm.weight", "k_layernorm.weight")
"""With model.attention.qk_norm: one weight for a channel of a head, which all heads share."""


class Attention(LayerKind):
    letter, name = "*", "attention"
    keys = ("attention", "multipliers.attention", "mup.base_heads")
    block = "megatron_blackmamba.model.specs:attention_block"
    rotary = True
    cut = None
    widens = True
    writes_to_residual = ("linear_proj.weight",)
    entry = '"attention"'

    def problems(self, model: ModelConfig) -> list[str]:
        width, heads, groups = model.hidden_size, model.attention.heads, kv_heads(model)
        found, given, odd = [], model.attention.head_dim, self.rotates(model) and head_dim(model) % 2
        if given is None and width % heads:
            found.append(
                f"model.hidden_size={width} is not divisible by model.attention.heads={heads}: set"
                " model.attention.head_dim"
            )
        elif given is not None and odd:
            found.append(f"model.attention.head_dim={given}: rotary positions need an even number")
        elif odd:
            found.append(
                f"model.attention.heads={heads} leaves {width // heads} channels a head of model.hidden_size={width}:"
                " rotary positions need an even number"
            )
        if heads % groups:
            found.append(f"model.attention.heads={heads} is not divisible by model.attention.kv_heads={groups}")
        return found

    def rotates(self, model: ModelConfig) -> bool:
        return model.attention.rotary

    def megatron(self, model: ModelConfig) -> dict[str, Any]:
        return {
            "num_attention_heads": model.attention.heads,
            "kv_channels": head_dim(model),
            "num_query_groups": model.attention.kv_heads,
            "qk_layernorm": model.attention.qk_norm,  # 0.19 refuses norms in the spec without it
        }

    def divisions(self, model: ModelConfig) -> list[Division]:
        return [
            Division("model.attention.heads", model.attention.heads, "tensor"),
            Division("model.attention.kv_heads", kv_heads(model), "tensor"),
        ]

    def parts(self, model: ModelConfig) -> dict[str, Fraction]:
        return {"attention": Fraction(1)}

    def part_of(self, parameter: str) -> str:
        return "attention"

    def weights(self, model: ModelConfig) -> dict[str, Weight]:
        D, C, groups, queries = model.hidden_size, head_dim(model), kv_heads(model), _queries(model)
        return {
            "linear_qkv.weight": replace(by_rows(D, q=queries // groups, k=C, v=C), groups=groups),
            "linear_proj.weight": by_columns(queries, out=D),
            **(dict.fromkeys(QK_NORMS, whole(channels=C)) if model.attention.qk_norm else {}),
        }

    def initial(self, name: str, shape: tuple[int, ...], model: ModelConfig, random: torch.Generator) -> Tensor | None:
        return None

    def flops(self, model: ModelConfig, sequence: int) -> dict[str, int]:
        D, queries = model.hidden_size, _queries(model)
        return {
            "attention_projections": 2 * D * (2 * queries + 2 * _key_values(model)),
            "attention_scores": 4 * queries * (sequence + 1) // 2,
        }

    def kept(self, at: Sizes) -> int:
        """Return the bytes saved for the backward pass.

        They are the input, the projected queries, keys and values, the rotated queries and keys, the output and its
        log-sums, and the tables of the rotation. Norms keep their inputs, queries and keys, and a number for each head.
        Context parallelism keeps the keys and values of whole sequences instead of a part's projections, as long as
        what attends is not these themselves.
        """
        model, heads = at.model, at.model.attention.heads
        D, KV, rotates = _queries(model) // at.tensor, _key_values(model) // at.tensor, self.rotates(model)
        kept = at.width * (3 if rotates else 2) * (D + KV) + FP32 * heads // at.tensor
        if at.context > 1:
            projections = 0 if rotates or model.attention.qk_norm else 2 * KV
            kept = at.width * (2 * D + 2 * at.context * KV + projections)
        if model.attention.qk_norm:
            normed = heads + kv_heads(model)
            kept += kept_by_norms(at, D * normed // heads) + FP32 * normed // at.tensor
        tables = 4 * at.width * at.sequence // at.context * head_dim(model) if rotates else 0
        return at.width * at.here * model.hidden_size + at.whole * kept + tables

    def traffic(self, at: Sizes, passes: int) -> dict[str, float]:
        """Return the traffic: the stream is gathered, scattered, and gathered again for the weight gradient.

        In each forward pass the ranks of a context group gather keys and values; backward they scatter the sums of
        their gradients.
        """
        joined = at.context * at.whole * at.width * 2 * _key_values(at.model) / at.tensor
        return {"tensor": (2 * passes + 1) * at.stream, "context": passes * joined}

    def work(self, at: Sizes) -> tuple[list[Work], list[Work]]:
        """Add what the last rank of a context group computes beyond the mean, as its queries see the most keys.

        Blocks of queries compute their scores again in the backward pass.
        """
        forward, backward = super().work(at)
        if at.context == 1:
            return forward, backward
        scores = self.flops(at.model, at.sequence)["attention_scores"] * at.here
        more = scores * (1 - 1 / at.context)
        return [*forward, Work(flops=more)], [*backward, Work(flops=2 * more), Work(flops=scores + more)]

    def exported(self, model: ModelConfig) -> str:
        return "attention"

    def imported(self, entry: str) -> dict[str, Any] | None:
        return {} if entry == "attention" else None

    def exported_fields(self, model: ModelConfig) -> dict[str, Any]:
        attention = model.attention
        return {
            "num_attention_heads": attention.heads,
            "num_key_value_heads": kv_heads(model),
            "head_dim": attention.head_dim,
            "rotary": attention.rotary,
            "rope_theta": attention.rotary_base,
            "attention_multiplier": model.attention_scale,
            "qk_norm": attention.qk_norm,
            "attention_across_documents": attention.across_documents,
        }

    def imported_fields(self, content: Mapping[str, Any]) -> dict[str, Any]:
        names = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "rotary_base": "rope_theta"}
        names |= {key: key for key in ("qk_norm", "head_dim", "rotary")}
        found = {ours: content[theirs] for ours, theirs in names.items() if theirs in content}
        return {"attention": {**found, "across_documents": content.get("attention_across_documents", True)}}

    def decoding(self, model: ModelConfig) -> Decoding:
        return AttentionDecoding(model.attention.across_documents)


def kv_heads(model: ModelConfig) -> int:
    """Return G."""
    return model.attention.kv_heads or model.attention.heads


def head_dim(model: ModelConfig) -> int:
    """Return C."""
    return model.attention.head_dim or model.hidden_size // model.attention.heads


def _queries(model: ModelConfig) -> int:
    """Return the width of the queries."""
    return head_dim(model) * model.attention.heads


def _key_values(model: ModelConfig) -> int:
    """Return the width of the keys, and of the values."""
    return head_dim(model) * kv_heads(model)


@dataclass(frozen=True)
class AttentionLayer:
    """The weights of one layer. For each group of heads the rows of qkv are its queries, one key and one value."""

    linear_qkv: Tensor
    linear_proj: Tensor
    norms_2C: Tensor
    """Of queries and keys; empty without model.attention.qk_norm."""


class AttentionDecoding(Decoding):
    """The memory is the rotated keys and the values `[B, G, S, C]`, and which of the S tokens are hidden `[B, S]`.

    Padding is, and after the end of a document all tokens so far, unless attention is `across` documents.
    """

    grows = True

    def __init__(self, across: bool) -> None:
        self.across = across

    def pack(self, get: Any, model: ModelConfig, dtype: torch.dtype, device: Any) -> AttentionLayer:
        import torch

        norms = [get(name) for name in QK_NORMS] if model.attention.qk_norm else []
        norms_2C = torch.stack(norms) if norms else torch.empty(0, device=device)
        return AttentionLayer(get("linear_qkv.weight", dtype), get("linear_proj.weight", dtype), norms_2C)

    def memory(self, model: ModelConfig, batch: int, dtype: torch.dtype, device: Any) -> list[Tensor]:
        import torch

        shape = (batch, kv_heads(model), 0, head_dim(model))
        k, v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        return [k, v, torch.zeros(batch, 0, dtype=torch.bool, device=device)]

    def restart(self, memory: list[Tensor], going_on_B: Tensor) -> None:
        if not self.across:
            memory[2] = memory[2] | ~going_on_B[:, None]

    def step(self, run: Runner, layer: AttentionLayer, memory: list[Tensor], x_BD: Tensor, inputs: Inputs) -> Tensor:
        qkv_B1Q = run.times(x_BD, layer.linear_qkv)[:, None]
        return run.times(_attend(run.config, layer, memory, qkv_B1Q, None, None)[:, 0].float(), layer.linear_proj)

    def read(self, run: Runner, layer: AttentionLayer, memory: list[Tensor], x_BLD: Tensor, inputs: Inputs) -> Tensor:
        from megatron_blackmamba.ops.matvec import product

        reset_BL = None if self.across else inputs.reset_BL
        y_BLD = _attend(run.config, layer, memory, product(x_BLD, layer.linear_qkv), inputs.keep_BL1, reset_BL)
        return product(y_BLD, layer.linear_proj)


def _attend(
    model: ModelConfig,
    layer: AttentionLayer,
    memory: list[Tensor],
    qkv_BLQ: Tensor,
    keep_BL1: Tensor | None,
    reset_BL: Tensor | None,
) -> Tensor:
    """Append keys and values to the memory and return `[B, L, D]`, what the queries find in it."""
    import torch
    import torch.nn.functional as F

    from megatron_blackmamba.ops.attention import attention, attention_after, documents_of

    keys, values, hidden_BS = memory
    B, L, _ = qkv_BLQ.shape
    heads, groups = model.attention.heads, kv_heads(model)
    of_groups = qkv_BLQ.view(B, L, groups, -1, head_dim(model)).permute(0, 2, 3, 1, 4)
    q, k, v = of_groups.split([heads // groups, 1, 1], dim=2)
    q, k, v = q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2)
    if model.attention.qk_norm:
        norms = layer.norms_2C
        q, k = (F.rms_norm(x.float(), w.shape, w, model.norm_eps) for x, w in zip((q, k), norms, strict=True))
    before = keys.shape[2]
    if model.attention.rotary:
        cos_LC, sin_LC = _rotation(model, before, L, q.device)
        q, k = (x.float() * cos_LC + _half_turned(x.float()) * sin_LC for x in (q, k))
    padding_BL = torch.zeros(B, L, dtype=torch.bool, device=q.device) if keep_BL1 is None else keep_BL1[..., 0] == 0
    memory[0] = keys = torch.cat([keys, k.to(keys.dtype)], dim=2)
    memory[1] = values = torch.cat([values, v.to(values.dtype)], dim=2)
    memory[2] = hidden_BS = torch.cat([hidden_BS, padding_BL], dim=1)
    q, scale = q.to(keys.dtype), model.attention_scale
    if before == 0 and keep_BL1 is None and reset_BL is None:
        y = attention(q, keys, values, scale=scale)
    else:
        documents = None if reset_BL is None else documents_of(reset_BL, before=before)
        y = attention_after(q, keys, values, hidden_BS, documents, scale)
        if documents is not None:  # of which the last goes on
            memory[2] = hidden_BS | (torch.arange(before + L, device=q.device) < documents.starts_BL[:, -1:])
    return y.transpose(1, 2).flatten(2)


def _rotation(model: ModelConfig, first: int, count: int, device: Any) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines `[L, C]` of the rotary embedding of positions from `first` on."""
    import torch

    C = head_dim(model)
    rates = model.attention.rotary_base ** (-torch.arange(0, C, 2, device=device).float() / C)
    angles_LC = torch.outer(torch.arange(first, first + count, device=device).float(), rates).repeat(1, 2)
    return angles_LC.cos(), angles_LC.sin()


def _half_turned(x: Tensor) -> Tensor:
    import torch

    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
