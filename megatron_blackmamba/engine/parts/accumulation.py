"""Weight gradients of a step, added up with fewer passes over memory than megatron-core makes.

megatron-core sets its gradient buffers to zero, adds each micro-batch, then multiplies by one over the number of
replicas. Here the first micro-batch overwrites the buffers, and the factor is applied while copying and adding. With
one replica on a CPU, and gradients of the weights' own type, autograd itself adds to the buffers.

megatron-core also reduces gradients and gathers weights among the ranks of a group that has one rank: of one process,
and of experts of which there is no replica. Here nothing is exchanged then.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.config import RunConfig
from megatron_blackmamba.engine.checked import replace, require

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

Weight = Any
"""A Parameter to which megatron-core has added `main_grad`."""


def reduction(config: RunConfig, ranks: int) -> DistributedDataParallelConfig:
    """Return the settings for gradients that are reduced over this many ranks."""
    in_fp32 = config.training.precision != "fp64" and config.optimizer.gradients == "fp32"
    overlap = config.training.overlap and ranks > 1
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=in_fp32,  # else in the parameters' precision
        use_distributed_optimizer=config.optimizer.distributed,
        overlap_grad_reduce=overlap,
        bucket_size=config.training.bucket_size,
        overlap_param_gather=overlap and config.optimizer.distributed,
        check_for_nan_in_grad=False,  # the optimizer's norm tells, and the step is skipped
    )


class Accumulation(DistributedDataParallel):
    """megatron-core's wrapper; `zero_grad_buffer` only notes that the gradients of the last step are outdated."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        overridden = "_make_backward_post_hook", "zero_grad_buffer", "start_grad_sync", "finish_grad_sync"
        require(DistributedDataParallel, *overridden)
        super().__init__(*args, **kwargs)
        self.outdated: dict[int, Weight] = {}
        """Parameters, by id, whose gradient buffer still holds the last step's gradient."""
        self._weights: dict[int, Weight] = {}
        self._direct: list[Weight] = []
        """Parameters to whose buffer autograd adds, since their `grad` is a part of it."""
        self.reads_grad = False
        """Whether the optimizer reads the `grad` of a parameter that has one, and its buffer otherwise."""
        self.keeps_grad = False
        """Whether gradients stay in `grad`: with one micro-batch and one replica, there is nothing to add up."""
        self._factors: dict[int, tuple[float, Tensor]] = {}
        """By id, what a gradient is multiplied by, so that the sum over the replicas is a mean; also as a tensor."""
        as_tensor: dict[float, Tensor] = {}
        for buffer in (*self.buffers, *self.expert_parallel_buffers):
            for bucket in buffer.buckets:
                factor = bucket.gradient_scaling_factor
                for parameter in bucket.params_list:
                    parameter.zero_out_wgrad = False  # asks for an addition after gradients that a product has added
                    if factor == 1.0 and parameter.main_grad.dtype == parameter.dtype and self._adds_directly():
                        self._direct.append(parameter)
                        continue
                    shared = as_tensor.setdefault(factor, parameter.main_grad.new_full((1,), factor))
                    self._weights[id(parameter)], self._factors[id(parameter)] = parameter, (factor, shared)
                replace(bucket, "gradient_scaling_factor", 1.0)
        if not self.ddp_config.overlap_grad_reduce:
            self._hook_weights()
        for group in (*self.bucket_groups, *self.expert_parallel_bucket_groups):
            if _ranks_of(group).size() == 1:
                for exchange in ("start_grad_sync", "finish_grad_sync", "start_param_sync"):
                    replace(group, exchange, _nothing)

    def _hook_weights(self) -> None:
        """Hook weights instead of autograd's nodes, and only where there is something to add.

        A node that is kept computes on the stream on which it was made, which is not the one that captures a graph.
        """
        self.grad_accs.clear()  # the nodes, and with them their hooks
        for parameter in self._weights.values():
            parameter.register_post_accumulate_grad_hook(self._make_backward_post_hook(parameter))

    def zero_grad_buffer(self) -> None:
        for group in (*self.bucket_groups, *self.expert_parallel_bucket_groups):
            group.reset()
        self.outdated = self._weights.copy()
        if self._direct:
            torch._foreach_zero_([parameter.main_grad for parameter in self._direct])
        for parameter in self._direct:
            parameter.grad = parameter.main_grad

    def start_grad_sync(self, *args: Any) -> None:
        self._zero_outdated()
        super().start_grad_sync(*args)

    def finish_grad_sync(self, *args: Any, **kwargs: Any) -> None:
        self._zero_outdated()
        super().finish_grad_sync(*args, **kwargs)

    def _zero_outdated(self) -> None:
        """Set to zero the gradients of parameters that no micro-batch has used."""
        for parameter in self.outdated.values():
            parameter.main_grad.zero_()
        self.outdated.clear()

    def _make_backward_post_hook(self, param: Weight) -> Callable[..., None]:
        finish = super()._make_backward_post_hook(param) if self.ddp_config.overlap_grad_reduce else None

        def hook(*unused: Any) -> None:
            if id(param) not in self._weights:
                return
            if self.keeps_grad and self._factors[id(param)][0] == 1.0:
                if param.grad is not None:
                    self.outdated.pop(id(param), None)
                return
            if param.grad is not None:
                self._add(param, param.grad)
            if finish is None:
                param.grad = None
                return
            param.grad_added_to_main_grad = True  # so that `finish` does not add it too
            finish(*unused)

        return hook

    def _adds_directly(self) -> bool:
        """Return whether autograd may add to the buffers: nothing waits for single gradients, and hooks cost time.

        On a GPU they do not, and setting the buffers to zero would.
        """
        return not self.ddp_config.overlap_grad_reduce and not torch.cuda.is_available()

    def _add(self, parameter: Weight, gradient: Tensor) -> None:
        """Add the gradient of a micro-batch. Called for each weight in the backward pass, where autograd is off."""
        total, (factor, as_tensor) = parameter.main_grad, self._factors[id(parameter)]
        if self.outdated.pop(id(parameter), None) is None:
            total.add_(gradient, alpha=factor)
        elif factor == 1.0:
            total.copy_(gradient)
        elif total.dtype == gradient.dtype:
            torch.mul(gradient, factor, out=total)
        else:  # the factor is a tensor: a number would have the product rounded to the gradient's dtype
            torch.mul(gradient, as_tensor, out=total)


def _ranks_of(buckets: Any) -> Any:
    """Return the process group over which a group of buckets is reduced and gathered."""
    if buckets.ddp_config.use_distributed_optimizer:
        return buckets.intra_distributed_optimizer_instance_group
    return buckets.data_parallel_group


def _nothing(**unused: Any) -> None:
    """Exchange nothing."""
