"""A model's answer by our megatron-core modules, a layer in memory at a time, in fp32, in a world of one process.

Shapes: B batch, S sequence, V vocabulary, D model, E experts.
"""

import torch
from torch import Tensor, nn

from megatron_blackmamba import norms
from megatron_blackmamba.config import ModelConfig, ParallelConfig, RunConfig
from megatron_blackmamba.interchange.canonical import HEAD, Canonical
from megatron_blackmamba.interchange.observation import Observation, Router
from megatron_blackmamba.layers import LayerKind, layers_of


@torch.inference_mode()
def observe(model: Canonical, tokens_BS: Tensor) -> Observation:
    from megatron_blackmamba.model import build
    from megatron_blackmamba.model.inputs import LayerInputs
    from megatron_blackmamba.runtime import world

    letters = "".join(dict.fromkeys(model.config.pattern))  # one layer of each kind, filled again and again
    run = _run(model.config.model_copy(update={"pattern": letters, "arrangement": "sequential"}), tokens_BS)
    with world.fake(ParallelConfig(), world_size=1, where="cpu") as alone:
        network = build(run, alone).eval()
        _fill(network.embedding, {"word_embeddings.weight": model.entries["embedding.word_embeddings.weight"].load()})
        if not model.config.tie_embeddings:
            _fill(network.output_layer, {"weight": model.entries[HEAD].load()})
        _fill(network.decoder.final_layernorm, _below(model, norms.PREFIX))
        inputs: LayerInputs = network._layer_inputs(tokens_BS)
        residual = network.embedded(tokens_BS)
        routers = []
        for i, kind in enumerate(layers_of(model.config.pattern)):
            block = network.decoder.layers[letters.index(kind.letter)]
            weights = _stacked(_below(model, f"decoder.layers.{i}."), kind, model.config)
            _fill(block, {"norm.weight": block.norm.weight, **weights})
            if model.config.has_norm(i):
                hidden = block.norm(residual)
            if kind.routed:
                selecting_SBE = block.mixer.router.selecting(hidden, inputs)
                routers.append(Router.of(i, selecting_SBE.transpose(0, 1), model.config.top_k))
            residual, branch = block(residual, None, inputs, hidden)
            residual = residual + branch
        hidden = network.decoder.final_layernorm(residual)
        return Observation(network.logits(hidden).transpose(0, 1).clone(), routers)


def _run(config: ModelConfig, tokens_BS: Tensor) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": config.model_dump(),
            "data": {"sequence_length": tokens_BS.shape[1]},
            "training": {"tokens": 1, "global_batch": 1, "precision": "fp32"},
        }
    )


def _below(model: Canonical, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): entry.load() for name, entry in model.entries.items() if name.startswith(prefix)}


def _stacked(weights: dict[str, Tensor], kind: LayerKind, config: ModelConfig) -> dict[str, Tensor]:
    """Turn a layer's canonical weights into those that megatron's module has."""
    for name, stack in kind.stacks(config).items():
        parts = [weights.pop(f"mixer.{part}") for part in stack.parts]
        weights[f"mixer.{name}"] = torch.stack(parts).view(stack.shape)
    return weights


def _fill(module: nn.Module, weights: dict[str, Tensor]) -> None:
    state = module.state_dict(keep_vars=True)  # buffers that are saved among them
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if tensors.keys() != weights.keys():
        raise RuntimeError(
            f"megatron's {type(module).__name__} has other parameters: {tensors.keys() ^ weights.keys()}"
        )
    for name, tensor in tensors.items():
        tensor.copy_(weights[name])
