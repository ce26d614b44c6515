"""Models of each kind of layer, carried from one rank to two tensor-parallel ranks and back by checkpoints.

`python -m tests.layers.rows_probe FOLDER`: imports once, forks the ranks, and prints what they found as JSON.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch

from megatron_blackmamba import layers
from megatron_blackmamba.config import load
from megatron_blackmamba.runtime import world
from tests.layers.fused import Fused, Untold
from tests.layers.running_mean.kind import RunningMean
from tests.layers.sizes import LETTERS, small
from tests.runtime.ranks import fork_ranks, import_once

GROUPS = ["model.mamba2.groups=2", "model.mamba3.groups=2", "model.delta.key_heads=4", "model.attention.kv_heads=2"]
HEADS = [*small(), *GROUPS, "model.vocab_size=64"]
MORE = ["model.mamba_norms=true", "model.mamba2.heads=6", "model.mamba3.rank=3", "model.mamba3.output_norm=true"]
MORE += ["model.attention.qk_norm=true", "model.attention.head_dim=10", "model.gated=false", "model.activation=relu2"]
MORE += ["model.delta.variant=gdn2", "model.delta.decay_rank=6", "model.delta.negative_eigenvalues=true"]
MORE += ["model.shared_expert_hidden_size=48", "model.latent_size=20", "model.top_k=2", "model.router.kind=expert_bias"]
ADDED = [kind for kind in (RunningMean, Fused, Untold) if kind.letter not in LETTERS]
ALL = LETTERS + "".join(kind.letter for kind in ADDED)
MODELS = {"plain": [f"model.pattern='{ALL}'"], "more": ["model.pattern='MSRG*-E'", *MORE]}
"""A layer of each kind, the one that lies last, and of those with options with them."""


def went(folder: Path, before: str | None, after: str | None, ranks: int) -> dict[str, dict]:
    """Build each model or load it, and save it; return what each layer computes, and weights that are not as built.

    In float64: no rounding decides between two experts.
    """
    from megatron_blackmamba.checkpoint.sharded import weights
    from megatron_blackmamba.model import build

    from megatron.core import dist_checkpointing

    layout = [f"parallel.tensor={ranks}", f"parallel.expert_tensor={ranks}", "training.precision=fp64"]
    configs = {name: load("tiny", [*HEADS, *words, *layout]) for name, words in MODELS.items()}
    place = world.start(next(iter(configs.values())).parallel)
    found = {}
    for name, config in configs.items():
        model = build(config, place).eval()
        built = {key: value.clone() for key, value in model.state_dict().items()}
        if before:
            for parameter in model.parameters():
                parameter.data.zero_()
            model.load_state_dict(dist_checkpointing.load(weights(model), str(folder / before / name)))
        if after:
            (folder / after / name).mkdir(parents=True, exist_ok=True)
            dist_checkpointing.save(weights(model), str(folder / after / name))
        squares = {}
        for letter, block in zip(config.model.pattern, model.decoder.layers, strict=True):
            block.register_forward_hook(partial(noted, squares, letter))
        tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(5))
        model(tokens)
        other = [key for key, value in model.state_dict().items() if not torch.equal(value, built[key])]
        found[name] = {"squares": squares, "other": other}
    return found


def noted(squares: dict[str, float], letter: str, _module: object, _inputs: object, output: tuple) -> None:
    squares[letter] = float(output[1].detach().square().sum())


def main(folder: Path) -> dict:
    import_once()
    for kind in ADDED:
        layers.register(kind)
    legs = {"one": (None, "one", 1), "two": ("one", "two", 2), "back": ("two", None, 1)}
    return {leg: fork_ranks(rest[-1], lambda rest=rest: went(folder, *rest)) for leg, rest in legs.items()}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))))
