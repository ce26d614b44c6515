"""Which module plugs in where: one spec a letter of the pattern."""

from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.model.attention import CausalAttention
from megatron_blackmamba.model.experts import GroupedExperts
from megatron_blackmamba.model.linears import ColumnLinear, RowLinear
from megatron_blackmamba.model.mamba import MambaMixer, MambaMixerSubmodules
from megatron_blackmamba.model.moe import MoEMixer
from megatron_blackmamba.model.norms import LayerNorm, RMSNorm
from megatron_blackmamba.model.router import SinkhornRouter, SoftmaxRouter
from megatron_blackmamba.model.stack import (
    AttentionBlock,
    Block,
    BlockSubmodules,
    ExpertsBlock,
    MambaBlock,
    MLPBlock,
    Stack,
    StackSubmodules,
)


def stack_spec(model: ModelConfig) -> ModuleSpec:
    """The whole stack of a model."""
    column, row = linears(model.linear)
    router = {"sinkhorn": SinkhornRouter, "softmax": SoftmaxRouter}[model.router.kind]
    mamba = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(in_proj=column, x_proj=row, out_proj=row))
    experts = ModuleSpec(MoEMixer, submodules=MoESubmodules(router=router, experts=GroupedExperts))
    attention = ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(linear_qkv=column, core_attention=CausalAttention, linear_proj=row),
    )
    mlp = ModuleSpec(DenseMLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row))
    return ModuleSpec(
        Stack,
        submodules=StackSubmodules(
            mamba=_block(MambaBlock, mamba),
            experts=_block(ExpertsBlock, experts),
            attention=_block(AttentionBlock, attention),
            mlp=_block(MLPBlock, mlp),
            final_norm=LayerNorm,
        ),
    )


def linears(kind: str) -> tuple[type, type]:
    """Column- and row-parallel linears: megatron-core's, or Transformer Engine's under the same parameter names."""
    if kind == "local":
        return ColumnLinear, RowLinear
    try:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear
    except ImportError as error:
        raise ValueError(
            "model.linear=te needs Transformer Engine, which is not installed here"
            " (pip install 'megatron-blackmamba[cuda]'); model.linear=local needs nothing"
        ) from error
    return TEColumnParallelLinear, TERowParallelLinear


class DenseMLP(MLP):
    """megatron-core's MLP without the arguments it does not know."""

    def __init__(self, config, submodules, layer_number, pg_collection):
        super().__init__(config, submodules, tp_group=pg_collection.tp)


def _block(kind: type[Block], mixer: ModuleSpec) -> ModuleSpec:
    return ModuleSpec(kind, submodules=BlockSubmodules(norm=RMSNorm, mixer=mixer))
