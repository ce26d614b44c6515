"""Routers as torch modules: what their kinds (`routers`) answer, between the gate and megatron-core's dispatchers.

All count the tokens each expert gets, so that the trainer can report them without asking the device anything.

Shapes: S sequence, B batch, D model, T = S * B tokens of this rank, E experts, K experts of a token.
"""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_blackmamba import routers
from megatron_blackmamba.model.config import MegatronConfig
from megatron_blackmamba.model.inputs import LayerInputs
from megatron_blackmamba.model.sharding import empty, replicated, without_decay
from megatron_blackmamba.ops.context import several
from megatron_blackmamba.ops.fp32_linear import applies, fp32_linear, fp32_linear_and_input
from megatron_blackmamba.registry import KindError
from megatron_blackmamba.routers import Routed, Tokens, largest
from megatron_blackmamba.routers.base import Z_LOSS
from megatron_blackmamba.runtime import device

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import Router, TopKRouter

Measured = dict[str, tuple[Tensor | float, float]]
"""By name a sum over what this rank saw, and what to divide it by once both are added up over all ranks."""


class _Counted(Router):
    """The part that our routers share: a bias, which megatron-core ties to the bias of every linear, and the counts."""

    def _complete(self, config: MegatronConfig) -> None:
        self.described = config.described
        self.kind = routers.kind_of(config.described.router.kind)
        self.use = self.kind.use(config.described)
        self.choices = self.kind.choices(config.described)
        self.groups: dict[str, dist.ProcessGroup | None] = {}
        if self.kind.learned:
            self.bias = None
            if config.described.router.bias:
                bias_E = empty(self.choices, dtype=config.params_dtype)
                self.bias = without_decay(replicated(bias_E, config.sequence_parallel))
        else:
            del self.weight
            self.register_parameter("weight", None)
        # With recomputation a forward runs twice, the first time without gradients; count that one.
        self.runs_twice = config.recompute != "none"
        self.register_buffer("tokens_E", self.zero_counts(self.choices), persistent=False)
        self.z_loss = config.described.router.z_loss
        if self.z_loss:
            self.register_buffer("log_sums", self.zero_counts(2).double(), persistent=False)  # of squares, and tokens

    def zero_counts(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=device.device())

    def gating(self, hidden_SBD: Tensor, inputs: LayerInputs | None = None) -> Tensor:
        """Return logits in fp32 (or float64): rounded to bf16, near-equal experts would swap."""
        if not self.kind.learned:
            return hidden_SBD.new_zeros(*hidden_SBD.shape[:2], self.num_experts, dtype=self.config.full_precision)
        return fp32_linear(hidden_SBD, self.weight, self.bias, self.config.full_precision)

    def tokens(self, hidden_SBD: Tensor, inputs: LayerInputs | None) -> Tokens:
        """Return what the kind reads of this rank's tokens beside their logits."""
        ids_T = None
        if self.kind.reads_ids:
            assert inputs is not None, f"model.router.kind={self.kind.name} reads token ids"
            first, count = self.tp_group.rank() * len(hidden_SBD), len(hidden_SBD)  # sequence parallelism
            ids_T = inputs.ids_BS[:, first : first + count].t().flatten()
        return Tokens(self.described, ids_T, {name: getattr(self, name) for name in self.kind.state}, self.groups)

    def selecting(self, hidden_SBD: Tensor, inputs: LayerInputs) -> Tensor:
        """Return the numbers by whose size tokens choose their experts by themselves, `[S, B, E]`."""
        logits_TE = self.gating(hidden_SBD, inputs).flatten(0, 1)
        selecting_TE = self.kind.selecting(logits_TE, self.tokens(hidden_SBD, inputs))
        return selecting_TE.unflatten(0, hidden_SBD.shape[:2])

    @property
    def counter_E(self) -> Tensor | None:
        """Return the counts that this forward pass adds to, or None if it must not count."""
        return None if self.runs_twice and torch.is_grad_enabled() else self.tokens_E

    def with_z_loss(self, logits: Tensor) -> Tensor:
        """Return the logits; in training their gradient then has that of the z-loss too.

        As megatron-core's own, it is the mean over the tokens of a micro-batch on all tensor- and context-parallel
        ranks, scaled like auxiliary losses. That one is only for its top-k router, and its metric is fp32.
        """
        if not (self.z_loss and self.training and torch.is_grad_enabled()):
            return logits
        squares_T = logits.logsumexp(-1).square()
        self.log_sums[0] += squares_T.detach().sum()
        self.log_sums[1] += squares_T.numel()
        term = self.z_loss / self.tp_cp_group.size() * squares_T.mean()
        return MoEAuxLossAutoScaler.apply(logits, term)

    def begin_batch(self) -> None:
        """Prepare for the micro-batches of a step, which may be computed again."""

    def end_batch(self) -> None:
        """Change what the kind keeps (`state`) after these; every rank calls this."""

    def measured(self) -> Measured:
        """Return the numbers that the kind's `metrics` names, of the last steps, and begin anew."""
        if not self.z_loss:
            return {}
        squares, tokens = self.log_sums.tolist()
        self.log_sums.zero_()
        return {Z_LOSS: (squares, tokens)}


class KindRouter(_Counted):
    """A router whose kind chooses the experts in training; else every token finds its own.

    It has the kind's weights and state. A module of another kind derives from it, and changes the state in `end_batch`.
    """

    def __init__(self, config: MegatronConfig, pg_collection: ProcessGroupCollection, is_mtp_layer: bool = False):
        super().__init__(config, pg_collection)
        self._complete(config)
        shapes = self.kind.inside(config.described)
        if (weight := (self.choices, self.kind.inputs(config.described))) != (self.num_experts, config.hidden_size):
            shapes = {"weight": weight, **shapes}
        for name, shape in shapes.items():
            parameter = replicated(empty(*shape, dtype=config.params_dtype), config.sequence_parallel)
            self.register_parameter(name, parameter if len(shape) > 1 else without_decay(parameter))
        for name in self.kind.state:
            self.register_buffer(name, torch.zeros(self.choices, dtype=torch.float32, device=device.device()))
        groups = {"rank": None, "tensor": pg_collection.tp_cp, "data": pg_collection.tp_dp_cp}
        self.groups = {scope: several(group) for scope, group in groups.items()}
        self.seen_distinct = False
        if not self.kind.every_token_gets_k:
            self.register_buffer("unrouted", self.zero_counts(2), persistent=False)

    def forward(self, hidden_SBD: Tensor, inputs: LayerInputs | None = None) -> Routed:
        """Return the experts of each token."""
        logits_SBE, hidden_SBD = self.logits(hidden_SBD, inputs)
        logits_TE = self.with_z_loss(logits_SBE).flatten(0, 1)
        chosen = self.routing(logits_TE.detach(), self.tokens(hidden_SBD, inputs))
        weigh = self.use.weight_map if chosen.dtype == torch.bool else self.use.weights
        return Routed(self.num_experts, chosen, weigh(logits_TE, chosen), hidden_SBD)

    def logits(self, hidden_SBD: Tensor, inputs: LayerInputs | None) -> tuple[Tensor, Tensor]:
        """Return also what experts read: on GPUs the product that makes the router's gradient adds theirs."""
        if self.kind.learned and self.kind.is_linear and applies(hidden_SBD, self.weight):
            return fp32_linear_and_input(hidden_SBD, self.weight, self.bias)
        logits_SBE, carried_SBR = self.computed(hidden_SBD, inputs)
        if inputs is not None:
            inputs.carried_SBR = carried_SBR
        return logits_SBE, hidden_SBD

    def gating(self, hidden_SBD: Tensor, inputs: LayerInputs | None = None) -> Tensor:
        """Return logits in fp32 (or float64): rounded to bf16, near-equal experts would swap."""
        return self.computed(hidden_SBD, inputs)[0]

    def computed(self, hidden_SBD: Tensor, inputs: LayerInputs | None) -> tuple[Tensor, Tensor | None]:
        """Return the logits and what the next layer's router reads, as the kind computes them."""
        if self.kind.is_linear:
            return super().gating(hidden_SBD, inputs), None
        carried_SBR = self.carried(hidden_SBD, inputs)
        return self.kind.logits(hidden_SBD.to(self.config.full_precision), self.widened(), carried_SBR, self.described)

    def widened(self, but: tuple[str, ...] = ()) -> dict[str, Tensor]:
        """Return the weights in full precision, by name, all but some."""
        weights = self.named_parameters(recurse=False)
        return {name: weight.to(self.config.full_precision) for name, weight in weights if name not in but}

    def carried(self, hidden_SBD: Tensor, inputs: LayerInputs | None) -> Tensor | None:
        """Return what the router before left; zeros if there is none, so that every parameter has a gradient."""
        if inputs is not None and inputs.carried_SBR is not None:
            return inputs.carried_SBR
        R = self.kind.carried(self.described)
        return hidden_SBD.new_zeros(*hidden_SBD.shape[:2], R, dtype=self.config.full_precision) if R else None

    def routing(self, logits_TE: Tensor, at: Tokens) -> Tensor:
        """Return the experts of each token: `[T, K]`, or `[T, E]` bool where their number differs."""
        if self.training:
            counter_E, counts = self.counter_E, self.kind.counts_tokens
            chosen = self.kind.choose(logits_TE, replace(at, tokens_E=counter_E if counts else None))
            self._refuse_wrong(chosen, logits_TE)
            if counter_E is not None and not counts:
                count(chosen, counter_E)
            if counter_E is not None and not self.kind.every_token_gets_k:
                self.unrouted[0] += chosen.logical_not().all(1).sum()
                self.unrouted[1] += len(chosen)
            return chosen
        choice_TK = largest(self.kind.selecting(logits_TE, at), self.described.top_k)
        count(choice_TK, self.tokens_E)
        return choice_TK

    def _refuse_wrong(self, chosen: Tensor, logits_TE: Tensor) -> None:
        """Refuse a choice of another shape than promised, and at first, on CPUs, an expert that is chosen twice."""
        gets_k, (tokens, experts) = self.kind.every_token_gets_k, logits_TE.shape
        expected = (torch.int64, (tokens, self.described.top_k)) if gets_k else (torch.bool, (tokens, experts))
        if (chosen.dtype, chosen.shape) != expected:
            other = " Set every_token_gets_k = False if tokens get different numbers of experts." if gets_k else ""
            raise KindError(
                f"{type(self.kind).__name__}.choose returned {chosen.dtype} {tuple(chosen.shape)}, expected"
                f" {expected[0]} {expected[1]} for {tokens} tokens.{other}"
            )
        if gets_k and not self.seen_distinct and not chosen.is_cuda:
            ordered_TK = chosen.sort(-1).values
            if (ordered_TK[:, 1:] == ordered_TK[:, :-1]).any():
                raise KindError(
                    f"{type(self.kind).__name__}.choose names an expert twice for one token. Name each once."
                )
            self.seen_distinct = True

    def measured(self) -> Measured:
        if self.kind.every_token_gets_k:
            return super().measured()
        without, of = self.unrouted.tolist()
        self.unrouted.zero_()
        return super().measured() | {"unrouted": (without, of)}


def count(chosen: Tensor, tokens_E: Tensor) -> None:
    """Add the tokens of each expert, without waiting for the device."""
    if chosen.dtype == torch.bool:
        tokens_E += chosen.sum(dim=0)
    else:
        choice_P = chosen.flatten()
        tokens_E.scatter_add_(0, choice_P, torch.ones_like(choice_P))


class MegatronRouter(_Counted, TopKRouter):
    """megatron-core's own top-k router, set by what the kind's `megatron` answers."""

    def __init__(self, config: MegatronConfig, pg_collection: ProcessGroupCollection, is_mtp_layer: bool = False):
        super().__init__(config, pg_collection)
        self._complete(config)

    def gating(self, hidden_SBD: Tensor, inputs: LayerInputs | None = None) -> Tensor:
        return self.with_z_loss(super().gating(hidden_SBD))

    def get_aux_loss_coeff(self, aux_loss_type: str) -> float:
        """Make up for the data-parallel ranks: megatron-core divides a batch's loss by their number, twice."""
        ranks = self.tp_dp_cp_group.size() // self.tp_cp_group.size() if aux_loss_type == "global_aux_loss" else 1
        coefficient: float = super().get_aux_loss_coeff(aux_loss_type)
        return coefficient * ranks

    def begin_batch(self) -> None:
        self.reset_global_aux_loss_tracker()

    def forward(self, hidden_SBD: Tensor, inputs: LayerInputs | None = None) -> Routed:
        weights_TE, chosen_TE = super().forward(hidden_SBD)
        if (counter_E := self.counter_E) is not None:
            count(chosen_TE, counter_E)
        return Routed(self.num_experts, chosen_TE, weights_TE, hidden_SBD)

    def measured(self) -> Measured:
        if self.expert_bias is None:
            return super().measured()
        return super().measured() | {"bias_range": (self.expert_bias.max() - self.expert_bias.min(), 1.0)}
