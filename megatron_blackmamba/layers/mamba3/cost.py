"""What a layer of Mamba-3 costs, for plans."""

from megatron_blackmamba.costs import FP32, Sizes, Work
from megatron_blackmamba.layers.cost import Cost
from megatron_blackmamba.layers.mamba3.kind import angles, in_proj, sizes
from megatron_blackmamba.settings import ModelConfig


class Mamba3Cost(Cost):
    elementwise = frozenset({"rotations"})

    def flops(self, model: ModelConfig, sequence: int) -> dict[str, int]:
        """Count the scan's matrix products with the chunk length of `ops/ssd`, including the masked halves.

        B and C differ by head, so each head has products of its own between rows of B and C.
        """
        from megatron_blackmamba.ops.ssd.chunked import CHUNK

        D, I, N, R = model.hidden_size, model.inner_size, model.mamba3.state_size, model.mamba3.rank
        H, chunk = I // model.mamba3.head_dim, max(1, CHUNK // R)
        whole, rest = divmod(sequence, chunk)
        pairs = R * R * (whole * chunk**2 + rest**2) / sequence  # of rows, for each token
        return {
            "mamba3_projections": 2 * D * in_proj(model).shape[0] + 2 * I * D,
            "rotations": 2 * 6 * R * H * angles(model),
            "ssd": round(2 * pairs * (H * N + I)) + 4 * R * I * N,
        }

    def kept(self, at: Sizes) -> int:
        """Return the bytes saved for the backward pass.

        The projections save in_proj's input and output. The norms save B and C, and their results. `Rates.of` saves
        nine numbers of a head, and the angles twice. The gate saves the scan's output, both factors and their product;
        with several outputs, for each of them in fp32, and z too. Context parallelism adds the state at the start and
        the decays of all parts.
        """
        (I, RGN, H, S), R = sizes(at.model), at.model.mamba3.rank
        width, wide = at.width, max(at.width, FP32)
        copies = 1 if width == wide else 2  # a norm keeps its input in fp32
        each = width * (in_proj(at.model).shape[0] + (1 + R) * I + 2 * RGN)
        each += width * I if R == 1 else wide * (3 * R + copies - 1) * I
        each += wide * (9 * H + 2 * S + H * S + copies * 2 * RGN + 2 * R * at.model.mamba3.groups)
        if at.model.mamba3.output_norm and R == 1:  # in one operation with the gate, which keeps its inputs
            each += wide * H - width * I
        elif at.model.mamba3.output_norm:
            each += R * (width * I + wide * (copies * I + H))
        start = FP32 * (I * at.model.mamba3.state_size + at.context * H) if at.context > 1 else 0
        return at.here * width * at.model.hidden_size + (at.whole * each + at.sequences * start) // at.tensor

    def working(self, at: Sizes) -> int:
        """Return the gradients of what it keeps, or the memory of the scan, in which each head has its own B and C."""
        from megatron_blackmamba.ops.ssd import costs

        I, _, H, _ = (number // at.tensor for number in sizes(at.model))
        N, R = at.model.mamba3.state_size, at.model.mamba3.rank
        return max(self.kept(at), costs.working(at, I, H, H * N, N, R))

    def work(self, at: Sizes) -> tuple[list[Work], list[Work]]:
        """Count the projections, and how often PyTorch's operations between them read and write."""
        from megatron_blackmamba.ops.ssd import costs

        D, (I, _, H, S), N = at.model.hidden_size, sizes(at.model), at.model.mamba3.state_size
        projections = [
            Work(at.width * at.whole * (D + size // at.tensor), 2 * D * size * at.whole // at.tensor)
            for size in (in_proj(at.model).shape[0], I)
        ]
        there, back = costs.passes(at, I // at.tensor, H // at.tensor, N, S, at.model.mamba3.rank)
        return [*projections, there], [*projections, *projections, back]

    def traffic(self, at: Sizes, passes: int) -> dict[str, float]:
        """Return the traffic: the stream as in Mamba-2, and for each sequence the state, decays and sums of angles."""
        I, _, H, S = sizes(at.model)
        wide = max(at.width, FP32)
        passed_on = passes * wide * (I * at.model.mamba3.state_size + H + 2 * H * S) + (passes - 1) * wide * H
        angle_rows = passes * at.whole * at.width * S
        return {
            "tensor": (2 * passes + 1) * at.stream + angle_rows,
            "context": at.context * at.sequences * passed_on / at.tensor,
        }
