"""The cost of a layer of the delta rule, for plans."""

from megatron_blackmamba.costs import FP32, Sizes, Work
from megatron_blackmamba.layers.cost import Cost
from megatron_blackmamba.layers.delta.kind import by_channel, in_proj, rank, sizes
from megatron_blackmamba.settings import ModelConfig

OUTSIDE = (16, 44)
"""Passes of PyTorch's operations over keys and values around the kernels, forward and backward, as rehearsed."""


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

        Saved are in_proj's input and output, and out_proj's input. The rest is in fp32: convolved q, k and v, lengths
        of keys, gates, and decays before and behind softplus. All that the rule reads is saved, and four forms of its
        output: as it is, normalised, with the norm's weight, and the gate. Context parallelism adds the last inputs of
        the part before, the state at the start, and the matrices of all parts.
        """
        delta = at.model.delta
        H, G, K, V = sizes(at.model)
        rows, decays = in_proj(at.model).rows, H * K if by_channel(at.model) else H
        gates, qkv = sum(rows["erase"]) + sum(rows.get("write", (0,))), 2 * G * K + H * V
        gates_twice = 1 if delta.variant == "gdn2" else 2  # erase, and write where it is a tensor of its own
        doubled = gates_twice * sum(rows["erase"]) * delta.negative_eigenvalues
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
        """Return the gradients of what the rule reads, and what a segment keeps: the kernels, or autograd in PyTorch.

        Autograd's numbers of a head and token are fitted to rehearsals of four shapes, within 2% of the peak.
        """
        from megatron_blackmamba.ops.delta import costs
        from megatron_blackmamba.ops.delta.chunked import CHUNK, NUMBERS

        H, _, K, V = sizes(at.model)
        length = at.sequence // at.context
        batch, heads = at.whole // length, H // at.tensor
        tokens = min(length, CHUNK * max(1, NUMBERS[at.device] // (batch * heads * K * CHUNK)))
        channelwise = by_channel(at.model)
        D = K if channelwise else 1
        numbers = 9.2 * (K + V) + (19 * K if channelwise else 4.4 * CHUNK)
        if costs.in_triton(at, K):
            numbers = costs.numbers(K, V, D)
        gradients = at.whole * heads * (3 * K + V + D)
        return round(max(at.width, FP32) * (gradients + batch * tokens * heads * numbers))

    def work(self, at: Sizes) -> tuple[list[Work], list[Work]]:
        """Count projections, convolution, and the rule: the kernels, or passes over keys, values and pairs of tokens.

        The passes are fitted to rehearsals of four shapes; the backward pass repeats the forward pass of each segment.
        """
        from megatron_blackmamba.ops.delta import costs
        from megatron_blackmamba.ops.delta.chunked import CHUNK

        H, G, K, V = (number // at.tensor if place < 2 else number for place, number in enumerate(sizes(at.model)))
        D, rows = at.model.hidden_size, in_proj(at.model).shape[0] // at.tensor
        projections = [Work(at.width * at.whole * (D + size), 2 * D * size * at.whole) for size in (rows, H * V)]
        convolved, each = at.width * at.whole * (2 * G * K + H * V), max(at.width, FP32) * at.whole * H
        channelwise = by_channel(at.model)
        there = 54 * (K + V) + 8 * CHUNK + (107 * K if channelwise else 0)
        back = 149 * (K + V) + (23 if channelwise else 35) * CHUNK + (411 * K if channelwise else 0)
        ruled = [Work(each * there)], [Work(each * back)]
        if costs.in_triton(at, K):
            ruled = costs.work(at.whole * H, K, V, K if channelwise else 1)
            for way, passes in zip(ruled, OUTSIDE, strict=True):
                way.append(Work(each * passes * (K + V)))
        forward = [*projections, Work(2 * convolved), *ruled[0]]
        return forward, [*projections, *projections, Work(4 * convolved), *ruled[1]]

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
