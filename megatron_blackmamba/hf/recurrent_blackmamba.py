"""The recurrent layers of BlackMamba, and the parts that all layers share.

If the package `megatron_blackmamba` is installed, its kernels replace the convolution and scans of
functions_blackmamba.py. On a CPU, its matrix-vector product also runs the generation steps. Each weight is read only in
the forward of the module that owns it. Offloading and device_map move the weight and the module's inputs to one device
there, and nowhere else.

Shapes: B batch, L length, D model, I inner, N state, R dt rank, K taps, W = K - 1 window.
In Mamba-2 and 3: H heads of P channels in G groups, S angles, R rank.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .functions_blackmamba import (
    bounded,
    causal_conv1d,
    delta_rule,
    exact_linear,
    mamba3,
    mamba3_rates,
    normalized,
    selective_scan,
    ssd,
    widen,
)

try:
    from megatron_blackmamba.ops.causal_conv1d import causal_conv1d as fast_conv1d
    from megatron_blackmamba.ops.mamba3 import Memory, Rates
    from megatron_blackmamba.ops.mamba3 import mamba3 as fast_mamba3
    from megatron_blackmamba.ops.matvec import product
    from megatron_blackmamba.ops.selective_scan import selective_scan as fast_scan
    from megatron_blackmamba.ops.ssd import ssd as fast_ssd

    HAVE_KERNELS = True
except ImportError:
    HAVE_KERNELS = False

try:  # by itself: an installed package of an earlier version has the others
    from megatron_blackmamba.ops.delta import delta as fast_delta
except ImportError:
    fast_delta = None  # type: ignore[assignment]


def use_kernels(config: Any) -> bool:
    return config.kernels == "auto" and HAVE_KERNELS


def may_run(fast: bool) -> bool:
    """Return whether kernels may run now; `torch.export` traces tensors without memory, and its graph runs anywhere."""
    return fast and not torch.compiler.is_exporting()


class FastLinear(nn.Linear):
    """nn.Linear with a kernel for the few tokens of a step of generation."""

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and not torch.is_grad_enabled() and may_run(True):
            return product(x, self.weight)
        return super().forward(x)


def linear(inputs: int, outputs: int, fast: bool) -> nn.Linear:
    """Apply a linear layer; without the kernels it is exactly nn.Linear, since quantization tools check the type."""
    return (FastLinear if fast else nn.Linear)(inputs, outputs, bias=False)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (normalized(x, self.eps) * widen(self.weight)).to(self.weight.dtype)


class GroupNorm(RMSNorm):
    """The norm of each group of channels by itself."""

    def __init__(self, size: int, groups: int, eps: float):
        super().__init__(size, eps)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        x_GC = normalized(x.unflatten(-1, (self.groups, -1)), self.eps)
        return (x_GC.flatten(-2) * widen(self.weight)).to(x.dtype)


class GatedNorm(GroupNorm):
    """The norm of gated channels, each group by itself."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(widen(x) * F.silu(widen(gate))).to(x.dtype)


class Convolution(nn.Conv1d):
    fast = False

    def forward(  # type: ignore[override]
        self, x_BLI: Tensor, window_BWI: Tensor, reset_BL: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        convolve: Callable[..., Any] = (
            partial(fast_conv1d, return_final_window=True) if may_run(self.fast) else causal_conv1d
        )
        return convolve(x_BLI, self.weight[:, 0], self.bias, initial_window=window_BWI, reset_BL=reset_BL)


class TimeStep(nn.Module):
    """The projection to delta, and the bias beside it: the scan adds that in fp32, also where delta is rounded."""

    def __init__(self, rank: int, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, rank, dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros(size, dtype=torch.float32))

    def forward(self, dt_BLR: Tensor) -> tuple[Tensor, Tensor]:
        return exact_linear(dt_BLR, self.weight), self.bias


class Recurrent(nn.Module):
    """The base class of layers with a state: Mamba, Mamba-2, Mamba-3, the delta rule, and yours.

    `forward(u_BLD, keep_BL1, reset_BL, cache)` returns what joins the residual stream.
    """

    layer: int
    conv1d: Convolution
    A_log: nn.Parameter
    kept_in_fp32: tuple[str, ...] = ()
    """Parameters and modules that stay in fp32 when the model is cast to half precision."""

    @classmethod
    def names_in_fp32(cls, config: Any) -> tuple[str, ...]:
        """Return those of `kept_in_fp32` that layers of such a model have."""
        return cls.kept_in_fp32

    def initialise(self) -> None:
        """Set the first values of the layer's own parameters; those of linears and norms are set."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Recurrent":
        """Apply `fn`, but not where it would cast `kept_in_fp32` to half precision."""
        parameters = self.named_parameters()
        exact = [(p, p.detach()) for name, p in parameters if name.split(".")[0] in self.kept_in_fp32]
        super()._apply(fn, recurse)
        for parameter, before in exact:
            if before.dtype == torch.float32 and parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = before.to(parameter.device)
        return self

    def convolved(
        self,
        x: Tensor,
        keep_BL1: Tensor | None,
        reset_BL: Tensor | None,
        cache: Any,
        state_shape: Sequence[int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return x behind the convolution, the next tokens' window, and the state before these tokens."""
        if keep_BL1 is not None:
            x = x * keep_BL1
        window_BIW = None if cache is None else cache.get_conv_state(self.layer)
        if window_BIW is None:
            window = x.new_zeros(x.shape[0], self.conv1d.kernel_size[0] - 1, x.shape[2])
        else:
            window = window_BIW.mT.contiguous()
        state = self.recalled(cache, self.A_log.new_empty(x.shape[0], *state_shape))
        x, window = self.conv1d(x, window, reset_BL)
        if keep_BL1 is not None:
            x = x * keep_BL1  # the convolution's bias alone must not feed the state at padding
        return x, window, state

    def recalled(self, cache: Any, like: Tensor) -> Tensor:
        """Return the state before these tokens, from the cache if there is one; zeros before the first."""
        state = None if cache is None else cache.get_recurrent_state(self.layer)
        return torch.zeros_like(like) if state is None else state

    def remember(self, cache: Any, state: Tensor, window: Tensor | None = None) -> None:
        """Put the state behind these tokens into the cache, if there is one, and a convolution's window."""
        if cache is not None:
            cache.update_recurrent_state(state, self.layer)
            if window is not None:
                cache.update_conv_state(window.mT, self.layer)


def spread_time_steps(bias: Tensor) -> None:
    """Set a bias such that its softplus is log-uniform between 0.001 and 0.1."""
    delta = torch.exp(torch.empty_like(bias).uniform_(math.log(1e-3), math.log(1e-1)))
    bias.copy_(delta + torch.log(-torch.expm1(-delta)))


class MambaMixer(Recurrent):
    kept_in_fp32 = ("A_log", "D", "dt_proj")

    def __init__(self, config: Any, layer: int):
        super().__init__()
        D, I, N, K = config.hidden_size, config.inner_size, config.state_size, config.conv_dimension
        self.layer = layer
        self.splits = (config.dt_rank, N, N)
        self.fast = use_kernels(config)
        self.in_proj = linear(D, 2 * I, self.fast)
        self.conv1d = Convolution(I, I, K, groups=I)
        self.conv1d.fast = self.fast
        self.x_proj = linear(I, sum(self.splits), self.fast)
        sizes = dict(zip(("dt_layernorm", "b_layernorm", "c_layernorm"), self.splits, strict=True))
        self.norms = sizes if config.mamba_norms else {}
        for name, size in self.norms.items():
            self.add_module(name, RMSNorm(size, config.norm_eps))
        self.dt_proj = TimeStep(config.dt_rank, I)
        self.A_log = nn.Parameter(torch.zeros(I, N, dtype=torch.float32))
        self.D = nn.Parameter(torch.ones(I, dtype=torch.float32))
        self.out_proj = linear(I, D, self.fast)

    def initialise(self) -> None:
        I, N = self.A_log.shape
        self.A_log.copy_(torch.arange(1, N + 1, device=self.A_log.device).float().log().expand(I, N))
        self.D.fill_(1.0)
        spread_time_steps(self.dt_proj.bias)

    def forward(self, u_BLD: Tensor, keep_BL1: Tensor | None, reset_BL: Tensor | None, cache: Any) -> Tensor:
        x, z = self.in_proj(u_BLD).chunk(2, dim=-1)
        x, window, state = self.convolved(x, keep_BL1, reset_BL, cache, self.A_log.shape)
        parts = self.x_proj(x).split(self.splits, dim=-1)
        if self.norms:
            parts = tuple(getattr(self, name)(part) for name, part in zip(self.norms, parts, strict=True))
        dt_BLR, B_BLN, C_BLN = parts
        delta_BLI, bias_I = self.dt_proj(dt_BLR)
        scan: Callable[..., Any] = selective_scan
        if may_run(self.fast):
            scan, delta_BLI = partial(fast_scan, return_final_state=True), delta_BLI.to(x.dtype)
        more = {"z_BLI": z, "delta_bias_I": bias_I, "initial_state_BIN": state, "reset_BL": reset_BL}
        y, state = scan(x, delta_BLI, -torch.exp(self.A_log), B_BLN, C_BLN, self.D, **more)
        self.remember(cache, state, window)
        return self.out_proj(y.to(u_BLD.dtype))


class Mamba2Mixer(Recurrent):
    """Mamba-2, with the names and rows of transformers' own: in_proj [z | x | B | C | dt], conv1d [x | B | C]."""

    kept_in_fp32 = ("A_log", "D", "dt_bias")

    def __init__(self, config: Any, layer: int):
        super().__init__()
        D, H, K, P = config.hidden_size, config.mamba2_heads, config.conv_dimension, config.mamba2_head_dim
        self.layer, self.groups, self.fast = layer, config.mamba2_groups, use_kernels(config)
        I, GN, self.time_step_min = H * P, self.groups * config.mamba2_state_size, config.mamba2_time_step_min
        self.splits, self.state_shape = (I, GN, GN), (H, P, config.mamba2_state_size)
        self.in_proj = linear(D, 2 * I + 2 * GN + H, self.fast)
        self.conv1d = Convolution(I + 2 * GN, I + 2 * GN, K, groups=I + 2 * GN)
        self.conv1d.fast = self.fast
        self.dt_bias = nn.Parameter(torch.zeros(H, dtype=torch.float32))
        self.A_log = nn.Parameter(torch.zeros(H, dtype=torch.float32))
        self.D = nn.Parameter(torch.ones(H, dtype=torch.float32))
        self.norm = GatedNorm(I, self.groups, config.norm_eps)
        self.b_layernorm, self.c_layernorm = (
            GroupNorm(GN, self.groups, config.norm_eps) if config.mamba_norms else None for _ in range(2)
        )
        self.out_proj = linear(I, D, self.fast)

    def initialise(self) -> None:
        self.A_log.uniform_(1.0, 16.0).log_()
        self.D.fill_(1.0)
        spread_time_steps(self.dt_bias)

    def forward(self, u_BLD: Tensor, keep_BL1: Tensor | None, reset_BL: Tensor | None, cache: Any) -> Tensor:
        heads, groups = self.state_shape[0], self.groups
        z, x, dt_BLH = self.in_proj(u_BLD).split((self.splits[0], sum(self.splits), heads), dim=-1)
        dt_BLH = bounded(dt_BLH, self.dt_bias, self.time_step_min)
        x, window, state = self.convolved(x, keep_BL1, reset_BL, cache, self.state_shape)
        x, B, C = x.split(self.splits, dim=-1)
        if self.b_layernorm is not None and self.c_layernorm is not None:
            B, C = self.b_layernorm(B), self.c_layernorm(C)
        x, B, C = x.unflatten(-1, (heads, -1)), B.unflatten(-1, (groups, -1)), C.unflatten(-1, (groups, -1))
        scan: Callable[..., Any] = partial(fast_ssd, return_final_state=True) if may_run(self.fast) else ssd
        more = {"dt_bias_H": self.dt_bias, "initial_state_BHPN": state, "reset_BL": reset_BL}
        y, state = scan(x, dt_BLH, -torch.exp(self.A_log), B, C, self.D, **more)
        self.remember(cache, state, window)
        return self.out_proj(self.norm(y.flatten(2), z).to(u_BLD.dtype))


class Mamba3Mixer(Recurrent):
    """Mamba-3, with the names and rows of mamba-ssm: in_proj [z | x | B | C | dt | A | trap | angle].

    The cache has, in the place of a convolution's window, the sum of angles with B and x of the last token.
    """

    kept_in_fp32 = ("D", "dt_bias", "B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o")
    mimo_x: nn.Parameter  # these with a rank above 1
    mimo_z: nn.Parameter
    mimo_o: nn.Parameter

    def __init__(self, config: Any, layer: int):
        super().__init__()
        D, I, P, N = config.hidden_size, config.inner_size, config.mamba3_head_dim, config.mamba3_state_size
        self.layer, self.groups, self.fast = layer, config.mamba3_groups, use_kernels(config)
        R = self.rank = config.mamba3_rank
        H, RGN, S = I // P, R * self.groups * N, int(N * config.mamba3_rope_fraction) // 2
        self.splits, self.state_shape, self.floor = (I, I, RGN, RGN, H, H, H, S), (H, P, N), config.mamba3_a_floor
        self.in_proj = linear(D, sum(self.splits), self.fast)
        self.dt_bias = nn.Parameter(torch.zeros(H, dtype=torch.float32))
        self.B_bias = nn.Parameter(torch.ones(H, R, N, dtype=torch.float32))
        self.C_bias = nn.Parameter(torch.ones(H, R, N, dtype=torch.float32))
        self.D = nn.Parameter(torch.ones(H, dtype=torch.float32))
        for name in ("mimo_x", "mimo_z", "mimo_o"):
            factors = nn.Parameter(torch.ones(H, R, P, dtype=torch.float32)) if R > 1 else None
            self.register_parameter(name, factors)
        self.B_norm, self.C_norm = (GroupNorm(N, 1, config.norm_eps) for _ in range(2))
        self.norm = GroupNorm(I, H, config.norm_eps) if config.mamba3_output_norm else None
        self.out_proj = linear(I, D, self.fast)

    @classmethod
    def names_in_fp32(cls, config: Any) -> tuple[str, ...]:
        return cls.kept_in_fp32 if config.mamba3_rank > 1 else cls.kept_in_fp32[:4]

    def initialise(self) -> None:
        for part in (self.D, self.B_bias, self.C_bias):
            part.fill_(1.0)
        if self.rank > 1:
            self.mimo_x.fill_(1 / self.rank)
            self.mimo_z.fill_(1.0)
            self.mimo_o.fill_(1 / self.rank)
        spread_time_steps(self.dt_bias)

    def forward(self, u_BLD: Tensor, keep_BL1: Tensor | None, reset_BL: Tensor | None, cache: Any) -> Tensor:
        z, x, B, C, dt, A, trap, angle = self.in_proj(u_BLD).split(self.splits, dim=-1)
        if keep_BL1 is not None:
            x = x * keep_BL1
        x = x.unflatten(-1, self.state_shape[:2])
        rows = (self.rank, self.groups, -1)
        B, C = self.B_norm(B.unflatten(-1, rows)), self.C_norm(C.unflatten(-1, rows))
        last = self.last_token(cache, u_BLD.shape[0], angle.shape[-1])
        projections = (dt, A, trap, angle, self.dt_bias, self.floor)
        biases = self.B_bias, self.C_bias
        after: Any
        if may_run(self.fast):
            rates = Rates.of(*projections)
            how = (B, C, *biases, self.D)
            y, after = fast_mamba3(x, rates, *how, mix_HRP=self.mimo_x, memory=Memory(*last), reset_BL=reset_BL)
        else:
            heads, one = x.shape[2] // self.groups, self.D.new_ones(len(self.D), 1, 1)
            B, C = (
                widen(V).repeat_interleave(heads, dim=3) + b.transpose(0, 1)
                for V, b in zip((B, C), biases, strict=True)
            )
            mix = one if self.rank == 1 else self.mimo_x
            y, after = mamba3(x, mamba3_rates(*projections), B, C, self.D, mix, last, reset_BL)
            y = y.squeeze(2) if self.rank == 1 else y
        if cache is not None:
            angle, state, B, x = after
            cache.update_conv_state(torch.cat((angle, B.flatten(2), x), dim=-1), self.layer)
            cache.update_recurrent_state(state, self.layer)
        if self.norm is not None:
            y = self.norm(y.flatten(-2)).unflatten(-1, y.shape[-2:])
        return self.out_proj(self.gated(y, z).to(u_BLD.dtype))

    def gated(self, y: Tensor, z_BLI: Tensor) -> Tensor:
        """Return y times SiLU of z; with several outputs their weighted sum, each with its own gate."""
        if self.rank == 1:
            return y.flatten(2) * F.silu(z_BLI)
        z_BLRHP = widen(z_BLI).unflatten(-1, self.state_shape[:2])[:, :, None] * self.mimo_z.transpose(0, 1)
        return (y * F.silu(z_BLRHP) * self.mimo_o.transpose(0, 1)).sum(2).flatten(2)

    def last_token(self, cache: Any, rows: int, angles: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the sum of angles, the state, and B and x of the last token; zeros before the first."""
        (H, P, N), R = self.state_shape, self.rank
        token = None if cache is None else cache.get_conv_state(self.layer)
        if token is None:
            new = self.dt_bias.new_zeros
            return new(rows, H, angles), new(rows, H, P, N), new(rows, H, R, N), new(rows, H, P)
        angle, B, x = token.split((angles, R * N, P), dim=-1)
        return angle, cache.get_recurrent_state(self.layer), B.unflatten(-1, (R, N)), x


class DeltaMixer(Recurrent):
    """The gated delta rule: in_proj [z | q | k | v | gates | decay], conv1d [q | k | v]."""

    kept_in_fp32 = ("A_log", "dt_bias")

    def __init__(self, config: Any, layer: int):
        super().__init__()
        H, G, K, V = config.delta_heads, config.delta_key_heads, config.delta_key_dim, config.delta_head_dim
        D, by_channel = config.hidden_size, config.delta_variant != "gdn"
        self.layer, self.fast, self.state_shape = layer, use_kernels(config), (H, K, V)
        self.sigmoid = config.delta_variant == "kda"
        self.largest = 2 if config.delta_negative_eigenvalues else 1
        gates = (H * K, H * V) if config.delta_variant == "gdn2" else (H,)
        R, decays = (config.delta_decay_rank, H * K) if by_channel else (H, H)
        self.qkv = (G * K, G * K, H * V)
        self.splits = (H * V, sum(self.qkv), *gates, R)
        self.in_proj = linear(D, sum(self.splits), self.fast)
        self.conv1d = Convolution(sum(self.qkv), sum(self.qkv), config.conv_dimension, groups=sum(self.qkv), bias=False)
        self.conv1d.fast = self.fast
        self.decay_proj = linear(R, decays, self.fast) if by_channel else None
        self.dt_bias = nn.Parameter(torch.zeros(decays, dtype=torch.float32))
        self.A_log = nn.Parameter(torch.zeros(H, dtype=torch.float32))
        self.norm = GroupNorm(V, 1, config.norm_eps)
        self.out_proj = linear(H * V, D, self.fast)

    def initialise(self) -> None:
        self.A_log.uniform_(1.0, 16.0).log_()
        spread_time_steps(self.dt_bias)

    def forward(self, u_BLD: Tensor, keep_BL1: Tensor | None, reset_BL: Tensor | None, cache: Any) -> Tensor:
        z, qkv, *gates, decay = self.in_proj(u_BLD).split(self.splits, dim=-1)
        qkv, window, state = self.convolved(qkv, keep_BL1, reset_BL, cache, self.state_shape)
        H, K, V = self.state_shape
        q, k, v = widen(qkv).split(self.qkv, dim=-1)
        q, k = (self.unit(x.unflatten(-1, (-1, K))) for x in (q, k))
        q, v = q * K**-0.5, v.unflatten(-1, (H, V))
        erase, *write = (torch.sigmoid(widen(gate).unflatten(-1, (H, -1))) for gate in gates)
        written, erase = (write[0] if write else self.largest * erase) * v, self.largest * erase * k
        dt = decay if self.decay_proj is None else self.decay_proj(decay)
        dt = F.softplus(widen(dt) + self.dt_bias).unflatten(-1, (H, -1))
        tokens = (q, k, erase, written, -torch.exp(self.A_log)[:, None] * dt)
        if fast_delta is not None and may_run(self.fast):
            y, state = fast_delta(*tokens, initial_state_BHKV=state, reset_BL=reset_BL)
        else:
            y, state = delta_rule(*tokens, state, reset_BL)
        self.remember(cache, state, window)
        gate = torch.sigmoid(widen(z)) if self.sigmoid else F.silu(widen(z))
        return self.out_proj((self.norm(y).flatten(2) * gate).to(u_BLD.dtype))

    def unit(self, x: Tensor) -> Tensor:
        """Return keys of length 1 for every head."""
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
        return x.repeat_interleave(self.state_shape[0] // x.shape[-2], dim=-2)
