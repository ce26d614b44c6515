"""Our configuration in megatron-core's words."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_blackmamba.config import KernelsConfig, ModelConfig, RunConfig
from megatron_blackmamba.layers import kinds_in
from megatron_blackmamba.ops.gated import ACTIVATIONS

from megatron.core.transformer.transformer_config import TransformerConfig

PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass
class MegatronConfig(TransformerConfig):
    """megatron-core's config with the `model:` and `kernels:` sections for the modules that it does not know."""

    blackmamba: ModelConfig | None = None
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    recompute: str = "none"

    @property
    def full_precision(self) -> torch.dtype:
        """Return fp32, or float64 for a float64 model: the dtype of residual stream, router and scan parameters."""
        return torch.promote_types(self.params_dtype, torch.float32)

    @property
    def described(self) -> ModelConfig:
        assert self.blackmamba is not None
        return self.blackmamba


def to_megatron(config: RunConfig) -> MegatronConfig:
    """Return every setting that megatron-core's modules, schedules and optimizer read."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="full scope is deprecated")  # of its own default
        return _to_megatron(config)


def _to_megatron(config: RunConfig) -> MegatronConfig:
    model, parallel = config.model, config.parallel
    dtype = PRECISIONS[config.training.precision]
    of_kinds: dict[str, Any] = {  # what megatron-core reads even where no layer has any
        "num_attention_heads": parallel.tensor,
        "moe_router_load_balancing_type": "none",
    }
    for kind in kinds_in(model.pattern):
        of_kinds |= kind.megatron(model)
    return MegatronConfig(
        blackmamba=model,
        kernels=config.kernels,
        recompute=config.training.recompute,
        num_layers=model.layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.mlp_hidden_size or model.expert_hidden_size or model.inner_size,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_eps,
        gated_linear_unit=model.gated,
        activation_func=ACTIVATIONS[model.activation],
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        mtp_num_layers=1 if model.mtp.pattern else None,  # then stages share the embedding, tied or not
        perform_initialization=False,  # initialise.py fills every parameter by its name
        params_dtype=dtype,
        pipeline_dtype=torch.promote_types(dtype, torch.float32),  # what stages exchange is the residual stream
        fp32_residual_connection=dtype is not torch.float64,  # else the embedding would round to fp32
        bf16=dtype is torch.bfloat16,
        # The experts
        moe_router_dtype="fp64" if dtype is torch.float64 else "fp32",
        moe_token_dispatcher_type=config.kernels.dispatcher,
        moe_grouped_gemm=False,
        # The layout
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        sequence_parallel=parallel.tensor > 1,
        batch_p2p_comm=torch.cuda.is_available(),
        batch_p2p_sync=False,  # works around a fault of older PyTorch versions, and stops the host at every exchange
        deterministic_mode=config.training.deterministic,
        # Fusions that need Apex or Transformer Engine
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        moe_permute_fusion=False,
        cross_entropy_loss_fusion=False,
        **of_kinds,
    )
