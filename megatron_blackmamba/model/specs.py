"""Which module plugs in where: the spec of the stack, and of the block of each kind of layer."""

from importlib import import_module
from typing import Any

from megatron_blackmamba import norms, routers
from megatron_blackmamba.config import ConfigError, KernelsConfig, ModelConfig
from megatron_blackmamba.layers import LayerKind, kinds_in
from megatron_blackmamba.layers.attention.mixer import CausalAttention
from megatron_blackmamba.layers.experts.grouped import GroupedExperts
from megatron_blackmamba.layers.experts.mixer import MoEMixer
from megatron_blackmamba.layers.mamba.mixer import MambaMixer, MambaMixerSubmodules
from megatron_blackmamba.layers.mamba2.mixer import Mamba2Mixer, Mamba2MixerSubmodules
from megatron_blackmamba.layers.mamba3.mixer import Mamba3Mixer, Mamba3MixerSubmodules
from megatron_blackmamba.model.linears import ColumnLinear, Fp8ColumnLinear, Fp8RowLinear, RowLinear
from megatron_blackmamba.model.norms import RMSNorm
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
from megatron_blackmamba.ops import fp8
from megatron_blackmamba.registry import KindError

from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec


def stack_spec(model: ModelConfig, kernels: KernelsConfig) -> ModuleSpec:
    """Return the spec of a model's whole stack."""
    blocks = {kind.letter: _block_of(kind, model, kernels) for kind in kinds_in(model.pattern)}
    final_norm = _named(norms.kind_of(model.final_norm).module)
    return ModuleSpec(Stack, submodules=StackSubmodules(blocks, final_norm))


def mamba_block(model: ModelConfig, kernels: KernelsConfig) -> ModuleSpec:
    column, row = linears(kernels.linear)
    mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(in_proj=column, x_proj=row, out_proj=row))
    return block(MambaBlock, mixer)


def mamba2_block(model: ModelConfig, kernels: KernelsConfig) -> ModuleSpec:
    column, row = linears(kernels.linear)
    return block(MambaBlock, ModuleSpec(Mamba2Mixer, submodules=Mamba2MixerSubmodules(in_proj=column, out_proj=row)))


def mamba3_block(model: ModelConfig, kernels: KernelsConfig) -> ModuleSpec:
    column, row = linears(kernels.linear)
    return block(MambaBlock, ModuleSpec(Mamba3Mixer, submodules=Mamba3MixerSubmodules(in_proj=column, out_proj=row)))


def experts_block(model: ModelConfig, kernels: KernelsConfig) -> ModuleSpec:
    column, row = linears(kernels.linear)
    submodules = MoESubmodules(
        router=_named(routers.kind_of(model.router.kind).module),
        experts=GroupedExperts,
        shared_experts=ModuleSpec(SharedExpertMLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row)),
    )
    return block(ExpertsBlock, ModuleSpec(MoEMixer, submodules=submodules))


def attention_block(model: ModelConfig, kernels: KernelsConfig) -> ModuleSpec:
    column, row = linears(kernels.linear)
    norm = RMSNorm if model.attention.qk_norm else None
    mixer = ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=column, core_attention=CausalAttention, linear_proj=row, q_layernorm=norm, k_layernorm=norm
        ),
    )
    return block(AttentionBlock, mixer)


def mlp_block(model: ModelConfig, kernels: KernelsConfig) -> ModuleSpec:
    column, row = linears(kernels.linear)
    return block(MLPBlock, ModuleSpec(DenseMLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row)))


def block(kind: type[Block], mixer: ModuleSpec) -> ModuleSpec:
    """Return the spec of a residual block: a norm, then the mixer."""
    return ModuleSpec(kind, submodules=BlockSubmodules(norm=RMSNorm, mixer=mixer))


def linears(kind: str) -> tuple[type, type]:
    """Return the column- and row-parallel linears: megatron-core's, also in FP8, or Transformer Engine's."""
    if kind == "local":
        return ColumnLinear, RowLinear
    if kind == "fp8":
        if reason := fp8.why_not():
            raise ConfigError(f"kernels.linear=fp8 cannot run here: {reason}. Use kernels.linear=local.")
        return Fp8ColumnLinear, Fp8RowLinear
    from megatron.core.extensions.transformer_engine import HAVE_TE, TEColumnParallelLinear, TERowParallelLinear

    if not HAVE_TE:  # the names are there nevertheless
        raise ConfigError(
            "kernels.linear=te needs Transformer Engine, which is not installed here"
            " (pip install 'megatron-blackmamba[cuda]'); kernels.linear=local needs nothing"
        )
    return TEColumnParallelLinear, TERowParallelLinear


class DenseMLP(MLP):
    """megatron-core's MLP without the arguments it does not know."""

    def __init__(self, config, submodules, layer_number, pg_collection):
        super().__init__(config, submodules, tp_group=pg_collection.tp)


def _block_of(kind: LayerKind, model: ModelConfig, kernels: KernelsConfig) -> ModuleSpec:
    try:
        make = _named(kind.block)
    except (ImportError, AttributeError) as error:
        raise KindError(f"{type(kind).__name__}.block={kind.block!r} cannot be imported: {error}") from error
    return make(model, kernels)


def _named(name: str) -> Any:
    """Return what "package.module:name" names, because a kind's file must not import megatron-core."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
