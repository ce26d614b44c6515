"""BlackMamba for transformers 4.50 and later; needs torch and transformers alone, and the files beside it.

Parameter names are the released checkpoint's, with the prefix `model.`. Tokens go to the experts with the largest
logits, computed in fp32.

Shapes: B batch, L length, I inner, N state.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.utils import ModelOutput, logging

from .cache_blackmamba import CACHE, BlackMambaCache
from .configuration_blackmamba import BlackMambaConfig
from .functions_blackmamba import capped, widen
from .layers_blackmamba import FINAL_NORMS, Affine, Layer, ZayaRouter, recurrent
from .recurrent_blackmamba import Recurrent, RMSNorm, TimeStep, linear, use_kernels

logger = logging.get_logger(__name__)


class Embedding(nn.Module):
    def __init__(self, config: BlackMambaConfig):
        super().__init__()
        self.word_embeddings: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)


class Decoder(nn.Module):
    def __init__(self, config: BlackMambaConfig):
        super().__init__()
        self.layers = nn.ModuleList([Layer(config, i) for i in range(config.num_layers)])
        if config.final_norm not in FINAL_NORMS:
            raise ValueError(f"final_norm must be {' or '.join(FINAL_NORMS)}, not {config.final_norm!r}")
        own = (getattr(config, "extensions", None) or {}).get(config.final_norm, {})
        self.final_layernorm: Any = FINAL_NORMS[config.final_norm](config.hidden_size, eps=config.norm_eps, **own)


@dataclass
class BlackMambaOutput(ModelOutput):
    """router_choices: for each mixture layer the expert of every token, `[B, L]`, when asked for; `[B, L, k]` where a
    token has several."""

    last_hidden_state: Tensor | None = None
    if CACHE == "cache":
        cache: BlackMambaCache | None = None
    else:
        past_key_values: BlackMambaCache | None = None
    hidden_states: tuple | None = None
    router_choices: tuple | None = None


@dataclass
class BlackMambaCausalOutput(ModelOutput):
    """The fields of BlackMambaOutput, plus the logits and, if labels were given, the loss."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    if CACHE == "cache":
        cache: BlackMambaCache | None = None
    else:
        past_key_values: BlackMambaCache | None = None
    hidden_states: tuple | None = None
    router_choices: tuple | None = None


class BlackMambaPreTrainedModel(PreTrainedModel):
    config_class = BlackMambaConfig
    base_model_prefix = "model"
    _no_split_modules = ["Layer"]  # noqa: RUF012
    _is_stateful = True
    supports_gradient_checkpointing = True
    _supports_cache_class = True  # asked by 4.50

    def __init__(self, config: BlackMambaConfig):
        config.check()  # from_pretrained sets fields after the config is made
        super().__init__(config)
        # Whole modules, since that is what transformers can name, and only names that there are. Newer versions have a
        # list that bf16 models obey too.
        strict = hasattr(PreTrainedModel, "_keep_in_fp32_modules_strict")
        mixers = filter(None, map(recurrent, config.mamba_moe_layers))
        names = sorted({name for mixer in mixers for name in mixer.names_in_fp32(config)})
        setattr(self, "_keep_in_fp32_modules_strict" if strict else "_keep_in_fp32_modules", names)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        std = self.config.initializer_range
        norms = (RMSNorm, nn.LayerNorm)
        if isinstance(module, (nn.Linear, nn.Embedding, TimeStep, *norms)):
            nn.init.ones_(module.weight) if isinstance(module, norms) else nn.init.normal_(module.weight, std=std)
            if isinstance(bias := getattr(module, "bias", None), Tensor):
                nn.init.zeros_(bias)
            if isinstance(module, ZayaRouter):
                for weight in (module.down, module.first, module.second):
                    nn.init.normal_(weight, std=std)
                for one in (module.carry, module.norm):
                    nn.init.ones_(one)
                for zero in (module.down_bias, module.first_bias, module.second_bias):
                    nn.init.zeros_(zero)
        elif isinstance(module, Affine):
            nn.init.ones_(module.scale)
            nn.init.zeros_(module.bias)
        elif isinstance(module, Recurrent):
            own = module.parameters(recurse=False)
            if not any(getattr(parameter, "_is_hf_initialized", False) for parameter in own):
                module.initialise()


class BlackMambaModel(BlackMambaPreTrainedModel):
    """The network up to its final norm."""

    def __init__(self, config: BlackMambaConfig):
        super().__init__(config)
        self.embedding = Embedding(config)
        self.decoder = Decoder(config)
        self.gradient_checkpointing = False  # gradient_checkpointing_enable() finds it and sets it
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding.word_embeddings = value

    def get_decoder(self) -> "BlackMambaModel":
        return self  # `self.decoder` is the stack of layers, which takes no token ids

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: BlackMambaCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_choices: bool | None = None,
        return_dict: bool | None = None,
        past_key_values: BlackMambaCache | None = None,
        **kwargs: Any,
    ) -> BlackMambaOutput | tuple:
        """Read tokens that follow the ones in `cache`.

        Args:
            past_key_values: Another name for `cache`, which transformers used before 5.24.
            attention_mask: Mask of these tokens, or of all tokens so far. Padding must be at either end.
            position_ids: Position 0 starts a new document and resets the state. Other values are ignored.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds")
        embeds = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        if not torch.compiler.is_compiling() and 0 in embeds.shape[:2]:
            raise ValueError(f"there are no tokens: (batch, tokens) is {tuple(embeds.shape[:2])}")
        output_hidden_states = _given_or(output_hidden_states, self.config.output_hidden_states)
        output_router_choices = _given_or(output_router_choices, self.config.output_router_choices)
        checkpointing = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        past = _one_of(cache, past_key_values)
        cache = self._cache(past, use_cache, checkpointing)
        residual = widen(embeds) * self.config.embedding_multiplier
        keep_BL1 = self._keep(attention_mask, embeds, past)
        begins_BL = _beginnings(position_ids, embeds)
        reset_BL = self._resets(input_ids, begins_BL, past)
        across = self.config.attention_across_documents
        segment_BL = _segments(keep_BL1, begins_BL if across else reset_BL, embeds, past)
        hidden_states, choices, shared, carried = [], [], None, None
        for layer in self.decoder.layers:
            if output_hidden_states:
                hidden_states.append(residual.to(embeds.dtype))
            past_and_ids = (cache, shared, input_ids, carried)
            residual, choice_BLk, shared, carried = layer(residual, keep_BL1, reset_BL, segment_BL, *past_and_ids)
            choices += [] if choice_BLk is None else [choice_BLk]
        if self.config.num_experts_per_tok == 1:
            choices = [choice_BLk[..., 0] for choice_BLk in choices]
        last = self.decoder.final_layernorm(residual)
        if cache is not None:
            cache.saw(segment_BL, None if input_ids is None else input_ids[:, -1])
        output = BlackMambaOutput(
            last_hidden_state=last,
            hidden_states=(*hidden_states, last) if output_hidden_states else None,
            router_choices=tuple(choices) if output_router_choices else None,
            **{CACHE: cache},
        )
        return output if _given_or(return_dict, self.config.return_dict) else output.to_tuple()

    def _cache(
        self, past: BlackMambaCache | None, use_cache: bool | None, checkpointing: bool
    ) -> BlackMambaCache | None:
        if checkpointing and past is not None:
            raise ValueError(
                "gradient checkpointing runs each layer twice, so it cannot continue from a cache. Pass none, "
                "or call gradient_checkpointing_disable()"
            )
        if checkpointing and use_cache:
            logger.warning_once("gradient checkpointing keeps no state: use_cache=True is ignored in training")
        if checkpointing or not _given_or(use_cache, past is not None or (self.config.use_cache and not self.training)):
            return None
        if past is not None and not isinstance(past, BlackMambaCache):
            raise ValueError(
                f"the cache is a {type(past).__name__}, not a BlackMambaCache. Pass none: the model makes its own"
            )
        return BlackMambaCache(self.config) if past is None else past

    def _keep(self, attention_mask: Tensor | None, embeds_BLD: Tensor, past: BlackMambaCache | None) -> Tensor | None:
        """Return 0 for padding and 1 for tokens, or None without padding."""
        if attention_mask is None:
            return None
        mask = attention_mask.bool()
        if not torch.compiler.is_compiling():  # a graph cannot look at values
            batch, length = embeds_BLD.shape[:2]
            lengths = {length, length + (past.seen if isinstance(past, BlackMambaCache) else 0)}
            if mask.dim() != 2 or mask.shape[0] != batch or mask.shape[1] not in lengths:
                raise ValueError(
                    f"attention_mask has the shape {tuple(mask.shape)}. Pass (batch, tokens), which is "
                    + " or ".join(str((batch, tokens)) for tokens in sorted(lengths))
                )
            if mask.all():
                return None
            before, after = mask.cummax(dim=1).values, mask.flip(1).cummax(dim=1).values.flip(1)
            if (before & after & ~mask).any():
                raise ValueError(
                    "attention_mask has a hole: a 0 between two 1s. Only padding at the left or right end can be "
                    "skipped; to generate, pad at the left (tokenizer.padding_side='left'), and give packed documents "
                    "position_ids that restart at 0"
                )
        first: Any = self.decoder.layers[0]
        return mask[:, -embeds_BLD.shape[1] :, None].to(first.norm.weight.dtype)

    def _resets(
        self, input_ids: Tensor | None, begins_BL: Tensor | None, past: BlackMambaCache | None
    ) -> Tensor | None:
        """Return True at the first token of each document: at position 0, or after the end-of-document token."""
        if self.config.eod_reset is None:
            return begins_BL
        if input_ids is None:
            raise ValueError(
                "this model resets its state after token eod_reset, so it needs input_ids, not inputs_embeds"
            )
        before = torch.full_like(input_ids[:, :1], -1)
        if past is not None and past.last_tokens is not None:
            before = past.last_tokens[:, None]
        reset_BL = torch.cat((before, input_ids[:, :-1]), dim=1) == self.config.eod_reset
        return reset_BL if begins_BL is None else reset_BL | begins_BL


def _one_of(cache: BlackMambaCache | None, past_key_values: BlackMambaCache | None) -> BlackMambaCache | None:
    if cache is not None and past_key_values is not None:
        raise ValueError("pass either cache or past_key_values: they are two names of one argument")
    return past_key_values if cache is None else cache


def _given_or(value: bool | None, default: bool | None) -> bool:
    return bool(default if value is None else value)


def _beginnings(position_ids: Tensor | None, embeds_BLD: Tensor) -> Tensor | None:
    """Return True at position 0, or None without position ids or without a position 0."""
    if position_ids is None:
        return None
    begins_BL = (position_ids == 0).expand(embeds_BLD.shape[:2])
    return begins_BL if torch.compiler.is_compiling() or begins_BL.any() else None


def _segments(
    keep_BL1: Tensor | None, begins_BL: Tensor | None, embeds_BLD: Tensor, past: BlackMambaCache | None
) -> Tensor:
    """Return the document number of each token, -1 at padding; attention stays within a document."""
    segment_BL = torch.zeros(embeds_BLD.shape[:2], dtype=torch.long, device=embeds_BLD.device)
    if begins_BL is not None:
        segment_BL = begins_BL.long().cumsum(dim=1)
    if past is not None and past.documents is not None:
        segment_BL = segment_BL + past.documents[:, None]
    return segment_BL if keep_BL1 is None else segment_BL.masked_fill(keep_BL1[..., 0] == 0, -1)


class BlackMambaForCausalLM(BlackMambaPreTrainedModel, GenerationMixin):
    """The network with its output layer, whose weight is the embedding's unless config.tie_word_embeddings is false."""

    _tied_weights_keys = {"lm_head.weight": "model.embedding.word_embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: BlackMambaConfig):
        super().__init__(config)
        self.model = BlackMambaModel(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size, use_kernels(config))
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls, *args: Any) -> bool:
        return False  # or generate() hands over a cache of attention layers

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings

    def get_decoder(self) -> BlackMambaModel:
        return self.model

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: BlackMambaCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_choices: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: BlackMambaCache | None = None,
        **kwargs: Any,
    ) -> BlackMambaCausalOutput | tuple:
        """Run BlackMambaModel.forward; `labels` are shifted here, and -100 is ignored."""
        body = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=_one_of(cache, past_key_values),
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_router_choices=output_router_choices,
            return_dict=True,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden = body.last_hidden_state[:, kept] / self.config.logits_scaling
        logits = capped(self.lm_head(hidden), self.config.logit_softcap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = BlackMambaCausalOutput(loss, logits, getattr(body, CACHE), body.hidden_states, body.router_choices)
        return output if _given_or(return_dict, self.config.return_dict) else output.to_tuple()

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        cache: BlackMambaCache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: BlackMambaCache | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the tokens that the state has not seen, and all options of forward."""
        cache = _one_of(cache, past_key_values)
        seen = 0 if cache is None else cache.get_seq_length()
        inputs = {name: value for name, value in kwargs.items() if name not in _GENERATION_ONLY}
        inputs |= {CACHE: cache, "attention_mask": attention_mask}
        if inputs_embeds is not None and _first_iteration(input_ids, inputs_embeds, kwargs):
            positions = kwargs.get("cache_position")  # before 5.x: of the embeddings that are new
            known = 0 if positions is None else len(positions)
            new = kwargs.get("next_sequence_length") or known or inputs_embeds.shape[1]
            return {**inputs, "inputs_embeds": inputs_embeds[:, -new:]}
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


# What generate() says to prepare_inputs_for_generation alone. position_ids follow from the state.
_GENERATION_ONLY = {"next_sequence_length", "is_first_iteration", "cache_position", "position_ids", "labels"}


def _first_iteration(input_ids: Tensor, inputs_embeds: Tensor, kwargs: dict[str, Any]) -> bool:
    if "is_first_iteration" in kwargs:  # 5.x says so
        return kwargs["is_first_iteration"]
    positions = kwargs.get("cache_position")
    return input_ids.shape[1] == 0 or (positions is not None and len(positions) == inputs_embeds.shape[1] > 1)


# So that save_pretrained takes these files along.
BlackMambaModel.register_for_auto_class("AutoModel")
BlackMambaForCausalLM.register_for_auto_class("AutoModelForCausalLM")
