"""BlackMamba for transformers 4.50 and later: one file, no dependency but torch and transformers.

Where the package `megatron_blackmamba` is installed, its convolution and scan replace the plain PyTorch ones below,
and on a CPU its matrix-vector product multiplies the few tokens of a step of generation.
Parameter names are those of the released checkpoint. Routing is the inference kind: the largest logit, in fp32.
A weight is read only in the forward of the module that holds it, and goes no further: that is where offloading and
device_map bring it, and where they bring the module's inputs to it.

Shapes: B batch, L length, D model, I inner, N state, R dt rank, K taps, W = K - 1 window, E experts, T tokens.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.utils import ModelOutput

from .configuration_blackmamba import BlackMambaConfig

try:
    from megatron_blackmamba.ops.causal_conv1d import causal_conv1d as fast_conv1d
    from megatron_blackmamba.ops.matvec import matvec as fast_matvec
    from megatron_blackmamba.ops.selective_scan import selective_scan as fast_scan

    HAVE_KERNELS = True
except ImportError:
    HAVE_KERNELS = False


def use_kernels(config):
    return config.kernels == "auto" and HAVE_KERNELS


def widen(x):
    """At least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu}


class BlackMambaCache(Cache):
    """The whole past in constant space: for each Mamba layer the last W inputs of the convolution and the fp32 state.

    A `Cache` only so that `generate` recognises one; nothing inherited is used, since what is there differs by version.
    """

    is_compileable = False

    def __init__(self):
        self.reset()

    def __repr__(self):
        return f"BlackMambaCache({self.seen} tokens seen, {len(self.states)} layers)"

    def reset(self):
        self.seen = 0
        self.windows: dict[int, Tensor] = {}
        self.states: dict[int, Tensor] = {}
        self.last_tokens: Tensor | None = None

    def get_seq_length(self, layer_idx=0):
        return self.seen

    def get_max_cache_shape(self, layer_idx=0):
        return None

    def _map_rows(self, function):
        self.windows = {layer: function(window) for layer, window in self.windows.items()}
        self.states = {layer: function(state) for layer, state in self.states.items()}
        if self.last_tokens is not None:
            self.last_tokens = function(self.last_tokens)

    def reorder_cache(self, beam_idx):
        self._map_rows(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_select_indices(self, indices):
        self._map_rows(lambda rows: rows[indices.to(rows.device)])

    def batch_repeat_interleave(self, repeats):
        self._map_rows(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def crop(self, max_length):
        raise NotImplementedError("a recurrent state cannot be cut back to an earlier token")


def causal_conv1d(x_BLI, weight_IK, bias_I, *, initial_window, reset_BL):
    """Depthwise convolution and SiLU; returns y_BLI and the window that the next tokens need."""
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
    """The recurrence of Mamba-1, token by token in fp32; returns y_BLI in u's dtype and the last state."""
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


def multiply(x, weight, fast):
    """F.linear, or for the few tokens of a step of generation a kernel as fast as memory delivers the weight."""
    if fast and x.device.type == "cpu" and not torch.is_grad_enabled():
        return fast_matvec(weight, x.flatten(0, -2)).unflatten(0, x.shape[:-1])  # with many tokens it is F.linear too
    return F.linear(x, weight)


class Linear(nn.Linear):
    def __init__(self, inputs, outputs, fast):
        super().__init__(inputs, outputs, bias=False)
        self.fast = fast

    def forward(self, x):
        return multiply(x, self.weight, self.fast)


class Words(nn.Embedding):
    """Ids to vectors and, since the output layer is the same matrix, hidden states to logits."""

    fast = False

    def forward(self, x):
        return multiply(x, self.weight, self.fast) if x.is_floating_point() else super().forward(x)


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
    def forward(self, x):
        return F.linear(widen(x), widen(self.weight), widen(self.bias))


class MambaMixer(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        D, I, N, K = config.hidden_size, config.inner_size, config.state_size, config.conv_dimension
        self.layer = layer
        self.splits = (config.dt_rank, N, N)
        self.fast = use_kernels(config)
        self.in_proj = Linear(D, 2 * I, self.fast)
        self.conv1d = Convolution(I, I, K, groups=I)
        self.conv1d.fast = self.fast
        self.x_proj = Linear(I, sum(self.splits), self.fast)
        self.dt_proj = TimeStep(config.dt_rank, I)
        self.A_log = nn.Parameter(torch.zeros(I, N))
        self.D = nn.Parameter(torch.ones(I))
        self.out_proj = Linear(I, D, self.fast)

    def _apply(self, fn, recurse=True):
        """Casting the model to a half precision leaves the recurrence's own parameters in fp32."""
        exact = [(p, p.detach()) for p in (self.A_log, self.D, self.dt_proj.weight, self.dt_proj.bias)]
        super()._apply(fn, recurse)
        for parameter, before in exact:
            if before.dtype == torch.float32 and parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = before.to(parameter.device)
        return self

    def forward(self, u_BLD, keep_BL1, reset_BL, cache):
        B = u_BLD.shape[0]
        x, z = self.in_proj(u_BLD).chunk(2, dim=-1)
        if keep_BL1 is not None:
            x = x * keep_BL1
        window, state = (None, None) if cache is None else (cache.windows.get(self.layer), cache.states.get(self.layer))
        if window is None:
            window = x.new_zeros(B, self.conv1d.kernel_size[0] - 1, x.shape[2])
            state = self.A_log.new_zeros(B, *self.A_log.shape)
        x, window = self.conv1d(x, window, reset_BL)
        if keep_BL1 is not None:
            x = x * keep_BL1  # the convolution's bias alone must not feed the state at padding
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


class Expert(nn.Module):
    def __init__(self, config):
        super().__init__()
        size, hidden, fast = config.hidden_size, config.ffn_hidden_size, use_kernels(config)
        self.linear_fc1 = Linear(size, 2 * hidden, fast)  # rows are [gate | up]
        self.linear_fc2 = Linear(hidden, size, fast)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x_TD):
        gate, up = self.linear_fc1(x_TD).chunk(2, dim=-1)
        return self.linear_fc2(self.activation(gate) * up)


class Experts(nn.Module):
    def __init__(self, config, experts):
        super().__init__()
        self.router = Router(config.hidden_size, experts)
        self.local_experts = nn.ModuleList([Expert(config) for _ in range(experts)])

    def forward(self, u_BLD):
        x_TD = u_BLD.flatten(0, 1)
        best_T, choice_T = self.router(x_TD).max(dim=-1)  # of the logits: their sigmoids saturate, and then tie
        order_T = choice_T.argsort(stable=True)
        counts_E = torch.bincount(choice_T, minlength=len(self.local_experts)).tolist()
        parts = zip(self.local_experts, x_TD[order_T].split(counts_E), strict=True)
        sorted_TD = torch.cat([expert(part) for expert, part in parts if part.shape[0]])
        y_TD = torch.empty_like(sorted_TD).index_copy(0, order_T, sorted_TD)
        y_BLD = (widen(y_TD) * torch.sigmoid(best_T)[:, None]).to(u_BLD.dtype).view_as(u_BLD)
        return y_BLD, choice_T.view(u_BLD.shape[:2])


class Layer(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        kind = config.mamba_moe_layers[index]
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.is_mamba = kind == "r"
        self.mixer = MambaMixer(config, index) if self.is_mamba else Experts(config, int(kind))

    def forward(self, residual_BLD, keep_BL1, reset_BL, cache):
        """The residual stream, and of a mixture the expert of every token."""
        x = self.norm(residual_BLD)
        y, choice_BL = (self.mixer(x, keep_BL1, reset_BL, cache), None) if self.is_mamba else self.mixer(x)
        return residual_BLD + y, choice_BL


class Embedding(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.word_embeddings = Words(config.vocab_size, config.hidden_size)
        self.word_embeddings.fast = use_kernels(config)


class Decoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = nn.ModuleList([Layer(config, i) for i in range(config.num_layers)])
        self.final_layernorm = FinalNorm(config.hidden_size, eps=config.norm_eps)


@dataclass
class BlackMambaOutput(ModelOutput):
    """router_choices: for each mixture layer the expert of every token, `[B, L]`, when asked for."""

    last_hidden_state: Tensor | None = None
    past_key_values: BlackMambaCache | None = None
    hidden_states: tuple | None = None
    router_choices: tuple | None = None


@dataclass
class BlackMambaCausalOutput(ModelOutput):
    """As BlackMambaOutput, with the logits and, where labels were given, the loss."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    past_key_values: BlackMambaCache | None = None
    hidden_states: tuple | None = None
    router_choices: tuple | None = None


class BlackMambaPreTrainedModel(PreTrainedModel):
    config_class = BlackMambaConfig
    base_model_prefix = ""
    _no_split_modules = ["Layer"]  # noqa: RUF012
    _is_stateful = True
    supports_gradient_checkpointing = True
    _supports_cache_class = True  # asked by 4.50
    # 4.50 reads the first name, later versions the second. Whole modules, since that is what they can name.
    _keep_in_fp32_modules = ["A_log", "D", "dt_proj"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["A_log", "D", "dt_proj"]  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module):
        std = self.config.initializer_range
        norms = (RMSNorm, nn.LayerNorm)
        if isinstance(module, (nn.Linear, nn.Embedding, TimeStep, *norms)):
            nn.init.ones_(module.weight) if isinstance(module, norms) else nn.init.normal_(module.weight, std=std)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, MambaMixer) and not getattr(module.A_log, "_is_hf_initialized", False):
            I, N = module.A_log.shape
            device = module.A_log.device
            module.A_log.copy_(torch.arange(1, N + 1, device=device).float().log().expand(I, N))
            module.D.fill_(1.0)
            delta = torch.exp(torch.empty(I, device=device).uniform_(math.log(1e-3), math.log(1e-1)))
            module.dt_proj.bias.copy_(delta + torch.log(-torch.expm1(-delta)))  # softplus of this is delta


class BlackMambaModel(BlackMambaPreTrainedModel):
    """The network up to its final norm."""

    def __init__(self, config):
        super().__init__(config)
        self.embedding = Embedding(config)
        self.decoder = Decoder(config)
        self.gradient_checkpointing = False  # gradient_checkpointing_enable() finds it and sets it
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding.word_embeddings

    def set_input_embeddings(self, embeddings):
        words = self.embedding.word_embeddings  # kept, since a plain nn.Embedding gives no logits
        words.weight, words.num_embeddings = embeddings.weight, embeddings.num_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: BlackMambaCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_choices: bool = False,
        return_dict: bool | None = None,
        **kwargs,
    ):
        """`attention_mask` may cover only these tokens or all seen so far; only padding on the left is skipped over."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        residual = widen(self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds)
        if use_cache is None:
            use_cache = past_key_values is not None  # scoring needs no state; generate() asks for one
        cache = (BlackMambaCache() if past_key_values is None else past_key_values) if use_cache else None
        checkpointing = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if checkpointing and cache is not None:
            raise ValueError(
                "gradient checkpointing goes with no state: no use_cache, or gradient_checkpointing_disable()"
            )
        keep_BL1 = self._keep(attention_mask, residual)
        reset_BL = self._resets(input_ids, past_key_values)
        hidden_states = [residual] if output_hidden_states else None
        choices = []
        for layer in self.decoder.layers:
            run = partial(self._gradient_checkpointing_func, layer.__call__) if checkpointing else layer
            residual, choice_BL = run(residual, keep_BL1, reset_BL, cache)
            choices += [] if choice_BL is None else [choice_BL]
            if hidden_states is not None:
                hidden_states.append(residual)
        if cache is not None:
            cache.seen += residual.shape[1]
            cache.last_tokens = None if input_ids is None else input_ids[:, -1]
        states = None if hidden_states is None else tuple(hidden_states)
        routes = tuple(choices) if output_router_choices else None
        output = BlackMambaOutput(self.decoder.final_layernorm(residual), cache, states, routes)
        return output.to_tuple() if return_dict is False else output

    def _keep(self, attention_mask, residual_BLD):
        if attention_mask is None:
            return None
        mask_BL = attention_mask[:, -residual_BLD.shape[1] :].bool()
        if mask_BL.all():
            return None
        return mask_BL[:, :, None].to(self.decoder.final_layernorm.weight.dtype)

    def _resets(self, input_ids, past):
        """True at each first token of a document, which is the one after an end-of-document token."""
        if self.config.eod_reset is None:
            return None
        if input_ids is None:
            raise ValueError("this model restarts after token eod_reset, so it needs input_ids, not inputs_embeds")
        before = torch.full_like(input_ids[:, :1], -1)
        if past is not None and past.last_tokens is not None:
            before = past.last_tokens[:, None]
        return torch.cat((before, input_ids[:, :-1]), dim=1) == self.config.eod_reset


class BlackMambaForCausalLM(BlackMambaModel, GenerationMixin):
    """The network with its output layer, which is the embedding again: there is no parameter of its own to tie."""

    @classmethod
    def _supports_default_dynamic_cache(cls, *args):
        return False  # or generate() hands over a cache of attention layers

    def get_output_embeddings(self):
        return None

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: BlackMambaCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_choices: bool = False,
        return_dict: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs,
    ):
        body = super().forward(
            *(input_ids, attention_mask, inputs_embeds, past_key_values, use_cache),
            *(output_hidden_states, output_router_choices),
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.get_input_embeddings()(body.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = BlackMambaCausalOutput(loss, logits, body.past_key_values, body.hidden_states, body.router_choices)
        return output.to_tuple() if return_dict is False else output

    def prepare_inputs_for_generation(
        self, input_ids, past_key_values=None, attention_mask=None, inputs_embeds=None, use_cache=None, **kwargs
    ):
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        inputs = {"past_key_values": past_key_values, "attention_mask": attention_mask, "use_cache": use_cache}
        if kwargs.get("logits_to_keep") is not None:
            inputs["logits_to_keep"] = kwargs["logits_to_keep"]
        if inputs_embeds is not None and seen == 0:
            return {**inputs, "inputs_embeds": inputs_embeds}
        if "next_sequence_length" in kwargs:  # 5.x says how many are new, None for all
            new = input_ids.shape[1] if kwargs["next_sequence_length"] is None else kwargs["next_sequence_length"]
        elif attention_mask is not None:
            new = attention_mask.shape[1] - seen  # it covers all the past, which input_ids need not repeat
        else:
            new = input_ids.shape[1] - seen if inputs_embeds is None else 1
        if not 0 < new <= input_ids.shape[1]:
            raise ValueError(
                f"the state has seen {seen} tokens: input_ids must repeat them before the new ones, or attention_mask "
                "must cover them (its width is seen + new)"
            )
        return {**inputs, "input_ids": input_ids[:, input_ids.shape[1] - new :].contiguous()}


# So that save_pretrained takes these files along.
BlackMambaModel.register_for_auto_class("AutoModel")
BlackMambaForCausalLM.register_for_auto_class("AutoModelForCausalLM")
