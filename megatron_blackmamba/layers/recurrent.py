"""What recurrent layers have in common."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from megatron_blackmamba.layers.decoding import Decoding, Inputs, Runner

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_blackmamba.layers.rows import Weight
    from megatron_blackmamba.registry import Cannot
    from megatron_blackmamba.settings import ModelConfig


A_RANGE = (1.0, 16.0)
"""Initial decay rates, as in mamba-ssm."""
NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")
"""With model.mamba_norms: behind x_proj, with Jamba's names. Mamba-2 has the last two, in front of its scan."""


def initial_dt_bias(shape: tuple[int, ...], model: ModelConfig, random: torch.Generator) -> Tensor:
    """Return the bias whose softplus is log-uniform between model.init.dt_min and dt_max."""
    import torch

    low, high = math.log(model.init.dt_min), math.log(model.init.dt_max)
    dt = torch.exp(torch.rand(shape, generator=random) * (high - low) + low).clamp(min=model.init.dt_floor)
    return dt + torch.log(-torch.expm1(-dt))


class RecurrentKind:
    """What recurrent kinds answer alike; a kind names it in front of LayerKind."""

    cut: ClassVar[Cannot | None] = None
    part: ClassVar[str]
    """Also the section of `model:` that it reads."""
    keys: ClassVar[tuple[str, ...]]
    exports: ClassVar[tuple[str, ...]] = ()
    """Keys of this section that an export's config.json has, behind the name of the section."""

    def initial(self, name: str, shape: tuple[int, ...], model: ModelConfig, random: torch.Generator) -> Tensor | None:
        import torch

        if name == "D":
            return torch.ones(shape)
        if name == "A_log":
            return torch.empty(shape).uniform_(*A_RANGE, generator=random).log()
        if name.startswith("conv1d."):
            return (torch.rand(shape, generator=random) * 2 - 1) * model.conv_kernel**-0.5
        return initial_dt_bias(shape, model, random) if name == "dt_bias" else None

    def exported_fields(self, model: ModelConfig) -> dict[str, Any]:
        fields = {f"{self.part}_{key}": getattr(getattr(model, self.part), key) for key in self.exports}
        return fields | ({"mamba_norms": model.mamba_norms} if "mamba_norms" in self.keys else {})

    def imported_fields(self, content: Mapping[str, Any]) -> dict[str, Any]:
        fields = {key: content[name] for key in self.exports if (name := f"{self.part}_{key}") in content}
        norms = {"mamba_norms": content.get("mamba_norms", False)} if "mamba_norms" in self.keys else {}
        return ({self.part: fields} if self.exports else {}) | norms


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm over as many channels as the last axis of the weight has, in x's dtype."""
    import torch.nn.functional as F

    return (F.rms_norm(x.float(), weight.shape[-1:], None, eps) * weight).to(x.dtype)


def convolved(x: Tensor, weight_IK: Tensor, bias_I: Tensor | None, window_BWI: Tensor, inputs: Inputs | None) -> Tensor:
    """Convolve tokens after those in the window, which moves on. Without inputs, x is one token of each sequence."""
    from megatron_blackmamba.ops.causal_conv1d import causal_conv1d, causal_conv1d_step

    if inputs is None:
        return causal_conv1d_step(window_BWI, x, weight_IK, bias_I)
    keep_BL1 = inputs.keep_BL1
    if keep_BL1 is not None:
        x = x * keep_BL1
    y_BLI, last_window_BWI = causal_conv1d(
        x, weight_IK, bias_I, initial_window=window_BWI, reset_BL=inputs.reset_BL, return_final_window=True
    )
    window_BWI.copy_(last_window_BWI)
    # The convolution's bias alone must not feed the state at padding.
    return y_BLI if keep_BL1 is None else y_BLI * keep_BL1


class ProjectedDecoding(Decoding):
    """A layer between in_proj and out_proj; the rows of one of its projections have names."""

    rows_of: Callable[[ModelConfig], Weight]
    """What the kind declares of this projection."""

    def __init__(self, rows: Weight, kind: Any = None) -> None:
        self.rows, self.kind = rows, kind

    @classmethod
    def of(cls, model: ModelConfig) -> Decoding:
        return cls(cls.rows_of(model))

    @abstractmethod
    def shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of what it remembers of a sequence, in fp32."""

    def memory(self, model: ModelConfig, batch: int, dtype: torch.dtype, device: Any) -> list[Tensor]:
        import torch

        return [torch.zeros(batch, *shape, dtype=torch.float32, device=device) for shape in self.shapes(model)]

    @abstractmethod
    def mixed(self, run: Runner, layer: Any, projected: Tensor, memory: list[Tensor], inputs: Inputs | None) -> Tensor:
        """Return what out_proj reads, given what in_proj computes. inputs: None for one token of each sequence."""

    def step(self, run: Runner, layer: Any, memory: list[Tensor], x_BD: Tensor, inputs: Inputs) -> Tensor:
        return run.times(self.mixed(run, layer, run.times(x_BD, layer.in_proj), memory, None), layer.out_proj)

    def read(self, run: Runner, layer: Any, memory: list[Tensor], x_BLD: Tensor, inputs: Inputs) -> Tensor:
        from megatron_blackmamba.ops.matvec import product

        return product(self.mixed(run, layer, product(x_BLD, layer.in_proj), memory, inputs), layer.out_proj)


class KindDecoding(ProjectedDecoding):
    """The decoding of a kind that computes `between` its projections, and whose `state` names what it remembers."""

    def pack(self, get: Callable[..., Tensor], model: ModelConfig, dtype: torch.dtype, device: Any) -> Any:
        kind = self.kind
        own = {name: get(name) if name in kind.kept_in_fp32 else get(name, dtype) for name in kind.weights(model)}
        return SimpleNamespace(in_proj=own.pop("in_proj.weight"), out_proj=own.pop("out_proj.weight"), own=own)

    def shapes(self, model: ModelConfig) -> tuple[tuple[int, ...], ...]:
        return tuple((self.kind.state(model) or {}).values())

    def mixed(self, run: Runner, layer: Any, projected: Tensor, memory: list[Tensor], inputs: Inputs | None) -> Tensor:
        keep_BL1, reset_BS = (None, None) if inputs is None else (inputs.keep_BL1, inputs.reset_BL)
        tokens = projected[:, None] if inputs is None else projected if keep_BL1 is None else projected * keep_BL1
        given = layer.own | {"inputs": SimpleNamespace(keep_BL1=keep_BL1, reset_BS=reset_BS)}
        y, *after = self.kind.computed(self.rows, tokens, given, run.config, memory)
        for old, new in zip(memory, after, strict=True):
            old.copy_(new)
        return y[:, 0] if inputs is None else y
