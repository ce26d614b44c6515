"""Adam with FusedAdam's state layout: `step` in the group, two moments a parameter.

megatron-core's distributed optimizer can save and resume that layout of Apex and Transformer Engine, so a checkpoint
made on CPUs continues on GPUs and back.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.ops import backends


class Adam(torch.optim.Optimizer):
    """Adam (adam_w_mode False: weight decay joins the gradient) or AdamW (True: it shrinks the weights directly)."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        **unsupported: Any,
    ) -> None:
        wanted = {name: value for name, value in unsupported.items() if value}
        if wanted:
            raise TypeError(f"this Adam has no {', '.join(wanted)}: install Transformer Engine for it")
        self.adam_w_mode = adam_w_mode
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": True}
        super().__init__(params, defaults)
        self.factor = 1.0
        """What gradients are multiplied by while a fused update reads them."""
        self.copies: dict[Tensor, Tensor] = {}
        """Weights in bf16 that a fused update also writes."""
        self._tables: dict[Any, Any] = {}

    @cached_property
    def fused(self) -> bool:
        """Return whether Triton's kernel updates all weights, and so can clip and write copies. Asked once."""
        weights = [p for group in self.param_groups for p in group["params"]]
        return all(backends.triton_of("adam", p) is not None and p.is_contiguous() for p in weights)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient; return the result of `closure`, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["params"]:
                group["step"] = int(group.get("step", 0)) + 1
                self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        for p in params:
            if "exp_avg" not in self.state[p]:
                self.state[p]["exp_avg"] = torch.zeros_like(p)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        by_kind: dict[Any, list[torch.Tensor]] = {}
        for p in params:
            by_kind.setdefault((p.device, p.dtype), []).append(p)
        if self.fused:
            for same in by_kind.values():
                self._update_fused(group, same)
            return
        beta1, beta2 = group["betas"]
        update = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        for (device, _), same in by_kind.items():
            step = torch.full((), float(group["step"]), device=device)  # no copy from the host
            update(
                same,
                [p.grad.to(p.dtype) for p in same if p.grad is not None],
                [self.state[p]["exp_avg"] for p in same],
                [self.state[p]["exp_avg_sq"] for p in same],
                [],
                [step] * len(same),
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
            )

    def _update_fused(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        kernel: Any = backends.triton_of("adam", weights[0])
        moments = [[self.state[p][name] for p in weights] for name in ("exp_avg", "exp_avg_sq")]
        columns = ([p.grad for p in weights], weights, *moments, [self.copies.get(p) for p in weights])
        place = (id(group), weights[0].device)
        table = self._tables.get(place)
        if table is None or table.key != kernel.key_of(*columns):
            table = self._tables[place] = kernel.Table(*columns)
        beta1, beta2 = group["betas"]
        settings = kernel.Settings(
            group["lr"], beta1, beta2, group["eps"], group["weight_decay"], self.adam_w_mode, group["step"]
        )
        table.update(settings, self.factor)
