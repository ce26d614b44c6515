"""The layers of BlackMamba in plain PyTorch.

If the package `megatron_blackmamba` is installed, its convolution and scan replace the ones below. On a CPU, its
matrix-vector product also runs the generation steps. Each weight is read only in the forward of the module that owns
it. Offloading and device_map move the weight and the module's inputs to one device there, and nowhere else.

Shapes: B batch, L length, S all tokens so far, T tokens, D model, I inner, N state, R dt rank, K taps.
W = K - 1 window, E experts, k experts of a token, H heads, G key-value heads, C channels of a head.
In Mamba-2: H heads of P channels in G groups.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

try:
    from megatron_blackmamba.ops.causal_conv1d import causal_conv1d as fast_conv1d
    from megatron_blackmamba.ops.matvec import product
    from megatron_blackmamba.ops.selective_scan import selective_scan as fast_scan
    from megatron_blackmamba.ops.ssd import ssd as fast_ssd

    HAVE_KERNELS = True
except ImportError:
    HAVE_KERNELS = False


def use_kernels(config):
    return config.kernels == "auto" and HAVE_KERNELS


def widen(x):
    """Return the tensor in at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu}


def causal_conv1d(x_BLI, weight_IK, bias_I, *, initial_window, reset_BL):
    """Apply the depthwise convolution and SiLU; return y_BLI and the window for the next tokens."""
    L, K = x_BLI.shape[1], weight_IK.shape[1]
    inputs = torch.cat((initial_window.to(x_BLI.dtype), x_BLI), dim=1)
    if reset_BL is None:
        y = F.conv1d(inputs.transpose(1, 2), weight_IK[:, None], bias_I, groups=x_BLI.shape[2]).transpose(1, 2)
        return F.silu(y), inputs[:, L:].clone()
    document = F.pad(reset_BL.long().cumsum(dim=1), (K - 1, 0))
    y = inputs.new_zeros(()) + bias_I
    for k in range(K):  # the last tap is the token itself
        same = document[:, k : k + L] == document[:, K - 1 :]
        y = y + weight_IK[:, k] * inputs[:, k : k + L] * same[:, :, None]
    ongoing = document[:, L:] == document[:, -1:]
    return F.silu(y), inputs[:, L:] * ongoing[:, :, None]


def selective_scan(u_BLI, delta_BLI, A_IN, B_BLN, C_BLN, D_I, z_BLI, delta_bias_I, initial_state_BIN, reset_BL):
    """Run the Mamba-1 recurrence token by token in fp32; return y_BLI in u's dtype and the last state."""
    u, B, C = widen(u_BLI), widen(B_BLN), widen(C_BLN)
    delta = F.softplus(widen(delta_BLI) + delta_bias_I)
    delta_u = delta * u
    keep_BL = None if reset_BL is None else (~reset_BL).to(u.dtype)
    state = initial_state_BIN
    chunk = max(1, min(64, 2**20 // max(1, state.numel())))  # exponentials of a chunk at once, while they fit a cache
    y_parts = []
    for start in range(0, u.shape[1], chunk):
        here = slice(start, start + chunk)
        decay = torch.exp(delta[:, here].transpose(0, 1).unsqueeze(-1) * A_IN)
        if keep_BL is not None:
            decay = decay * keep_BL[:, here].t()[:, :, None, None]
        states = []
        for t in range(decay.shape[0]):
            state = torch.addcmul(delta_u[:, start + t, :, None] * B[:, start + t, None, :], decay[t], state)
            states.append(state)
        y_parts.append(torch.einsum("lbin,bln->bli", torch.stack(states), C[:, here]))
    y = torch.cat(y_parts, dim=1) + D_I * u
    return (y * F.silu(widen(z_BLI))).to(u_BLI.dtype), state


def ssd(x_BLHP, dt_BLH, A_H, B_BLGN, C_BLGN, D_H, dt_bias_H, initial_state_BHPN, reset_BL, chunk=64):
    """Run the Mamba-2 recurrence as matrix products in fp32; return y_BLHP in x's dtype and the last state."""
    heads_of_group = x_BLHP.shape[2] // B_BLGN.shape[2]
    x, B, C = (widen(tensor).transpose(1, 2) for tensor in (x_BLHP, B_BLGN, C_BLGN))
    B, C = (tensor.repeat_interleave(heads_of_group, dim=1) for tensor in (B, C))
    dt_BHL = F.softplus(widen(dt_BLH) + dt_bias_H).transpose(1, 2)
    exponent_BHL = dt_BHL * A_H[:, None]
    if reset_BL is not None:
        exponent_BHL = exponent_BHL.masked_fill(reset_BL[:, None], -torch.inf)
    x_dt, state = x * dt_BHL[..., None], initial_state_BHPN
    y_parts = []
    for start in range(0, x.shape[2], chunk):
        here = slice(start, start + chunk)
        exponent_BHT, C_T = exponent_BHL[..., here], C[:, :, here]
        T = exponent_BHT.shape[-1]
        not_after_TT = torch.ones(T, T, dtype=torch.bool, device=x.device).triu()
        # Each column sums from its own token on: a difference of running sums would be inexact.
        sums = exponent_BHT[..., None].expand(-1, -1, T, T).masked_fill(not_after_TT, 0.0).cumsum(dim=-2)
        decay_BHTT = sums.masked_fill(not_after_TT.triu(1), -torch.inf).exp()
        since_start_BHT1 = exponent_BHT.cumsum(dim=-1).exp()[..., None]
        scores_BHTT = C_T @ B[:, :, here].mT * decay_BHTT
        y_parts.append(scores_BHTT @ x_dt[:, :, here] + C_T @ state.mT * since_start_BHT1)
        left_BHTP = x_dt[:, :, here] * decay_BHTT[..., -1, :, None]
        state = state * since_start_BHT1[:, :, -1:] + left_BHTP.mT @ B[:, :, here]
    y = torch.cat(y_parts, dim=2) + D_H[:, None, None] * x
    return y.transpose(1, 2).to(x_BLHP.dtype), state


class FastLinear(nn.Linear):
    """nn.Linear with a kernel for the few tokens of a step of generation."""

    def forward(self, x):
        if x.device.type == "cpu" and not torch.is_grad_enabled():
            return product(x, self.weight)
        return super().forward(x)


def linear(inputs, outputs, fast):
    """Apply a linear layer; without the kernels it is exactly nn.Linear, since quantization tools check the type."""
    return (FastLinear if fast else nn.Linear)(inputs, outputs, bias=False)


class FinalNorm(nn.LayerNorm):
    def forward(self, x):
        weight, bias = widen(self.weight), widen(self.bias)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps).to(self.weight.dtype)


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        x = widen(x)
        x = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self.eps)
        return (x * widen(self.weight)).to(self.weight.dtype)


class GatedNorm(RMSNorm):
    """The norm of gated channels, each group by itself."""

    def __init__(self, size, groups, eps):
        super().__init__(size, eps)
        self.groups = groups

    def forward(self, x, gate):
        x_GC = (widen(x) * F.silu(widen(gate))).unflatten(-1, (self.groups, -1))
        x_GC = x_GC * torch.rsqrt(x_GC.square().mean(dim=-1, keepdim=True) + self.eps)
        return (x_GC.flatten(-2) * widen(self.weight)).to(x.dtype)


class Convolution(nn.Conv1d):
    fast = False

    def forward(self, x_BLI, window_BWI, reset_BL):
        convolve = partial(fast_conv1d, return_final_window=True) if self.fast else causal_conv1d
        return convolve(x_BLI, self.weight[:, 0], self.bias, initial_window=window_BWI, reset_BL=reset_BL)


class TimeStep(nn.Module):
    """The projection to delta, and the bias beside it: the scan adds that in fp32, also where delta is rounded."""

    def __init__(self, rank, size):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, rank))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, dt_BLR):
        return F.linear(dt_BLR.to(self.weight.dtype), self.weight), self.bias


class Router(nn.Linear):
    """The router: fp32 logits, and the choice and weights of experts that follow from them."""

    def __init__(self, config, experts):
        super().__init__(config.hidden_size, experts)
        self.top_k = config.num_experts_per_tok
        self.scores, self.normalized = config.router_scores, config.router_normalized
        self.register_buffer("expert_bias", torch.zeros(experts) if config.router_biased else None)

    def _apply(self, fn, recurse=True):
        """Apply `fn`, but keep the expert bias in fp32 when the model is cast to half precision."""
        before = self.expert_bias
        super()._apply(fn, recurse)
        if before is not None and before.dtype == torch.float32 and self.expert_bias.dtype != torch.float32:
            self.expert_bias = before.to(self.expert_bias.device)
        return self

    def forward(self, x):
        return F.linear(widen(x), widen(self.weight), widen(self.bias))

    def scored(self, logits_TE):
        return torch.sigmoid(logits_TE) if self.scores == "sigmoid" else torch.softmax(logits_TE, dim=-1)

    def selecting(self, logits_TE):
        """Return the numbers whose largest are chosen. Not the scores, since large logits have equal sigmoids."""
        return logits_TE if self.expert_bias is None else self.scored(logits_TE) + self.expert_bias

    def choose(self, logits_TE):
        """Return the weights and numbers of each token's experts, `[T, k]`."""
        choice_Tk = self.selecting(logits_TE).topk(self.top_k, dim=-1).indices
        weights_Tk = self.scored(logits_TE).gather(-1, choice_Tk)
        return weights_Tk / weights_Tk.sum(dim=-1, keepdim=True) if self.normalized else weights_Tk, choice_Tk


class Recurrent(nn.Module):
    """The base class of Mamba and Mamba-2 layers."""

    def _apply(self, fn, recurse=True):
        """Apply `fn`, but keep the parameters of the recurrence in fp32 when the model is cast to half precision."""
        exact = [(p, p.detach()) for p in self.exact()]
        super()._apply(fn, recurse)
        for parameter, before in exact:
            if before.dtype == torch.float32 and parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = before.to(parameter.device)
        return self

    def convolved(self, x, keep_BL1, reset_BL, cache, state_shape):
        """Return x behind the convolution, the next tokens' window, and the state before these tokens."""
        if keep_BL1 is not None:
            x = x * keep_BL1
        window, state = (None, None) if cache is None else (cache.windows.get(self.layer), cache.states.get(self.layer))
        if window is None:
            window = x.new_zeros(x.shape[0], self.conv1d.kernel_size[0] - 1, x.shape[2])
            state = self.A_log.new_zeros(x.shape[0], *state_shape)
        x, window = self.conv1d(x, window, reset_BL)
        if keep_BL1 is not None:
            x = x * keep_BL1  # the convolution's bias alone must not feed the state at padding
        return x, window, state


class MambaMixer(Recurrent):
    def __init__(self, config, layer):
        super().__init__()
        D, I, N, K = config.hidden_size, config.inner_size, config.state_size, config.conv_dimension
        self.layer = layer
        self.splits = (config.dt_rank, N, N)
        self.fast = use_kernels(config)
        self.in_proj = linear(D, 2 * I, self.fast)
        self.conv1d = Convolution(I, I, K, groups=I)
        self.conv1d.fast = self.fast
        self.x_proj = linear(I, sum(self.splits), self.fast)
        self.dt_proj = TimeStep(config.dt_rank, I)
        self.A_log = nn.Parameter(torch.zeros(I, N))
        self.D = nn.Parameter(torch.ones(I))
        self.out_proj = linear(I, D, self.fast)

    def exact(self):
        return self.A_log, self.D, self.dt_proj.weight, self.dt_proj.bias

    def forward(self, u_BLD, keep_BL1, reset_BL, cache):
        x, z = self.in_proj(u_BLD).chunk(2, dim=-1)
        x, window, state = self.convolved(x, keep_BL1, reset_BL, cache, self.A_log.shape)
        dt_BLR, B_BLN, C_BLN = self.x_proj(x).split(self.splits, dim=-1)
        delta_BLI, bias_I = self.dt_proj(dt_BLR)
        scan = _fast_scan if self.fast else selective_scan
        y, state = scan(x, delta_BLI, -torch.exp(self.A_log), B_BLN, C_BLN, self.D, z, bias_I, state, reset_BL)
        if cache is not None:
            cache.windows[self.layer], cache.states[self.layer] = window, state
        return self.out_proj(y.to(u_BLD.dtype))


def _fast_scan(u, delta, A, B, C, D, z, bias, state, reset):
    options = {"z_BLI": z, "delta_bias_I": bias, "initial_state_BIN": state, "reset_BL": reset}
    return fast_scan(u, delta.to(u.dtype), A, B, C, D, **options, return_final_state=True)


class Mamba2Mixer(Recurrent):
    """Mamba-2, with the names and rows of transformers' own: in_proj [z | x | B | C | dt], conv1d [x | B | C]."""

    def __init__(self, config, layer):
        super().__init__()
        D, I, K, P = config.hidden_size, config.inner_size, config.conv_dimension, config.mamba2_head_dim
        self.layer, self.groups, self.fast = layer, config.mamba2_groups, use_kernels(config)
        H, GN = I // P, self.groups * config.mamba2_state_size
        self.splits, self.state_shape = (I, GN, GN), (H, P, config.mamba2_state_size)
        self.in_proj = linear(D, 2 * I + 2 * GN + H, self.fast)
        self.conv1d = Convolution(I + 2 * GN, I + 2 * GN, K, groups=I + 2 * GN)
        self.conv1d.fast = self.fast
        self.dt_bias = nn.Parameter(torch.zeros(H))
        self.A_log = nn.Parameter(torch.zeros(H))
        self.D = nn.Parameter(torch.ones(H))
        self.norm = GatedNorm(I, self.groups, config.norm_eps)
        self.out_proj = linear(I, D, self.fast)

    def exact(self):
        return self.A_log, self.D, self.dt_bias

    def forward(self, u_BLD, keep_BL1, reset_BL, cache):
        heads, groups = self.state_shape[0], self.groups
        z, x, dt_BLH = self.in_proj(u_BLD).split((self.splits[0], sum(self.splits), heads), dim=-1)
        x, window, state = self.convolved(x, keep_BL1, reset_BL, cache, self.state_shape)
        x, B, C = x.split(self.splits, dim=-1)
        x, B, C = x.unflatten(-1, (heads, -1)), B.unflatten(-1, (groups, -1)), C.unflatten(-1, (groups, -1))
        scan = _fast_ssd if self.fast else ssd
        y, state = scan(x, dt_BLH, -torch.exp(self.A_log), B, C, self.D, self.dt_bias, state, reset_BL)
        if cache is not None:
            cache.windows[self.layer], cache.states[self.layer] = window, state
        return self.out_proj(self.norm(y.flatten(2), z).to(u_BLD.dtype))


def _fast_ssd(x, dt, A, B, C, D, bias, state, reset):
    options = {"dt_bias_H": bias, "initial_state_BHPN": state, "reset_BL": reset}
    return fast_ssd(x, dt, A, B, C, D, **options, return_final_state=True)


class Attention(nn.Module):
    """Causal attention with rotary positions, over the tokens with the same segment_BL; -1 is padding.

    eod_reset begins no segment: attention crosses documents, as in training.
    """

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.theta = layer, config.rope_theta
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        D, fast = config.hidden_size, use_kernels(config)
        self.channels = D // self.heads
        # For each group of heads the rows are its queries, one key and one value.
        self.linear_qkv = linear(D, (self.heads + 2 * self.groups) * self.channels, fast)
        self.linear_proj = linear(D, D, fast)

    def forward(self, u_BLD, segment_BL, cache):
        L = u_BLD.shape[1]
        q, k, v = self._heads(self.linear_qkv(u_BLD))
        past = None if cache is None else cache.keys_values.get(self.layer)
        before = 0 if past is None else past[0].shape[2]
        q, k = (self._rotated(x, before) for x in (q, k))
        segment_BS = segment_BL
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
            segment_BS = torch.cat((past[2], segment_BL), dim=1)
        if cache is not None:
            cache.keys_values[self.layer] = (k, v, segment_BS)
        here_L = torch.arange(before, before + L, device=q.device)[:, None]
        there_S = torch.arange(before + L, device=q.device)
        same_BLS = segment_BL[:, :, None] == segment_BS[:, None]  # padding sees padding: no NaN
        seen_BLS = (there_S <= here_L) & same_BLS
        y = F.scaled_dot_product_attention(q, k, v, seen_BLS[:, None], enable_gqa=self.heads != self.groups)
        return self.linear_proj(y.transpose(1, 2).flatten(2))

    def _heads(self, qkv_BLQ):
        B, L, _ = qkv_BLQ.shape
        each = self.heads // self.groups
        of_groups = qkv_BLQ.view(B, L, self.groups, each + 2, self.channels).permute(0, 2, 3, 1, 4)
        return (part.flatten(1, 2) for part in of_groups.split((each, 1, 1), dim=2))

    def _rotated(self, x_BHLC, first):
        C, L = self.channels, x_BHLC.shape[2]
        rates = self.theta ** (-torch.arange(0, C, 2, device=x_BHLC.device).float() / C)
        angles_LC = torch.outer(torch.arange(first, first + L, device=x_BHLC.device).float(), rates).repeat(1, 2)
        x = widen(x_BHLC)
        half, other = x.chunk(2, dim=-1)
        return (x * angles_LC.cos() + torch.cat((-other, half), dim=-1) * angles_LC.sin()).to(x_BHLC.dtype)


class GatedMLP(nn.Module):
    def __init__(self, config, hidden):
        super().__init__()
        size, fast = config.hidden_size, use_kernels(config)
        self.linear_fc1 = linear(size, 2 * hidden, fast)  # rows are [gate | up]
        self.linear_fc2 = linear(hidden, size, fast)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x_TD):
        gate, up = self.linear_fc1(x_TD).chunk(2, dim=-1)
        return self.linear_fc2(self.activation(gate) * up)


class Experts(nn.Module):
    def __init__(self, config, experts):
        super().__init__()
        self.router = Router(config, experts)
        self.local_experts = nn.ModuleList([GatedMLP(config, config.ffn_hidden_size) for _ in range(experts)])
        shared = config.shared_expert_hidden_size
        self.shared_experts = GatedMLP(config, shared) if shared else None

    def forward(self, u_BLD):
        x_TD = u_BLD.flatten(0, 1)
        weights_Tk, choice_Tk = self.router.choose(self.router(x_TD))
        y_TkD = self._by_all(x_TD, choice_Tk) if torch.compiler.is_exporting() else self._by_choice(x_TD, choice_Tk)
        y_TD = (widen(y_TkD) * weights_Tk[:, :, None]).sum(dim=1).to(u_BLD.dtype)
        if self.shared_experts is not None:
            y_TD = y_TD + self.shared_experts(x_TD)
        return y_TD.view_as(u_BLD), choice_Tk.view(*u_BLD.shape[:2], -1)

    @torch.compiler.disable  # the sizes depend on the values: one known break of the graph
    def _by_choice(self, x_TD, choice_Tk):
        """Send each token to its experts only."""
        pairs = choice_Tk.flatten()
        order = pairs.argsort(stable=True)
        counts_E = torch.bincount(pairs, minlength=len(self.local_experts)).tolist()
        parts = zip(self.local_experts, x_TD[order // choice_Tk.shape[1]].split(counts_E), strict=True)
        sorted_y = torch.cat([expert(part) for expert, part in parts if part.shape[0]])
        return torch.empty_like(sorted_y).index_copy(0, order, sorted_y).unflatten(0, choice_Tk.shape)

    def _by_all(self, x_TD, choice_Tk):
        """Send each token to every expert, for exported graphs, whose sizes must not depend on values."""
        y_TkD = x_TD.new_zeros(*choice_Tk.shape, x_TD.shape[1])
        for number, expert in enumerate(self.local_experts):
            y_TkD = torch.where((choice_Tk == number)[:, :, None], expert(x_TD)[:, None], y_TkD)
        return y_TkD


class Layer(nn.Module):
    """A residual block; config.mamba_moe_layers says which mixer it has."""

    def __init__(self, config, index):
        super().__init__()
        self.kind = config.mamba_moe_layers[index]
        shares = config.arrangement == "parallel" and index % 2 == 1
        self.norm = None if shares else RMSNorm(config.hidden_size, config.norm_eps)
        if self.kind == "r":
            self.mixer = MambaMixer(config, index)
        elif self.kind == "mamba2":
            self.mixer = Mamba2Mixer(config, index)
        elif self.kind == "attention":
            self.mixer = Attention(config, index)
        elif self.kind == "mlp":
            self.mixer = GatedMLP(config, config.mlp_hidden_size)
        else:
            self.mixer = Experts(config, int(self.kind))

    def forward(self, residual_BLD, keep_BL1, reset_BL, segment_BL, cache, shared_BLD=None):
        """Return the residual stream, of a mixture of experts each token's expert, and the stream as it was normalized.

        shared_BLD is that of the layer before, for a layer without a norm of its own.
        """
        x, choice_BLk = shared_BLD if self.norm is None else self.norm(residual_BLD), None
        if self.kind in ("r", "mamba2"):
            y = self.mixer(x, keep_BL1, reset_BL, cache)
        elif self.kind == "attention":
            y = self.mixer(x, segment_BL, cache)
        elif self.kind == "mlp":
            y = self.mixer(x)
        else:
            y, choice_BLk = self.mixer(x)
        return residual_BLD + y, choice_BLk, x
