"""Adam with FusedAdam's state layout: `step` in the group, two moments a parameter.

megatron-core's distributed optimizer can save and resume that layout of Apex and Transformer Engine, so a checkpoint
made on CPUs continues on GPUs and back. Moments are in the precision of the weights, or in bf16, rounded stochastically
(ops/adam/rounding.py); they are saved in fp32 by the distributed optimizer either way. Gradients may be in bf16.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_blackmamba.ops.adam import kernel_for, rounding

MOMENTS = ("exp_avg", "exp_avg_sq")
BLOCK = 2**20
"""Weights whose bf16 moments PyTorch widens at a time."""


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
        moments: torch.dtype | None = None,
        **unsupported: Any,
    ) -> None:
        """Keep the moments in the dtype `moments` (bf16), or in that of the weights."""
        wanted = {name: value for name, value in unsupported.items() if value}
        if wanted:
            raise TypeError(f"this Adam has no {', '.join(wanted)}: install Transformer Engine for it")
        self.adam_w_mode, self.moments = adam_w_mode, moments
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": True}
        super().__init__(params, defaults)
        self.factor: Tensor | float = 1.0
        """What an update multiplies gradients by while it reads them; a tensor where updates are `fused`. NaN in it
        makes a fused update change nothing."""
        self.copies: dict[Tensor, Tensor] = {}
        """Weights in bf16 that a fused update also writes."""
        self._tables: dict[Any, Any] = {}

    @cached_property
    def fused(self) -> bool:
        """Return whether Triton's kernel updates all weights, and so can clip and write copies. Asked once."""
        weights = [p for group in self.param_groups for p in group["params"]]
        return all(kernel_for(p) is not None and p.is_contiguous() for p in weights)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load moments of any precision; PyTorch gives them that of the weights."""
        super().load_state_dict(state_dict)
        for state in self.state.values():
            for name in MOMENTS:
                if self.moments and name in state:
                    state[name] = state[name].to(self.moments)

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

    def take_back(self) -> None:
        """Count one step less, after an update that has changed nothing."""
        for group in self.param_groups:
            if group["params"]:
                group["step"] -= 1

    def _update(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            return
        for p in params:
            self._make_moments(p)
        by_kind: dict[Any, list[torch.Tensor]] = {}
        for p in params:
            by_kind.setdefault((p.device, p.dtype, p.grad.dtype), []).append(p)
        for same in by_kind.values():
            if self.fused:
                self._update_fused(group, same)
                continue
            columns = same, [self._read(p) for p in same], *self._moments_of(same)
            if self.moments is None:
                self._update_wide(group, *columns)
            else:
                self._update_narrow(group, *columns)

    def _read(self, weight: Tensor) -> Tensor:
        """Return the gradient in the precision of the weight, times `factor`."""
        assert weight.grad is not None
        gradient = weight.grad.to(weight.dtype).contiguous()
        return gradient if self.factor == 1.0 else gradient * self.factor

    def _make_moments(self, weight: Tensor) -> None:
        """Add the moments of a weight before its first update, or in their precision where others have added them."""
        state = self.state[weight]
        for name in MOMENTS:
            before = state.get(name)
            if before is None:
                state[name] = torch.zeros_like(weight, dtype=self.moments)
            elif self.moments:
                state[name] = before.to(self.moments)

    def _moments_of(self, weights: list[Tensor]) -> tuple[list[Tensor], ...]:
        return tuple([self.state[p][name] for p in weights] for name in MOMENTS)

    def _update_wide(self, group: dict[str, Any], weights: list, gradients: list, first: list, second: list) -> None:
        """Update weights whose moments have their precision."""
        beta1, beta2 = group["betas"]
        update = torch._fused_adamw_ if self.adam_w_mode else torch._fused_adam_
        step = weights[0].new_full((), float(group["step"]), dtype=torch.float32)  # no copy from the host
        update(
            weights,
            gradients,
            first,
            second,
            [],
            [step] * len(weights),
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )

    def _update_narrow(self, group: dict[str, Any], *columns: list[Tensor]) -> None:
        """Update weights whose moments are in bf16, some at a time."""
        seed = rounding.seed_of(group["step"])
        for tensors in zip(*columns, strict=True):
            for block in zip(*(x.view(-1).split(BLOCK) for x in tensors), strict=True):
                weight, gradient, first, second = block
                bits = rounding.random_bits(first, second, weight, seed)
                wide = first.to(weight.dtype), second.to(weight.dtype)
                self._update_wide(group, [weight], [gradient], *([moment] for moment in wide))
                first.copy_(rounding.to_bf16(wide[0], bits))
                second.copy_(rounding.to_bf16(wide[1], bits >> 16))

    def _update_fused(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        kernel = kernel_for(weights[0])
        gradients: list[Any] = [p.grad for p in weights]
        columns = (gradients, weights, *self._moments_of(weights), [self.copies.get(p) for p in weights])
        place = (id(group), weights[0].device, gradients[0].dtype)
        table = self._tables.get(place)
        if table is None or table.key != kernel.key_of(*columns):
            table = self._tables[place] = kernel.Table(*columns)
        beta1, beta2 = group["betas"]
        settings = kernel.Settings(
            group["lr"], beta1, beta2, group["eps"], group["weight_decay"], self.adam_w_mode, group["step"]
        )
        table.update(settings, self.factor)
