"""The stack: pre-norm blocks on a residual stream that is fp32 from the embedding to the last norm.

A letter of the pattern is a block: x + mix(norm(x)). In a parallel arrangement two blocks share the norm of the first.
A block leaves the addition to the norm of the next one, whose kernel does both.
Blocks are named by their place in the whole model, so a parameter has the same name on every pipeline stage.

Shapes: S sequence (of this rank), B batch, D model.
"""

from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from megatron_blackmamba import norms
from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.layers import LayerKind, carried, kind_of
from megatron_blackmamba.model.config import MegatronConfig
from megatron_blackmamba.model.inputs import LayerInputs
from megatron_blackmamba.model.norms import Affine, RMSNorm
from megatron_blackmamba.model.sharding import sharded_mixer, sharded_modules

from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule


class Block(MegatronModule):
    """One residual layer: x + mix(norm(x))."""

    def __init__(
        self,
        config: MegatronConfig,
        kind: LayerKind,
        layer_number: int,
        pg_collection: ProcessGroupCollection,
        recompute: bool = False,
        has_norm: bool = True,
    ):
        super().__init__(config)
        self.layer_number = layer_number
        self.groups = pg_collection
        self.kind = kind
        self.recompute = recompute
        self.multiplier = config.described.multipliers.residual
        self.norm: Any = RMSNorm(config, config.hidden_size, eps=config.layernorm_epsilon) if has_norm else None
        self.mixer: Any = kind.module(config, layer_number, pg_collection)
        self.stream, self.output = (
            Affine(config) if config.described.residual_scaling else nn.Identity() for _ in range(2)
        )

    def forward(
        self,
        residual_SBD: Tensor,
        branch_SBD: Tensor | None,
        inputs: LayerInputs,
        shared_SBD: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream and the output that is still to be added to it.

        Args:
            residual_SBD: The stream, to which `branch_SBD` of the previous block is still to be added.
            shared_SBD: The normalised stream shared with the neighbouring block.
        """
        recompute = self.recompute and self.training and torch.is_grad_enabled()
        if shared_SBD is None and not recompute:  # the norm's kernel adds
            hidden_SBD, residual_SBD = self.norm(residual_SBD, branch_SBD, and_stream=True)
            return self.stream(residual_SBD), self.output(scaled(self.mixer(hidden_SBD, inputs), self.multiplier))

        def mixed(x_SBD: Tensor, *carried_SBR: Tensor) -> tuple[Tensor, ...]:
            own = replace(inputs, carried_SBR=next(iter(carried_SBR), None))  # a recomputed layer begins as it did
            hidden_SBD = self.norm(x_SBD) if shared_SBD is None else x_SBD
            y_SBD = self.output(scaled(self.mixer(hidden_SBD, own), self.multiplier))
            return (y_SBD,) if own.carried_SBR is None else (y_SBD, own.carried_SBR)

        residual_SBD = added(residual_SBD, branch_SBD)
        reads = [residual_SBD if shared_SBD is None else shared_SBD]
        if self.kind.carried(self.config.described) and inputs.carried_SBR is not None:
            reads.append(inputs.carried_SBR)
        branch_SBD, *left = tensor_parallel.checkpoint(mixed, False, *reads) if recompute else mixed(*reads)
        if left:
            (inputs.carried_SBR,) = left
        return self.stream(residual_SBD), branch_SBD

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        around = {f"{name}.": module for name, module in self.named_children() if name != "mixer"}
        declared = self.kind.stored(self.config.described)
        return sharded_modules(around, prefix, sharded_offsets, metadata, self.groups.tp) | sharded_mixer(
            self.mixer, declared, f"{prefix}mixer.", metadata, self.groups
        )


class Stack(MegatronModule):
    def __init__(
        self,
        config: MegatronConfig,
        pre_process: bool,
        post_process: bool,
        pg_collection: ProcessGroupCollection,
    ):
        super().__init__(config)
        self.tp_group = pg_collection.tp
        self.pre_process = pre_process
        self.received_SBD: Tensor | None = None
        self.read_ahead_SBD: Tensor | None = None
        pattern = config.described.pattern
        here = layers_of_stage(config.described, pg_collection.pp.rank(), pg_collection.pp.size())
        self.parallel = config.described.arrangement == "parallel"
        self.carried = carried(config.described)
        self.layers: Any = nn.ModuleList()  # megatron-core's schedules iterate over it
        for i in here:
            kind = kind_of(pattern[i])
            recompute, has_norm = config.recompute in kind.recompute, config.described.has_norm(i)
            block = Block(config, kind, i + 1, pg_collection, recompute, has_norm)
            self.layers.add_module(str(i), block)  # named by the place in the whole model, not in this stage
        self.final_layernorm: Any = None
        if post_process:
            norm = resolve_name(norms.kind_of(config.described.final_norm).module)
            self.final_layernorm = norm(config, config.hidden_size, eps=config.layernorm_epsilon)

    def set_input_tensor(self, received_SBD: Tensor) -> None:
        """Set what the previous pipeline stage sent, `between_stages`; megatron-core's schedules call this."""
        self.received_SBD = received_SBD

    def forward(self, residual_SBD: Tensor | None, inputs: LayerInputs) -> Tensor:
        x = residual_SBD if self.pre_process else self.received_SBD
        assert x is not None, "the stage before sent nothing"
        if self.carried:
            if self.pre_process:
                inputs.carried_SBR = x.new_zeros(*x.shape[:-1], self.carried)
            else:
                x, inputs.carried_SBR = (
                    part.contiguous() for part in x.tensor_split([self.config.hidden_size], dim=-1)
                )
        branch: Tensor | None = None
        shared: Tensor | None = None
        block: Any
        for block in self.layers:
            if self.parallel and block.norm is not None:
                x, branch = added(x, branch), None
                shared = block.norm(x)
            x, branch = block(x, branch, inputs, shared)
        x = added(x, branch)
        if self.final_layernorm is not None:
            normed = self.final_layernorm(x)
            if (mtp := self.config.described.mtp).pattern and self.training:
                self.read_ahead_SBD = x if mtp.reads == "stream" else normed
            return normed
        return x if inputs.carried_SBR is None else torch.cat([x, inputs.carried_SBR], dim=-1)

    def take_read_ahead(self) -> Tensor:
        """Return what the extra depth reads of the last forward pass of training, and let go of it."""
        read_SBD, self.read_ahead_SBD = self.read_ahead_SBD, None
        assert read_SBD is not None, "only a forward pass of training with model.mtp keeps it"
        return read_SBD

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        modules: dict[str, nn.Module] = {f"layers.{name}.": block for name, block in self.layers.named_children()}
        if self.final_layernorm is not None:
            modules["final_layernorm."] = self.final_layernorm
        return sharded_modules(modules, prefix, sharded_offsets, metadata, self.tp_group)


def between_stages(model: ModelConfig, shapes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the shapes of what pipeline stages exchange: the stream, and behind it what layers carry beside it."""
    return [(*shape[:-1], shape[-1] + carried(model)) for shape in shapes]


def added(residual_SBD: Tensor, branch_SBD: Tensor | None) -> Tensor:
    return residual_SBD if branch_SBD is None else residual_SBD + branch_SBD


def scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


def layers_of_stage(model: ModelConfig, stage: int, stages: int) -> range:
    """Return the layers of one pipeline stage: shares as equal as possible, larger ones first, and no pair is split."""
    each, more = divmod(model.layers // model.layers_together, stages)
    first = stage * each + min(stage, more)
    end = first + each + (stage < more)
    return range(first * model.layers_together, end * model.layers_together)


def extra_depth_of_stage(model: ModelConfig, stage: int, stages: int) -> str:
    """Return the layers of model.mtp on one pipeline stage, which are all on the last."""
    return model.mtp.pattern or "" if stage == stages - 1 else ""
