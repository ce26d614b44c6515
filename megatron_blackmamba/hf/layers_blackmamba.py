"""The layers of BlackMamba; those with a state are in recurrent_blackmamba.py.

Shapes: B batch, L length, S all tokens so far, T tokens, D model.
E experts, k experts of a token, H heads, G key-value heads, C channels of a head.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .functions_blackmamba import activated, attended, exact_linear, hashed, rotated, sinkhorn, widen
from .recurrent_blackmamba import (
    DeltaMixer,
    Mamba2Mixer,
    Mamba3Mixer,
    MambaMixer,
    Recurrent,
    RMSNorm,
    linear,
    use_kernels,
)

try:
    from transformers.modeling_layers import GradientCheckpointingLayer
except ImportError:  # transformers 4.50

    class GradientCheckpointingLayer(nn.Module):  # type: ignore[no-redef]
        """A layer that runs its forward again in the backward pass if the model's gradient checkpointing is on."""

        gradient_checkpointing = False
        _gradient_checkpointing_func: Callable[..., Any]

        def __call__(self, *args: Any) -> Any:
            if self.gradient_checkpointing and self.training:
                return self._gradient_checkpointing_func(super().__call__, *args)
            return super().__call__(*args)


class WideLayerNorm(nn.LayerNorm):
    """LayerNorm in at least fp32, as the residual stream is."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = widen(self.weight), widen(self.bias)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps).to(self.weight.dtype)


FINAL_NORMS: dict[str, Callable[..., nn.Module]] = {"layer": WideLayerNorm, "rms": RMSNorm}
"""By config.final_norm. The export of a norm, router or layer that the package lacks adds its own at the end."""


class Router(nn.Linear):
    """The router: fp32 logits, and the choice and weights of experts that follow from them."""

    expert_bias: Tensor | None

    carries = False
    """Whether `forward` also reads and returns what each router hands to the next."""

    def __init__(self, config: Any, experts: int, inputs: int | None = None):
        super().__init__(inputs or config.hidden_size, experts, bias=config.router_bias)
        self.top_k = config.num_experts_per_tok
        self.scores, self.normalized, self.scale = config.router_scores, config.router_normalized, config.router_scale
        self.balanced, self.bias_on_logits = config.balance_in_training, config.router_bias_on_logits
        options = (config.router_options or {}).items()
        self.plan_options = {name: value for name, value in options if name in ("iterations", "temperature", "start")}
        self.groups, self.group_top_k = ((config.router_options or {}).get(key, 1) for key in ("groups", "group_top_k"))
        bias = torch.zeros(experts, dtype=torch.float32) if config.router_biased else None
        self.register_buffer("expert_bias", bias)  # transformers loads it in this dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        """Apply `fn`, but keep the expert bias in fp32 when the model is cast to half precision."""
        all_before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, before in all_before.items():
            after = getattr(self, name)
            if before.dtype == torch.float32 != after.dtype:
                setattr(self, name, before.to(after.device))
        return self

    def forward(self, x: Tensor) -> Tensor:
        return exact_linear(x, self.weight, self.bias)

    def scored(self, logits_TE: Tensor) -> Tensor:
        return torch.sigmoid(logits_TE) if self.scores == "sigmoid" else torch.softmax(logits_TE, dim=-1)

    def selecting(self, logits_TE: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return the numbers whose largest are chosen. Not the scores, since large logits have equal sigmoids."""
        numbers_TE = logits_TE
        if self.expert_bias is not None:
            numbers_TE = (logits_TE if self.bias_on_logits else self.scored(logits_TE)) + self.expert_bias
        if self.groups == 1:
            return numbers_TE
        by_logits = self.expert_bias is not None or (self.scores == "softmax" and self.normalized)
        added_TGE = (numbers_TE if by_logits else self.scored(logits_TE)).unflatten(-1, (self.groups, -1))
        groups_TG = added_TGE.topk(self.top_k // self.group_top_k, dim=-1).values.sum(-1)
        inside_TG = torch.zeros_like(groups_TG, dtype=torch.bool)
        inside_TG.scatter_(-1, groups_TG.topk(self.group_top_k, dim=-1).indices, True)
        return numbers_TE.masked_fill(~inside_TG.repeat_interleave(added_TGE.shape[-1], -1), float("-inf"))

    def choose(self, logits_TE: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights and numbers of each token's experts, `[T, k]`."""
        balance = self.balanced and self.training
        selecting_TE = sinkhorn(logits_TE, **self.plan_options) if balance else self.selecting(logits_TE, ids)
        if self.top_k == 1:  # of equal experts the first, as in training; topk may take another
            choice_Tk = selecting_TE.max(dim=-1, keepdim=True).indices
        else:
            choice_Tk = selecting_TE.topk(self.top_k, dim=-1).indices
        weights_Tk = self.scored(logits_TE).gather(-1, choice_Tk)
        if self.normalized:
            sum_T1 = weights_Tk.sum(dim=-1, keepdim=True)
            weights_Tk = weights_Tk / sum_T1.where(sum_T1 > 0, 1)
        return weights_Tk * self.scale, choice_Tk


class ZayaRouter(Router):
    """An MLP which also reads the router of the layer of experts before (ZAYA1)."""

    carries = True

    def __init__(self, config: Any, experts: int):
        options = config.router_options or {}
        R, experts = options.get("hidden_size", 256), experts + options.get("skip", False)
        super().__init__(config, experts, inputs=R)
        self.eps = config.norm_eps
        self.down, self.down_bias = (nn.Parameter(torch.empty(shape)) for shape in ((R, config.hidden_size), (R,)))
        self.carry, self.norm = (nn.Parameter(torch.ones(R)) for _ in range(2))
        self.first, self.second = (nn.Parameter(torch.empty(R, R)) for _ in range(2))
        self.first_bias, self.second_bias = (nn.Parameter(torch.zeros(R)) for _ in range(2))
        for name in ("bias_mean", "bias_square", "bias_steps"):  # of the bias's Adam in pretraining
            self.register_buffer(name, torch.zeros(experts, dtype=torch.float32))

    def forward(self, x: Tensor, carried: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the logits, and what the next router reads."""
        state = exact_linear(x, self.down, self.down_bias)
        if carried is not None:
            state = state + widen(self.carry) * carried
        hidden = F.rms_norm(state, self.norm.shape, widen(self.norm), self.eps)
        for weight, bias in ((self.first, self.first_bias), (self.second, self.second_bias)):
            hidden = F.gelu(exact_linear(hidden, weight, bias))
        return super().forward(hidden), state


class HashRouter(nn.Module):
    """The router that hashes token ids, without weights; the outputs of a token's experts are averaged."""

    carries = False

    def __init__(self, config: Any, experts: int):
        super().__init__()
        self.top_k, self.experts = config.num_experts_per_tok, experts

    def forward(self, x: Tensor) -> Tensor:
        return widen(x).new_zeros(*x.shape[:-1], self.experts)

    def selecting(self, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        if ids is None:
            raise ValueError("this model chooses experts by token ids, so it needs input_ids, not inputs_embeds")
        return hashed(hashed(ids.flatten())[:, None] ^ torch.arange(1, self.experts + 1, device=ids.device)) / 2.0**32

    def choose(self, logits_TE: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the weights and numbers of each token's experts, `[T, k]`."""
        choice_Tk = self.selecting(logits_TE, ids).topk(self.top_k, dim=-1).indices
        return torch.full_like(choice_Tk, 1, dtype=logits_TE.dtype) / self.top_k, choice_Tk


ROUTERS: dict[str, Any] = {"hash": HashRouter, "zaya": ZayaRouter}
"""By router_kind the routers that choose otherwise than by one linear's logits."""


class Attention(nn.Module):
    """Causal attention, by default with rotary positions, over the tokens with the same segment_BL; -1 is padding.

    eod_reset begins a segment too, unless config.attention_across_documents is true.
    """

    def __init__(self, config: Any, layer: int):
        super().__init__()
        self.layer, self.rotary, self.theta = layer, config.rotary, config.rope_theta
        self.scale = config.attention_multiplier
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        D, fast = config.hidden_size, use_kernels(config)
        self.channels = config.head_dim
        # For each group of heads the rows are its queries, one key and one value.
        self.linear_qkv = linear(D, (self.heads + 2 * self.groups) * self.channels, fast)
        self.linear_proj = linear(self.heads * self.channels, D, fast)
        self.q_layernorm, self.k_layernorm = (
            RMSNorm(self.channels, config.norm_eps) if config.qk_norm else None for _ in range(2)
        )

    def forward(self, u_BLD: Tensor, segment_BL: Tensor, cache: Any) -> Tensor:
        q, k, v = self._heads(self.linear_qkv(u_BLD))
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        before = 0 if cache is None else cache.get_seq_length()
        if self.rotary:
            q, k = (rotated(x, before, self.theta) for x in (q, k))
        segment_BS = segment_BL
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
            segment_BS = cache.with_past(segment_BL)
        y = attended(q, k, v, segment_BL, segment_BS, self.scale)
        return self.linear_proj(y.transpose(1, 2).flatten(2))

    def _heads(self, qkv_BLQ: Tensor) -> Iterator[Tensor]:
        B, L, _ = qkv_BLQ.shape
        each = self.heads // self.groups
        of_groups = qkv_BLQ.view(B, L, self.groups, each + 2, self.channels).permute(0, 2, 3, 1, 4)
        return (part.flatten(1, 2) for part in of_groups.split((each, 1, 1), dim=2))


class MLP(nn.Module):
    def __init__(self, config: Any, hidden: int, size: int):
        super().__init__()
        fast, self.gated = use_kernels(config), config.gated
        self.linear_fc1 = linear(size, 2 * hidden if self.gated else hidden, fast)  # rows are [gate | up]
        self.linear_fc2 = linear(hidden, size, fast)
        self.activation = config.activation

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.linear_fc2(activated(self.linear_fc1(x_TD), self.activation, self.gated))


def dense(config: Any, layer: int) -> MLP:
    """Return the mixer of an "mlp" layer."""
    return MLP(config, config.mlp_hidden_size, config.hidden_size)


MIXERS: dict[str, Callable[..., nn.Module]] = {"r": MambaMixer, "mamba2": Mamba2Mixer, "mamba3": Mamba3Mixer}
MIXERS |= {"delta": DeltaMixer, "attention": Attention, "mlp": dense}
"""By entry of config.mamba_moe_layers."""


def recurrent(entry: str) -> type[Recurrent] | None:
    """Return the class of an entry's mixer if it has a state."""
    mixer = MIXERS.get(entry)
    return mixer if isinstance(mixer, type) and issubclass(mixer, Recurrent) else None


class Experts(nn.Module):
    def __init__(self, config: Any, experts: int):
        super().__init__()
        self.router = ROUTERS.get(config.router_kind, Router)(config, experts)
        size, latent, fast = config.hidden_size, config.latent_size, use_kernels(config)
        of_each = config.ffn_hidden_size, latent or size
        self.local_experts = nn.ModuleList([MLP(config, *of_each) for _ in range(experts)])
        self.latent_down = linear(size, latent, fast) if latent else nn.Identity()
        self.latent_up = linear(latent, size, fast) if latent else nn.Identity()
        shared = config.shared_expert_hidden_size
        self.shared_experts = MLP(config, shared, size) if shared else None

    def forward(
        self, u_BLD: Tensor, ids_BL: Tensor | None, carried_TR: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the output, each token's experts, and what the next router reads."""
        x_TD = u_BLD.flatten(0, 1)
        router = getattr(self.router, "base_layer", self.router)  # an adapter may wrap it
        if router.carries:
            logits_TE, carried_TR = self.router(x_TD, carried_TR)
        else:
            logits_TE = self.router(x_TD)
        weights_Tk, choice_Tk = router.choose(logits_TE, ids_BL)
        own_Tk = choice_Tk
        if router.carries:  # and may have a choice behind the experts, which adds nothing
            skips_Tk = choice_Tk == len(self.local_experts)
            weights_Tk, own_Tk = weights_Tk.masked_fill(skips_Tk, 0.0), choice_Tk.masked_fill(skips_Tk, 0)
        by, narrow_TW = self._by_all if torch.compiler.is_exporting() else self._by_choice, self.latent_down(x_TD)
        y_TD = self.latent_up((widen(by(narrow_TW, own_Tk)) * weights_Tk[:, :, None]).sum(dim=1).to(u_BLD.dtype))
        if self.shared_experts is not None:
            y_TD = y_TD + self.shared_experts(x_TD)
        return y_TD.view_as(u_BLD), choice_Tk.view(*u_BLD.shape[:2], -1), carried_TR

    @torch.compiler.disable  # the sizes depend on the values: one known break of the graph
    def _by_choice(self, x_TD: Tensor, choice_Tk: Tensor) -> Tensor:
        """Send each token to its experts only."""
        pairs = choice_Tk.flatten()
        order = pairs.argsort(stable=True)
        counts_E = torch.bincount(pairs, minlength=len(self.local_experts)).tolist()
        parts = zip(self.local_experts, x_TD[order // choice_Tk.shape[1]].split(counts_E), strict=True)
        sorted_y = torch.cat([expert(part) for expert, part in parts if part.shape[0]])
        return torch.empty_like(sorted_y).index_copy(0, order, sorted_y).unflatten(0, choice_Tk.shape)

    def _by_all(self, x_TD: Tensor, choice_Tk: Tensor) -> Tensor:
        """Send each token to every expert, for exported graphs, whose sizes must not depend on values."""
        y_TkD = x_TD.new_zeros(*choice_Tk.shape, x_TD.shape[1])
        for number, expert in enumerate(self.local_experts):
            y_TkD = torch.where((choice_Tk == number)[:, :, None], expert(x_TD)[:, None], y_TkD)
        return y_TkD


class Affine(nn.Module):
    """A bias and a scale of each channel."""

    def __init__(self, size: int):
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return ((widen(x) + widen(self.bias)) * widen(self.scale)).to(x.dtype)


class Layer(GradientCheckpointingLayer):
    """A residual block; config.mamba_moe_layers says which mixer it has."""

    mixer: nn.Module

    def __init__(self, config: Any, index: int):
        super().__init__()
        self.kind, self.multiplier = config.mamba_moe_layers[index], config.residual_multiplier
        shares = config.arrangement == "parallel" and index % 2 == 1
        self.norm = None if shares else RMSNorm(config.hidden_size, config.norm_eps)
        scales, D = config.residual_scaling, config.hidden_size
        self.stream, self.output = (Affine(D) if scales else nn.Identity() for _ in range(2))
        if self.kind.isdecimal():
            self.mixer = Experts(config, int(self.kind))
        elif self.kind in MIXERS:
            self.mixer = MIXERS[self.kind](config, index)
        else:
            named = ", ".join(map(repr, MIXERS))
            raise ValueError(f"mamba_moe_layers: an entry is {named} or a number of experts, not {self.kind!r}")

    def forward(
        self,
        residual_BLD: Tensor,
        keep_BL1: Tensor | None,
        reset_BL: Tensor | None,
        segment_BL: Tensor,
        cache: Any,
        shared_BLD: Tensor | None = None,
        ids_BL: Tensor | None = None,
        carried_TR: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return the residual stream, of a mixture of experts each token's expert, and the stream as it was normalized.

        shared_BLD is that of the layer before, for a layer without a norm of its own. Last comes what routers hand on.
        """
        x, choice_BLk = shared_BLD if self.norm is None else self.norm(residual_BLD), None
        if isinstance(self.mixer, Recurrent):
            y = self.mixer(x, keep_BL1, reset_BL, cache)
        elif self.kind == "attention":
            y = self.mixer(x, segment_BL, cache)
        elif self.kind.isdecimal():
            y, choice_BLk, carried_TR = self.mixer(x, ids_BL, carried_TR)
        else:
            y = self.mixer(x)
        return self.stream(residual_BLD) + self.output(y * self.multiplier), choice_BLk, x, carried_TR
