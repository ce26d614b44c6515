"""What a layer of the delta rule costs, for plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_blackmamba.costs import FP32, Sizes
from megatron_blackmamba.layers.cost import Cost
from megatron_blackmamba.layers.delta.kind import by_channel, in_proj, rank, sizes

if TYPE_CHECKING:
    from megatron_blackmamba.settings import ModelConfig


class DeltaCost(Cost):
    elementwise = frozenset({"convolution"})

    def flops(self, model: ModelConfig, sequence: int) -> dict[str, int]:
        """Count the products of the chunkwise form, and the triangular systems as if they were half of a product."""
        from megatron_blackmamba.ops.delta.chunked import CHUNK

        D, (H, G, K, V), C = model.hidden_size, sizes(model), min(CHUNK, sequence)
        met = 2 * C * K if by_channel(model) else 4 * C * K
        decays = 2 * rank(model) * H * K if by_channel(model) else 0
        return {
            "delta_projections": 2 * D * in_proj(model).shape[0] + decays + 2 * H * V * D,
            "convolution": 2 * model.conv_kernel * (2 * G * K + H * V),
            "delta": H * (met + C * (K + V) + 2 * C * V + 6 * K * V),
        }

    def kept(self, at: Sizes) -> int:
        """Return the bytes saved for the backward pass: in_proj's input and output, and all that the rule reads.

        In fp32 are convolved and unit keys, gates, decays, and outputs before and behind the norm.
        """
        H, G, K, V = sizes(at.model)
        projected, decays = in_proj(at.model).shape[0], H * K if by_channel(at.model) else H
        gates = sum(in_proj(at.model).rows["erase"])
        wide = max(at.width, FP32)
        numbers = 4 * G * K + 6 * H * K + 6 * H * V + 3 * gates + 4 * decays
        each = at.whole * (at.width * (projected + 2 * G * K + 2 * H * V) + wide * numbers)
        return at.here * at.width * at.model.hidden_size + each // at.tensor

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
