"""The generation cache of BlackMamba, made of transformers' own layers of a cache where it has them (5.21).

Shapes: B sequences, S tokens so far, I inner, W window of the convolution.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.modeling_outputs import BaseModelOutputWithPast

from .layers_blackmamba import recurrent

CACHE = next(field.name for field in fields(BaseModelOutputWithPast) if field.name in ("cache", "past_key_values"))
"""The name of the cache in outputs and in the arguments of generate: `cache` from transformers 5.24 on."""

if hasattr(cache_utils.Cache, "get_conv_state"):
    from transformers.cache_utils import Cache, DummyLayer, DynamicLayer, LinearAttentionLayer
else:  # before 5.21: what is used of it

    class DummyLayer:  # type: ignore[no-redef]
        def reorder_cache(self, beam_idx: Tensor) -> None: ...
        def batch_repeat_interleave(self, repeats: int) -> None: ...
        def batch_select_indices(self, indices: Tensor) -> None: ...

    class DynamicLayer:  # type: ignore[no-redef]
        is_sliding = False
        keys: Tensor | None = None
        values: Tensor | None = None

        def update(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            if self.keys is not None and self.values is not None:
                keys, values = torch.cat((self.keys, keys), dim=-2), torch.cat((self.values, values), dim=-2)
            self.keys, self.values = keys, values
            return keys, values

        def reorder_cache(self, beam_idx: Tensor) -> None:
            if self.keys is not None and self.values is not None:
                self.keys, self.values = self.keys[beam_idx], self.values[beam_idx]

        batch_select_indices = reorder_cache

        def batch_repeat_interleave(self, repeats: int) -> None:
            if self.keys is not None:
                self.reorder_cache(torch.arange(len(self.keys), device=self.keys.device).repeat_interleave(repeats))

    class LinearAttentionLayer:  # type: ignore[no-redef]
        def __init__(self) -> None:
            self.conv_states, self.recurrent_states = {0: None}, {0: None}
            self.is_conv_states_initialized, self.is_recurrent_states_initialized = {0: False}, {0: False}
            self.has_previous_state = {0: False}

    class Cache(cache_utils.Cache):  # type: ignore[no-redef]
        layers: list[Any]

        def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
            return self.layers[layer_idx].conv_states[0]

        def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
            return self.layers[layer_idx].recurrent_states[0]

        def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
            return self.layers[layer_idx].update_conv_state(conv_states)

        def update_recurrent_state(
            self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
        ) -> Tensor:
            return self.layers[layer_idx].update_recurrent_state(recurrent_states)

        def update(self, keys: Tensor, values: Tensor, layer_idx: int, *rest: Any) -> tuple[Tensor, Tensor]:
            return self.layers[layer_idx].update(keys, values)


class RecurrentLayer(LinearAttentionLayer):
    """The state of a recurrent layer of any kind in constant space: in fp32, and `[B, I, W]` of the convolution.

    In the place of the latter a Mamba-3 layer has what the last token leaves, `[B, H, S + N + P]`.

    A new state replaces the old one. transformers copies into it, and has no gradients through two calls of the model.
    """

    is_compileable = False

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        self.conv_states[state_idx] = conv_states
        self.is_conv_states_initialized[state_idx] = True
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = self.has_previous_state[state_idx] = True
        return recurrent_states

    def _map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        states: Any
        for states in (self.conv_states, self.recurrent_states):
            if states[0] is not None:
                states[0] = function(states[0])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map_rows(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map_rows(lambda rows: rows[indices.to(rows.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_rows(lambda rows: rows.repeat_interleave(repeats, dim=0))


class BlackMambaCache(Cache):
    """The generation cache of B sequences.

    Mamba layers of each kind have their state, attention layers their keys and values, and other layers nothing. Beside
    them are the last tokens, since a document's end resets states, and the document of each token for attention.
    """

    is_compileable = False
    layers: list[Any]

    def __init__(self, config: Any):
        self.offloading = False  # the rest of Cache's fields; its __init__ differs by version
        self.layer_class_to_replicate = None
        self.kinds = tuple(config.mamba_moe_layers)
        self.reset()

    def __repr__(self) -> str:
        return f"BlackMambaCache({self.seen} tokens seen, {len(self.layers)} layers)"

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer_idx: int) -> tuple[Tensor, ...]:
        """Return the tensors of a layer: convolution and state, keys and values, or none."""
        layer = self.layers[layer_idx]
        if isinstance(layer, RecurrentLayer):
            tensors = (layer.conv_states[0], layer.recurrent_states[0])
        else:
            tensors = (getattr(layer, "keys", None), getattr(layer, "values", None))
        return tuple(tensor for tensor in tensors if tensor is not None)

    def reset(self) -> None:
        """Forget everything."""
        others: dict[str, type] = {"attention": DynamicLayer}
        self.layers = [RecurrentLayer() if recurrent(kind) else others.get(kind, DummyLayer)() for kind in self.kinds]
        self.seen = 0
        self.last_tokens: Tensor | None = None
        self.documents: Tensor | None = None  # that each row is in
        self.documents_BS: Tensor | None = None  # of all tokens so far, if a layer attends to them

    def saw(self, document_BL: Tensor, last_tokens: Tensor | None) -> None:
        """Count tokens that every layer has read."""
        self.seen += document_BL.shape[1]
        self.last_tokens = last_tokens
        self.documents = document_BL.amax(dim=1).clamp(min=0)
        if "attention" in self.kinds:
            self.documents_BS = self.with_past(document_BL)

    def with_past(self, document_BL: Tensor) -> Tensor:
        """Return the documents of all tokens: those that were seen, and these."""
        return document_BL if self.documents_BS is None else torch.cat((self.documents_BS, document_BL), dim=1)

    @property
    def is_linear(self) -> list[bool]:
        """Return False for every layer: generate then skips the part of a prompt that the state has seen.

        From transformers 5.24 on it would read the whole prompt again if all layers were linear.
        """
        return [False] * len(self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_max_cache_shape(self, layer_idx: int = 0) -> None:
        return None

    def _map_rows(self, function: Callable[[Tensor], Tensor]) -> None:
        for name in ("last_tokens", "documents", "documents_BS"):
            if (rows := getattr(self, name)) is not None:
                setattr(self, name, function(rows))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for layer in self.layers:
            layer.reorder_cache(beam_idx)
        self._map_rows(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        for layer in self.layers:
            layer.batch_select_indices(indices)
        self._map_rows(lambda rows: rows[indices.to(rows.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        for layer in self.layers:
            layer.batch_repeat_interleave(repeats)
        self._map_rows(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def crop(self, max_length: int) -> None:
        raise NotImplementedError("a recurrent state cannot be cut back to an earlier token")
