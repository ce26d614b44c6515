"""Parameters by kind, counted from the real modules, which are built without memory in a pretended world."""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from torch import nn

from megatron_blackmamba.config import ModelConfig, ParallelConfig, RunConfig
from megatron_blackmamba.layers import MTP, kind_of, kinds_in
from megatron_blackmamba.model import build
from megatron_blackmamba.runtime import world

MTP_PART = "multi-token prediction"


@dataclass(frozen=True)
class Parameters:
    """Parameter counts of the whole model. `forward` counts those that one token uses: one expert with top-1."""

    total: int
    forward: int
    by_kind: dict[str, int]


def count(config: RunConfig) -> Parameters:
    """Build the model as one process would hold it and count."""
    alone = config.model_copy(update={"parallel": ParallelConfig()})
    with world.fake(alone.parallel, world_size=1) as us:
        by_kind = _by_kind(build(alone, us), config.model)
    used = {part: share for kind in kinds_in(config.model.pattern) for part, share in kind.parts(config.model).items()}
    used[MTP_PART] = Fraction(0)
    forward = sum(int(number * used.get(part, 1)) for part, number in by_kind.items())
    return Parameters(sum(by_kind.values()), forward, by_kind)


def _by_kind(model: nn.Module, described: ModelConfig) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        counts[part_of(name, described.pattern)] += parameter.numel()
    return dict(counts)


def part_of(name: str, pattern: str) -> str:
    """Return the part of the model that a parameter belongs to."""
    parts = name.split(".")
    if parts[0] == "embedding":
        return "embedding"
    if parts[0] == "output_layer":
        return "head"
    if parts[0] == MTP:
        return MTP_PART
    if "layers" not in parts or parts[3] != "mixer":  # the scales of model.residual_scaling among them
        return "norms"
    return kind_of(pattern[int(parts[2])]).part_of(".".join(parts[4:]))
