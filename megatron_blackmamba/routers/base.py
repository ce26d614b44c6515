"""The questions that a router kind answers.

Shapes: T tokens, E experts, K experts of a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from megatron_blackmamba.costs import BOOL, FP32, Sizes
from megatron_blackmamba.registry import Cannot, Kind

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor

    from megatron_blackmamba.settings import ModelConfig

__all__ = ["Cannot", "Routed", "RouterKind", "Sizes", "Tokens", "Use", "largest"]

OWN_MODULE = "megatron_blackmamba.model.router:KindRouter"
MEGATRON_MODULE = "megatron_blackmamba.model.router:MegatronRouter"
GROUPS = ("groups", "group_top_k")
"""Keys of kinds that choose within groups of experts."""
LOGITS = ("bias", "scale")
"""Keys of every kind that computes logits."""
BIAS_METRICS = MappingProxyType({"bias_range": "Largest expert bias less the smallest"})
"""What a kind with an expert bias measures."""
Z_LOSS = "z_loss"
"""The name of what `measured` says of model.router.z_loss, whichever the kind."""


@dataclass(frozen=True)
class Groups:
    """Equal groups of experts, of which a token takes those whose best experts have the largest sum of scores."""

    count: int
    chosen: int
    """Groups of a token."""
    best: int
    """Experts of a group that are added up."""

    def outside(self, scores_TE: Tensor) -> Tensor:
        """Return which experts are in no group of a token."""
        scores_TGE = scores_TE.unflatten(-1, (self.count, -1))
        sums_TG = scores_TGE.topk(self.best, dim=-1).values.sum(-1)
        outside_TG = sums_TG.new_ones(sums_TG.shape).scatter(-1, largest(sums_TG, self.chosen), 0.0).bool()
        return outside_TG.repeat_interleave(scores_TGE.shape[-1], dim=-1)


@dataclass(frozen=True)
class Use:
    """How experts are weighted, and how a token chooses its experts by itself, as in evaluation, decoding and exports.

    It chooses the K experts with the largest logits. Its weights, in training too, are `scores` of their logits.
    """

    scores: Literal["sigmoid", "softmax"]
    """softmax: over all experts, not only the chosen ones."""
    normalized: bool = False
    """Whether the weights of a token are divided by their sum, unless that is 0."""
    biased: bool = False
    """Whether the largest sums of score and expert bias are chosen instead. The bias does not enter the weights."""
    bias_on_logits: bool = False
    """Whether that bias is added to the logits instead of the scores."""
    groups: Groups | None = None
    """Groups of experts within which a token chooses."""
    scale: float = 1.0
    """Factor of the weights."""

    def scored(self, logits_TE: Tensor) -> Tensor:
        """Return the score of every expert."""
        return logits_TE.sigmoid() if self.scores == "sigmoid" else logits_TE.softmax(-1)

    def selecting(self, logits_TE: Tensor, bias_E: Tensor | None = None) -> Tensor:
        """Return the numbers whose largest K are chosen. Logits, because large ones have equal sigmoids."""
        numbers_TE = self._compared(logits_TE, bias_E)
        if self.groups is None:
            return numbers_TE
        by_numbers = self.biased or (self.scores == "softmax" and self.normalized)  # a softmax of the chosen alone
        outside_TE = self.groups.outside(numbers_TE if by_numbers else self.scored(logits_TE))
        return numbers_TE.masked_fill(outside_TE, float("-inf"))

    def _compared(self, logits_TE: Tensor, bias_E: Tensor | None) -> Tensor:
        if not self.biased:
            return logits_TE
        if bias_E is None:
            raise TypeError("Use(biased=True) needs the bias of each expert, which the router's module must keep")
        return (logits_TE if self.bias_on_logits else self.scored(logits_TE)) + bias_E

    def choice(self, logits_TE: Tensor, top_k: int, bias_E: Tensor | None = None) -> Tensor:
        """Return the experts of each token, `[T, K]`."""
        return largest(self.selecting(logits_TE, bias_E), top_k)

    def weights(self, logits_TE: Tensor, choice_TK: Tensor) -> Tensor:
        """Return the weights of the chosen experts, `[T, K]`."""
        scores_TE = logits_TE if self.scores == "sigmoid" else logits_TE.softmax(-1)
        scores_TK = scores_TE.gather(-1, choice_TK)
        scores_TK = scores_TK.sigmoid() if self.scores == "sigmoid" else scores_TK
        return self._final(scores_TK)

    def weight_map(self, logits_TE: Tensor, chosen_TE: Tensor) -> Tensor:
        """Return the weights of the chosen experts and zero for the others, `[T, E]`."""
        return self._final(self.scored(logits_TE) * chosen_TE)

    def _final(self, weights: Tensor) -> Tensor:
        weights = _divided_by_sum(weights) if self.normalized else weights
        return weights if self.scale == 1 else weights * self.scale


def groups_of(model: ModelConfig) -> Groups | None:
    router = model.router
    return None if router.groups == 1 else Groups(router.groups, router.group_top_k, model.top_k // router.group_top_k)


def groups_in_megatron(model: ModelConfig) -> dict[str, Any]:
    """Return megatron-core's fields for groups of experts."""
    groups = groups_of(model)
    return {"moe_router_num_groups": groups.count, "moe_router_group_topk": groups.chosen} if groups else {}


def scaling(model: ModelConfig) -> float | None:
    """Return megatron-core's factor of the expert weights; None leaves them as they are."""
    return None if model.router.scale == 1 else model.router.scale


def largest(selecting_TE: Tensor, top_k: int) -> Tensor:
    """Return the experts with the largest numbers of each token, `[T, K]`."""
    return selecting_TE.max(-1, keepdim=True).indices if top_k == 1 else selecting_TE.topk(top_k, -1).indices


def _divided_by_sum(weights_TE: Tensor) -> Tensor:
    """Divide by each row's sum; a row of zeros, of a token without an expert, stays zero and has zero gradients."""
    sum_T1 = weights_TE.sum(-1, keepdim=True)
    return weights_TE / sum_T1.where(sum_T1 > 0, 1)


@dataclass(frozen=True)
class Tokens:
    """The inputs of a router beside logits: the tokens of a micro-batch on one rank, or of a call of the decoder."""

    model: ModelConfig
    ids_T: Tensor | None = None
    """Token ids, if the kind `reads_ids`."""
    state: Mapping[str, Tensor] = field(default_factory=dict)
    """What the kind's `state` names, `[E]` each."""
    groups: Mapping[str, dist.ProcessGroup | None] = field(default_factory=dict)
    """By value of model.router.scope, the ranks whose tokens are balanced together; None: this rank alone."""
    tokens_E: Tensor | None = None
    """Where `choose` adds the tokens of each expert if the kind `counts_tokens`; int64. None: nothing is counted."""
    plan_bias_E: Tensor | None = None
    """Where a kind that balances by a bias adds the one of these tokens. None: it is not wanted."""

    @property
    def bias_E(self) -> Tensor | None:
        """Return the bias of each expert, if the kind has it."""
        return self.state.get("expert_bias")

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Return the ranks selected by model.router.scope."""
        return self.groups[self.model.router.scope]


@dataclass(frozen=True)
class Routed:
    """The answer of a router: the experts of each token and their weights."""

    experts: int
    chosen: Tensor
    """`[T, K]` int64, or `[T, E]` bool where tokens have different numbers of experts."""
    weights: Tensor
    """Of the chosen experts; in the second case, zero for the others."""
    hidden: Tensor
    """The hidden states for the experts to read, as the router got them or as it passes their gradients on."""

    def as_map(self) -> tuple[Tensor, Tensor]:
        """Return weights and choice as `[T, E]`, as megatron-core's dispatchers take them."""
        import torch

        if self.chosen.dtype == torch.bool:
            return self.weights, self.chosen
        none_TE = self.weights.new_zeros(len(self.chosen), self.experts)
        return none_TE.scatter(1, self.chosen, self.weights), none_TE.bool().scatter_(1, self.chosen, True)


class RouterKind(Kind, ABC):
    """A way to assign tokens to experts: what it is called, reads, chooses and keeps.

    Answers are arithmetic, strings and plain tensor operations. Import torch inside methods: the config reads these
    files too.
    """

    name: ClassVar[str]
    """The value of model.router.kind."""
    keys: ClassVar[tuple[str, ...]]
    """Keys of model.router that only some kinds read, such as ("aux_loss",). A kind that does not read a key refuses
    another value than its default."""
    depends_on: ClassVar[str]
    """What the choice in training depends on, for people: later tokens, earlier steps, or the token alone."""
    module: ClassVar[str] = OWN_MODULE
    """The torch module, as "package.module:class": one that calls `choose`, or one that is megatron-core's."""
    scopes: ClassVar[tuple[str, ...]] = ("rank", "tensor", "data")
    """Values of model.router.scope, of a kind that reads it."""
    balances_micro_batches: ClassVar[bool] = True
    """Whether training depends on which tokens share a micro-batch, and so on training.micro_batch."""
    every_token_gets_k: ClassVar[bool] = True
    """Whether each token gets exactly model.top_k experts in training. If not, `choose` returns `[T, E]` bool, and
    `metrics` has an entry "unrouted", the share of tokens without an expert."""
    learned: ClassVar[bool] = True
    """Whether it has weights, from which logits follow. The logits of a kind without are zero."""
    reads_ids: ClassVar[bool] = False
    """Whether it chooses by token ids, `at.ids_T`; its exports then refuse embeddings in place of ids."""
    counts_tokens: ClassVar[bool] = False
    """Whether `choose` itself adds to `at.tokens_E`, as a fused kernel can. Else the router's module counts."""
    balanced_by_exports: ClassVar[bool] = False
    """Whether the modeling files balance it in training if asked to (`balance_in_training`)."""
    state: ClassVar[tuple[str, ...]] = ()
    """Names of fp32 buffers `[E]` that are saved and zero at first. Needs a `module` that changes them."""
    by_adam: ClassVar[tuple[str, ...]] = ()
    """Names of matrices in `inside` that optimizer.kind=muon leaves to Adam, as it does `weight`."""
    metrics: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Numbers that the `measured` of `module` returns, and what each says."""

    @classmethod
    def unanswered(cls) -> list[str]:
        asked = [
            name for name in ("inputs", "inside", "carried") if getattr(cls, name) is not getattr(RouterKind, name)
        ]
        missing = [f"logits (it defines {', '.join(asked)})"] if asked and cls.logits is RouterKind.logits else []
        if cls.module != OWN_MODULE:
            return missing
        missing += ["choose"] if cls.choose is RouterKind.choose else []
        if not cls.every_token_gets_k and "unrouted" not in cls.metrics:
            missing.append('metrics["unrouted"] (every_token_gets_k is False)')
        needed = [*cls.state, *sorted(cls.metrics.keys() - ({"unrouted"} if not cls.every_token_gets_k else set()))]
        return missing + ([f"module (the default keeps and measures no {', '.join(needed)})"] if needed else [])

    def problems(self, model: ModelConfig) -> list[str]:
        """Return what the config lacks or gets wrong for this kind."""
        return []

    def choices(self, model: ModelConfig) -> int:
        """Return the number of logits: the experts, and behind them perhaps a choice that skips (model.router.skip)."""
        return model.experts

    def gets_k(self, model: ModelConfig) -> bool:
        """Return whether experts compute `model.top_k` outputs for each token in training."""
        return self.every_token_gets_k and self.choices(model) == model.experts

    def measures(self, model: ModelConfig) -> Mapping[str, str]:
        """Return those of `metrics` that a model has."""
        return self.metrics

    def inputs(self, model: ModelConfig) -> int:
        """Return the columns of `weight`, whose product with its input are the logits."""
        return model.hidden_size

    def inside(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Return the shapes of weights between the hidden states and this input, by name in the module."""
        return {}

    def initial(self, name: str, shape: tuple[int, ...], random: torch.Generator) -> Tensor | None:
        """Return the initial value of one of these; None: zero for a bias, else normal, with model.init's deviation."""
        return None

    def carried(self, model: ModelConfig) -> int:
        """Return how many numbers a token takes from one layer's router to the next; `logits` reads and returns them.

        Pipeline stages exchange them behind the stream, and a recomputed layer begins with them. Your own call of
        megatron-core's schedule then needs `adjust_tensor_shapes_fn`, as in training/step/step.py.
        """
        return 0

    def logits(
        self, hidden_D: Tensor, weights: Mapping[str, Tensor], carried_R: Tensor | None, model: ModelConfig
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits of tokens, and the numbers that the next layer's router reads; in training and decoding.

        Args:
            hidden_D: Hidden states in full precision; tokens are the axes before the last.
            weights: In full precision, by name: those of `inside`, "weight", and "bias" if it has one.
            carried_R: The numbers of the layer of experts before; None: it is the first, or there are none.
        """
        from torch.nn.functional import linear

        if not self.learned:
            return hidden_D.new_zeros(*hidden_D.shape[:-1], model.experts), None
        return linear(hidden_D, weights["weight"], weights.get("bias")), None

    @property
    def is_linear(self) -> bool:
        """Return whether the logits are those of one linear, or zero."""
        return type(self).logits is RouterKind.logits

    @property
    def is_plain(self) -> bool:
        """Return whether one linear and `use` are all of it, as in kernels and in the modeling files' usual class."""
        return self.learned and self.is_linear and type(self).selecting is RouterKind.selecting

    def megatron(self, model: ModelConfig) -> dict[str, Any]:
        """Return the fields of megatron-core's TransformerConfig that this kind sets."""
        return {}

    def choose(self, logits_TE: Tensor, at: Tokens) -> Tensor:
        """Return the experts of each token in training: `[T, K]` int64, or `[T, E]` bool.

        The logits carry no gradient. Use no random numbers: resumed runs and other layouts must choose alike.
        """
        raise NotImplementedError(f"{type(self).__name__} leaves the choice to megatron-core")

    def selecting(self, logits_TE: Tensor, at: Tokens) -> Tensor:
        """Return the numbers by whose size a token chooses its experts by itself, `[T, E]`."""
        return self.use(at.model).selecting(logits_TE, at.bias_E)

    @abstractmethod
    def use(self, model: ModelConfig) -> Use:
        """Return how a token finds its experts by itself."""

    @abstractmethod
    def layouts(self, model: ModelConfig) -> bool | Cannot:
        """Return True where every layout balances the same tokens together, so that all have one loss curve."""

    def exported(self, model: ModelConfig) -> bool | Cannot:
        """Return whether exports serve a model trained with this kind: by `modeling`, of (config, experts), or without.

        The class in hf/ for all other kinds has one linear, routes as `use` says, and keeps no state but the bias.
        """
        if self.modeling or (self.is_plain and self.state == (("expert_bias",) if self.use(model).biased else ())):
            return True
        return Cannot(f"the modeling files have no class for model.router.kind={self.name}")

    def flops(self, model: ModelConfig) -> int:
        """Return the forward FLOPs of one layer's router per token; a choice is left out."""
        return 2 * model.hidden_size * self.choices(model) if self.learned else 0

    def kept(self, at: Sizes) -> int:
        """Return the bytes per token that the router keeps for the backward pass: input, logits, scores, maps."""
        if not self.learned:
            return 0
        width = FP32 if at.device == "cpu" else at.width  # on CPUs the input is made fp32
        return width * at.model.hidden_size + (2 * FP32 + 2 * BOOL) * at.model.experts

    def traffic(self, at: Sizes, passes: int) -> dict[str, float]:
        """Return the bytes that balancing moves in a micro-batch, by field of ParallelConfig.

        A few numbers an expert are left out.
        """
        return {}
