"""Attention to the tokens so far.

Shapes: B batch, L new tokens, S all tokens so far, D model, H heads, G key-value heads, C channels of a head,
Q = (H + 2G) C.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba.layers.attention.kind import QK_NORMS, head_dim, kv_heads
from megatron_blackmamba.layers.decoding import Decoding, Inputs, Runner
from megatron_blackmamba.ops.attention import attention, attention_after, documents_of
from megatron_blackmamba.ops.matvec import product
from megatron_blackmamba.settings import ModelConfig


class AttentionDecoding(Decoding):
    """The memory is the rotated keys and the values `[B, G, S, C]`, and which of the S tokens are hidden `[B, S]`.

    Padding is, and after the end of a document all tokens so far, unless attention is `across` documents.
    """

    grows = True

    def __init__(self, across: bool) -> None:
        self.across = across

    @classmethod
    def of(cls, model: ModelConfig) -> "AttentionDecoding":
        return cls(model.attention.across_documents)

    def pack(self, get: Any, model: ModelConfig, dtype: torch.dtype, device: Any) -> SimpleNamespace:
        """Return the weights. For each group of heads the rows of qkv are its queries, one key and one value."""
        norms_2C = torch.stack([get(name) for name in QK_NORMS]) if model.attention.qk_norm else None
        linears = {name: get(f"{name}.weight", dtype) for name in ("linear_qkv", "linear_proj")}
        return SimpleNamespace(**linears, norms_2C=norms_2C)

    def memory(self, model: ModelConfig, batch: int, dtype: torch.dtype, device: Any) -> list[Tensor]:
        shape = (batch, kv_heads(model), 0, head_dim(model))
        k, v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        return [k, v, torch.zeros(batch, 0, dtype=torch.bool, device=device)]

    def restart(self, memory: list[Tensor], going_on_B: Tensor) -> None:
        if not self.across:
            memory[2] = memory[2] | ~going_on_B[:, None]

    def step(self, run: Runner, layer: Any, memory: list[Tensor], x_BD: Tensor, inputs: Inputs) -> Tensor:
        qkv_B1Q = run.times(x_BD, layer.linear_qkv)[:, None]
        return run.times(_attend(run.config, layer, memory, qkv_B1Q, None, None)[:, 0].float(), layer.linear_proj)

    def read(self, run: Runner, layer: Any, memory: list[Tensor], x_BLD: Tensor, inputs: Inputs) -> Tensor:
        reset_BL = None if self.across else inputs.reset_BL
        y_BLD = _attend(run.config, layer, memory, product(x_BLD, layer.linear_qkv), inputs.keep_BL1, reset_BL)
        return product(y_BLD, layer.linear_proj)


def _attend(
    model: ModelConfig,
    layer: Any,
    memory: list[Tensor],
    qkv_BLQ: Tensor,
    keep_BL1: Tensor | None,
    reset_BL: Tensor | None,
) -> Tensor:
    """Append keys and values to the memory and return `[B, L, D]`, what the queries find in it."""
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
    C = head_dim(model)
    rates = model.attention.rotary_base ** (-torch.arange(0, C, 2, device=device).float() / C)
    angles_LC = torch.outer(torch.arange(first, first + count, device=device).float(), rates).repeat(1, 2)
    return angles_LC.cos(), angles_LC.sin()


def _half_turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
