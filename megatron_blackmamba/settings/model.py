"""The architecture of the model: the `model:` section of a run file."""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from megatron_blackmamba.settings.base import Section
from megatron_blackmamba.settings.rules import FIXED, FIXED_IN_RUN, LOSS_WEIGHT

Activation = Literal["silu", "gelu", "relu2"]
WIDEST = 2**24
"""Largest width of a layer: the number of values in a weight, and of its bytes, stays below 2^63."""


class RouterConfig(Section):
    """The router, which assigns tokens to experts. A router kind refuses keys that it does not read."""

    rule = FIXED

    kind: str = "sinkhorn"
    """sinkhorn: balanced choice in training, sigmoid(logit) scales the output (the paper).
    sinkhorn_bias: the same in training; in inference the mean bias of its plan goes on choosing.
    softmax: an auxiliary loss balances the experts.
    expert_bias: a bias that follows the experts' loads balances them, without an auxiliary loss.
    quantile: a bias that would have given the last batches equal loads, without an auxiliary loss.
    zaya: an MLP that also reads the router of the layer before, with a bias moved by an Adam of its own (ZAYA1).
    expert_choice: in training each expert takes its best tokens, so training is not causal.
    hash: a hash of the token id chooses, without weights; the outputs of several experts are averaged."""
    iterations: Annotated[int | Literal["auto"], FIXED_IN_RUN] = 1
    """Sinkhorn iterations in training. With start=balanced, one is enough at the logit scales of the paper's training.
    auto: one to 16, until no expert has more than 1.2 times its share; for high learning rates.
    0 with start=uniform: no balance, tokens go where they do in inference."""
    temperature: Annotated[float, FIXED_IN_RUN] = Field(2.0, gt=0)
    """Factor of the logits inside Sinkhorn; larger values follow the logits more."""
    start: Annotated[Literal["balanced", "uniform"], FIXED_IN_RUN] = "balanced"
    """balanced: the paper's initial values, with each expert normalised over the tokens. uniform: the textbook's."""
    scope: Literal["rank", "tensor", "data", "sequence"] = "tensor"
    """Ranks whose tokens sinkhorn and expert_choice balance together, or the softmax router's loss. rank: each rank
    alone. tensor: the tensor- and context-parallel ranks, which share sequences. data: also the data-parallel group;
    the softmax router's loss then counts the step's micro-batches so far. sequence, of softmax: each sequence."""
    aux_loss: float = Field(0.01, ge=0)
    """Weight of the load-balancing loss of the softmax router."""
    groups: int = Field(1, ge=1, le=2**16)
    """Equal groups of experts, of softmax and expert_bias: each token chooses among the experts of group_top_k groups.
    1: among all."""
    group_top_k: int = Field(1, ge=1)
    """Groups of a token: those whose top_k / group_top_k best experts have the largest sum of scores."""
    bias_update_rate: float = Field(0.001, gt=0)
    """Amount by which expert_bias changes the bias of an expert after each step; of zaya, its Adam's learning rate."""
    hidden_size: int = Field(256, gt=0, le=WIDEST)
    """Width of zaya's MLP: the numbers of a token that each router hands to the next."""
    skip: bool = False
    """Give zaya's router one more choice, which adds nothing for the token and costs nothing."""
    z_loss: Annotated[float, LOSS_WEIGHT] = Field(0.0, ge=0)
    """Weight of the squared log-sum of each token's router logits in the loss (ST-MoE: 0.001). 0: none."""
    bias: bool = True
    """Learn a bias for the logit of each expert. false, as in most other models: none."""
    gate: Literal["sigmoid", "softmax"] | None = None
    """Scale an expert's output by the sigmoid of its logit or by the softmax over all experts. null: as the kind does.
    With sigmoid, the softmax router divides the weights of several experts by their sum."""
    normalize: bool = False
    """Divide the softmax router's weights of a token by their sum, as Mixtral does."""
    scale: float = Field(1.0, gt=0)
    """Factor of the expert weights of a token (Nemotron-H: 2.5)."""

    @field_validator("iterations", mode="before")
    @classmethod
    def _number_or_auto(cls, value: Any) -> Any:
        if value == "auto" or (type(value) is int and value >= 0):
            return value
        raise PydanticCustomError("number_or_auto", "must be a whole number from 0 on, or auto")


class AttentionConfig(Section):
    """Attention layers (`*`), as in the paper's transformer baselines."""

    rule = FIXED

    heads: int = Field(16, gt=0)
    """Number of attention heads."""
    kv_heads: int | None = Field(None, gt=0)
    """Number of groups of heads that share keys and values, a divisor of heads. null: as many as heads."""
    head_dim: int | None = Field(None, gt=0, le=WIDEST)
    """Channels of a head. null: hidden_size / heads."""
    rotary: bool = True
    """Rotate queries and keys by their positions. false: attention has no positions, as in Nemotron-H."""
    rotary_base: Annotated[int, FIXED_IN_RUN] = Field(10000, gt=0, le=2**53)
    """Base of the rotary position embedding."""
    across_documents: bool = False
    """Attend to earlier documents also where model.eod_reset ends states. true: as in versions before 0.3."""
    qk_norm: bool = False
    """Normalise the queries and keys of each head by RMSNorm before the rotation, as Qwen3 does."""


class Mamba2Config(Section):
    """Mamba-2 layers (`S`); they share `expand` and `conv_kernel` with Mamba-1 layers."""

    rule = FIXED

    heads: int | None = Field(None, gt=0, le=WIDEST)
    """Number of heads. null: expand × hidden_size / head_dim."""
    head_dim: int = Field(64, gt=0, le=WIDEST)
    """Channels of a head; expand × hidden_size is divided into heads."""
    state_size: int = Field(128, gt=0, le=WIDEST)
    """State size of a channel."""
    groups: int = Field(1, gt=0)
    """Groups of heads that share B and C; tensor parallelism splits the groups."""
    time_step_min: float = Field(0.0, ge=0)
    """Lower bound of the time steps, as transformers has for Nemotron-H (0.001). 0: none."""


class Mamba3Config(Section):
    """Mamba-3 layers (`R`); they share `expand` with Mamba-1 layers and have no convolution."""

    rule = FIXED

    head_dim: int = Field(64, gt=0)
    """Channels of a head; expand × hidden_size is divided into heads."""
    state_size: int = Field(128, gt=0, le=WIDEST)
    """State size of a channel."""
    groups: int = Field(1, gt=0)
    """Groups of heads that share B and C; tensor parallelism splits the groups."""
    rope_fraction: float = Field(0.5, gt=0, le=1)
    """Part of the state whose pairs of B and C turn by angles from the data."""
    rank: int = Field(1, gt=0, le=64)
    """Inputs and outputs of a head for each token (MIMO), each with its own B and C; 1: one of each (SISO)."""
    a_floor: float = Field(1e-4, ge=0)
    """Smallest decay rate that the data can ask for."""
    output_norm: bool = False
    """Normalise each head's output by RMSNorm before the gate."""


class DeltaConfig(Section):
    """Layers of the delta rule (`G`); they share `expand` and `conv_kernel` with Mamba-1 layers."""

    rule = FIXED

    variant: Literal["gdn", "kda", "gdn2"] = "gdn"
    """gdn: Gated DeltaNet, one gate and decay a head. kda: Kimi Delta Attention, a decay for each key channel. gdn2:
    Gated DeltaNet-2, gates for each channel as well."""
    heads: int | None = Field(None, gt=0, le=WIDEST)
    """Number of heads. null: expand × hidden_size / head_dim."""
    key_heads: int | None = Field(None, gt=0, le=WIDEST)
    """Groups of heads that share queries and keys; tensor parallelism splits them. null: as many as heads."""
    key_dim: int = Field(128, gt=0, le=WIDEST)
    """Key channels of a head, the rows of its state."""
    head_dim: int = Field(128, gt=0, le=WIDEST)
    """Value channels of a head; expand × hidden_size is divided into heads."""
    decay_rank: int | None = Field(None, gt=0, le=WIDEST)
    """Numbers from which a token's decays follow, with kda and gdn2. null: key_dim."""
    negative_eigenvalues: bool = False
    """Let erase gates reach 2 instead of 1, which turns what a state holds under a key around."""


class InitConfig(Section):
    """Initial weights; they depend on the seed and a parameter's global name, never on the layout."""

    rule = FIXED

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


class MultipliersConfig(Section):
    """Constant factors inside the model, named as in Granite."""

    rule = FIXED

    embedding: float = Field(1.0, gt=0)
    """Factor of the embeddings (Granite: embedding_multiplier)."""
    residual: float = Field(1.0, gt=0)
    """Factor of each layer's output, before it joins the residual stream (residual_multiplier)."""
    attention: float | None = Field(None, gt=0)
    """Factor of the attention scores (attention_multiplier). null: 1 / sqrt(channels of a head)."""
    logits: float = Field(1.0, gt=0)
    """The output logits are divided by this (logits_scaling)."""


class MupConfig(Section):
    """Width transfer (µP): learning rates and initial values follow from those tuned on a narrower base model.

    The base model has the same keys, but its widths are smaller in proportion: hidden_size and the inner widths of
    experts and MLPs, and latent_size. Explicit sizes, such as attention.head_dim, are the same.
    """

    rule = FIXED

    base_width: int | None = Field(None, gt=0, le=WIDEST)
    """hidden_size of the base model. null: no width transfer."""
    base_heads: int | None = Field(None, gt=0)
    """Attention heads of the base model. null: as many as here, so that heads grow wider."""


class MtpConfig(Section):
    """Multi-token prediction: an extra depth that predicts the token after the next one, as in DeepSeek-V3."""

    rule = FIXED

    pattern: str | None = None
    """Layers of the extra depth, as letters that model.pattern has too. null: no extra depth."""
    loss: Annotated[float, LOSS_WEIGHT] = Field(0.1, gt=0)
    """Weight of its loss (DeepSeek-V3: 0.3, later 0.1)."""
    reads: Literal["stream", "norm"] = "stream"
    """stream: the extra depth reads the residual stream behind the last layer. norm: what the last norm makes of it, as
    in Nemotron 3."""


class ModelConfig(Section):
    """One stack of layers; `pattern` has one letter per layer: M Mamba, S Mamba-2, R Mamba-3,
    G delta rule, E experts, * attention, - dense MLP."""

    rule = FIXED

    pattern: str
    """One letter for each layer: M Mamba, S Mamba-2, R Mamba-3, G delta rule, E mixture of experts, * attention,
    - dense MLP."""
    arrangement: Literal["sequential", "parallel"] = "sequential"
    """sequential: each layer has its own norm and residual connection (the paper).
    parallel: the two layers of a pair share one norm, and their outputs are summed (the paper's ablation)."""
    residual_scaling: bool = False
    """Learn a scale and a bias of each channel behind every layer, of the residual stream and of the layer's output
    (ZAYA1)."""
    vocab_size: int = Field(gt=0, le=2**31)
    """Rows of the embedding: the tokenizer's vocabulary, padded."""
    hidden_size: int = Field(gt=0, le=WIDEST)
    """Width of the residual stream."""
    state_size: int = Field(16, gt=0, le=64)
    """State size of a Mamba channel."""
    conv_kernel: int = Field(4, ge=2, le=8)
    """Width of the causal convolution of Mamba, Mamba-2 and delta rule layers."""
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
    latent_size: int | None = Field(None, gt=0, le=WIDEST)
    """Width of tokens on the way to the experts and back: a layer's experts share a projection to it and one from it
    (Nemotron 3 Super: a quarter of hidden_size). Router and shared expert read all of it. null: hidden_size."""
    mlp_hidden_size: int | None = Field(None, gt=0, le=WIDEST)
    """Inner width of a dense MLP; needed when the pattern has -."""
    activation: Activation = "silu"
    """The gate of experts and MLPs. The paper says SwiGLU (silu); the released inference code gates with erf-GELU.
    relu2: the square of ReLU, as in Nemotron-H."""
    gated: bool = True
    """Multiply the activated half of an MLP's or expert's first product by the other half.
    false: activate all of it."""
    final_norm: str = "layer"
    """The norm before the head. layer: LayerNorm with a bias (the released code's).
    rms: RMSNorm, as before the layers. That of model.mtp is always RMSNorm."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the variance in every norm."""
    tie_embeddings: bool = True
    """Use the embedding as the output layer too."""
    z_loss: Annotated[float, LOSS_WEIGHT] = Field(0.0, ge=0)
    """Weight of the squared log-sum of each token's output logits in the loss (PaLM: 0.0001). 0: none."""
    logit_softcap: float | None = Field(None, gt=0)
    """Output logits become cap * tanh(logits / cap), as in Gemma 2 (30). null: no cap."""
    mamba_norms: bool = False
    """Normalise what a Mamba layer's scan reads by RMSNorm: dt, B and C as in Jamba; in Mamba-2, B and C by group."""
    eod_reset: Annotated[int | None, FIXED_IN_RUN] = Field(None, ge=0)
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
    delta: DeltaConfig = DeltaConfig()
    """Settings of layers of the delta rule."""
    init: InitConfig = InitConfig()
    """Initial weights."""
    multipliers: MultipliersConfig = MultipliersConfig()
    """Constant factors inside the model."""
    mtp: MtpConfig = MtpConfig()
    """Multi-token prediction by an extra depth."""
    mup: MupConfig = MupConfig()
    """Width transfer (µP) from a narrower base model."""
    extensions: dict[str, dict[str, Any]] = Field({})
    """Keys of layers, routers and norms that define their own, by the name of the kind and of the key."""

    @model_validator(mode="after")
    def _widths(self) -> "ModelConfig":
        if self.arrangement == "parallel" and self.layers % 2:
            raise ValueError(
                f"model.arrangement=parallel pairs layers, and the pattern has {self.layers}: make it even"
            )
        if self.residual_scaling and self.arrangement == "parallel":
            raise ValueError(
                "model.residual_scaling scales one output a time: it needs model.arrangement=sequential, not parallel"
            )
        if self.residual_scaling and self.mtp.pattern:
            raise ValueError(
                "model.residual_scaling: the extra depth of model.mtp.pattern has none. Leave one of them out"
            )
        if self.mtp.reads != "stream" and not self.mtp.pattern:
            raise ValueError(f"model.mtp.reads={self.mtp.reads} needs an extra depth: set model.mtp.pattern")
        if self.top_k > self.experts:
            raise ValueError(f"model.top_k={self.top_k} is more than model.experts={self.experts}")
        if self.mup.base_heads and not self.mup.base_width:
            raise ValueError("model.mup.base_heads needs model.mup.base_width, the width of the base model")
        if self.eod_reset is not None and self.eod_reset >= self.vocab_size:
            raise ValueError(f"model.eod_reset={self.eod_reset} is outside the vocabulary of {self.vocab_size}")
        return self

    @property
    def layers(self) -> int:
        return len(self.pattern)

    @property
    def trained_pattern(self) -> str:
        """Return the letters of all layers that training computes; the extra depth comes last."""
        return self.pattern + (self.mtp.pattern or "")

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
    def base_width(self) -> int:
        """Return hidden_size of the base model of a width transfer; without one, this model's."""
        return self.mup.base_width or self.hidden_size

    @property
    def routed_size(self) -> int:
        """Return the width of tokens on the way to the experts and back."""
        return self.latent_size or self.hidden_size

    @property
    def base(self) -> "ModelConfig":
        """Return the base model of a width transfer; it has as many attention heads unless explicit ones are fewer."""
        inner = ("expert_hidden_size", "shared_expert_hidden_size", "latent_size", "mlp_hidden_size")
        sizes = {name: size for name in inner if (size := getattr(self, name))}
        scaled = {name: max(1, round(size * self.base_width / self.hidden_size)) for name, size in sizes.items()}
        attention = self.attention
        if attention.head_dim and self.mup.base_heads:
            attention = attention.model_copy(update={"heads": self.mup.base_heads})
        return self.model_copy(update={"hidden_size": self.base_width, "attention": attention, **scaled})

    @property
    def attention_scale(self) -> float | None:
        """Return the factor of attention scores; None: 1 / sqrt(channels of a head).

        In a width transfer it falls with the channels themselves, since trained queries and keys are correlated.
        """
        heads, scale = self.attention.heads, self.multipliers.attention
        channels, before = self.hidden_size / heads, self.base_width / (self.mup.base_heads or heads)
        if self.attention.head_dim or channels == before:
            return scale
        return (before**-0.5 if scale is None else scale) * before / channels

    @property
    def logits_divisor(self) -> float:
        """Return the number that output logits are divided by; a width transfer adds the growth of the width."""
        return self.multipliers.logits * self.hidden_size / self.base_width

    @property
    def dt_rank_or_default(self) -> int:
        return self.dt_rank or math.ceil(self.hidden_size / 16)
