"""megatron-core's Muon, made to know stacks of matrices and float64.

Shapes: E experts of this rank, R rows and C columns of one expert's matrix.
"""

from typing import Any

import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers import muon_utils
from torch import Tensor

from megatron_blackmamba.engine.checked import private
from megatron_blackmamba.engine.float64 import as_if_fp32
from megatron_blackmamba.optimizers.muon import orthogonalizes

from megatron.core.optimizer import emerging_optimizers
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate


class StackedMuon(emerging_optimizers.TensorParallelMuon):
    """Muon that makes the matrix of each expert orthogonal by itself, where megatron-core takes Adam."""

    def orthogonalize(self, p: Any, grad: Tensor, **kwargs: Any) -> Tensor:
        """Return the update of a weight with this momentum; weights of tensor-parallel ranks are gathered for it."""
        with as_if_fp32(muon_utils, grad):
            return super().orthogonalize(p, grad, **kwargs) if p.dim() == 2 else self._each(p, grad)

    def _each(self, stack: Any, momentum: Tensor) -> Tensor:
        """Gather the hidden units of each expert, flatten gate and up into one matrix, and keep this rank's units."""
        group, axis = self.pg_collection.expt_tp, stack.partition_dim
        parts = [torch.empty_like(momentum) for _ in range(group.size())]
        dist.all_gather(parts, momentum.contiguous(), group)
        whole = torch.cat(parts, axis)
        update_ERC = self.scaled_orthogonalize_fn(whole.flatten(1, -2), group, None)
        return update_ERC.view(whole.shape).chunk(group.size(), axis)[group.rank()]


def register() -> None:
    """Add it to megatron-core's optimizers, with Adam for all other weights."""
    others = ParamKey(predicate=ParamPredicate("updated_by_adam", lambda weight: not orthogonalizes(weight)))
    private(emerging_optimizers, "_EMERGING_OPTIMIZERS")["stacked_muon"] = emerging_optimizers.EmergingOptimizerEntry(
        StackedMuon,
        config_to_kwargs=private(emerging_optimizers, "_muon_config_to_kwargs"),
        default_param_overrides={others: {"optimizer": "adam"}},
    )
