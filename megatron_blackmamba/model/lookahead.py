"""Refuse layers, routers and last norms of users that read later tokens: they predict what they have read.

Each is checked alone, by one process on the CPU, with noise on weights that begin at zero. If its inputs change from
one position on, its outputs before that position must stay. In training a router may balance all tokens together, so
modules are checked as in validation.

Shapes: S sequence, B batch, D model, T = S * B tokens, E experts.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_blackmamba import norms, routers
from megatron_blackmamba.config import KernelsConfig, ModelConfig, ParallelConfig, RunConfig
from megatron_blackmamba.layers import kinds_in, named_layers
from megatron_blackmamba.model.build import build
from megatron_blackmamba.model.inputs import LayerInputs
from megatron_blackmamba.model.language_model import LanguageModel
from megatron_blackmamba.registry import Kind
from megatron_blackmamba.runtime import world
from megatron_blackmamba.runtime.process import default_float32
from megatron_blackmamba.runtime.seeding import generator

LENGTH = 256
"""Tokens of the check, at most."""
TOLERANCE = 1e-4
"""Largest change of an output that counts as rounding, compared with the largest change of any output."""
EOD, VOCABULARY = 0, 64
SMALL_EXPERTS = {"expert_hidden_size": 8, "shared_expert_hidden_size": None}
"""A router does not depend on them."""

Answer = Callable[[LanguageModel, Tensor, LayerInputs], Tensor]
"""From a model of one layer, hidden states `[S, 1, D]` and the inputs beside them to outputs `[S, ...]`."""


class LookaheadError(ValueError):
    """A part of a model whose output at a token depends on later ones, or on another document."""


@dataclass(frozen=True)
class Part:
    """A kind that a model uses, and how to check it."""

    kind: Kind
    name: str
    """For messages."""
    answer: Answer
    changes: dict[str, object]
    """From the model's config to that of a model of one layer."""
    remembers: bool = False
    """Whether it may carry something from token to token, which must end with the document."""

    @property
    def is_ours(self) -> bool:
        return type(self.kind).__module__.partition(".")[0] == __name__.partition(".")[0]


def refuse(config: RunConfig) -> list[str]:
    """Raise LookaheadError if a part from outside the package looks ahead; return notes on what cannot be checked."""
    notes = []
    for part in parts_of(config.model):
        if part.is_ours:
            continue
        try:
            problem = problem_of(part, config)
        except Exception as error:
            said = " ".join(str(error).split())
            notes.append(f"{part.name}: not checked for later tokens ({type(error).__name__}: {said})")
        else:
            if problem:
                raise LookaheadError(f"{part.name} {problem}")
    return notes


def parts_of(model: ModelConfig) -> Iterator[Part]:
    """Yield what could look ahead in a model."""
    kinds = kinds_in(model.trained_pattern)
    for kind in kinds:
        first, *more = (name for name, its in named_layers(model) if its is kind)
        name = f"{first}{f' and {len(more)} more' if more else ''} ({kind.letter}, {_source(kind)})"
        remembers = not (kind.rotary and model.attention.across_documents)
        yield Part(kind, name, _mixed, {"pattern": kind.letter}, remembers)
    for kind in [kind for kind in kinds if kind.routed][:1]:
        router = routers.kind_of(model.router.kind)
        name = f"model.router.kind={router.name} ({_source(router)})"
        yield Part(router, name, _routed, {"pattern": kind.letter, **SMALL_EXPERTS})
    norm = norms.kind_of(model.final_norm)
    name = f"model.final_norm={norm.name} ({_source(norm)})"
    yield Part(norm, name, _normed, {"pattern": model.pattern[0], **SMALL_EXPERTS})


def _source(kind: Kind) -> str:
    return f"{type(kind).__name__} of {type(kind).__module__}"


def _mixed(network: LanguageModel, hidden_SBD: Tensor, inputs: LayerInputs) -> Tensor:
    mixed_SBD: Tensor = network.decoder.layers[0].mixer(hidden_SBD, inputs)
    return mixed_SBD


def _routed(network: LanguageModel, hidden_SBD: Tensor, inputs: LayerInputs) -> Tensor:
    weights_TE, chosen_TE = network.decoder.layers[0].mixer.router(hidden_SBD, inputs).as_map()
    return torch.cat([weights_TE, chosen_TE.to(weights_TE.dtype)], 1)


def _normed(network: LanguageModel, hidden_SBD: Tensor, inputs: LayerInputs) -> Tensor:
    normed_SBD: Tensor = network.decoder.final_layernorm(hidden_SBD)
    return normed_SBD


@torch.no_grad()
@default_float32()
def problem_of(part: Part, config: RunConfig) -> str | None:
    """Return which tokens a part reads and must not, or None."""
    length = min(config.data.sequence_length, LENGTH)
    middle = length // 2
    with torch.random.fork_rng([]), world.fake(ParallelConfig(), world_size=1, where="cpu") as alone:
        network = build(_alone(config, part.changes), alone).eval()
        _leave_no_zeros(network)
        for first in (middle, middle + 1):  # a chunk that ends at one of them does not end at the other
            if 0 < first < length and _reaches(part, network, range(first, length), range(first)):
                return (
                    f"reads later tokens: outputs before token {first} change with the tokens from there on. The loss"
                    " would look splendid, and the model could not generate. Let an output use its own token and"
                    " earlier ones only: no mean, norm or transform of the whole sequence, no centred convolution."
                )
        told = part.remembers and config.model.eod_reset is not None
        if told and middle and _reaches(part, network, range(middle), range(middle, length), resets=True):
            return (
                f"reads the document before: if one begins at token {middle}, outputs from there on change with earlier"
                " tokens. Forget them where inputs.reset_BS is true, or set model.eod_reset=null."
            )
    return None


def _alone(config: RunConfig, changes: dict[str, object]) -> RunConfig:
    """Return the config of a model of one layer that this process holds on the CPU."""
    model, training = config.model, config.training
    eod = None if model.eod_reset is None else EOD
    fields = {"vocab_size": VOCABULARY, "eod_reset": eod, "arrangement": "sequential", "mtp": type(model.mtp)()}
    return config.model_copy(
        update={
            "parallel": ParallelConfig(),
            "kernels": KernelsConfig(),
            "model": model.model_copy(update=fields | changes),
            "training": training.model_copy(update={"precision": "fp32", "recompute": "none"}),
        }
    )


def _leave_no_zeros(network: LanguageModel) -> None:
    """Add noise to all weights: a layer whose last matrix begins at zero would show nothing."""
    for name, weight in network.named_parameters():
        deviation = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.1
        weight.add_(torch.randn(weight.shape, generator=generator(0, name)), alpha=deviation)


def _reaches(part: Part, network: LanguageModel, changed: range, kept: range, resets: bool = False) -> bool:
    """Return whether outputs at `kept` change with the inputs at `changed`."""
    random = generator(0, part.name)
    length, D = max(changed.stop, kept.stop), network.config.hidden_size
    here, there = slice(changed.start, changed.stop), slice(kept.start, kept.stop)
    outputs = []
    hidden_SBD = torch.randn(length, 1, D, generator=random)
    ids_BS = torch.randint(EOD + 1, VOCABULARY, (1, length), generator=random)
    for _ in range(2):
        if resets:
            ids_BS[:, kept.start - 1] = EOD
        outputs.append(part.answer(network, hidden_SBD.clone(), network._layer_inputs(ids_BS)).double())
        hidden_SBD[here] = torch.randn(len(changed), 1, D, generator=random)
        ids_BS[:, here] = torch.randint(EOD + 1, VOCABULARY, (1, len(changed)), generator=random)
    moved = (outputs[0] - outputs[1]).abs()
    largest = float(moved.max())
    if not math.isfinite(largest):
        raise ArithmeticError("its outputs are not finite")
    return float(moved[there].max()) > TOLERANCE * largest
