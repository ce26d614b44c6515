"""Adam with FusedAdam's state layout: `step` in the group, two moments a parameter.

megatron-core's distributed optimizer can save and resume that layout of Apex and Transformer Engine, so a checkpoint
made on CPUs continues on GPUs and back.
"""

from collections.abc import Iterable
from typing import Any

import torch


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
