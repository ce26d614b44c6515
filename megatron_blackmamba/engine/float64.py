"""Keep float64 models in float64 where megatron-core rounds to fp32.

Training in float64 exists to compare layouts on CPUs. megatron-core hard-codes fp32 for the gradients given to the
optimizer, the optimizer's checkpoint, the router's scores, and the loss. Every function here checks the
model's precision first; other models take megatron-core's own path.
"""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_blackmamba.engine.checked import private, replace, torch_with


def apply() -> None:
    """Replace the methods that round."""
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel.cross_entropy import VocabParallelCrossEntropy
    from megatron.core.transformer.moe import moe_utils, router

    distributed = distrib_optimizer.DistributedOptimizer
    _in_float64(distributed, "_copy_model_grads_to_main_grads", _copy_gradients)
    load = private(distributed, "load_state_dict")

    def load_float64(*args: Any) -> None:
        with mock.patch.object(distrib_optimizer, "torch", torch_with(float32=torch.float64)):
            load(*args)

    _in_float64(distributed, "load_state_dict", load_float64)
    for name in ("topk_routing_with_score_function", "compute_routing_scores_for_aux_loss"):
        replace(router, name, _of_float64_logits(moe_utils, private(moe_utils, name)))
    replace(VocabParallelCrossEntropy, "calculate_logits_max", staticmethod(_logits_max))


def _in_float64(kind: type, name: str, replacement: Callable) -> None:
    """Give optimizers of float64 models another method, and leave the others as they are."""
    original = private(kind, name)

    @wraps(original)
    def choose(self: Any, *args: Any, **kwargs: Any) -> Any:
        float64 = getattr(self.config, "params_dtype", None) is torch.float64
        return (replacement if float64 else original)(self, *args, **kwargs)

    replace(kind, name, choose)


def _copy_gradients(self: Any) -> None:
    """Hand the reduced gradients of this rank's shards to the optimizer."""
    for parameters, shards in zip(self.model_fp32_groups, self.shard_fp32_groups, strict=True):
        for parameter, shard in zip(parameters, shards, strict=True):
            here = self._get_model_param_range_map(parameter)["param"]
            shard.grad = parameter.main_grad.view(-1)[here.start : here.end]


@contextmanager
def as_if_fp32(module: types.ModuleType, x: Tensor) -> Iterator[None]:
    """Have functions of `module` that ask for fp32 take float64, if `x` is float64."""
    if x.dtype is not torch.float64:
        yield
        return
    with mock.patch.object(module, "torch", torch_with(float32=torch.float64)):
        yield


def _of_float64_logits(module: types.ModuleType, original: Callable) -> Callable:
    """Run a function of `module` on float64 logits without its casts to fp32."""

    @wraps(original)
    def run(logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        if logits.dtype is not torch.float64:
            return original(logits, *args, **kwargs)
        with as_if_fp32(module, logits), mock.patch.object(Tensor, "float", Tensor.double):
            return original(logits, *args, **kwargs)

    return run


def _logits_max(logits_SBV: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits in at least fp32, and the largest of each token."""
    logits_SBV = logits_SBV.to(torch.promote_types(logits_SBV.dtype, torch.float32))
    return logits_SBV, logits_SBV.amax(dim=-1)
