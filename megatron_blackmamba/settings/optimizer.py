"""The optimizer's section of a run's config: the update of the weights, and the schedule of the learning rate."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from megatron_blackmamba.settings.base import Section
from megatron_blackmamba.settings.rules import BY_NAME, FIXED

SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda part: 1.0 - part,
    "cosine": lambda part: 0.5 * (math.cos(math.pi * part) + 1.0),
    "sqrt": lambda part: 1.0 - math.sqrt(part),
    "exponential": lambda part: 2.0 * math.pow(0.5, part) - 1.0,
}
"""Shape of a decay → what is left of the learning rate above its minimum, by the part of the decay that is done."""
if TYPE_CHECKING:
    Shape = str
else:
    Shape = Literal[tuple(SHAPES)]


class GroupConfig(Section):
    """Factors of one kind of parameter."""

    rule = BY_NAME

    learning_rate: float = Field(1.0, ge=0)
    """Factor of the learning rate, over the whole schedule; 0 leaves these weights as they are."""
    weight_decay: float = Field(1.0, ge=0)
    """Factor of optimizer.weight_decay."""


class GroupsConfig(Section):
    """Factors of learning rate and weight decay by kind of parameter."""

    rule = BY_NAME

    embedding: GroupConfig = GroupConfig()
    """The embedding, which is the output layer too unless model.tie_embeddings=false."""
    head: GroupConfig = GroupConfig()
    """The output layer, with model.tie_embeddings=false."""
    norms: GroupConfig = GroupConfig()
    """Weights and biases of all norms."""
    router: GroupConfig = GroupConfig()
    """Weights and biases of the routers."""
    recurrence: GroupConfig = GroupConfig()
    """A_log, D, the biases and the factors in the recurrence of Mamba, Mamba-2, Mamba-3 and the delta rule."""
    mixers: GroupConfig = GroupConfig()
    """All other weights of recurrent, attention and dense MLP layers."""
    experts: GroupConfig = GroupConfig()
    """The experts, routed and shared."""


class OptimizerConfig(Section):
    """The update of the weights."""

    rule = BY_NAME

    kind: Annotated[str, FIXED] = "adamw"
    """adamw: Adam with decoupled weight decay (the paper's). sgd: gradient descent with momentum.
    muon: matrices by orthogonalized momentum, the rest by Adam."""
    learning_rate: float = Field(2e-4, gt=0)
    """Largest learning rate, reached at the end of the warm-up."""
    min_learning_rate: float = Field(2e-5, ge=0)
    """Learning rate at the end of the decay; decay=constant does not read it."""
    warmup_fraction: float = Field(0.01, ge=0, lt=1)
    """Part of the run over which the learning rate rises linearly from 0."""
    warmup_tokens: int | None = Field(None, ge=0)
    """Tokens of the warm-up, which then does not depend on the length of the run. null: warmup_fraction decides."""
    decay: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the schedule after the warm-up. wsd (warm-up, stable, decay): constant, then a decay at the end."""
    decay_fraction: float = Field(0.2, gt=0, le=1)
    """Part of the run after its warm-up over which wsd decays."""
    decay_tokens: int | None = Field(None, gt=0)
    """Tokens over which wsd decays. null: decay_fraction decides."""
    decay_shape: Shape = "linear"
    """Shape of the decay of wsd. sqrt: 1 - sqrt(part of the decay). exponential: halves, then goes to the minimum."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay rate of Adam's first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay rate of Adam's second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator of Adam's update."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """Precision of Adam's moments. bf16 (rounded stochastically) saves 4 bytes per weight, with a faster update."""
    gradients: Literal["fp32", "bf16"] = "fp32"
    """Precision in which gradients of bf16 weights are added up over micro-batches and replicas, and stored."""
    momentum: float = Field(0.9, gt=0, lt=1)
    """Momentum of sgd and muon."""
    matrices: Literal["parts", "whole"] = "parts"
    """What muon makes orthogonal: each part of a fused weight, such as x and z of in_proj, or the weight as a whole."""
    newton_schulz: Literal["quintic", "jordan"] = "quintic"
    """Coefficients of muon's five Newton-Schulz steps. quintic ends nearer to an orthogonal matrix."""
    qk_clip: float | None = Field(None, gt=0)
    """Cap of attention logits with muon: an update shrinks queries and keys of heads above it. null: none."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of matrices; vectors, norms and A_log have none."""
    clip: float = Field(1.0, ge=0)
    """Largest gradient norm; 0 switches clipping off."""
    distributed: Annotated[bool, FIXED] = True
    """Shard the optimizer state over the data-parallel group."""
    groups: GroupsConfig = GroupsConfig()
    """Factors of learning rate and weight decay by kind of parameter."""
    extensions: dict[str, dict[str, Any]] = Field({})
    """Keys of an optimizer that defines its own, by the name of the kind and of the key."""

    @model_validator(mode="after")
    def _minimum(self) -> "OptimizerConfig":
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"optimizer.min_learning_rate={self.min_learning_rate} is above"
                f" optimizer.learning_rate={self.learning_rate}"
            )
        return self
