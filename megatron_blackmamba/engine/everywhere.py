"""megatron-core with CUDA and without: what Transformer Engine and Apex would bring, and checkpoints."""

import importlib
from collections.abc import Callable
from typing import Any

import torch

from megatron_blackmamba.engine.checked import private, replace, torch_with


def router_gemm() -> None:
    from megatron.core.transformer.moe import moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)  # a name that it reads and does not have


def adam() -> None:
    from megatron_blackmamba.engine.adam import Adam

    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    replace(optimizer, "Adam", Adam)
    replace(optimizer, "USING_PYTORCH_OPTIMIZER", False)
    replace(distrib_optimizer, "Adam", Adam)
    replace(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    replace(distrib_optimizer, "USING_TE_OPTIMIZER", True)


def clipping() -> None:
    """Clip all gradients with a few launches and a single wait, which is megatron-core's."""
    from megatron.core.optimizer import clip_grads

    def norm(_: Any, __: Any, tensors: list[list[torch.Tensor]], *___: Any) -> tuple[torch.Tensor, None]:
        return norm_of(tensors[0]).view(1), None

    def scale(_: Any, __: Any, tensors: list[list[torch.Tensor]], factor: float) -> None:
        source, target = tensors
        if source is not target:
            torch._foreach_copy_(target, source)
        torch._foreach_mul_(target, factor)

    replace(clip_grads, "l2_norm_impl", norm)
    replace(clip_grads, "multi_tensor_scale_impl", scale)


def norm_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all tensors in at least fp32, the same bits whether they are stored in bf16 or in fp32."""
    norms: list[Any] = [None] * len(tensors)
    for dtype in {x.dtype for x in tensors}:  # one call takes one type
        places = [place for place, x in enumerate(tensors) if x.dtype == dtype]
        found = torch._foreach_norm([tensors[place] for place in places], 2, torch.promote_types(dtype, torch.float32))
        for place, norm in zip(places, found, strict=True):
            norms[place] = norm
    return torch.linalg.vector_norm(torch.stack(norms))


def one_type() -> None:
    """Call them once for each type: with gradients in bf16, those of fp32 weights would make the norm NaN."""
    from megatron.core.optimizer import clip_grads, optimizer

    for module in (clip_grads, optimizer):
        replace(module, "multi_tensor_applier", _by_type(private(module, "multi_tensor_applier")))


def _by_type(apply: Callable[..., Any]) -> Callable[..., Any]:
    def each(kernel: Any, overflow: Any, columns: list[list[torch.Tensor]], *args: Any) -> Any:
        rows_of: dict[tuple[torch.dtype, ...], list[tuple[torch.Tensor, ...]]] = {}
        for row in zip(*columns, strict=True):
            rows_of.setdefault(tuple(x.dtype for x in row), []).append(row)
        parts = [[*map(list, zip(*rows, strict=True))] for rows in rows_of.values()] or [columns]
        answers = [apply(kernel, overflow, part, *args) for part in parts]
        if len(answers) < 2 or not isinstance(answers[0], tuple):
            return answers[0]
        return torch.linalg.vector_norm(torch.stack([norm.view(1) for norm, *_ in answers])).view(1), None

    return each


def checkpoint_folder() -> None:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    replace(FileSystemWriterAsync, "prepare_local_plan", lambda writer, plan: plan)  # rank 0 has made the folder


def stored_strides() -> None:
    strategy = importlib.import_module("megatron.core.dist_checkpointing.strategies.torch")

    def empty(*args: Any, strides: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.empty(*args, **kwargs)

    replace(strategy, "torch", torch_with(empty=empty))
