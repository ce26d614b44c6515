"""Upcycling: a model whose dense MLPs become experts, all equal at first, behind routers that start from scratch.

The weights of a token's experts sum to 1, so the new model computes what the old one did until training changes them.
"""

import re
from dataclasses import replace

from torch import Tensor

from megatron_blackmamba.config import ModelConfig
from megatron_blackmamba.config.checks import problem_of_model
from megatron_blackmamba.interchange.canonical import Canonical, Entry, InterchangeError, shapes
from megatron_blackmamba.layers.experts.kind import Experts
from megatron_blackmamba.layers.mlp.kind import MLP

_EXPERT = re.compile(r"local_experts\.\d+\.")
SEED = 1234
"""Of the routers' initial weights."""


def upcycled(model: Canonical, experts: int, top_k: int) -> Canonical:
    """Return the model with `experts` copies of each dense MLP, of which a token uses `top_k`."""
    old = model.config
    if MLP.letter not in old.pattern or Experts.letter in old.pattern:
        raise InterchangeError(
            f"{model.source}: model.pattern={old.pattern}: upcycling needs dense MLPs ({MLP.letter}) and no experts yet"
        )
    config = _config(old, experts, top_k)
    if problem := problem_of_model(config):
        raise InterchangeError(f"{model.source}: {problem[1]}")
    entries = {name: _entry(name, shape, model, config) for name, shape in shapes(config).items()}
    return replace(model, config=config, entries=entries)


def _config(old: ModelConfig, experts: int, top_k: int) -> ModelConfig:
    if not 2 <= top_k <= experts:
        raise InterchangeError(f"--top-k {top_k} of --experts {experts}: give 2 to {experts}, or more experts")
    router = {"kind": "softmax", "normalize": True, "bias": False}
    changes = {
        "pattern": old.pattern.replace(MLP.letter, Experts.letter),
        "experts": experts,
        "top_k": top_k,
        "router": router,
        "expert_hidden_size": old.mlp_hidden_size,
        "mlp_hidden_size": None,
    }
    return ModelConfig.model_validate(old.model_dump() | changes)


def _entry(name: str, shape: tuple[int, ...], model: Canonical, config: ModelConfig) -> Entry:
    if name.endswith(".router.weight"):
        dtype = model.dtype

        def draw_router() -> Tensor:
            from megatron_blackmamba.model.initialise import draw

            return draw(name, shape, config, SEED).to(dtype)

        return Entry(shape, dtype, draw_router)
    return model.entries[_EXPERT.sub("", name)]
