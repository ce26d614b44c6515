"""What a layer of Mamba-2 costs, for plans."""

from megatron_blackmamba.costs import FP32, SMALL_KERNELS, Sizes, Work
from megatron_blackmamba.layers.cost import Cost
from megatron_blackmamba.layers.mamba2.kind import sizes
from megatron_blackmamba.settings import ModelConfig


class Mamba2Cost(Cost):
    elementwise = frozenset({"convolution"})

    def flops(self, model: ModelConfig, sequence: int) -> dict[str, int]:
        """Count the scan's matrix products with the chunk length of `ops/ssd`, including the masked halves.

        The product between the states of several chunks is left out: it depends on batch and device, and is
        about 1 % of the layer on a GPU.
        """
        from megatron_blackmamba.ops.ssd.chunked import CHUNK

        D, N, G = model.hidden_size, model.mamba2.state_size, model.mamba2.groups
        I, H, GN = sizes(model)
        whole, rest = divmod(sequence, CHUNK)
        pairs = (whole * CHUNK**2 + rest**2) / sequence  # a token meets in its chunk
        return {
            "mamba2_projections": 2 * D * (2 * I + 2 * GN + H) + 2 * I * D,
            "convolution": 2 * model.conv_kernel * (I + 2 * GN),
            "ssd": round(2 * pairs * (G * N + I)) + 4 * I * N,
        }

    def kept(self, at: Sizes) -> int:
        """Return the bytes saved for the backward pass.

        Saved are in_proj's input and output, x, B and C after the convolution, and the scan's output before and after
        the norm. One number per group of the norm, A, and a copy of the convolution's weights are saved too. Context
        parallelism adds the last inputs of the part before, the state at the start, and the decays of all parts.
        Norms of B and C keep these, their normalised values and results, and a number for each group.
        """
        I, H, GN = sizes(at.model)
        split = 2 * I + 2 * GN + H + (I + 2 * GN) + 2 * I
        each = at.whole * (at.width * split + FP32 * at.model.mamba2.groups) + 2 * FP32 * H
        each += FP32 * (at.model.conv_kernel + 1) * (I + 2 * GN)
        if at.model.mamba_norms:
            each += at.whole * max(at.width, FP32) * 2 * (2 * GN + at.model.mamba2.groups)
        if at.context > 1:
            states = FP32 * (I * at.model.mamba2.state_size + at.context * H)
            each += at.sequences * (at.width * (at.model.conv_kernel - 1) * (I + 2 * GN) + states)
        return at.here * at.width * at.model.hidden_size + each // at.tensor

    def working(self, at: Sizes) -> int:
        """Return the gradients of what it keeps, or the needs of the scan or of the gated norm."""
        from megatron_blackmamba.ops.ssd import costs

        I, H, GN = (number // at.tensor for number in sizes(at.model))
        N = at.model.mamba2.state_size
        if costs.in_triton(at, I // H, N):
            scan = costs.working_in_triton(at, I, H, GN // N, N)
        else:
            scan = costs.working(at, I, H, GN, N)
        each = 3 * at.width if at.device == "cuda" and at.width <= FP32 else at.width + 8 * max(FP32, at.width)
        return max(self.kept(at), scan, at.whole * I * each)

    def work(self, at: Sizes) -> tuple[list[Work], list[Work]]:
        """Count projections, convolution, scan and norm where the scan runs in Triton.

        The backward pass also joins the gradients of parts of in_proj's output, and of x, B and C.
        """
        from megatron_blackmamba.ops.ssd import costs

        I, H, GN = (number // at.tensor for number in sizes(at.model))
        D, N = at.model.hidden_size, at.model.mamba2.state_size
        if not costs.in_triton(at, I // H, N):
            return super().work(at)
        projections = [Work(at.width * at.whole * (D + X), 2 * D * X * at.whole) for X in (2 * I + 2 * GN + H, I)]
        convolved = at.width * at.whole * (I + 2 * GN)
        joined = 2 * convolved + 2 * at.width * at.whole * (2 * I + 2 * GN + H)
        norms = [Work(tensors * at.width * at.whole * I) for tensors in (3, 5)]
        forward, backward = costs.work_in_triton(at, I, N)
        forward = [*projections, Work(2 * convolved), *forward, norms[0], Work(launches=SMALL_KERNELS[0])]
        backward = [*projections, *projections, Work(4 * convolved), *backward, norms[1]]
        return forward, [*backward, Work(joined), Work(launches=SMALL_KERNELS[1])]

    def traffic(self, at: Sizes, passes: int) -> dict[str, float]:
        """Return the traffic: the stream is gathered, scattered, and gathered again for the weight gradient.

        For each sequence, every rank of the context group also gathers the last inputs of the convolution, the state
        and, except in the backward pass, a decay for each head.
        """
        I, H, GN = sizes(at.model)
        sequences, width = at.sequences, max(at.width, FP32)
        window = at.width * (at.model.conv_kernel - 1) * (I + 2 * GN)
        passed_on = passes * (window + width * I * at.model.mamba2.state_size) + (passes - 1) * width * H
        context = at.context * sequences * passed_on / at.tensor
        return {"tensor": (2 * passes + 1) * at.stream, "context": context}
