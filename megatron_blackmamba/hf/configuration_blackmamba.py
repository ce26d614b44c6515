"""The configuration of a BlackMamba for transformers: Mamba mixers alternating with mixtures of experts."""

import math

from transformers import PretrainedConfig


class BlackMambaConfig(PretrainedConfig):
    """Fields carry the names of the released config.json, as far as it has them; the others are additions.

    mamba_moe_layers: one entry per layer: "r" for Mamba, "mamba2", a number for a mixture of that many experts,
    "attention" or "mlp".
    mamba2_head_dim, mamba2_state_size, mamba2_groups: of "mamba2" layers.
    num_attention_heads, num_key_value_heads, rope_theta: of "attention" layers.
    mlp_hidden_size: the inner width of "mlp" layers.
    num_experts_per_tok: how many experts a token goes to.
    router_scores: what weighs their outputs, the "sigmoid" or the "softmax" of the router's logits.
    router_normalized: whether the weights of a token are divided by their sum.
    router_biased: whether the largest sums of score and expert bias are chosen, instead of the largest logits.
    router_kind: the router of training, which these files do not have.
    shared_expert_hidden_size: the inner width of one more expert that every token goes to; None for none.
    activation: the gate of the experts. "silu" is what the paper trains; "gelu" is what the released code computes.
    arrangement: "sequential", or "parallel": the layers of a pair share one norm and their outputs are added together.
    eod_reset: id of the token after which the state restarts; None lets it run across documents, as in the paper.
    output_router_choices: return the expert of every token from each forward.
    kernels: "auto" uses megatron_blackmamba's kernels where that package is installed, "torch" never does.
    """

    model_type = "blackmamba"
    keys_to_ignore_at_inference = ["past_key_values", "router_choices"]  # noqa: RUF012 (transformers' own form)
    attribute_map = {  # noqa: RUF012
        "num_hidden_layers": "num_layers",
        "max_position_embeddings": "max_sequence_length",
        "intermediate_size": "ffn_hidden_size",
    }

    def __init__(
        self,
        vocab_size=50304,
        hidden_size=1152,
        num_layers=30,
        state_size=16,
        conv_dimension=4,
        expansion_factor=2,
        dt_rank=None,
        mamba_moe_layers=None,
        ffn_hidden_size=3072,
        max_sequence_length=2048,
        activation="silu",
        eod_reset=None,
        norm_eps=1e-5,
        arrangement="sequential",
        num_attention_heads=16,
        num_key_value_heads=None,
        rope_theta=10000,
        mlp_hidden_size=None,
        mamba2_head_dim=64,
        mamba2_state_size=128,
        mamba2_groups=1,
        num_experts_per_tok=1,
        router_scores="sigmoid",
        router_normalized=False,
        router_biased=False,
        router_kind="sinkhorn",
        shared_expert_hidden_size=None,
        initializer_range=0.02,
        kernels="auto",
        output_router_choices=False,
        use_cache=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
        tie_word_embeddings=True,
        **kwargs,
    ):
        if mamba_moe_layers is None:
            mamba_moe_layers = ["r" if i % 2 == 0 else "8" for i in range(num_layers)]
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.state_size = state_size
        self.conv_dimension = conv_dimension
        self.expansion_factor = expansion_factor
        self.dt_rank = math.ceil(hidden_size / 16) if dt_rank is None else dt_rank
        self.mamba_moe_layers = [str(kind) for kind in mamba_moe_layers]
        self.ffn_hidden_size = ffn_hidden_size
        self.max_sequence_length = max_sequence_length
        self.activation = activation
        self.eod_reset = eod_reset
        self.norm_eps = norm_eps
        self.arrangement = arrangement
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.rope_theta = rope_theta
        self.mlp_hidden_size = mlp_hidden_size
        self.mamba2_head_dim = mamba2_head_dim
        self.mamba2_state_size = mamba2_state_size
        self.mamba2_groups = mamba2_groups
        self.num_experts_per_tok = num_experts_per_tok
        self.router_scores = router_scores
        self.router_normalized = router_normalized
        self.router_biased = router_biased
        self.router_kind = router_kind
        self.shared_expert_hidden_size = shared_expert_hidden_size
        self.initializer_range = initializer_range
        self.kernels = kernels
        self.output_router_choices = output_router_choices
        self.use_cache = use_cache
        super().__init__(
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )
        self._check()

    def _check(self):
        if len(self.mamba_moe_layers) != self.num_layers:
            raise ValueError(
                f"mamba_moe_layers has {len(self.mamba_moe_layers)} entries, num_layers is {self.num_layers}"
            )
        for kind in self.mamba_moe_layers:
            if kind not in ("r", "mamba2", "attention", "mlp") and not (kind.isdecimal() and int(kind) > 0):
                raise ValueError(
                    'mamba_moe_layers: an entry is "r", "mamba2", "attention", "mlp" or a number of experts, '
                    f"not {kind!r}"
                )
            if kind.isdecimal() and not 1 <= self.num_experts_per_tok <= int(kind):
                raise ValueError(f"num_experts_per_tok is 1 to {kind}, not {self.num_experts_per_tok}")
        if "mlp" in self.mamba_moe_layers and self.mlp_hidden_size is None:
            raise ValueError("mamba_moe_layers has mlp: set mlp_hidden_size")
        heads_of_group = self.mamba2_head_dim * self.mamba2_groups
        if "mamba2" in self.mamba_moe_layers and self.inner_size % heads_of_group:
            raise ValueError(
                f"expansion_factor * hidden_size = {self.inner_size} is not divisible by "
                f"mamba2_head_dim * mamba2_groups = {heads_of_group}"
            )
        if "attention" in self.mamba_moe_layers and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads {self.num_attention_heads}"
            )
        if self.arrangement not in ("sequential", "parallel"):
            raise ValueError(f'arrangement is "sequential" or "parallel", not {self.arrangement!r}')
        if self.activation not in ("silu", "gelu"):
            raise ValueError(f'activation is "silu" or "gelu", not {self.activation!r}')
        if self.router_scores not in ("sigmoid", "softmax"):
            raise ValueError(f'router_scores is "sigmoid" or "softmax", not {self.router_scores!r}')
        if self.kernels not in ("auto", "torch"):
            raise ValueError(f'kernels is "auto" or "torch", not {self.kernels!r}')
        if not self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings: BlackMamba's output layer is its embedding; it cannot be untied")

    @property
    def inner_size(self):
        return self.expansion_factor * self.hidden_size


BlackMambaConfig.register_for_auto_class()  # so that save_pretrained takes this file along
