"""The network run as a recurrence: a prompt in parallel through the scan, then a token at a time, in constant memory.

Shapes: B batch, L prompt length, T = B * L tokens, D model, I and O in and out, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_blackmamba import norms
from megatron_blackmamba.inference.linear import linear, threads_for_matrices_alone
from megatron_blackmamba.inference.weights import Weights, decodings
from megatron_blackmamba.layers import Inputs
from megatron_blackmamba.ops import decoding
from megatron_blackmamba.ops.gated import activated
from megatron_blackmamba.ops.rms_norm import norm_and_stream
from megatron_blackmamba.ops.softcap import capped

READ_AT_ONCE = 2048
"""Prompt tokens a batch reads at once: a longer prompt goes in pieces, from state to state."""


@dataclass
class State:
    """All that the model remembers of B sequences; its size does not depend on their length."""

    memories: list[list[Tensor]]
    """What each layer remembers, as its kind says; the first axis of each tensor is the batch."""
    last_B: Tensor
    """The last token of each sequence, -1 before the first."""

    def rows(self, index: Tensor) -> "State":
        """Return the sequences at `index`, in that order; a sequence may occur more than once."""
        return State([[tensor[index] for tensor in memory] for memory in self.memories], self.last_B[index])

    @staticmethod
    def joined(states: Sequence["State"]) -> "State":
        """Return the sequences of several states as one; not for states that grow, whose lengths differ."""
        layers = zip(*(state.memories for state in states), strict=True)
        memories = [[torch.cat(parts) for parts in zip(*layer, strict=True)] for layer in layers]
        return State(memories, torch.cat([state.last_B for state in states]))

    def first(self, rows: int) -> "State":
        """Return the first sequences, as views."""
        return State([[tensor[:rows] for tensor in memory] for memory in self.memories], self.last_B[:rows])

    def copy_(self, other: "State") -> None:
        """Take over the values of `other`, in place."""
        torch._foreach_copy_(self._tensors(), other._tensors())

    def _tensors(self) -> tuple[Tensor, ...]:
        return (*chain.from_iterable(self.memories), self.last_B)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())


class Decoder:
    """A model that reads and continues; the weights are shared by any number of states.

    fused: compute whole blocks in kernels of this project, where there are some for the layer and the device.
    """

    def __init__(self, weights: Weights, fused: bool = True):
        self.weights = weights
        self.config = weights.config
        self.threads: int | None = None
        self.fused = fused
        self.graphs: object = None
        """The captured steps, once there are any (`captured`)."""
        self.how = decodings(weights.config)
        self.final_norm = norms.kind_of(weights.config.final_norm)
        self.final_norm_settings = self.final_norm.own(weights.config)
        in_order = self.config.arrangement == "sequential" and self.config.multipliers.residual == 1
        in_order &= not self.config.residual_scaling
        compiles = fused and decoding.why_not(weights.embedding_VD) is None and in_order
        self.compiled = [
            how.compiled(layer, norm_D, self.config) if compiles and norm_D is not None else None
            for how, layer, norm_D in zip(self.how, weights.layers, weights.norms_D, strict=True)
        ]

    @property
    def grows(self) -> bool:
        """Return whether the state grows with every token."""
        return any(how.grows for how in self.how)

    def start(self, batch: int) -> State:
        """Return the state before the first token of `batch` sequences."""
        device, dtype = self.weights.device, self.weights.dtype
        return State(
            [how.memory(self.config, batch, dtype, device) for how in self.how],
            torch.full((batch,), -1, dtype=torch.long, device=device),
        )

    @torch.inference_mode()
    def read(self, state: State, tokens_BL: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """Read tokens in parallel, update `state` in place, and return the last logits, `[B, V]` fp32.

        `lengths_B` gives the number of tokens in each row; the positions to their left are padding and are ignored.
        Only sequences that have read nothing can be padded.
        """
        return self.logits_of_stream(self.stream(state, tokens_BL, lengths_B)[:, -1])

    @torch.inference_mode()
    def read_all(self, state: State, tokens_BL: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """Read tokens like `read`, and return the logits after every token, `[B, L, V]`."""
        stream_TD = self.stream(state, tokens_BL, lengths_B).flatten(0, 1)
        return self.logits_of_stream(stream_TD).unflatten(0, tokens_BL.shape)

    @torch.inference_mode()
    def step(self, state: State, tokens_B: Tensor, choices: list[Tensor] | None = None) -> Tensor:
        """Read one token of each sequence, update `state` in place, and return the next logits, `[B, V]` fp32.

        choices: receives the experts of each token, `[B, K]`, of each routed layer.
        """
        if tokens_B.shape != state.last_B.shape:
            raise ValueError(
                f"tokens have the shape {tuple(tokens_B.shape)}: give one for each sequence of the state,"
                f" {tuple(state.last_B.shape)}."
            )
        residual_BD = self.embedded(tokens_B)
        with threads_for_matrices_alone(residual_BD, self.weights.embedding_VD) as self.threads:
            compiled = decoding.why_not(self.weights.embedding_VD) is None
            self._restart(state, compiled)
            self._layers(state, residual_BD, Inputs(tokens_B), compiled, choices)
            state.last_B.copy_(tokens_B)
            return self.logits_of_stream(residual_BD)

    def _layers(
        self, state: State, residual_BD: Tensor, inputs: Inputs, compiled: bool, choices: list[Tensor] | None
    ) -> None:
        weights = self.weights
        layers = zip(self.how, weights.layers, weights.norms_D, state.memories, self.compiled, strict=True)
        x_BD = residual_BD
        for i, (how, layer, norm_D, memory, step) in enumerate(layers):
            in_one = compiled and step is not None
            observed = choices is not None and how.routes
            if norm_D is not None and (observed or not in_one):
                x_BD = rms_norm(residual_BD, norm_D, self.config.norm_eps)
            if choices is not None and observed:  # a block in one step does not tell its choice
                choices.append(how.choice(layer, x_BD, inputs, self.config))
            if compiled and step is not None:
                step(residual_BD, *memory, threads=self.threads, last_B=state.last_B)
            else:
                residual_BD += self._branch(i, residual_BD, how.step(self, layer, memory, x_BD, inputs))

    def _branch(self, layer: int, residual: Tensor, y: Tensor) -> Tensor:
        """Return what a layer's output adds to the residual stream, which residual scaling changes in place."""
        if self.config.multipliers.residual != 1:
            y = y * self.config.multipliers.residual
        if self.config.residual_scaling:
            scale_D, bias_D, output_scale_D, output_bias_D = self.weights.scalings_4D[layer]
            residual.add_(bias_D).mul_(scale_D)
            y = (y + output_bias_D) * output_scale_D
        return y

    def _restart(self, state: State, compiled: bool) -> None:
        """Forget sequences whose document has ended, in the layers whose step does not do so."""
        steps = zip(self.how, state.memories, self.compiled, strict=True)
        left = [(how, memory) for how, memory, step in steps if not (compiled and step is not None and step.restarts)]
        if self.config.eod_reset is None or not left:
            return
        going_on_B = state.last_B.ne(self.config.eod_reset)
        if not going_on_B.is_cuda and going_on_B.all():
            return
        for how, memory in left:
            how.restart(memory, going_on_B)

    @torch.inference_mode()
    def stream(
        self,
        state: State,
        tokens_BL: Tensor,
        lengths_B: Tensor | None = None,
        choices: list[Tensor] | None = None,
    ) -> Tensor:
        """Take in tokens as `read` does, and return what the last norm reads after every token, `[B, L, D]` fp32.

        choices: receives the experts of each token, `[B, L, K]`, of each routed layer.
        """
        weights, batch = self.weights, len(state.last_B)
        if tokens_BL.dim() != 2 or len(tokens_BL) != batch or tokens_BL.shape[1] == 0:
            raise ValueError(
                f"tokens have the shape {tuple(tokens_BL.shape)}, and the state holds {batch} sequences:"
                f" give [{batch}, L] with L of at least 1."
            )
        inputs = Inputs(tokens_BL, self._keep(state, tokens_BL, lengths_B), self._resets(state, tokens_BL))
        x_BLD = residual_BLD = self.embedded(tokens_BL)
        branch_BLD: Tensor | None = None  # what the layer before adds to the residual stream
        layers = zip(self.how, weights.layers, weights.norms_D, state.memories, strict=True)
        for i, (how, layer, norm_D, memory) in enumerate(layers):
            if norm_D is not None:
                x_BLD, residual_BLD = norm_and_stream(
                    residual_BLD, norm_D, self.config.norm_eps, branch_BLD, weights.dtype
                )
            elif branch_BLD is not None:
                residual_BLD = residual_BLD + branch_BLD
            if choices is not None and how.routes:
                choice_TK = how.choice(layer, x_BLD.flatten(0, 1).float(), inputs, self.config)
                choices.append(choice_TK.unflatten(0, tokens_BL.shape))
            branch_BLD = self._branch(i, residual_BLD, how.read(self, layer, memory, x_BLD, inputs))
        last_B = tokens_BL[:, -1]
        state.last_B.copy_(last_B if lengths_B is None else torch.where(lengths_B > 0, last_B, state.last_B))
        return residual_BLD if branch_BLD is None else residual_BLD + branch_BLD

    def times(self, x_BI: Tensor, weight_OI: Tensor) -> Tensor:
        """Multiply a few rows by a weight, in fp32."""
        return linear(x_BI, weight_OI, self.threads, self.fused)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return the residual stream before the first layer, fp32 and a tensor of its own."""
        embedding_VD, multiplier = self.weights.embedding_VD, self.config.multipliers.embedding
        if self.fused and (stream := decoding.embedded(tokens, embedding_VD, multiplier)) is not None:
            return stream
        return F.embedding(tokens, embedding_VD).float() * multiplier

    def activated(self, x: Tensor) -> Tensor:
        """Return what the second weight of an MLP or expert reads, of the product with the first."""
        return activated(x, self.config.activation, self.config.gated)

    def _keep(self, state: State, tokens_BL: Tensor, lengths_B: Tensor | None) -> Tensor | None:
        L = tokens_BL.shape[1]
        if lengths_B is None or bool((lengths_B == L).all()):
            return None
        if bool(((lengths_B < L) & (state.last_B >= 0)).any()):
            raise ValueError(
                f"lengths {lengths_B.tolist()} of {L}: padding behind tokens that a sequence has read would change what"
                " it remembers. Read such sequences one by one."
            )
        position_L = torch.arange(L, device=tokens_BL.device)
        return (position_L >= L - lengths_B[:, None])[:, :, None].to(self.weights.dtype)

    def _resets(self, state: State, tokens_BL: Tensor) -> Tensor | None:
        if self.config.eod_reset is None:
            return None
        return torch.cat((state.last_B[:, None], tokens_BL[:, :-1]), dim=1) == self.config.eod_reset

    @torch.inference_mode()
    def logits_of_stream(self, stream_TD: Tensor) -> Tensor:
        """Apply the last norm and the head to some rows of `stream`: `[T, V]` fp32."""
        return self.logits(self.normed(stream_TD))

    def normed(self, stream_TD: Tensor) -> Tensor:
        """Apply the last norm."""
        own = self.final_norm_settings
        return self.final_norm.apply(stream_TD, self.weights.final_norm_parameters, self.config.norm_eps, *own)

    @torch.inference_mode()
    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Apply the head to some rows behind the last norm: `[T, V]` fp32."""
        if self.config.logits_divisor != 1:
            hidden_TD = hidden_TD / self.config.logits_divisor
        return capped(self.times(hidden_TD, self.weights.head_VD), self.config.logit_softcap)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight_D.shape, weight_D, eps)
