"""What a layer of the delta rule costs, for plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_blackmamba.costs import FP32, Sizes
from megatron_blackmamba.layers.cost import Cost
from megatron_blackmamba.layers.delta.kind import by_channel, in_proj, rank, sizes

if TYPE_CHECKING:
    from megatron_blackmamba.settings import ModelConfig


class DeltaCost(Cost):
    elementwise = frozenset({"convolution", "delta_systems"})

    def flops(self, model: ModelConfig, sequence: int) -> dict[str, int]:
        """Count the products of the chunkwise form; a triangular system counts as half of a product."""
        from megatron_blackmamba.ops.delta.chunked import CHUNK

        D, (H, G, K, V), C = model.hidden_size, sizes(model), min(CHUNK, sequence)
        met = 2 * (C - 1) * K if by_channel(model) else 4 * C * K
        decays = 2 * rank(model) * H * K if by_channel(model) else 0
        return {
            "delta_projections": 2 * D * in_proj(model).shape[0] + decays + 2 * H * V * D,
            "convolution": 2 * model.conv_kernel * (2 * G * K + H * V),
            "delta": H * (met + 2 * C * V + 6 * K * V),
            "delta_systems": H * C * (K + V),
        }

    def kept(self, at: Sizes) -> int:
        """Return the bytes saved for the backward pass.

        Saved are in_proj's input and output, and out_proj's input. In fp32 are convolved q, k and v, lengths of keys,
        gates, decays before and behind softplus and as the rule reads them, all else that it reads, and outputs: of the
        rule, normalised, with the norm's weight, and the gate. Context parallelism adds the last inputs of the part
        before, the state at the start, and the matrices of all parts.
        """
        delta = at.model.delta
        H, G, K, V = sizes(at.model)
        rows, decays = in_proj(at.model).rows, H * K if by_channel(at.model) else H
        gates, qkv = sum(rows["erase"]) + sum(rows.get("write", (0,))), 2 * G * K + H * V
        doubled = sum(rows["erase"]) * delta.negative_eigenvalues
        low, wide = rank(at.model) if by_channel(at.model) else 0, max(at.width, FP32)
        numbers = qkv + 2 * G + gates + doubled + 3 * decays + 3 * H * K + 5 * H * V + H
        if at.width < wide:
            numbers += H * V  # z
        each = at.whole * (at.width * (in_proj(at.model).shape[0] + H * V) + wide * numbers)
        each += FP32 * (at.model.conv_kernel + 1) * qkv
        if at.context > 1:
            states = wide * H * K * (V + at.context * K)
            each += at.sequences * (at.width * (at.model.conv_kernel - 1) * qkv + states)
        return at.width * (at.here * at.model.hidden_size + at.whole * low) + each // at.tensor

    def working(self, at: Sizes) -> int:
        """Return the gradients of what it keeps, and what autograd keeps of a segment of the chunkwise form."""
        from megatron_blackmamba.ops.delta.chunked import CHUNK, NUMBERS

        H, _, K, V = sizes(at.model)
        length = at.sequence // at.context
        batch, heads = at.whole // length, H // at.tensor
        tokens = min(length, CHUNK * max(1, NUMBERS[at.device] // (batch * heads * K * CHUNK)))
        levels = CHUNK.bit_length() - 1 if by_channel(at.model) else 1
        numbers = 4 * levels * K + 8 * CHUNK + 8 * (K + V) + 2 * K * V // CHUNK
        return self.kept(at) + max(at.width, FP32) * batch * tokens * heads * numbers

    def traffic(self, at: Sizes, passes: int) -> dict[str, float]:
        """Return the traffic: the stream as in Mamba-2, and for each sequence a state and the matrices that map it."""
        H, G, K, V = sizes(at.model)
        wide = max(at.width, FP32)
        window = at.width * (at.model.conv_kernel - 1) * (2 * G * K + H * V)
        passed_on = passes * (window + wide * H * K * V) + (passes - 1) * wide * H * K * K
        decays = passes * at.whole * at.width * rank(at.model) if by_channel(at.model) else 0
        return {
            "tensor": (2 * passes + 1) * at.stream + decays,
            "context": at.context * at.sequences * passed_on / at.tensor,
        }
