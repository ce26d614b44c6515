"""The architecture of the model: the `model:` section of a run file."""

import math
from typing import Literal

from pydantic import Field, model_validator

from megatron_blackmamba.settings.base import Section

Activation = Literal["silu", "gelu"]
WIDEST = 2**24
"""Largest width of a layer: the number of values in a weight, and of its bytes, stays below 2^63."""


class RouterConfig(Section):
    """The router, which assigns tokens to experts. A router kind refuses keys that it does not read."""

    kind: str = "sinkhorn"
    """sinkhorn: balanced choice in training, sigmoid(logit) scales the output (the paper).
    softmax: an auxiliary loss balances the experts.
    expert_bias: a bias that follows the experts' loads balances them, without an auxiliary loss.
    expert_choice: in training each expert takes its best tokens, so training is not causal.
    hash: a hash of the token id chooses, without weights; the outputs of several experts are averaged."""
    iterations: int = Field(1, ge=1)
    """Sinkhorn iterations in training. With start=balanced, one is enough at the logit scales of training."""
    temperature: float = Field(2.0, gt=0)
    """Factor of the logits inside Sinkhorn; larger values follow the logits more."""
    start: Literal["balanced", "uniform"] = "balanced"
    """balanced: the paper's initial values, with each expert normalised over the tokens. uniform: the textbook's."""
    scope: Literal["rank", "tensor", "data"] = "tensor"
    """Ranks whose tokens sinkhorn and expert_choice balance together. rank: each rank alone. tensor: the tensor- and
    context-parallel ranks, which share sequences. data: also the data-parallel group."""
    aux_loss: float = Field(0.01, ge=0)
    """Weight of the load-balancing loss of the softmax router."""
    bias_update_rate: float = Field(0.001, gt=0)
    """Amount by which expert_bias changes the bias of an expert after each step."""
    z_loss: float = Field(0.0, ge=0)
    """Weight of the squared log-sum of each token's router logits in the loss (ST-MoE: 0.001). 0: none."""


class AttentionConfig(Section):
    """Attention layers (`*`), as in the paper's transformer baselines."""

    heads: int = Field(16, gt=0)
    """Number of attention heads."""
    kv_heads: int | None = Field(None, gt=0)
    """Number of groups of heads that share keys and values, a divisor of heads. null: as many as heads."""
    rotary_base: int = Field(10000, gt=0, le=2**53)
    """Base of the rotary position embedding."""
    across_documents: bool = False
    """Attend to earlier documents also where model.eod_reset ends states. true: as in versions before 0.3."""
    qk_norm: bool = False
    """Normalise the queries and keys of each head by RMSNorm before the rotation, as Qwen3 does."""


class Mamba2Config(Section):
    """Mamba-2 layers (`S`); they share `expand` and `conv_kernel` with Mamba-1 layers."""

    head_dim: int = Field(64, gt=0)
    """Channels of a head; expand × hidden_size is divided into heads."""
    state_size: int = Field(128, gt=0, le=WIDEST)
    """State size of a channel."""
    groups: int = Field(1, gt=0)
    """Groups of heads that share B and C; tensor parallelism splits the groups."""


class Mamba3Config(Section):
    """Mamba-3 layers (`R`); they share `expand` with Mamba-1 layers and have no convolution."""

    head_dim: int = Field(64, gt=0)
    """Channels of a head; expand × hidden_size is divided into heads."""
    state_size: int = Field(128, gt=0, le=WIDEST)
    """State size of a channel."""
    groups: int = Field(1, gt=0)
    """Groups of heads that share B and C; tensor parallelism splits the groups."""
    rope_fraction: float = Field(0.5, gt=0, le=1)
    """Part of the state whose pairs of B and C turn by angles from the data."""
    a_floor: float = Field(1e-4, ge=0)
    """Smallest decay rate that the data can ask for."""
    output_norm: bool = False
    """Normalise each head's output by RMSNorm before the gate."""


class InitConfig(Section):
    """Initial weights; they depend on the seed and a parameter's global name, never on the layout."""

    std: float = Field(0.02, gt=0)
    """Standard deviation of the initial weights."""
    scale_outputs_by_depth: bool = True
    """Divide the std of projections that write to the residual stream by sqrt(2 * layers)."""
    dt_min: float = Field(0.001, gt=0)
    """Smallest initial time step of a Mamba channel."""
    dt_max: float = Field(0.1, gt=0)
    """Largest initial time step of a Mamba channel."""
    dt_floor: float = Field(1e-4, gt=0)
    """Lower bound of the initial time steps."""

    @model_validator(mode="after")
    def _in_order(self) -> "InitConfig":
        if self.dt_min > self.dt_max:
            raise ValueError(f"model.init.dt_min={self.dt_min} is above model.init.dt_max={self.dt_max}")
        return self


class ModelConfig(Section):
    """One stack of layers; `pattern` has one letter per layer: M Mamba, S Mamba-2, R Mamba-3, E experts,
    * attention, - dense MLP."""

    pattern: str
    """One letter for each layer: M Mamba, S Mamba-2, R Mamba-3, E experts, * attention, - dense MLP."""
    arrangement: Literal["sequential", "parallel"] = "sequential"
    """sequential: each layer has its own norm and residual connection (the paper).
    parallel: the two layers of a pair share one norm, and their outputs are summed (the paper's ablation)."""
    vocab_size: int = Field(gt=0, le=2**31)
    """Rows of the embedding: the tokenizer's vocabulary, padded."""
    hidden_size: int = Field(gt=0, le=WIDEST)
    """Width of the residual stream."""
    state_size: int = Field(16, gt=0, le=64)
    """State size of a Mamba channel."""
    conv_kernel: int = Field(4, ge=2, le=8)
    """Width of the causal convolution of Mamba layers."""
    expand: int = Field(2, gt=0, le=1024)
    """Inner width of a Mamba layer divided by hidden_size."""
    dt_rank: int | None = Field(None, gt=0, le=WIDEST)
    """null: ceil(hidden_size / 16)."""
    experts: int = Field(8, ge=1, le=2**16)
    """Number of experts in each E layer."""
    top_k: int = Field(1, ge=1)
    """Number of experts per token."""
    expert_hidden_size: int | None = Field(None, gt=0, le=WIDEST)
    """Inner width of one expert; needed when the pattern has E."""
    shared_expert_hidden_size: int | None = Field(None, gt=0, le=WIDEST)
    """Inner width of an additional expert in each E layer that processes all tokens. null: no such expert."""
    mlp_hidden_size: int | None = Field(None, gt=0, le=WIDEST)
    """Inner width of a dense MLP; needed when the pattern has -."""
    activation: Activation = "silu"
    """The gate of experts and MLPs. The paper says SwiGLU (silu); the released inference code gates with erf-GELU."""
    final_norm: str = "layer"
    """The norm before the head. layer: LayerNorm with a bias (the released code's).
    rms: RMSNorm, as before the layers."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the variance in every norm."""
    tie_embeddings: bool = True
    """Use the embedding as the output layer too."""
    z_loss: float = Field(0.0, ge=0)
    """Weight of the squared log-sum of each token's output logits in the loss (PaLM: 0.0001). 0: none."""
    logit_softcap: float | None = Field(None, gt=0)
    """Output logits become cap * tanh(logits / cap), as in Gemma 2 (30). null: no cap."""
    mamba_norms: bool = False
    """Normalise what a Mamba layer's scan reads by RMSNorm: dt, B and C as in Jamba; in Mamba-2, B and C by group."""
    eod_reset: int | None = Field(None, ge=0)
    """Id of the end-of-document token after which state and convolution restart.
    null, as in the paper: states run across documents."""
    router: RouterConfig = RouterConfig()
    """Routing of tokens to experts."""
    attention: AttentionConfig = AttentionConfig()
    """Settings of attention layers."""
    mamba2: Mamba2Config = Mamba2Config()
    """Settings of Mamba-2 layers."""
    mamba3: Mamba3Config = Mamba3Config()
    """Settings of Mamba-3 layers."""
    init: InitConfig = InitConfig()
    """Initial weights."""

    @model_validator(mode="after")
    def _widths(self) -> "ModelConfig":
        if self.arrangement == "parallel" and self.layers % 2:
            raise ValueError(
                f"model.arrangement=parallel pairs layers, and the pattern has {self.layers}: make it even"
            )
        if self.top_k > self.experts:
            raise ValueError(f"model.top_k={self.top_k} is more than model.experts={self.experts}")
        if self.eod_reset is not None and self.eod_reset >= self.vocab_size:
            raise ValueError(f"model.eod_reset={self.eod_reset} is outside the vocabulary of {self.vocab_size}")
        return self

    @property
    def layers(self) -> int:
        return len(self.pattern)

    @property
    def layers_together(self) -> int:
        """Return the number of layers that share a norm."""
        return 2 if self.arrangement == "parallel" else 1

    def has_norm(self, layer: int) -> bool:
        """Return whether a layer has a norm of its own, or shares that of the one before."""
        return layer % self.layers_together == 0

    @property
    def inner_size(self) -> int:
        return self.expand * self.hidden_size

    @property
    def dt_rank_or_default(self) -> int:
        return self.dt_rank or math.ceil(self.hidden_size / 16)
