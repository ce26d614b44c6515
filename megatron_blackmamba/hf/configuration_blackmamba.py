"""The configuration of a BlackMamba for transformers: Mamba mixers alternating with mixtures of experts."""

import math
from typing import Any

from packaging.version import Version
from transformers import PretrainedConfig
from transformers import __version__ as transformers_version
from transformers.utils import logging

TRIED = ("4.50.3", "5.24.0")
"""The oldest and the newest version of transformers with which these files were tried."""
CHOICES = {
    "delta_variant": ("gdn", "kda", "gdn2"),
    "arrangement": ("sequential", "parallel"),
    "activation": ("silu", "gelu", "relu2"),
    "router_scores": ("sigmoid", "softmax"),
    "kernels": ("auto", "torch"),
}

DERIVED: Any = None
"""The default of a field that follows from others."""
POSITIVE = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling", "logit_softcap")
"""Fields that are above 0, or None."""


def compare_versions(here: str) -> None:
    """Refuse a version of transformers older than the tried ones, and warn once of a newer one."""
    oldest, version, newest = (Version(text).release[:2] for text in (TRIED[0], here, TRIED[1]))
    if version < oldest:
        raise ImportError(f"this model needs transformers {TRIED[0]} or newer, not {here}: pip install -U transformers")
    if version > newest:
        logging.get_logger(__name__).warning_once(
            f"This model's code was tried with transformers {TRIED[0]} to {TRIED[1]}, not with {here}. If it fails, "
            f"get newer code with `blackmamba export refresh FOLDER`, or `pip install transformers=={TRIED[1]}`."
        )


compare_versions(transformers_version)


class BlackMambaConfig(PretrainedConfig):
    """The configuration of a BlackMamba model.

    Field names are those in the released config.json; fields that it lacks are additions.

    Args:
        mamba_moe_layers: One entry per layer: "r" (Mamba), "mamba2", "mamba3", "delta", "attention", "mlp",
            or the number of experts.
        mamba2_heads: Heads of a "mamba2" layer. Default: expansion_factor * hidden_size / mamba2_head_dim.
        mamba2_head_dim: Channels per head of a "mamba2" layer.
        mamba2_state_size: State size of a "mamba2" layer.
        mamba2_time_step_min: Lower bound of the time steps of a "mamba2" layer. 0: none.
        mamba2_groups: Groups of a "mamba2" layer; the heads of a group share B and C.
        mamba3_head_dim, mamba3_state_size, mamba3_groups: The same of a "mamba3" layer.
        mamba3_rope_fraction: Part of a "mamba3" state whose pairs turn.
        mamba3_rank: Inputs and outputs of a head of a "mamba3" layer for each token (MIMO). 1: one of each (SISO).
        mamba3_a_floor: Smallest decay rate of a "mamba3" layer.
        mamba3_output_norm: Normalise each head's output of a "mamba3" layer by RMSNorm.
        delta_variant: The gates and decays of a "delta" layer: "gdn", "kda" or "gdn2".
        delta_heads, delta_head_dim: Heads of a "delta" layer and their value channels.
        delta_key_heads, delta_key_dim: Groups of its heads that share queries and keys, and the channels of these.
        delta_decay_rank: Numbers from which its decays follow, but for "gdn".
        delta_negative_eigenvalues: Let its erase gates reach 2.
        num_attention_heads: Query heads of an "attention" layer.
        num_key_value_heads: Key and value heads of an "attention" layer. Default: num_attention_heads.
        head_dim: Channels per head of an "attention" layer. Default: hidden_size / num_attention_heads.
        rotary: Rotate queries and keys of an "attention" layer by their positions.
        rope_theta: Base of the rotary position embedding of an "attention" layer.
        attention_across_documents: Attend to earlier documents also with eod_reset, as older exports do.
        qk_norm: Normalise queries and keys of each head by RMSNorm before the rotation.
        mlp_hidden_size: Hidden size of an "mlp" layer.
        num_experts_per_tok: Number of experts per token.
        router_scores: Weights of the expert outputs: "sigmoid" or "softmax" of the router logits.
        router_scale: Factor of the expert weights.
        router_bias: Whether the router has a bias for each logit.
        router_normalized: Divide the expert weights of each token by their sum.
        router_biased: Choose the largest sums of score and expert bias instead of the largest logits.
        router_bias_on_logits: Add that bias to the logits instead of the scores.
        router_kind: Router used in pretraining.
        router_options: Settings of that router. None: the defaults.
        residual_scaling: Whether each layer has a scale and a bias of the stream and of its output.
        balance_in_training: In training, route by Sinkhorn over the tokens of the batch, as in pretraining.
        shared_expert_hidden_size: Hidden size of an additional expert applied to every token. None: no shared expert.
        latent_size: Width to which a token is projected for its experts. None: hidden_size, without a projection.
        mamba_norms: Normalise dt, B and C of a Mamba layer by RMSNorm, and in a "mamba2" layer B and C of each group.
        logit_softcap: Cap of the logits, which become cap * tanh(logits / cap). None: no cap.
        embedding_multiplier: Factor of the embeddings.
        residual_multiplier: Factor of each layer's output.
        attention_multiplier: Factor of the attention scores. None: 1 / sqrt(channels of a head).
        logits_scaling: Number that the logits are divided by.
        activation: Activation of the gates: "silu" as in the paper, "gelu" as in the released code, or "relu2".
        gated: Whether experts and MLPs have a gate. If not, their first product is activated as a whole.
        final_norm: Norm before the head: "layer" (LayerNorm with a bias) or "rms".
        arrangement: "sequential", or "parallel": both layers of a pair share one norm, and their outputs are added.
        eod_reset: Token id after which the state is reset. None: the state continues across documents, as in the paper.
        output_router_choices: Return the chosen expert of every token from each forward pass.
        kernels: "auto" uses the kernels of megatron_blackmamba if it is installed; "torch" never does.
    """

    model_type = "blackmamba"
    keys_to_ignore_at_inference = ["cache", "past_key_values", "router_choices"]  # noqa: RUF012 (transformers' own form)
    attribute_map = {  # noqa: RUF012
        "num_hidden_layers": "num_layers",
        "max_position_embeddings": "max_sequence_length",
        "intermediate_size": "ffn_hidden_size",
    }

    vocab_size: int = 50304
    hidden_size: int = 1152
    num_layers: int = 30
    state_size: int = 16
    conv_dimension: int = 4
    expansion_factor: int = 2
    dt_rank: int = DERIVED
    mamba_moe_layers: list[str] = DERIVED
    ffn_hidden_size: int = 3072
    max_sequence_length: int = 2048
    activation: str = "silu"
    eod_reset: int | None = None
    norm_eps: float = 1e-5
    final_norm: str = "layer"
    arrangement: str = "sequential"
    num_attention_heads: int = 16
    num_key_value_heads: int = DERIVED
    rope_theta: float = 10000
    mlp_hidden_size: int | None = None
    mamba2_head_dim: int = 64
    mamba2_state_size: int = 128
    mamba2_groups: int = 1
    mamba3_head_dim: int = 64
    mamba3_state_size: int = 128
    mamba3_groups: int = 1
    mamba3_rope_fraction: float = 0.5
    mamba3_rank: int = 1
    mamba3_a_floor: float = 1e-4
    mamba3_output_norm: bool = False
    delta_variant: str = "gdn"
    delta_heads: int = DERIVED
    delta_key_heads: int = DERIVED
    delta_key_dim: int = 128
    delta_head_dim: int = 128
    delta_decay_rank: int | None = None
    delta_negative_eigenvalues: bool = False
    num_experts_per_tok: int = 1
    router_scores: str = "sigmoid"
    router_normalized: bool = False
    router_biased: bool = False
    router_bias_on_logits: bool = False
    router_kind: str = "sinkhorn"
    router_options: dict[str, Any] | None = None
    balance_in_training: bool = False
    shared_expert_hidden_size: int | None = None
    latent_size: int | None = None
    initializer_range: float = 0.02
    kernels: str = "auto"
    output_router_choices: bool = False
    qk_norm: bool = False
    head_dim: int = DERIVED
    rotary: bool = True
    mamba2_heads: int = DERIVED
    mamba2_time_step_min: float = 0.0
    gated: bool = True
    router_scale: float = 1.0
    router_bias: bool = True
    attention_across_documents: bool = True
    mamba_norms: bool = False
    logit_softcap: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float | None = None
    logits_scaling: float = 1.0
    residual_scaling: bool = False
    use_cache: bool = True

    def __init__(self, **given: Any) -> None:
        for name in BlackMambaConfig.__annotations__:
            setattr(self, name, given.pop(name, getattr(BlackMambaConfig, name)))
        if self.mamba_moe_layers is None:
            self.mamba_moe_layers = ["r" if i % 2 == 0 else "8" for i in range(self.num_layers)]
        self.mamba_moe_layers = [str(kind) for kind in self.mamba_moe_layers]
        if self.dt_rank is None:
            self.dt_rank = math.ceil(self.hidden_size / 16)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        self.delta_heads = self._heads("delta", self.delta_heads, self.delta_head_dim)
        self.mamba2_heads = self._heads("mamba2", self.mamba2_heads, self.mamba2_head_dim)
        if self.delta_key_heads is None:
            self.delta_key_heads = self.delta_heads
        if self.delta_variant != "gdn" and self.delta_decay_rank is None:
            self.delta_decay_rank = self.delta_key_dim
        if (
            self.head_dim is None
            and "attention" in self.mamba_moe_layers
            and self.hidden_size % self.num_attention_heads
        ):
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {self.num_attention_heads}"
            )
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__init__(**{"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True} | given)
        self.check()

    def _heads(self, kind: str, heads: int | None, size: int) -> int:
        """Return the heads of a layer, by default as many as there are in its channels."""
        if heads is None and kind in self.mamba_moe_layers and self.inner_size % size:
            raise ValueError(
                f"expansion_factor * hidden_size = {self.inner_size} is not divisible by {kind}_head_dim = {size}"
            )
        return self.inner_size // size if heads is None else heads

    def check(self) -> None:
        """Refuse fields that contradict each other."""
        if len(self.mamba_moe_layers) != self.num_layers:
            raise ValueError(
                f"mamba_moe_layers has {len(self.mamba_moe_layers)} entries, num_layers is {self.num_layers}"
            )
        for kind in self.mamba_moe_layers:
            if not kind.isidentifier() and not (kind.isdecimal() and int(kind) > 0):
                raise ValueError(f"mamba_moe_layers: an entry is a name or a number of experts, not {kind!r}")
            if kind.isdecimal() and not 1 <= self.num_experts_per_tok <= int(kind):
                raise ValueError(f"num_experts_per_tok must be 1 to {kind}, not {self.num_experts_per_tok}")
        if "mlp" in self.mamba_moe_layers and self.mlp_hidden_size is None:
            raise ValueError("mamba_moe_layers has mlp: set mlp_hidden_size")
        if "mamba2" in self.mamba_moe_layers and self.mamba2_heads % self.mamba2_groups:
            raise ValueError(f"mamba2_heads {self.mamba2_heads} is not divisible by mamba2_groups {self.mamba2_groups}")
        if "delta" in self.mamba_moe_layers and not self.delta_heads:
            raise ValueError(f"expansion_factor * hidden_size = {self.inner_size} has no head of {self.delta_head_dim}")
        if "delta" in self.mamba_moe_layers and self.delta_heads % self.delta_key_heads:
            raise ValueError(
                f"delta_heads {self.delta_heads} is not divisible by delta_key_heads {self.delta_key_heads}"
            )
        heads_of_group = self.mamba3_head_dim * self.mamba3_groups
        if "mamba3" in self.mamba_moe_layers and self.inner_size % heads_of_group:
            raise ValueError(
                f"expansion_factor * hidden_size = {self.inner_size} is not divisible by "
                f"mamba3_head_dim * mamba3_groups = {heads_of_group}"
            )
        for name, choices in CHOICES.items():
            *first, last = (f'"{choice}"' for choice in choices)
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be {', '.join(first)} or {last}, not {getattr(self, name)!r}")
        if self.balance_in_training and self.router_kind != "sinkhorn":
            raise ValueError(f"balance_in_training needs a model trained with Sinkhorn, not {self.router_kind!r}")
        for name in POSITIVE:
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")

    @property
    def inner_size(self) -> int:
        return self.expansion_factor * self.hidden_size


BlackMambaConfig.register_for_auto_class()  # so that save_pretrained takes this file along
