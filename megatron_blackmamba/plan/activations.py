"""Bytes that one micro-batch saves for the backward pass, block by block, as this project's modules save them.

Under sequence parallelism, the residual stream and the experts see a part of the sequence. Inside a Mamba, attention or
MLP block, each rank sees the whole sequence with a part of the channels.

The kind of a mixer defines what it saves (`kinds`).
"""

from dataclasses import replace

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.costs import BOOL, FP32, INT64, Sizes
from megatron_blackmamba.layers import LayerKind, carried

WIDTH = {"bf16": 2, "fp32": 4, "fp64": 8}
"""Bytes of a number, by training.precision."""


def sizes_of(config: RunConfig, device: str) -> Sizes:
    """Return one micro-batch of a run on one kind of device."""
    parallel = config.parallel
    whole = config.training.micro_batch * config.data.sequence_length // parallel.context
    here = whole // parallel.tensor
    return Sizes(
        model=config.model,
        sequence=config.data.sequence_length,
        here=here,
        whole=whole,
        routed=here * config.model.top_k * parallel.expert_tensor,
        width=WIDTH[config.training.precision],
        device=device,
        tensor=parallel.tensor,
        expert_tensor=parallel.expert_tensor,
        context=parallel.context,
        keeps_states=config.kernels.scan_states == "keep",
        ssd=config.kernels.ssd,
        delta=config.kernels.delta,
        clips=config.optimizer.qk_clip is not None,
    )


class Activations:
    """The sizes of one run's activations on one kind of device."""

    def __init__(self, config: RunConfig, device: str) -> None:
        self.model, self.device = config.model, device
        self.sizes = sizes_of(config, device)
        self.width, self.tensor = self.sizes.width, self.sizes.tensor

    def block(self, kind: LayerKind, recompute: str, has_norm: bool = True) -> int:
        """Return what one block keeps until its backward pass; a recomputed block keeps only its input."""
        if self.model.arrangement == "parallel":  # the norm stands before both blocks of a pair, and is kept
            shared = self._norm() if has_norm else 0
            hidden = self.width * self.model.hidden_size * self.sizes.here if has_norm else 0
            return shared + (hidden if recompute in kind.recompute else kind.costs.kept(self.sizes))
        scaled = FP32 * self.model.hidden_size * self.sizes.here if self.model.residual_scaling else 0
        if recompute in kind.recompute:
            return self.residual() + FP32 * kind.carried(self.model) * self.sizes.here + scaled
        return self._norm() + kind.costs.kept(self.sizes) + 2 * scaled

    def working(self, kind: LayerKind) -> int:
        """Return the bytes that the backward pass of one block needs in addition, without a scan's states."""
        without_states = kind.costs.working(replace(self.sizes, keeps_states=False))
        return self.block(kind, "none") - kind.costs.kept(self.sizes) + without_states

    def residual(self) -> int:
        """Return the bytes of the fp32 residual stream that enters a block."""
        return FP32 * self.model.hidden_size * self.sizes.here

    def sent(self) -> int:
        """Return the bytes that a pipeline stage sends to the next: the stream, and what layers carry beside it."""
        return self.residual() + FP32 * carried(self.model) * self.sizes.here

    def head(self) -> int:
        """Return the bytes of the last norm and the head's input, without the logits."""
        return self._norm(statistics=2) + self.width * self.model.hidden_size * self.sizes.here

    def logits(self) -> int:
        """Return the bytes of the logits, which the loss keeps; with a split vocabulary, of their fp32 softmax.

        Multi-token prediction has logits of its own, and keeps both until the backward pass.

        A soft cap keeps its tangents too, except in the fused loss on a GPU.
        """
        width = FP32 if self.tensor > 1 else self.width
        if self.model.logit_softcap and (self.device == "cpu" or self.tensor > 1):
            width += self.width
        losses = 2 if self.model.mtp.pattern else 1
        return losses * self.sizes.whole * (width * self.model.vocab_size // self.tensor + INT64 + BOOL)

    def logits_peak(self) -> int:
        """Return the bytes of the logits, and later of their gradient, in addition to the softmax."""
        model, V = self.model, self.model.vocab_size // self.tensor
        if self.device == "cuda" and self.tensor == 1:  # the weight's gradient in fp32, then in its own precision too
            return model.hidden_size * (V * (FP32 + self.width) + self.width * self.sizes.whole)
        if self.device == "cuda" and self.width == FP32:
            return self.width * model.hidden_size * (V + self.sizes.whole)  # gradients of the head's weight and input
        return self.sizes.whole * self.width * V

    def extra_depth(self) -> int:
        """Return what multi-token prediction keeps beside its layers and logits.

        They are the embeddings, the projection's input, the two ends of its last norm, and ids.
        """
        both = self.sizes.here * (FP32 * self.model.hidden_size + 2 * self.width * self.model.hidden_size)
        last = self._norm() + self.width * self.model.hidden_size * self.sizes.here
        return both + last + self.embedding()

    def embedding(self) -> int:
        return INT64 * self.sizes.whole

    def _norm(self, statistics: int = 1) -> int:
        """Return the bytes of a norm's fp32 input and statistics."""
        return self.sizes.here * FP32 * (self.model.hidden_size + statistics)
