"""Bytes that one micro-batch leaves behind for the backward pass, block by block, as this project's modules save them.

Under sequence parallelism the residual stream and the experts see a part of the sequence, the inside of a Mamba,
attention or MLP block all of it with a part of the channels.

Letters: D model, I inner, N state, R rank of dt, F hidden units, E experts, V vocabulary; `width` bytes of a number.
"""

from dataclasses import dataclass

from megatron_blackmamba.config import RunConfig

FP32, INT64, BOOL = 4, 8, 1
SCAN_CHUNK = {"cpu": 16, "cuda": 64}
"""Tokens between the states that the scan keeps."""


@dataclass(frozen=True)
class Tokens:
    """What one micro-batch is to a rank."""

    here: int
    """Tokens whose residual stream this rank holds."""
    whole: int
    """Tokens of the whole micro-batch."""
    routed: int
    """Tokens its experts compute, were the load equal."""


def tokens_of(config: RunConfig) -> Tokens:
    parallel = config.parallel
    whole = config.training.micro_batch * config.data.sequence_length
    here = whole // parallel.tensor
    return Tokens(here, whole, here * config.model.top_k * parallel.expert_tensor)


class Activations:
    """Sizes for one run on one kind of device."""

    def __init__(self, config: RunConfig, device: str) -> None:
        self.config, self.model, self.device = config, config.model, device
        self.tokens = tokens_of(config)
        self.width = 2 if config.training.precision == "bf16" else FP32
        self.tensor = config.parallel.tensor

    def block(self, letter: str, recompute: str) -> int:
        """Kept by one block until its backward pass; recomputed blocks keep only what they are given."""
        if recompute == "layers" or (recompute == "experts" and letter == "E"):
            return self.residual()
        inside = {"M": self._mamba, "E": self._experts, "*": self._attention, "-": self._mlp}[letter]
        return self._norm() + inside()

    def residual(self) -> int:
        """The fp32 residual stream that enters a block."""
        return FP32 * self.model.hidden_size * self.tokens.here

    def head(self) -> int:
        """The last norm and the head's input, without the logits."""
        return self._norm(statistics=2) + self.width * self.model.hidden_size * self.tokens.here

    def logits(self) -> int:
        """The fp32 softmax that the loss keeps; on a CPU with the whole vocabulary it keeps the logits as they are."""
        width = self.width if self.device == "cpu" and self.tensor == 1 else FP32
        return self.tokens.whole * (width * self.model.vocab_size // self.tensor + INT64 + BOOL)

    def logits_peak(self) -> int:
        """Beside the softmax, the logits in the width of computation, and later their gradient."""
        return self.tokens.whole * self.width * self.model.vocab_size // self.tensor

    def embedding(self) -> int:
        return INT64 * self.tokens.whole

    def _norm(self, statistics: int = 1) -> int:
        """Its fp32 input and statistics."""
        return self.tokens.here * FP32 * (self.model.hidden_size + statistics)

    def _mamba(self) -> int:
        """in_proj's input; x before and after the convolution, delta, z and y; dt, B and C, the last two also in fp32;
        the scan's states between chunks."""
        model = self.model
        I, N, R = model.inner_size // self.tensor, model.state_size, model.dt_rank_or_default
        channels = self.width * 5 * I + FP32 * N * I / SCAN_CHUNK[self.device]
        shared = self.width * (R + 2 * N) + FP32 * 2 * N
        return int(self.tokens.here * self.width * model.hidden_size + self.tokens.whole * (channels + shared))

    def _experts(self) -> int:
        """The router's fp32 input, logits and maps; the experts' input, gate and up, and product. GPUs also keep the
        activation, and the output that the weight of its token meets."""
        model, routed = self.model, self.tokens.routed
        F = (model.expert_hidden_size or 0) // self.config.parallel.expert_tensor
        router = FP32 * model.hidden_size + (2 * FP32 + 2 * BOOL) * model.experts
        apart = 0 if self.device == "cpu" else model.hidden_size + F
        expert = self.width * (model.hidden_size + 3 * F + apart) + FP32 + INT64
        return self.tokens.here * router + routed * expert

    def _mlp(self) -> int:
        """The input; gate and up, the activation, the product."""
        F = (self.model.mlp_hidden_size or 0) // self.tensor
        return self.width * (self.tokens.here * self.model.hidden_size + self.tokens.whole * 4 * F)

    def _attention(self) -> int:
        """The input; queries, keys and values as projected, the first two also as rotated; the output and its log-sums;
        the tables of the rotation."""
        model = self.model
        heads, kv_heads = model.attention.heads, model.attention.kv_heads or model.attention.heads
        D = model.hidden_size // self.tensor
        channels = 3 * D + 3 * D * kv_heads // heads
        kept = self.width * channels + FP32 * heads // self.tensor
        tables = 4 * self.width * self.config.data.sequence_length * model.hidden_size // heads
        return self.width * self.tokens.here * model.hidden_size + self.tokens.whole * kept + tables
