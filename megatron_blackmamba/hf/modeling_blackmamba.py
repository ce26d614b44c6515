"""BlackMamba for transformers 4.50 and later; needs torch and transformers alone, and the two files beside it.

Parameter names are those of the released checkpoint. Routing is the inference kind: the largest logit, in fp32.

Shapes: B batch, L length, I inner, N state, W window of the convolution.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.utils import ModelOutput

from .configuration_blackmamba import BlackMambaConfig
from .layers_blackmamba import FinalNorm, Layer, MambaMixer, RMSNorm, TimeStep, Words, use_kernels, widen


class BlackMambaCache(Cache):
    """The past of B sequences.

    For each Mamba layer it holds the last W inputs of the convolution and the fp32 state, in constant space; for each
    attention layer the keys, the values, and which tokens are padding.

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
        self.keys_values: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.last_tokens: Tensor | None = None

    def get_seq_length(self, layer_idx=0):
        return self.seen

    def get_max_cache_shape(self, layer_idx=0):
        return None

    def _map_rows(self, function):
        self.windows = {layer: function(window) for layer, window in self.windows.items()}
        self.states = {layer: function(state) for layer, state in self.states.items()}
        self.keys_values = {layer: tuple(map(function, past)) for layer, past in self.keys_values.items()}
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
        choices, shared = [], None
        for layer in self.decoder.layers:
            run = partial(self._gradient_checkpointing_func, layer.__call__) if checkpointing else layer
            residual, choice_BL, shared = run(residual, keep_BL1, reset_BL, cache, shared)
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
