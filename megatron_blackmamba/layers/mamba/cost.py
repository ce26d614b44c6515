"""What a layer of Mamba-1 costs, for plans."""

from megatron_blackmamba.costs import FP32, SMALL_KERNELS, Sizes, Work, kept_by_norms
from megatron_blackmamba.layers.cost import Cost
from megatron_blackmamba.layers.mamba.kind import sizes
from megatron_blackmamba.layers.recurrent import NORMS
from megatron_blackmamba.settings import ModelConfig


class MambaCost(Cost):
    elementwise = frozenset({"convolution", "scan"})

    def flops(self, model: ModelConfig, sequence: int) -> dict[str, int]:
        D, I, N, K, R = sizes(model)
        return {
            "mamba_projections": 2 * (2 * D * I + I * (R + 2 * N) + R * I + I * D),
            "convolution": 2 * K * I,
            "scan": I * (7 * N + 4),
        }

    def kept(self, at: Sizes) -> int:
        """Return the bytes saved for the backward pass.

        They are in_proj's input, x before and after the convolution, delta, z, y, dt, B and C, and the scan's states
        between chunks. B and C are also saved in fp32. On GPUs, states of every few tokens and y before the gate may be
        kept instead of the states between chunks. A is saved twice, and so is a copy of the convolution's weights.
        Norms keep dt, B and C as they were, in fp32, and a number for each of the three.
        """
        from megatron_blackmamba.ops.selective_scan import costs

        D, inner, N, K, R = sizes(at.model)
        I = inner // at.tensor
        channels = at.width * 5 * I + costs.kept(at, I, N)
        shared = at.width * (R + 2 * N) + FP32 * 2 * N
        if at.model.mamba_norms:
            shared += kept_by_norms(at, R + 2 * N) + FP32 * len(NORMS)
        weights = FP32 * I * (2 * N + K + 1)
        return int(at.here * at.width * D + at.whole * (channels + shared)) + weights + self._kept_of_parts(at)

    def _kept_of_parts(self, at: Sizes) -> int:
        """Return the bytes that context parallelism adds for each sequence.

        They are the last inputs of the part before, the state at the start, and the decays of all parts.
        """
        _, inner, N, K, _ = sizes(at.model)
        cells = at.sequences * inner // at.tensor
        return cells * (at.width * (K - 1) + FP32 * N * (1 + at.context)) if at.context > 1 else 0

    def traffic(self, at: Sizes, passes: int) -> dict[str, float]:
        """Return the traffic: the stream is gathered, scattered, and gathered again for the weight gradient.

        In addition, dt, B and C are summed.
        """
        shared = at.whole * (at.model.dt_rank_or_default + 2 * at.model.state_size) * at.width
        return {"tensor": (2 * passes + 1) * at.stream + passes * 2 * shared, "context": self._passed_on(at, passes)}

    def _passed_on(self, at: Sizes, passes: int) -> float:
        """Return the traffic of the context group.

        For each sequence, every rank gathers the last inputs of the convolution, the state and, except in the backward
        pass, its decay.
        """
        _, inner, N, K, _ = sizes(at.model)
        I, sequences = inner // at.tensor, at.sequences
        width = max(at.width, FP32)
        return at.context * sequences * I * (passes * (at.width * (K - 1) + width * N) + (passes - 1) * width * N)

    def work(self, at: Sizes) -> tuple[list[Work], list[Work]]:
        """Count projections, convolution and scan as the Triton kernels do them; `one` is a number for each channel."""
        from megatron_blackmamba.ops.selective_scan import costs

        D, inner, N, _, R = sizes(at.model)
        cells = at.whole * inner // at.tensor
        one = at.width * cells
        rows = at.width * at.whole
        projections = [
            Work(rows * D + 2 * one, 4 * D * cells),
            Work(rows * (R + 2 * N) + one, 2 * (R + 2 * N) * cells),
            Work(rows * R + one, 2 * R * cells),
            Work(rows * D + one, 2 * D * cells),
        ]
        forward, backward = costs.work(at, inner // at.tensor, N)
        forward, backward = [Work(2 * one), *forward], [*backward, Work(4 * one)]  # with the convolution
        small = [Work(launches=kernels) for kernels in SMALL_KERNELS]
        return [*projections, *forward, small[0]], [*projections, *projections, *backward, small[1]]

    def paper_flops(self, model: ModelConfig, tokens: int) -> tuple[float, float] | None:
        D, I, N, K, R = sizes(model)
        state_space = I * (11 * N + 4 * R + 1) + I * N / tokens
        return state_space, 6 * I * D + 2 * I * K + state_space
